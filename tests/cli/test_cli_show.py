"""`dsjob show`: the resolved document as YAML or JSON, which is a job itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from job_documents import make_job, resolve, write_json

from dsjob.cli import main
from dsjob.document import parse


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `dsjob show` and gives back its exit code, what it printed, and what it complained about."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["show", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_a_recipe_is_shown_resolved_as_yaml(show: Any) -> None:
    code, out, err = show("+recipe=quickstart")
    document = yaml.safe_load(out)
    assert (code, err) == (0, "")
    assert document["name"] == "quickstart"
    assert document["trainer"]["train_batch"] == document["trainer"]["micro_batch"]
    assert document["data"]["train"]["context"] == document["model"]["context"]
    assert "deepspeed" not in document


def test_json_and_yaml_show_the_same(show: Any) -> None:
    as_json = json.loads(show("+recipe=quickstart", "--format", "json")[1])
    assert as_json == yaml.safe_load(show("+recipe=quickstart")[1])
    assert list(as_json)[:4] == ["name", "model", "tasks", "data"]


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_what_is_shown_is_a_job_that_shows_itself(show: Any, form: str) -> None:
    _, first, _ = show("+recipe=quickstart", "trainer.seed=7", "--format", form)
    Path(f"shown.{form}").write_text(first)
    assert main(["validate", f"shown.{form}"]) == 0
    assert show(f"shown.{form}", "--format", form) == (0, first, "")


def test_a_file_is_shown_with_its_overrides(show: Any) -> None:
    write_json(Path("job.json"), make_job())
    code, out, _ = show("job.json", "trainer.max_steps=99", "zero=stage2")
    document = yaml.safe_load(out)
    assert code == 0
    assert document["trainer"]["max_steps"] == 99
    assert document["zero_optimization"]["stage"] == 2
    assert document["name"] == "job"


def test_flags_may_stand_between_overrides(show: Any) -> None:
    write_json(Path("job.json"), make_job())
    code, out, _ = show("trainer.max_steps=99", "--format", "json", "job.json", "--world-size", "2", "trainer.seed=1")
    trainer = json.loads(out)["trainer"]
    assert code == 0
    assert (trainer["max_steps"], trainer["seed"], trainer["train_batch"]) == (99, 1, 8)


@pytest.mark.parametrize(
    ("arguments", "environment", "train_batch"),
    [
        ([], {}, 4),
        (["launch.nproc=3"], {}, 12),
        (["launch.nproc=3", "--world-size", "5"], {}, 20),
        (["launch.nproc=3"], {"RANK": "0", "WORLD_SIZE": "2"}, 8),
    ],
)
def test_batch_sizes_are_those_of_the_ranks_there_would_be(
    show: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], environment: dict[str, str], train_batch: int
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    write_json(Path("job.json"), make_job())
    assert yaml.safe_load(show("job.json", *arguments)[1])["trainer"]["train_batch"] == train_batch


def test_letters_of_all_alphabets_stay_readable(show: Any) -> None:
    write_json(Path("job.json"), make_job(model={"_target_": "a.b", "word": "naïve 日本"}))
    assert "naïve 日本" in show("job.json")[1]


def test_numbers_are_read_back_as_they_were(show: Any) -> None:
    values = [1e-3, 5e-5, 1e8, 0.1, 3, 1e-8]
    write_json(Path("job.json"), make_job(model={"_target_": "a.b", "values": values}))
    for form in ("yaml", "json"):
        read = parse(show("job.json", "--format", form)[1], f"x.{form}").value["model"]["values"]
        assert read == values
        assert [type(value) for value in read] == [type(value) for value in values]


def test_what_looks_like_another_kind_of_value_stays_a_string(show: Any) -> None:
    numbers = ["1e-3", "12:30", "0x1F", "1_000", "-.5", "+7", "2024-01-01"]
    values = [*numbers, "true", "null", "~", "on", "", " a ", "a: b", "{x}", "-"]
    write_json(Path("job.json"), make_job(model={"_target_": "a.b", "values": values}))
    for form in ("yaml", "json"):
        assert parse(show("job.json", "--format", form)[1], f"x.{form}").value["model"]["values"] == values


def test_a_folder_of_ones_own_configs_is_used(show: Any) -> None:
    Path("mine/recipe").mkdir(parents=True)
    Path("mine/recipe/small.yaml").write_text("# @package _global_\ndefaults: [quickstart]\ntrainer: {max_steps: 7}\n")
    for flag in ("--config-dir", "-cd"):
        code, out, _ = show("+recipe=small", flag, "mine")
        assert (code, yaml.safe_load(out)["trainer"]["max_steps"]) == (0, 7)


def test_a_runs_folder_stands_for_its_document(show: Any) -> None:
    Path("run").mkdir()
    write_json(Path("run/resolved.json"), resolve(make_job()))
    for name in ("run", "run/"):
        document = yaml.safe_load(show(name, "trainer.max_steps=99")[1])
        assert document["output"]["dir"] == "run"
        assert document["trainer"]["max_steps"] == 99


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gone.json"], "no such file: gone.json"),
        (["."], "there is no resolved.json in it"),
        (["job.json", "other.json"], "one job file at a time, not job.json, other.json"),
        (
            ["job.json", "trainer.mirco_batch=1"],
            'error[unknown-key]: trainer.mirco_batch: unknown key; did you mean "micro_batch"?',
        ),
        (["+recipe=quickstrat"], 'did you mean "quickstart"?'),
        (
            ["job.json", "trainer.max_steps=0"],
            "command line: trainer.max_steps=0: error[range]: trainer.max_steps: must be at least 1",
        ),
        (["job.json", "launch=2"], "command line: launch=2: error[type]: launch: must be an object, but is 2"),
        (["job.json", "optimizer.params.lr=inf"], "optimizer.params.lr: must be a finite number, but is inf"),
        (["job.json", "launch.nproc=inf"], "launch.nproc: must be an integer"),
        (
            ["job.json", "trainer.train_batch=7"],
            "train_batch 7 (command line: trainer.train_batch=7) is not micro_batch 4 (job.json:12:5) x grad_accum 1",
        ),
        (["job.json", "name=${oc.env:DSJOB_NONE}"], "DSJOB_NONE"),
        (["job.json", "--config-dir", "gone"], "no such folder: gone"),
        (["broken.yaml"], "broken.yaml:1:"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback_and_exits_2(show: Any, arguments: list[str], said: str) -> None:
    write_json(Path("job.json"), make_job())
    write_json(Path("other.json"), make_job())
    Path("broken.yaml").write_text("a: [")
    code, out, err = show(*arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments", [[], ["--format", "toml", "+recipe=quickstart"], ["--world-size", "0", "job.json"]]
)
def test_wrong_flags_exit_2(arguments: list[str]) -> None:
    assert main(["show", *arguments]) == 2


def test_a_deepspeed_file_is_built_on(show: Any) -> None:
    write_json(Path("ds.json"), {"zero_optimization": {"stage": 3}, "steps_per_print": 7})
    write_json(Path("job.json"), make_job(deepspeed="ds.json"))
    document = yaml.safe_load(show("job.json")[1])
    assert document["zero_optimization"]["stage"] == 3
    assert document["trainer"]["log_every"] == 7


# ---- where values come from


LAYERS = """\
model: {_target_: mine.build, hidden_size: 8}
data: {train: {_target_: mine.Data}}
trainer:
  max_steps: 10
  train_batch: 8
optimizer: {type: AdamW, params: {lr: 0.001}}
deepspeed: conf/ds.json
"""
DEEPSPEED = """\
{
  "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
\t"train_micro_batch_size_per_gpu": 4,
  "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 3}}
}
"""
ORIGINS = {
    "name": ("layers", "name of the file"),
    "model.hidden_size": (8, "layers.yaml:1:31"),
    "data.shuffle": (True, "default"),
    "trainer.train_batch": (8, "layers.yaml:5:3"),
    "trainer.micro_batch": (4, "conf/ds.json:3:2"),
    "trainer.grad_accum": (2, "derived: train_batch 8 / micro_batch 4 / 1 ranks"),
    "trainer.max_steps": (10, "layers.yaml:4:3"),
    "trainer.seed": (7, "command line: trainer.seed=7"),
    "gradient_clipping": (1.0, "default"),
    "bf16.enabled": (True, "command line: precision=bf16"),
    "zero_optimization.stage": (2, "conf/ds.json:2:25"),
    "zero_optimization.reduce_bucket_size": (
        64,
        "auto: hidden_size^2 (no effect here: FSDP2 chooses its buffer sizes itself)",
    ),
    "optimizer.params.lr": (0.001, "layers.yaml:6:35"),
    "optimizer.params.eps": (1e-8, "default"),
    "scheduler.params.warmup_max_lr": (0.001, "auto: optimizer.params.lr"),
    "scheduler.params.warmup_num_steps": (3, "conf/ds.json:4:73"),
}


def write_layers() -> None:
    Path("conf").mkdir()
    Path("conf/ds.json").write_text(DEEPSPEED)
    Path("layers.yaml").write_text(LAYERS)


def test_each_value_is_shown_with_its_origin(show: Any) -> None:
    write_layers()
    arguments = ["layers.yaml", "trainer.seed=7", "precision=bf16", "--origins"]
    code, out, err = show(*arguments, "--format", "json")
    assert (code, err) == (0, "")
    rows = {row["path"]: (row["value"], row["origin"]) for row in json.loads(out)}
    assert {path: rows[path] for path in ORIGINS} == ORIGINS
    lines = show(*arguments)[1].splitlines()
    assert len(lines) == len(rows)
    for line in lines:
        left, _, origin = line.partition("  # ")
        path, _, value = left.partition(": ")
        assert (json.loads(value), origin) == rows[path]


def test_what_a_recipe_gives_is_said_to_be_the_recipes(show: Any) -> None:
    rows = json.loads(show("+recipe=quickstart", "trainer.max_steps=9", "--origins", "--format", "json")[1])
    origins = {row["path"]: row["origin"] for row in rows}
    assert origins["model.width"] == "recipe quickstart"
    assert origins["trainer.max_steps"] == "command line: trainer.max_steps=9"
    assert origins["trainer.grad_accum"] == "default"
    assert origins["trainer.train_batch"].startswith("derived: micro_batch ")
    assert set(map(str, origins.values())) >= {"default", "recipe quickstart"}


def test_a_file_beside_a_recipe_has_its_own_places(show: Any) -> None:
    Path("more.yaml").write_text("trainer:\n  max_steps: 3\n")
    rows = json.loads(show("+recipe=quickstart", "more.yaml", "--origins", "--format", "json")[1])
    origins = {row["path"]: row["origin"] for row in rows}
    assert (origins["trainer.max_steps"], origins["trainer.micro_batch"]) == ("more.yaml:2:3", "recipe quickstart")


def test_changed_is_what_differs_from_the_defaults(show: Any) -> None:
    write_layers()
    out = show("layers.yaml", "trainer.seed=42", "trainer.log_every=3", "--changed")[1]
    assert out.splitlines() == [
        'name: "layers"',
        'model._target_: "mine.build"',
        "model.hidden_size: 8",
        'data.train._target_: "mine.Data"',
        "trainer.train_batch: 8",
        "trainer.micro_batch: 4",
        "trainer.grad_accum: 2",
        "trainer.max_steps: 10",
        "trainer.log_every: 3",
        "zero_optimization.stage: 2",
        "zero_optimization.reduce_bucket_size: 64",
        'optimizer.type: "AdamW"',
        'scheduler.type: "WarmupLR"',
        "scheduler.params.warmup_max_lr: 0.001",
        "scheduler.params.warmup_num_steps: 3",
    ]
    (row,) = [
        row
        for row in json.loads(show("layers.yaml", "--changed", "--format", "json")[1])
        if row["path"] == "trainer.max_steps"
    ]
    assert row == {"path": "trainer.max_steps", "value": 10}
    assert "trainer.max_steps: 10" in show("layers.yaml", "--changed", "--origins")[1]


# ---- differences


def test_two_files_differ_in_what_they_resolve_to(show: Any) -> None:
    write_json(Path("a.json"), make_job())
    write_json(Path("b.json"), make_job(trainer={"train_batch": 4, "max_steps": 10}, bf16={"enabled": True}))
    Path("b.yaml").write_text(yaml.safe_dump(make_job()))
    code, out, err = show("--diff", "a.json", "b.json")
    assert (code, out, err) == (0, "bf16.enabled: false -> true\n", "")
    rows = json.loads(show("a.json", "b.json", "--diff", "--format", "json")[1])
    assert rows == [{"path": "bf16.enabled", "first": False, "second": True}]
    assert show("--diff", "a.json", "b.yaml")[1] == "no difference\n"
    assert json.loads(show("--diff", "a.json", "b.yaml", "--format", "json")[1]) == []


def test_what_only_one_of_two_has_is_null_in_the_other(show: Any) -> None:
    write_json(Path("a.json"), make_job())
    write_json(Path("b.json"), make_job(loss={"_target_": "a.b", "weight": 2}))
    assert show("--diff", "a.json", "b.json")[1] == 'loss._target_: null -> "a.b"\nloss.weight: null -> 2\n'
    assert show("--diff", "b.json", "a.json")[1] == 'loss._target_: "a.b" -> null\nloss.weight: 2 -> null\n'


def test_two_runs_are_compared_by_their_folders(show: Any) -> None:
    for name, seed in (("one", 1), ("two", 2)):
        Path(name).mkdir()
        trainer = {"micro_batch": 4, "max_steps": 10, "seed": seed}
        write_json(Path(name, "resolved.json"), resolve(make_job(trainer=trainer)))
    code, out, _ = show("--diff", "one", "two")
    assert (code, out) == (0, 'trainer.seed: 1 -> 2\noutput.dir: "one" -> "two"\n')


@pytest.mark.parametrize("sources", [["job.json"], ["job.json", "job.json", "job.json"], ["job.json", "gone.json"]])
def test_a_difference_needs_two_that_are_there(show: Any, sources: list[str]) -> None:
    write_json(Path("job.json"), make_job())
    code, out, err = show("--diff", *sources)
    assert (code, out) == (2, "")
    assert ("no such file" if "gone.json" in sources else "two documents") in err


def test_old_spellings_have_their_origin_and_give_way_to_the_command_line(show: Any) -> None:
    gather = "stage3_gather_16bit_weights_on_model_save"
    zero = {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}
    write_json(Path("ds.json"), {"bfloat16": {"enabled": True}, "zero_optimization": zero})
    write_json(Path("job.json"), make_job(deepspeed="ds.json"))
    changed = show("job.json", "--origins", "--changed")[1]
    assert re.search(r"bf16\.enabled: true +# ds\.json:3:5\n", changed)
    assert re.search(gather + r": true +# ds\.json:7:5\n", changed)
    write_json(Path("mixed.json"), make_job(amp={"enabled": True, "opt_level": "O2"}))
    assert re.search(r"fp16\.enabled: true +# mixed\.json:\d+:5\n", show("mixed.json", "--origins")[1])
    write_json(Path("own.json"), make_job(zero_optimization=zero))
    code, out, err = show("own.json", f"zero_optimization.{gather}=false", "--format", "json")
    assert (code, err) == (0, "")
    assert json.loads(out)["zero_optimization"][gather] is False


def test_a_deepspeed_config_is_shown_by_itself(show: Any) -> None:
    write_json(Path("a.json"), {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}})
    write_json(Path("b.json"), {"train_batch_size": 16, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}})
    code, out, err = show("a.json", "--origins", "--changed", "--world-size", "2")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "trainer.train_batch: 8  # a.json:2:3",
        "trainer.micro_batch: 2  # a.json:3:3",
        "trainer.grad_accum: 2   # derived: train_batch 8 / micro_batch 2 / 2 ranks",
        "bf16.enabled: true      # a.json:5:5",
    ]
    shown = json.loads(show("a.json", "--format", "json")[1])
    assert not shown.keys() & {"model", "data", "optimizer", "checkpoint"}
    assert shown["trainer"] == {"train_batch": 8, "micro_batch": 2, "grad_accum": 4}
    different = show("--diff", "a.json", "b.json")[1].splitlines()
    assert different[:2] == ["trainer.train_batch: 8 -> 16", "trainer.micro_batch: 2 -> 16"]
    assert "optimizer.params.lr: null -> 0.1" in different
    write_json(Path("c.json"), {"train_batch_size": 8, "bf16": {"enable": True}})
    code, _, err = show("c.json")
    assert (code, "c.json:4:5: error[unknown-key]" in err) == (2, True)


def test_a_document_is_shown_for_the_ranks_that_it_was_resolved_for(show: Any) -> None:
    trainer = {"train_batch": 64, "micro_batch": 4, "grad_accum": 2, "max_steps": 1}
    write_json(Path("ran.json"), make_job(trainer=trainer, resolved={"world_size": 8}))
    assert json.loads(show("ran.json", "--format", "json")[1])["trainer"]["grad_accum"] == 2
    for arguments in (["launch.nproc=4"], ["--world-size", "4"]):
        assert json.loads(show("ran.json", *arguments, "--format", "json")[1])["trainer"]["grad_accum"] == 4
