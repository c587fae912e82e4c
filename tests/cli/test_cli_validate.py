"""`dsjob validate`: exit codes, places, and what it says of jobs and of bare DeepSpeed configs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from job_documents import make_job, write_json

from dsjob import storage
from dsjob.cli import main
from dsjob.contract.schema import job_schema


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("mine.py", "def build(): ...\n\n\nclass Data: ...\n")


@pytest.fixture
def validate(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `dsjob validate` and gives back its exit code, what it printed, and what it complained about."""

    def run(*arguments: str) -> tuple[int, list[str], list[str]]:
        capsys.readouterr()
        code = main(["validate", *arguments])
        printed = capsys.readouterr()
        return code, printed.out.splitlines(), printed.err.splitlines()

    return run


def write(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


GOOD_YAML = """\
model: {_target_: mine.build}
data:
  train: {_target_: mine.Data}
trainer:
  micro_batch: 4
  max_steps: 10
optimizer:
  type: AdamW
"""


@pytest.mark.parametrize("name", ["job.yaml", "job.yml", "job"])
def test_a_good_yaml_document_is_ok(validate: Any, name: str) -> None:
    assert validate(write(name, GOOD_YAML)) == (0, [f"{name}: ok"], [])


def test_a_good_json_document_is_ok(validate: Any) -> None:
    write_json(Path("job.json"), make_job())
    assert validate("job.json") == (0, ["job.json: ok"], [])


def test_a_document_may_be_given_by_url(validate: Any, tmp_path: Path) -> None:
    # A URL's document may not name local modules.
    text = GOOD_YAML.replace("mine.build", "dsjob.recipes.gpt.build").replace(
        "mine.Data", "dsjob.recipes.text.ByteText"
    )
    write("job.yaml", text)
    url = f"file://{tmp_path}/job.yaml"
    assert validate(url) == (0, [f"{url}: ok"], [])


def test_overrides_are_checked_as_run_checks_them(
    validate: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write("job.yaml", GOOD_YAML)
    assert validate("job.yaml", "trainer.max_steps=3") == (0, ["job.yaml: ok"], [])
    for wrong in ("trainer.max_steps=x", "optimizer.params.lrr=3", "trainer.max_stpes=3", "optimizer=gone"):
        code, _, err = validate("job.yaml", wrong)
        capsys.readouterr()
        assert main(["run", "job.yaml", wrong]) == code == 2
        told = capsys.readouterr().err.removeprefix("dsjob: error: ").splitlines()
        assert err[0].startswith("command line")
        assert told[0] in err[0]
    code, _, err = validate("job.yaml", "trainer.max_steps=x", "trainer.seed=y")
    assert [line.partition(": error")[0] for line in err] == [
        "command line: trainer.max_steps=x",
        "command line: trainer.seed=y",
    ]
    assert validate("job.yaml", "a=[1")[2][0].startswith(
        "command line: error[override]: cannot read the override 'a=[1'"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["job.yaml", "job.yaml", "trainer.seed=1"], "overrides need exactly one document, not 2"),
        (["trainer.seed=1"], "dsjob validate needs a file or a recipe"),
        (["ds.json", "trainer.seed=1"], "this is a DeepSpeed config: edit it"),
    ],
)
def test_overrides_without_a_document_to_go_over(validate: Any, words: list[str], said: str) -> None:
    write("job.yaml", GOOD_YAML)
    write("ds.json", '{"train_batch_size": 8, "zero_optimization": {"stage": 1}}')
    code, out, err = validate(*words)
    assert (code, out) == (2, [])
    assert said in "\n".join(err)


def test_a_recipe_is_checked_without_a_file(validate: Any) -> None:
    assert validate("+recipe=quickstart", "trainer.seed=3") == (0, ["+recipe=quickstart: ok"], [])
    code, out, err = validate("+recipe=quickstart", "trainer.max_steps=x", "trainer.sed=1")
    assert (code, out) == (2, [])
    assert [line.split(": ")[-2] for line in err] == ["trainer.sed", "trainer.max_steps"]


def test_what_a_run_refuses_is_an_error(validate: Any) -> None:
    write("job.yaml", GOOD_YAML.replace("mine.build", "os.system"))
    code, out, (err,) = validate("job.yaml")
    assert (code, out) == (2, [])
    assert "error[untrusted-target]: model._target_: os.system is not trusted" in err
    assert validate("--trust", "os.system", "job.yaml") == (0, ["job.yaml: ok"], [])


def test_the_last_line_says_that_a_target_is_not_on_this_machine(validate: Any) -> None:
    code, out, _ = validate(write("job.yaml", GOOD_YAML.replace("mine.build", "elsewhere.build")))
    assert code == 0
    assert out[-1] == "job.yaml: valid, 1 warning, but dsjob run cannot import all of its targets on this machine"


BAD_YAML = """\
model: {_target_: mine.build}
data:
  train: {_target_: mine.Data}
  shufle: true
trainer:
  micro_batch: 0
  max_steps: ten
optimizer:
  type: AdamW
  params:
    betas: [0.9, 1.5]
"""

BAD_JSON = """\
{
  // the same mistakes
  "model": {"_target_": "mine.build"},
  "data": {"train": {"_target_": "mine.Data"}, "shufle": true},
  "trainer": {
    "micro_batch": 0, "max_steps": "ten",
  },
  "optimizer": {"type": "AdamW", "params": {"betas": [0.9,
    1.5]}}
}
"""


@pytest.mark.parametrize(
    ("name", "text", "places"),
    [("job.yaml", BAD_YAML, ["4:3", "6:3", "7:3", "11:18"]), ("job.json", BAD_JSON, ["4:48", "6:5", "6:23", "9:5"])],
)
def test_every_problem_is_printed_at_once_with_its_place(
    validate: Any, name: str, text: str, places: list[str]
) -> None:
    code, out, err = validate(write(name, text))
    assert (code, out) == (2, [])
    assert err == [
        f'{name}:{places[0]}: error[unknown-key]: data.shufle: unknown key; did you mean "shuffle"?',
        f"{name}:{places[1]}: error[range]: trainer.micro_batch: must be at least 1, but is 0",
        f'{name}:{places[2]}: error[type]: trainer.max_steps: must be an integer, but is "ten"',
        f"{name}:{places[3]}: error[range]: optimizer.params.betas[1]: must be less than 1, but is 1.5",
    ]


@pytest.mark.parametrize(("text", "place"), [('{"a": 1,\n "b": }', "2:7"), ("a: 1\n  b: 2\n", "2:4")])
def test_a_syntax_error_has_its_place(validate: Any, text: str, place: str) -> None:
    code, _, err = validate(write("job", text))
    assert code == 2
    assert err[0].startswith(f"job:{place}: ")


def test_each_of_several_files_is_checked_and_one_bad_one_fails_all(validate: Any) -> None:
    write("good.yaml", GOOD_YAML)
    write("bad.yaml", GOOD_YAML.replace("micro_batch", "mirco_batch"))
    code, out, err = validate("good.yaml", "bad.yaml", "gone.yaml", "good.yaml")
    assert code == 2
    assert out == ["good.yaml: ok", "good.yaml: ok"]
    assert err == [
        'bad.yaml:5:3: error[unknown-key]: trainer.mirco_batch: unknown key; did you mean "micro_batch"?',
        "gone.yaml: error[unreadable]: cannot read gone.yaml: no such file or folder",
    ]


@pytest.mark.parametrize("name", [".", "gone/job.yaml", "memory://no/such.yaml", "nosuch://x"])
def test_what_cannot_be_read_is_named(validate: Any, name: str) -> None:
    code, out, (line,) = validate(name)
    assert (code, out) == (2, [])
    assert name in line


@pytest.mark.parametrize("text", ["", "{}", "[]", "5", "null", "{", "launch: 2", "model: 1\ndata: x", "deepspeed: 7"])
def test_no_document_makes_it_crash(validate: Any, text: str) -> None:
    code, out, err = validate(write("job.yaml", text))
    assert (code, out) == (2, [])
    assert err
    assert not any("Error" in line for line in err)


def test_keys_without_effect_are_warnings_with_the_reason_and_do_not_fail(validate: Any) -> None:
    section = "zero_optimization:\n  stage: 2\n  overlap_comm: true\n"
    told = "has no effect here; FSDP2 and DDP always overlap"
    code, out, err = validate(write("job.yaml", GOOD_YAML + section))
    assert (code, err) == (0, [])
    assert out == [
        f"job.yaml:11:3: warning[no-effect]: zero_optimization.overlap_comm: {told}",
        "job.yaml: ok, 1 warning",
    ]


def test_what_is_not_supported_is_an_error_with_the_reason(validate: Any) -> None:
    code, _, err = validate(write("job.yaml", GOOD_YAML + "fp16:\n  fp16_master_weights_and_grads: true\n"))
    note = job_schema()["properties"]["fp16"]["properties"]["fp16_master_weights_and_grads"]["x-note"]
    told = "fp16.fp16_master_weights_and_grads: true is not supported by dsjob"
    assert (code, err) == (
        2,
        [f"job.yaml:10:3: error[unsupported]: {told}; {note}"],
    )


def test_interpolations_are_followed(validate: Any) -> None:
    code, out, _ = validate(write("job.yaml", GOOD_YAML + "checkpoint: {every: '${trainer.max_steps}'}\n"))
    assert (code, out) == (0, ["job.yaml: ok"])
    code, _, err = validate(write("job.yaml", GOOD_YAML + "checkpoint: {every: '${optimizer.type}'}\n"))
    assert (code, err) == (
        2,
        [
            (
                "job.yaml:9:14: error[pattern]: checkpoint.every: must be a number of steps, or a length with a unit "
                'such as 100ba, 2ep, 1000sp, 1e6tok, 90sec, 30min or 2h, but is "AdamW"'
            )
        ],
    )


def test_an_interpolation_that_leads_nowhere_has_its_place(validate: Any) -> None:
    code, _, err = validate(write("job.yaml", GOOD_YAML + "checkpoint: {every: '${trainer.nope}'}\n"))
    (line,) = err
    assert code == 2
    told = "${trainer.nope} names a key that the document does not set"
    assert line == f"job.yaml:9:14: error[interpolation]: checkpoint.every: {told}"


def test_an_environment_variable_that_is_missing_is_named(validate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSJOB_TEST_STEPS", "7")
    monkeypatch.delenv("DSJOB_TEST_NONE", raising=False)
    text = GOOD_YAML + "checkpoint: {every: '${oc.decode:${oc.env:DSJOB_TEST_STEPS}}'}\n"
    monkeypatch.setattr("dsjob.front.validate.read_environment", lambda: ("DSJOB_TEST_STEPS", "DSJOB_TEST_NONE"))
    assert validate(write("job.yaml", text))[0] == 0
    code, _, (line,) = validate(write("job.yaml", text.replace("STEPS", "NONE")))
    assert code == 2
    assert line.startswith("job.yaml:9:14: error[interpolation]: checkpoint.every: ")
    assert "DSJOB_TEST_NONE" in line


# ---- batch sizes


@pytest.mark.parametrize(
    ("arguments", "nproc", "is_good"),
    [([], 1, False), ([], 2, True), (["--world-size", "2"], 1, True), (["--world-size", "1"], 2, False)],
)
def test_batch_sizes_are_checked_for_the_number_of_ranks(
    validate: Any, arguments: list[str], nproc: int, is_good: bool
) -> None:
    trainer = {"train_batch": 16, "micro_batch": 4, "grad_accum": 2, "max_steps": 1}
    write_json(Path("job.json"), make_job(trainer=trainer, launch={"nproc": nproc}))
    code, _, err = validate("job.json", *arguments)
    assert code == (0 if is_good else 2)
    if not is_good:
        ((place, message),) = [line.split(": ", 1) for line in err]
        assert place == "job.json:12:5"
        assert message == (
            "error[batch]: trainer.train_batch: train_batch 16 (job.json:12:5) is not micro_batch 4 (job.json:13:5) x "
            f"grad_accum 2 (job.json:14:5) x world size 1 "
            f"({'--world-size' if arguments else 'launch.nproc'}); "
            "use launch.nproc=2 (world size 2), or trainer.grad_accum=4, or trainer.train_batch=8"
        )


@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_a_world_size_that_is_none_is_refused(validate: Any, number: str) -> None:
    assert main(["validate", "--world-size", number, "job.yaml"]) == 2


# ---- building on a DeepSpeed file


def test_a_contradiction_with_the_deepspeed_file_names_both_places(validate: Any) -> None:
    write("ds.json", '{\n  "gradient_clipping": 3\n}')
    code, _, err = validate(write("job.yaml", GOOD_YAML + "gradient_clipping: 2\ndeepspeed: ds.json\n"))
    assert code == 2
    (line,) = err
    assert line == (
        "job.yaml:9:1: error[conflict]: gradient_clipping: is 2 (job.yaml:9:1), but deepspeed.gradient_clipping says 3 "
        "(ds.json:2:3); keep one of the two"
    )


def test_a_mistake_in_the_deepspeed_file_is_placed_there(validate: Any) -> None:
    write("ds.json", '{\n  "gradient_clippin": 3\n}')
    code, _, err = validate(write("job.yaml", GOOD_YAML + "deepspeed: ds.json\n"))
    assert code == 2
    assert err == [
        'ds.json:2:3: error[unknown-key]: deepspeed.gradient_clippin: unknown key; did you mean "gradient_clipping"?'
    ]


def test_a_deepspeed_file_that_is_a_pipe_is_not_waited_for(validate: Any) -> None:
    os.mkfifo("pipe.json")
    code, _, err = validate(write("job.yaml", GOOD_YAML + "deepspeed: pipe.json\n"))
    assert code == 2
    assert "cannot read pipe.json: not a regular file" in err[0]


def test_a_deepspeed_file_that_is_missing_is_named(validate: Any) -> None:
    code, _, err = validate(write("job.yaml", GOOD_YAML + "deepspeed: gone.json\n"))
    told = "cannot read gone.json: no such file or folder; paths are relative to the job file"
    assert (code, err) == (2, [f"job.yaml:9:1: error[unreadable]: deepspeed: {told}"])


def test_a_key_that_is_given_twice_hides_no_other_mistake(validate: Any) -> None:
    write("ds.json", '{"zero_optimization": {"stage": 9},\n "bf16": {}, "bf16": {}}')
    code, _, err = validate(write("job.yaml", GOOD_YAML + "seed: 1\nloss: 5\nname: a\nname: b\n"))
    assert code == 2
    assert [line.split(":")[:4] for line in err] == [
        ["job.yaml", "9", "1", " error[unknown-key]"],
        ["job.yaml", "10", "1", " error[type]"],
        ["job.yaml", "12", "1", " error[duplicate-key]"],
    ]
    code, _, err = validate(write("job.yaml", GOOD_YAML + "loss: 5\ndeepspeed: ds.json\n"), "ds.json")
    assert [line.split(": ")[:2] for line in err] == [
        ["ds.json:2:14", "error[duplicate-key]"],
        ["job.yaml:9:1", "error[type]"],
        ["ds.json:1:1", "error[batch]"],
        ["ds.json:1:24", "error[enum]"],
        ["ds.json:2:14", "error[duplicate-key]"],
    ]


def test_a_folder_that_holds_another_job_is_told(validate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("run/checkpoints/commits").mkdir(parents=True)
    Path("run/checkpoints/commits/step-00000001.json").write_text("{}")
    write_json(
        Path("run/resolved.json"),
        make_job(data={"train": {"_target_": "mine.Data"}}, model={"_target_": "other.build"}),
    )
    code, _, (line,) = validate(write("job.yaml", GOOD_YAML + "output: {dir: run}\n"))
    assert code == 2
    assert line.startswith(
        "job.yaml:9:10: error[another-job]: output.dir: run holds the run of another job: its model is"
    )
    away = GOOD_YAML + "output: {dir: run}\ncheckpoint: {dir: 's3://bucket/c'}\n"
    with monkeypatch.context() as patched:
        patched.setattr(storage, "list_names", lambda url: pytest.fail(f"{url} was listed"))
        assert validate(write("away.yaml", away))[0] == 0
    same = make_job(model={"_target_": "mine.build"}, data={"train": {"_target_": "mine.Data"}})
    write_json(Path("run/resolved.json"), same)
    assert validate("job.yaml")[0] == 0


def test_an_unknown_key_in_trainer_does_not_hide_the_batch(validate: Any) -> None:
    text = GOOD_YAML.replace("  micro_batch: 4\n", "  micro_batch: 4\n  train_batch: 6\n  foo: 1\n")
    told = validate(write("job.yaml", text))[2]
    assert [line.split(": ")[1] for line in told] == ["error[batch]", "error[unknown-key]"]


def test_what_an_unread_deepspeed_file_may_say_is_not_missed(validate: Any) -> None:
    text = GOOD_YAML.replace("  micro_batch: 4\n", "") + "seed: 1\ndeepspeed: "
    for name, kind in (("gone.json", "error[unreadable]"), ("s3://bucket/ds.json", "warning[not-read]")):
        code, out, err = validate(write("job.yaml", text + name + "\n"))
        assert code == 2
        assert sorted(line.split(": ")[1] for line in out + err) == sorted(["error[unknown-key]", kind])


def test_a_document_from_a_url_has_its_deepspeed_file_read_by_nobody(validate: Any) -> None:
    write("ds.json", "{}")
    for name in ("ds.json", str(Path("ds.json").absolute())):
        storage.write_bytes("memory://jobs/job.yaml", (GOOD_YAML + f"deepspeed: {name}\n").encode())
        code, out, _ = validate("--trust", "mine", "memory://jobs/job.yaml")
        assert code == 0
        assert f"warning[not-read]: deepspeed: {name} is not read here" in "\n".join(out)


# ---- bare DeepSpeed configs; the documents are those of the Hugging Face Trainer's own page

STAGE_2 = """\
{
   "zero_optimization": {
       "stage": 2,
       "allgather_partitions": true,
       "allgather_bucket_size": 5e8,
       "overlap_comm": true,
       "reduce_scatter": true,
       "reduce_bucket_size": 5e8,
       "contiguous_gradients": true%s
   },

   "optimizer": {
     "type": "AdamW",
     "params": {
       "lr": 3e-5,
       "betas": [ 0.8, 0.999 ],
       "eps": 1e-8,
       "weight_decay": 3e-7
     }
   },

   "scheduler": {
     "type": "WarmupLR",
     "params": {
       "warmup_min_lr": 0,
       "warmup_max_lr": 3e-5,
       "warmup_num_steps": 500
     }
   },
%s
}
"""


def test_a_good_deepspeed_config_is_ok(validate: Any) -> None:
    text = STAGE_2 % ("", '   "train_batch_size": 8,\n   "steps_per_print": 2000,\n   "wall_clock_breakdown": false')
    code, out, err = validate(write("ds.json", text))
    assert (code, err) == (0, [])
    assert [line.split(": ")[2] for line in out[:-1]] == [
        "zero_optimization.allgather_partitions",
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.overlap_comm",
        "zero_optimization.reduce_scatter",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.contiguous_gradients",
    ]
    assert all(": warning[no-effect]: " in line for line in out[:-1])
    assert out[-1] == "ds.json: ok, 6 warnings"


def test_a_deepspeed_config_without_batch_sizes_is_told_to_give_them(validate: Any) -> None:
    code, _, (line,) = validate(write("ds.json", STAGE_2 % ("", "")))
    assert code == 2
    assert "set train_batch_size or train_micro_batch_size_per_gpu" in line


def test_offloading_and_fp16_of_a_stage_2_config_are_good(validate: Any) -> None:
    fp16 = '"fp16": {"enabled": true, "loss_scale": 0, "hysteresis": 2}, "train_batch_size": 8'
    assert validate(write("ds.json", STAGE_2 % (',\n       "cpu_offload": true', fp16)))[0] == 0


STAGE_3 = """\
{
    "zero_optimization": {
        "stage": 3,
        "cpu_offload": true,
        "cpu_offload_params": true,
        "cpu_offload_use_pin_memory" : true,
        "overlap_comm": true,
        "contiguous_gradients": true,
        "sub_group_size": 1e14,
        "reduce_bucket_size": 1e6,
        "stage3_prefetch_bucket_size": 0.94e6,
        "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_fp16_weights_on_model_save": true
    },
    "train_micro_batch_size_per_gpu": 4
}
"""


def test_a_stage_3_config_with_offloading_is_good(validate: Any) -> None:
    code, _, err = validate(write("ds.json", STAGE_3))
    assert code == 0
    assert all(": warning[" in line for line in err)


def test_a_config_that_ends_with_a_comma_is_read(validate: Any) -> None:
    code, out, _ = validate(write("ds.json", '{\n    "gradient_accumulation_steps": 3,\n  "train_batch_size": 6,\n}'))
    assert (code, out) == (0, ["ds.json: ok"])


@pytest.mark.parametrize(
    ("config", "path", "said"),
    [
        ({"train_batch_size": 8, "fp16": {"clip": 1.0}}, "clip", "is not supported by dsjob"),
        ({"train_batch_siez": 8, "bf16": {}}, "train_batch_siez", 'did you mean "train_batch_size"?'),
        ({"train_batch_size": "eight"}, "train_batch_size", "must be an integer"),
        ({"train_batch_size": 8, "zero_optimization": {"stage": 5}}, "zero_optimization.stage", "must be one of"),
        ({"train_batch_size": 8, "gradient_clipping": "1.0"}, "gradient_clipping", "must be a number"),
        ({"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup": 1}}}, "warmup", "unknown key"),
    ],
)
def test_a_mistake_in_a_deepspeed_config_is_named(validate: Any, config: dict[str, Any], path: str, said: str) -> None:
    write("ds.json", json.dumps(config))
    code, out, (line,) = validate("ds.json")
    assert (code, out) == (2, [])
    assert line.startswith("ds.json:1:")
    assert path in line
    assert said in line


@pytest.mark.parametrize(("ranks", "code"), [("2", 0), ("3", 2)])
def test_batch_sizes_of_a_deepspeed_config_are_checked_for_the_world_size(validate: Any, ranks: str, code: int) -> None:
    write("ds.json", '{"train_batch_size": 8}')
    assert validate("--world-size", ranks, "ds.json")[0] == code


def test_nothing_is_fetched_and_nothing_of_the_environment_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DSJOB_TEST_SECRET", "hunter22345" * 9)
    Path("job.json").write_text(
        json.dumps(
            make_job(trainer={"max_steps": "${oc.env:DSJOB_TEST_SECRET}"}, deepspeed="http://127.0.0.1:9/x.json")
        )
    )
    assert main(["validate", "job.json"]) == 2
    told = "".join(capsys.readouterr())
    assert "hunter2" not in told
    assert "trainer.max_steps: environment variable DSJOB_TEST_SECRET is not allowed here" in told


WRONG = """\
model: {_target_: subprocess.run}
data: {train: {_target_: mine.Data}}
trainer: {train_batch: 7, micro_batch: 2, max_steps: 10}
optimizer: {type: AdamWW, params: {lr: "0.1", wieght_decay: 3}}
scheduler: {type: WarmupDecayLr, params: {warmup_num_stepz: 1}}
"""


def test_a_wrong_type_of_an_optimizer_hides_no_other_problem(validate: Any) -> None:
    code, out, err = validate(write("job.yaml", WRONG))
    assert code == 2
    assert [line.split(": ")[2] for line in err] == [
        "model._target_",
        "trainer.train_batch",
        "optimizer.type",
        "optimizer.params.lr",
        "optimizer.params.wieght_decay",
        "scheduler.type",
        "scheduler.params.warmup_num_stepz",
    ]
    assert out == []


def test_a_folder_is_told_with_a_document_in_it(validate: Any) -> None:
    write("job.yaml", GOOD_YAML)
    code, _, err = validate(".")
    assert (code, err) == (
        2,
        [".: error[unreadable]: this is a folder, not a job document; name a file: dsjob validate job.yaml"],
    )


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("scheduler: {type: WarmupLR, params: {warmup: 3}}", 'did you mean "warmup_num_steps"?'),
        ("zero_optimization: 3", "must be an object, true or false, but is 3"),
        ("amp: {enabled: false}", "is an old spelling; leave it out: this is the default"),
    ],
)
def test_a_mistake_is_told_with_what_to_do(validate: Any, section: str, said: str) -> None:
    _, out, err = validate(write("job.yaml", GOOD_YAML + section))
    assert said in "\n".join(out + err)


def test_what_is_not_supported_is_not_also_completed(validate: Any) -> None:
    write("job.yaml", GOOD_YAML + "zero_optimization: {stage: 3, zero_quantized_weights: true}")
    (told,) = validate("job.yaml")[2]
    assert "zero_quantized_weights: true is not supported by dsjob" in told
