"""Jobs as a user runs them: own code, own files, repeated, continued, converted, swept."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import dsjob, list_commits, make_job, read_metrics
from safetensors.torch import load_file


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return make_job(tmp_path)


def test_a_job_of_own_code_trains_and_says_what_to_do_next(job: Path) -> None:
    done = dsjob("cfg.json", cwd=job)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for expected in ("my_model.build, 569 parameters", "8 = 8 micro x 1 accumulated x 1 rank", "step 6/6 100%", "eval"):
        assert expected in done.stdout
    for command in ("dsjob run run ", "dsjob convert --to fp32 run/checkpoints", "dsjob -m run/resolved.json"):
        assert command in done.stdout
    losses = read_metrics(job / "run")
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    assert losses[6] < losses[1]
    evaluated = dsjob("run", "run", "data.eval.n=5", "optimizer.params.lr=1e-4", cwd=job)
    assert "to evaluate it, run dsjob eval run data.eval.n=5; to train with" in evaluated.stdout, evaluated.stderr
    assert list_commits(job / "run") == ["step-00000006"]
    result = json.loads((job / "run" / "result.json").read_text())
    assert result["status"] == "done"
    assert result["metrics"]["eval/loss"] == pytest.approx(read_metrics(job / "run", "eval/loss")[6])


def test_a_resolved_document_repeats_the_run(job: Path) -> None:
    assert dsjob("run", "cfg.json", "output.dir=first/%time", cwd=job).returncode == 0
    (first,) = (job / "first").iterdir()
    assert dsjob("run", str(first / "resolved.json"), cwd=job).returncode == 0
    _, second = sorted((job / "first").iterdir())
    assert read_metrics(second) == read_metrics(first)
    assert json.loads((second / "resolved.json").read_text()) == json.loads((first / "resolved.json").read_text())


def test_a_run_folder_is_continued(job: Path) -> None:
    assert dsjob("cfg.json", "output.dir=whole", "trainer.max_steps=9", cwd=job).returncode == 0
    first = dsjob("cfg.json", "+monitor={csv_monitor: {enabled: true}}", cwd=job)
    assert "  continue   dsjob run run trainer.max_steps=12\n" in first.stdout, first.stderr
    again = dsjob("run", "run", cwd=job)
    _, told, following, *_ = again.stdout.splitlines()
    new = "to evaluate it, run dsjob eval run; to train with other settings, set a new output.dir"
    longer = f"to train longer, set trainer.max_steps=12; {new}"
    assert (told, following) == (f"already finished  step 6 of 6: nothing was trained or evaluated; {longer}", "next")
    changed = dsjob("run", "run", "optimizer.params.lr=1e-4", cwd=job)  # not used, so it has to be given again
    assert "  continue   dsjob run run trainer.max_steps=12 optimizer.params.lr=1e-4\n" in changed.stdout
    assert list_commits(job / "run") == ["step-00000006"]
    extended = dsjob("run", "run", "trainer.max_steps=9", cwd=job)
    assert "step-00000006-a0001 at step 6" in extended.stdout
    assert read_metrics(job / "run") == read_metrics(job / "whole")


def test_parameter_groups_of_the_document_are_trained_and_continued(job: Path) -> None:
    section = {
        "type": "AdamW",
        "params": {"lr": 0.01, "weight_decay": 0.1},
        "param_groups": {"no_decay": {"match": ["*bias"], "weight_decay": 0}, "head": {"match": "head.*", "lr": 0.1}},
    }
    document = json.loads((job / "cfg.json").read_text())
    (job / "cfg.json").write_text(json.dumps({**document, "optimizer": section, "scheduler": None}))
    done = dsjob("cfg.json", cwd=job)
    assert done.returncode == 0, done.stderr
    assert json.loads((job / "run/resolved.json").read_text())["optimizer"]["param_groups"] == section["param_groups"]
    again = dsjob("run", "run", "trainer.max_steps=8", "optimizer.param_groups.no_decay.weight_decay=0.5", cwd=job)
    assert "optimizer.param_groups.no_decay.weight_decay 0 -> 0.5" in again.stdout, again.stderr
    wrong = dsjob("cfg.json", "optimizer.param_groups.head.match=haed.*", "output.dir=other", cwd=job)
    assert wrong.returncode == 2
    assert '"haed.*" matches no trained parameter' in wrong.stderr
    assert "head.weight" in wrong.stderr


def test_the_newest_checkpoints_are_kept(job: Path) -> None:
    assert dsjob("cfg.json", "checkpoint.every=1", "checkpoint.keep=3", cwd=job).returncode == 0
    assert list_commits(job / "run") == ["step-00000004", "step-00000005", "step-00000006"]
    folders = sorted(path.name for path in (job / "run/checkpoints").iterdir() if path.name.startswith("step-"))
    assert folders == ["step-00000004-a0001", "step-00000005-a0001", "step-00000006-a0001"]
    assert (job / "run/checkpoints/latest").read_text() == "step-00000006\n"


def test_going_back_to_a_tag_sets_later_checkpoints_aside(job: Path) -> None:
    assert dsjob("cfg.json", "checkpoint.every=2", "checkpoint.keep=0", cwd=job).returncode == 0
    before = read_metrics(job / "run")
    back = dsjob("cfg.json", "checkpoint.resume=step-00000002", "checkpoint.every=2", "checkpoint.keep=0", cwd=job)
    assert "step-00000002-a0001 at step 2" in back.stdout, back.stderr
    assert read_metrics(job / "run") == before
    lines = [json.loads(line) for line in (job / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 6]  # and the evaluation: nothing twice
    superseded = (job / "run" / "metrics-superseded.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in superseded] == [3, 4, 5, 6, 6]
    assert list_commits(job / "run") == ["step-00000002", "step-00000004", "step-00000006"]
    aside = sorted(path.name for path in (job / "run/checkpoints/superseded").iterdir())
    assert aside == ["step-00000004-a0001.json", "step-00000006-a0001.json"]


@pytest.mark.parametrize(
    ("policy", "first", "code", "message"),
    [
        ("required", False, 1, "contains no committed checkpoint"),
        ("required", True, 0, ""),
        ("never", False, 0, ""),
        ("never", True, 1, "checkpoint.resume is never"),
        ("auto", False, 0, ""),
        ("step-00000099", True, 1, "checkpoint.resume: no committed checkpoint 'step-00000099' in"),
        ("step-00000002-a0009", True, 1, "step-00000002 is in step-00000002-a0001"),
        ("step-00000002-a0001", True, 0, ""),
        ("step-00000099", False, 1, "checkpoint.resume: no committed checkpoint in"),
        ("./elsewhere", False, 1, "checkpoint.resume: no such folder: "),
        (".//", False, 1, "checkpoint.resume: no committed checkpoint in"),
    ],
)
def test_resume_does_what_it_is_told(job: Path, policy: str, first: bool, code: int, message: str) -> None:
    if first:
        assert dsjob("cfg.json", "trainer.max_steps=2", cwd=job).returncode == 0
    attempts = [path.name for path in job.glob("run/checkpoints/attempts/*")]
    done = dsjob("cfg.json", f"checkpoint.resume={policy}", cwd=job)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    if message.startswith("checkpoint.resume: no"):  # what is mistyped fences no run
        assert attempts == [path.name for path in job.glob("run/checkpoints/attempts/*")]


def test_a_job_begins_with_weights_that_were_converted_into_another_jobs_folder(job: Path) -> None:
    assert dsjob("cfg.json", "trainer.max_steps=2", cwd=job).returncode == 0
    assert dsjob("convert", "--to", "fp32", "run", cwd=job).returncode == 0
    begin = ("cfg.json", "output.dir=other", "trainer.max_steps=1")
    done = dsjob(*begin, "checkpoint.resume=run/checkpoints/weights-step-00000002-fp32", cwd=job)
    assert done.returncode == 0, done.stderr
    assert "weights-step-00000002-fp32" in done.stdout
    done = dsjob(*begin, "checkpoint.resume=run/checkpoints/step-00000099", "output.dir=third", cwd=job)
    assert done.returncode == 1
    assert "no committed checkpoint 'step-00000099' in" in done.stderr
    assert not (job / "third" / "checkpoints" / "attempts").exists()


def test_a_converted_file_holds_the_trained_weights(job: Path) -> None:
    assert dsjob("cfg.json", cwd=job).returncode == 0
    done = dsjob("convert", "--to", "fp32", "run", "weights", cwd=job)
    assert done.returncode == 0, done.stderr
    namespace: dict[str, Any] = {}
    exec((job / "my_model.py").read_text(), namespace)
    model = namespace["build"]()
    model.load_state_dict(load_file(job / "weights" / "model.safetensors"))
    data = namespace["Data"](n=10, seed=1)
    x, y = (torch.stack(part) for part in zip(*[data[i] for i in range(10)], strict=True))
    assert model(x, y).item() == pytest.approx(read_metrics(job / "run", "eval/loss")[6], rel=1e-5)


def test_loss_metrics_and_collate_may_be_own_functions(tmp_path: Path) -> None:
    make_job(
        tmp_path,
        model={"_target_": "my_model.Linear", "in_features": 8, "out_features": 1},
        data={
            "train": {"_target_": "my_model.Data"},
            "eval": {"_target_": "my_model.Data"},
        },
        loss={"_target_": "my_model.square"},
        metrics={"half": {"_target_": "my_model.half", "_partial_": True}},
    )
    (tmp_path / "my_model.py").write_text(
        (tmp_path / "my_model.py")
        .read_text()
        .replace(
            "def forward(self, x):\n        return super().forward(x)",
            "def forward(self, x, y):\n        return super().forward(x)",
        )
    )
    done = dsjob("cfg.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "eval/half 0.5000" in done.stdout


def test_a_sweep_goes_on_when_one_run_fails(job: Path) -> None:
    done = dsjob(
        "-m", "cfg.json", "optimizer.params.lr=1e-2,1e-3", "model._target_=my_model.build,my_model.Crash", cwd=job
    )
    assert done.returncode == 1
    table = done.stdout[done.stdout.index("sweep run") :]
    assert table.count("done") == 2
    assert table.count("failed: ValueError: shapes do not fit") == 2
    assert "optimizer.params.lr=0.01" in table
    assert [json.loads((job / "run" / str(i) / "result.json").read_text())["status"] for i in range(4)] == [
        "done",
        "failed",
        "done",
        "failed",
    ]


def test_a_sweep_without_lists_says_that_it_is_one_run(job: Path) -> None:
    done = dsjob("-m", "cfg.json", cwd=job)
    assert done.returncode == 0, done.stderr
    assert "== run 0\n" in done.stdout
    assert "note: no key has several values, so this sweep is one run" in done.stderr


def test_a_sweep_tells_all_wrong_values_before_its_first_run(job: Path) -> None:
    done = dsjob("-m", "cfg.json", "optimizer.params.lr=1e-2,abc", "optimizer.type=AdamW,Adan", cwd=job)
    assert done.returncode == 2
    assert "optimizer.params.lr" in done.stderr
    assert "Adan" in done.stderr
    assert "== run" not in done.stdout
    assert not (job / "run").exists()


def test_what_hydra_users_expect_works(job: Path) -> None:
    (job / "mine" / "recipe").mkdir(parents=True)
    (job / "mine" / "recipe" / "tiny.yaml").write_text(
        "# @package _global_\ndefaults:\n  - quickstart\n  - _self_\nmodel:\n  width: 16\n"
    )
    shown = dsjob("--config-dir", "mine", "--cfg", "job", "+recipe=tiny", cwd=job)
    assert "width: 16" in shown.stdout, shown.stderr
    assert "null" not in shown.stdout
    short = dsjob("-cd", "mine", "-c", "job", "-p", "model", "+recipe=tiny", cwd=job)
    assert short.stdout.startswith("_target_: dsjob.recipes.gpt.build"), short.stderr
    assert "recipe/quickstart" in dsjob("--info", "defaults", "+recipe=quickstart", cwd=job).stdout
    assert "run" in dsjob("--cfg", "hydra", cwd=job).stdout
    assert "hydra_bash_completion" in dsjob("-sc", "install=bash", cwd=job).stdout
    completed = dsjob("-sc", "query=bash", cwd=job, COMP_LINE="dsjob +recipe=qu")
    assert completed.stdout.strip() == "+recipe=quickstart"
    assert sorted(path.name for path in job.iterdir()) == ["cfg.json", "mine", "my_model.py"]


def test_a_bare_deepspeed_config_can_be_built_on(tmp_path: Path) -> None:
    make_job(tmp_path, trainer={"max_steps": 2}, deepspeed="ds_config.json")
    (tmp_path / "ds_config.json").write_text(
        '{"train_batch_size": 8, "gradient_clipping": 0.5, "zero_optimization": {"stage": 2, "overlap_comm": true},}'
    )
    done = dsjob("cfg.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "stage 2 (one rank: nothing to shard)" in done.stdout
    assert "clipping 0.5" in done.stdout
    assert "no effect here: deepspeed.zero_optimization.overlap_comm" in done.stderr


CANARY = "hunter2-canary"


def test_a_secret_comes_from_the_environment_and_is_nowhere_in_the_run_folder(job: Path) -> None:
    with (job / "my_model.py").open("a") as file:
        file.write(f"""
class Private(Data):
    def __init__(self, token, options, **others):
        assert (token, options["items"][0]["secret_key"]) == ("{CANARY}", "{CANARY}")
        super().__init__(**others)
""")
    nested = {"items": [{"secret_key": "${oc.env:DSJOB_CANARY}"}]}
    document = json.loads((job / "cfg.json").read_text())
    document["data"]["train"] = {"_target_": "my_model.Private", "token": "${oc.env:DSJOB_CANARY}", "options": nested}
    (job / "cfg.json").write_text(json.dumps(document))
    given = (
        "launch.nproc=2",
        "checkpoint.every=3",
        "data.eval._target_=my_model.Private",
        "+data.eval.options.items=[{secret_key:${oc.env:DSJOB_CANARY}}]",
    )
    done = dsjob("cfg.json", *given, "+data.eval.token=${oc.env:DSJOB_CANARY}", cwd=job, DSJOB_CANARY=CANARY)
    assert done.returncode == 0, done.stderr
    again = dsjob("run", "run", "trainer.max_steps=8", cwd=job, DSJOB_CANARY=CANARY)
    assert again.returncode == 0, again.stderr
    shown = dsjob("show", "cfg.json", cwd=job, DSJOB_CANARY=CANARY)
    assert "${oc.env:DSJOB_CANARY}" in shown.stdout
    files = [path for path in (job / "run").rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [str(path) for path in files if CANARY.encode() in path.read_bytes()] == []
    assert CANARY not in done.stdout + done.stderr + again.stdout + again.stderr + shown.stdout
    without = dsjob("cfg.json", "output.dir=other", cwd=job)
    assert without.returncode == 2
    assert "environment variable DSJOB_CANARY is not set" in without.stderr


@pytest.mark.parametrize(("nproc", "fresh"), [(1, False), (2, False), (2, True)])
@pytest.mark.full("1-False", "2-True")
def test_what_a_program_says_of_a_secret_is_masked(job: Path, nproc: int, fresh: bool) -> None:
    """Printed, logged, in metrics and in the error that ends the run: on screen, in logs and in the run's folder."""
    with (job / "my_model.py").open("a") as file:
        file.write("""
import logging, sys, warnings
from urllib.parse import quote
from dsjob.callbacks.callback import Callback

class Tell(Callback):
    def __init__(self, url):
        self.url = url

    def on_log(self, run, record):
        print("printed", self.url, flush=True)
        logging.getLogger("mine").warning("logged %s", self.url)
        warnings.warn(f"warned {self.url}")
        sys.stderr.write(quote(self.url, safe="") + "\\n")
        record[f"of {self.url}"] = 1.0
        if run.step >= 2:
            raise ConnectionError(f"cannot reach {self.url!r}")
""")
    document = json.loads((job / "cfg.json").read_text())
    document["callbacks"] = {"tell": {"_target_": "my_model.Tell", "url": "${oc.env:DSJOB_CANARY}"}}
    (job / "cfg.json").write_text(json.dumps(document))
    url = f"postgres://me:{CANARY}@h/db"
    done = dsjob("cfg.json", f"launch.nproc={nproc}", cwd=job, fresh=fresh, DSJOB_CANARY=url)
    assert done.returncode == 1, done.stderr
    assert "ConnectionError: cannot reach '***'" in done.stderr
    assert "printed ***" in done.stdout
    assert "logged ***" in done.stderr
    files = [path for path in (job / "run").rglob("*") if path.is_file()]
    assert [str(path) for path in files if CANARY.encode() in path.read_bytes()] == []
    assert CANARY not in done.stdout + done.stderr
    if nproc == 2:
        assert any(b"printed ***" in path.read_bytes() for path in files if path.suffix == ".log")


def test_a_sweep_masks_the_errors_of_its_runs(job: Path) -> None:
    with (job / "my_model.py").open("a") as file:
        file.write("""
class Failing(Data):
    def __init__(self, auth, **others):
        raise ConnectionError(f"no access with {auth}")
""")
    given = ("data.train._target_=my_model.Failing", "+data.train.auth=${oc.env:DSJOB_CANARY}", "trainer.seed=1,2")
    done = dsjob("-m", "cfg.json", *given, cwd=job, DSJOB_CANARY=CANARY)
    assert done.returncode == 1, done.stderr
    results = [json.loads(path.read_text()) for path in (job / "run").rglob("result.json")]
    assert len(results) == 2
    assert all("no access with ***" in result["error"] for result in results)
    assert CANARY not in done.stdout + done.stderr


def test_a_secret_in_the_document_is_refused_and_not_repeated(job: Path) -> None:
    done = dsjob("cfg.json", f"+data.train.token={CANARY}", f"+data.train.options={{api_key:{CANARY}}}", cwd=job)
    assert done.returncode == 2
    for key in ("token", "options.api_key"):
        assert f"error[secret-in-document]: data.train.{key}: is refused" in done.stderr
        assert f"data.train.{key}='${{oc.env:NAME}}'" in done.stderr
    assert "${oc.env:NAME}" in done.stderr
    assert CANARY not in done.stdout + done.stderr
    assert not (job / "run").exists()


@pytest.mark.parametrize(
    "override",
    [
        f"+data.train.token={CANARY}",
        f"+data.train.token='${{oc.env:DSJOB_CANARY}}',{CANARY}",
        f"+data.train.options={{api_key:{CANARY}}}",
        f"+data.train.url='postgresql://u:{CANARY}@h/db'",
        f"+data.train.token=a b {CANARY}",
    ],
)
@pytest.mark.parametrize("more", ["trainer.max_steps=1,2", "hydra.sweep.dir=elsewhere"])
def test_a_sweep_with_a_secret_does_not_begin_and_does_not_repeat_it(job: Path, override: str, more: str) -> None:
    before = sorted(job.rglob("*"))
    done = dsjob("-m", "cfg.json", override, more, cwd=job)
    assert done.returncode == 2
    assert CANARY not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert [path for path in sorted(job.rglob("*")) if path not in before and "__pycache__" not in str(path)] == []


def test_a_secret_of_a_deepspeed_file_is_refused_and_shown_nowhere(job: Path) -> None:
    (job / "ds.json").write_text(json.dumps({"comet": {"enabled": True, "api_key": CANARY}}))
    done = dsjob("cfg.json", "deepspeed=ds.json", "trainer.max_steps=1", cwd=job)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error[secret-in-document]") == 1
    assert "deepspeed.comet.api_key" in done.stderr
    assert "set the environment variable COMET_API_KEY instead" in done.stderr
    shown = dsjob("cfg.json", "deepspeed=ds.json", "--cfg", "job", cwd=job)
    assert "***" in shown.stdout
    assert CANARY not in done.stdout + done.stderr + shown.stdout
    assert not (job / "run").exists()


def test_training_on_follows_the_longer_schedule(job: Path) -> None:
    scheduler = ["+scheduler.type=WarmupDecayLR", "scheduler.params={warmup_num_steps:2}"]
    assert dsjob("cfg.json", *scheduler, "trainer.max_steps=9", "output.dir=whole", cwd=job).returncode == 0
    assert dsjob("cfg.json", "+scheduler.type=WarmupDecayLR", scheduler[1], cwd=job).returncode == 0
    assert dsjob("run", "run", "trainer.max_steps=9", cwd=job).returncode == 0
    rates, whole = read_metrics(job / "run", "lr"), read_metrics(job / "whole", "lr")
    assert [rates[step] for step in (7, 8, 9)] == [whole[step] for step in (7, 8, 9)]
    assert rates[7] > 0


def test_gradients_that_are_not_finite_are_never_committed(job: Path) -> None:
    arguments = ("checkpoint.every=2", "checkpoint.keep=1", "trainer.log_every=100", "~data.eval")
    done = dsjob("cfg.json", "model._target_=my_model.NanGradient", *arguments, cwd=job)
    assert done.returncode == 1
    assert "the gradients' norm became nan in step 4; the last good checkpoint is" in done.stderr
    assert list_commits(job / "run") == ["step-00000002"]


@pytest.mark.parametrize("model", ["NanGradient", "NanOnce"])
def test_an_overflow_of_fp16_is_a_skipped_step_and_no_failure(job: Path, model: str) -> None:
    arguments = ("fp16.enabled=true", "fp16.initial_scale_power=10", "checkpoint.every=2", "~data.eval")
    done = dsjob("cfg.json", f"model._target_=my_model.{model}", *arguments, cwd=job)
    assert done.returncode == 0, done.stderr
    assert "fp16, fp32 masters, dynamic loss scale 1024" in done.stdout
    assert "skipped  1 step, the last one 4: gradients overflowed fp16; the loss scale is 1024 now" in done.stdout
    assert list(read_metrics(job / "run", "loss_scale").values()) == [1024] * 6
    assert [step for step, norm in read_metrics(job / "run", "grad_norm").items() if norm is None] == [4]
    losses = read_metrics(job / "run")
    assert (losses[4] is None) == (model == "NanOnce")
    assert losses[6] < losses[1]
    assert list_commits(job / "run") == ["step-00000004", "step-00000006"]


def test_gradients_of_bf16_that_are_not_finite_are_a_skipped_step_and_a_loss_that_is_not_ends_the_job(
    job: Path,
) -> None:
    done = dsjob("cfg.json", "model._target_=my_model.NanGradient", "bf16.enabled=true", "~data.eval", cwd=job)
    assert done.returncode == 0, done.stderr
    assert "skipped  1 step, the last one 4: gradients were not finite" in done.stdout
    assert [step for step, norm in read_metrics(job / "run", "grad_norm").items() if norm is None] == [4]
    assert json.loads((job / "run" / "resolved.json").read_text())["bf16"]["check_grad_overflow"] is True
    arguments = ("model._target_=my_model.NanOnce", "bf16.enabled=true", "~data.eval", "output.dir=other")
    done = dsjob("cfg.json", *arguments, cwd=job)
    assert done.returncode == 1
    assert "the loss became nan in step 4" in done.stderr


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (6, "no step was taken: the gradients' norm became inf in step 6"),
        (20, "10 steps in a row were skipped, up to step 10: gradients were not finite"),
    ],
)
def test_a_job_of_bf16_that_takes_no_step_is_an_error(job: Path, steps: int, message: str) -> None:
    given = ("model._target_=my_model.NanGradients", "bf16.enabled=true", "~data.eval", f"trainer.max_steps={steps}")
    done = dsjob("cfg.json", *given, cwd=job)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list_commits(job / "run") == []


def test_the_smallest_loss_scale_ends_a_job_and_names_what_overflows(job: Path) -> None:
    arguments = ("fp16.enabled=true", "fp16.initial_scale_power=1", "model._target_=my_model.Nan", "~data.eval")
    done = dsjob("cfg.json", *arguments, cwd=job)
    assert done.returncode == 1
    assert "gradients overflowed fp16 at the smallest loss scale, 1, in blocks.0.fc.weight, " in done.stderr
    assert "bf16.enabled=true" in done.stderr
    assert "Traceback" not in done.stderr
    assert list_commits(job / "run") == []


def test_after_going_back_a_folder_goes_on_from_its_newest(job: Path) -> None:
    save = ("checkpoint.every=2", "checkpoint.keep=0")
    assert dsjob("cfg.json", *save, cwd=job).returncode == 0
    assert dsjob("cfg.json", *save, "checkpoint.resume=step-00000002", "trainer.max_steps=8", cwd=job).returncode == 0
    again = dsjob("run", "run", "trainer.max_steps=10", cwd=job)
    assert "step-00000008-a0002 at step 8" in again.stdout, again.stderr


def test_changed_hyperparameters_take_effect_and_are_told(job: Path) -> None:
    assert dsjob("cfg.json", cwd=job).returncode == 0
    changes = ("optimizer.params.lr=0.5", "optimizer.params.weight_decay=0.25", "trainer.max_steps=8")
    again = dsjob("run", "run", *changes, cwd=job)
    assert "optimizer.params.lr 0.01 -> 0.5, optimizer.params.weight_decay 0 -> 0.25" in again.stdout, again.stderr
    assert read_metrics(job / "run", "lr")[8] == 0.5
    other = dsjob("run", "run", "optimizer.type=SGD", "~optimizer.params", "trainer.max_steps=9", cwd=job)
    assert other.returncode == 1
    assert "the checkpoint was saved with the optimizer AdamW, but the job uses SGD" in other.stderr


@pytest.mark.parametrize("change", ["model._target_=my_model.NoLoss", "model._target_=my_model.nope"])
@pytest.mark.full("model._target_=my_model.NoLoss")
def test_a_run_that_fails_at_once_spoils_nothing(job: Path, change: str) -> None:
    assert dsjob("cfg.json", cwd=job).returncode == 0
    kept = {name: (job / "run" / name).read_bytes() for name in ("resolved.json", "result.json", "metrics.jsonl")}
    assert dsjob("run", "run", change, "trainer.max_steps=8", cwd=job).returncode != 0
    assert dsjob("run", "run", "checkpoint.resume=never", cwd=job).returncode == 1
    assert kept == {name: (job / "run" / name).read_bytes() for name in kept}
    assert dsjob("run", "run", cwd=job).returncode == 0
    assert kept["result.json"] == (job / "run" / "result.json").read_bytes()


def test_a_folder_goes_on_with_another_number_of_ranks(job: Path) -> None:
    assert dsjob("cfg.json", "launch.nproc=2", cwd=job).returncode == 0
    again = dsjob("run", "run", "launch.nproc=1", "trainer.max_steps=8", cwd=job)
    assert "8 = 4 micro x 2 accumulated x 1 rank" in again.stdout, again.stderr


def test_a_repeated_run_does_not_go_on_in_the_old_folder(job: Path) -> None:
    assert dsjob("cfg.json", cwd=job).returncode == 0
    assert dsjob("run", "run/resolved.json", cwd=job).returncode == 0
    (again,) = job.glob("run-*")
    assert read_metrics(again) == read_metrics(job / "run")
    assert dsjob("-m", "run/resolved.json", "trainer.seed=1,2", cwd=job).returncode == 0
    assert len(list(job.glob("run-*/1/result.json"))) == 1


def test_a_sweep_does_not_mix_with_an_earlier_one(job: Path) -> None:
    assert dsjob("-m", "cfg.json", "trainer.seed=1,2", cwd=job).returncode == 0
    again = dsjob("-m", "cfg.json", "trainer.seed=1,2", cwd=job)
    assert again.returncode == 0, again.stderr
    losses = [json.loads((job / "run" / str(i) / "result.json").read_text())["metrics"]["eval/loss"] for i in (0, 1)]
    assert len(set(losses)) == 2
    mixed = dsjob("-m", "cfg.json", "trainer.seed=3,4", cwd=job)
    assert mixed.returncode == 2
    assert "run/0 holds the run with trainer.seed=1" in mixed.stderr
    assert losses == [
        json.loads((job / "run" / str(i) / "result.json").read_text())["metrics"]["eval/loss"] for i in (0, 1)
    ]


STOP = """
import os, signal
from dsjob.callbacks.callback import Callback

class Stop(Callback):
    def on_log(self, run, record):
        os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("sweep", [[], ["-m", "trainer.seed=1,2"]], ids=["run", "sweep"])
def test_a_run_that_sigterm_has_stopped_is_saved_and_no_error(job: Path, sweep: list[str]) -> None:
    (job / "stop.py").write_text(STOP)
    done = dsjob("cfg.json", *sweep, "+callbacks.stop={_target_: stop.Stop}", cwd=job)
    assert done.returncode == 75, done.stderr
    assert re.search(r"^dsjob: stopped by SIGTERM after step 2; saved run/", done.stderr, re.MULTILINE)
    assert "error" not in done.stderr
    assert "== run 1" not in done.stdout  # nor does a sweep go on


def test_a_sweep_may_have_a_folder_that_hydra_fills_in(job: Path) -> None:
    done = dsjob("-m", "cfg.json", "trainer.seed=1,2", "hydra.sweep.dir='sweeps/${now:%Y}'", cwd=job)
    assert done.returncode == 0, done.stderr
    assert len(list(job.glob("sweeps/*/*/result.json"))) == 2


def test_modules_beside_the_job_file_are_found_again(job: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert dsjob("../cfg.json", cwd=elsewhere).returncode == 0
    again = dsjob("run", "run", "trainer.max_steps=7", cwd=elsewhere)
    assert again.returncode == 0, again.stderr


def test_a_resume_draws_the_same_noise_in_workers(job: Path) -> None:
    noisy = ("data.train._target_=my_model.Noisy", "data.num_workers=2", "~data.eval")
    assert dsjob("cfg.json", *noisy, "output.dir=whole", cwd=job).returncode == 0
    assert dsjob("cfg.json", *noisy, "trainer.max_steps=3", cwd=job).returncode == 0
    assert dsjob("run", "run", "trainer.max_steps=6", cwd=job).returncode == 0
    assert read_metrics(job / "run") == read_metrics(job / "whole")


def test_a_folder_of_another_job_is_not_gone_on_with(job: Path) -> None:
    assert dsjob("cfg.json", cwd=job).returncode == 0
    other = dsjob("cfg.json", "model._target_=my_model.Net", "trainer.max_steps=8", cwd=job)
    assert other.returncode == 2
    assert "run holds the run of another job: its model is my_model.build" in other.stderr


STEP = """
def step(engines, batch):
    loss = engines["net"](*batch)
    engines["net"].backward(loss)
    engines["net"].step()
    return {"loss": loss}
"""


@pytest.mark.parametrize("models", [False, True])
@pytest.mark.full("True")
def test_another_type_of_optimizer_drops_the_old_ones_arguments_and_says_so(tmp_path: Path, models: bool) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.9]}}
    model, step = {"_target_": "my_model.build"}, {"_target_": "two.step"}
    own = {"models": {"net": {"model": model, "optimizer": optimizer}}, "model": None, "optimizer": None}
    trainer = {"train_batch": 8, "max_steps": 2, "step": step}
    sections = {**own, "trainer": trainer} if models else {"optimizer": optimizer}
    make_job(tmp_path, **{"data": {"train": {"_target_": "my_model.Data"}}, **sections})
    (tmp_path / "two.py").write_text(STEP)
    first = dsjob("cfg.json", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    path = f"{'models.net.' if models else ''}optimizer"
    again = dsjob("run", "run", f"{path}.type=SGD", f"{path}.params.momentum=0.9", "trainer.max_steps=8", cwd=tmp_path)
    assert f"{path}.type changes from AdamW to SGD: it keeps lr 0.01 and drops betas" in again.stderr
    assert "the checkpoint was saved with the optimizer AdamW, but the job uses SGD" in again.stderr
    assert (
        "keep AdamW, or start a new run from these weights: dsjob run FOLDER/resolved.json output.dir=" in again.stderr
    )
    assert again.returncode == 1
    anew = ("output.dir=other", "checkpoint.resume=run/", f"{path}.type=SGD", f"{path}.params.momentum=0.9")
    done = dsjob("run/resolved.json", *anew, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "other" / "resolved.json").read_text())
    found = written["models"]["net"]["optimizer"] if models else written["optimizer"]
    assert (found["type"], found["params"]["lr"], found["params"]["momentum"]) == ("SGD", 0.01, 0.9)


def test_another_type_of_schedule_goes_on_at_the_step_and_says_so(job: Path) -> None:
    warm_up = ("+scheduler.type=WarmupLR", "scheduler.params.warmup_num_steps=3", "~data.eval")
    assert dsjob("cfg.json", *warm_up, cwd=job).returncode == 0
    again = dsjob("run", "run", "scheduler.type=WarmupCosineLR", "trainer.max_steps=8", cwd=job)
    assert again.returncode == 0, again.stderr
    assert (
        "scheduler.type changes from WarmupLR to WarmupCosineLR: it keeps warmup_num_steps 3 and drops" in again.stderr
    )
    assert "scheduler WarmupLR -> WarmupCosineLR, which continues at step 6" in again.stdout
    whole = dsjob(
        "cfg.json", "+scheduler.type=WarmupCosineLR", *warm_up[1:], "trainer.max_steps=8", "output.dir=whole", cwd=job
    )
    assert whole.returncode == 0, whole.stderr
    assert read_metrics(job / "run", "lr")[8] == read_metrics(job / "whole", "lr")[8]


def test_a_run_goes_on_from_where_it_is(job: Path) -> None:
    """Another output.dir, or a checkpoint.dir without checkpoints, would begin anew without a word."""
    assert dsjob("cfg.json", "checkpoint.every=2", "output.dir=run", cwd=job).returncode == 0
    moved = dsjob("run", "run", "output.dir=other", "trainer.max_steps=9", cwd=job)
    assert moved.returncode == 2
    assert "dsjob run run/resolved.json output.dir=other" in moved.stderr
    elsewhere = dsjob("run", "run", "checkpoint.dir=other", "trainer.max_steps=9", cwd=job)
    assert elsewhere.returncode == 2
    assert "checkpoint.dir=other holds no checkpoint" in elsewhere.stderr
    assert dsjob("ckpt", "copy", "run/checkpoints", "other", cwd=job).returncode == 0
    copied = dsjob("run", "run", "checkpoint.dir=other", "trainer.max_steps=9", cwd=job)
    assert copied.returncode == 0, copied.stderr
    assert "resumed" in copied.stdout
