"""Mistakes: one clear message that says what and where, the right exit code, no traceback."""

import os
import sys
from pathlib import Path

import pytest
from jobs import dsjob, list_commits, make_job, read_metrics
from programs import run_program

CASES = [
    (["trainer.micro_bath=4"], 2, ["trainer.micro_bath: unknown key", 'did you mean "micro_batch"?']),
    (["optimizer={type: SGD, parms: {lr: 1}}"], 2, ["optimizer.parms: is not in the document", '"params"']),
    (["model.hidden=4"], 2, ["model.hidden: is not in the document", "+model.hidden="]),
    (
        ["trainer.micro_bath=4", "optimizer.parms.lr=1", "trainer.max_steps=many"],
        2,
        [
            "trainer.micro_bath: unknown key",
            '"optimizer.params.lr"?',
            'trainer.max_steps: must be an integer, but is "many"',
        ],
    ),
    (["+model.dropuot=0.1"], 2, ["my_model.build", "dropuot", 'did you mean "dropout"?']),
    (["trainer.max_steps=many"], 2, ['trainer.max_steps: must be an integer, but is "many"']),
    (
        ["trainer.train_batch=9", "trainer.micro_batch=2"],
        2,
        ["train_batch 9 (command line: trainer.train_batch=9) is not micro_batch 2"],
    ),
    (["+recipe=quikstart"], 2, ["unknown recipe 'quikstart'", "quickstart"]),
    (["deepspeed=nowhere.json"], 2, ["cannot read nowhere.json"]),
    (["checkpoint.resume=maybe", "output.dir=runs/%time"], 2, ['"maybe" is the tag of a checkpoint']),
    (
        ["model._target_=transformers.AutoModel.from_pretrained", "+model.pretrained_model_name_or_path=./gone"],
        2,
        ["model._target_: there is no model folder ./gone"],
    ),
    (["model._target_=nowhere.build"], 2, ["there is no module 'nowhere'"]),
    (["model._target_=my_model.biuld"], 2, ["my_model has no 'biuld'", 'did you mean "build"?']),
    (["model._target_=my_model.not_a_model"], 1, ["returned int, not a torch.nn.Module"]),
    (
        ["model._target_=torch.nn.Identity"],
        1,
        ["model: the model Identity cannot be trained", "no parameters"],
    ),
    (["model._target_=my_model.NoLoss"], 1, ["has no loss: it is a dict of logits", "loss._target_"]),
    (["model._target_=my_model.Nan"], 1, ["the loss became nan in step 1", "optimizer.params.lr"]),
    (["model._target_=my_model.Crash"], 1, ["ValueError: shapes do not fit", "my_model.py:", "--debug"]),
    (["+data.train.n=0"], 1, ["data.train (Data) is empty"]),
    (["optimizer.type=AdamX"], 2, ['unknown optimizer "AdamX"', "Adamax"]),
    (["checkpoint.resume=required"], 1, ["run/checkpoints contains no committed checkpoint"]),
    (["output.dir=cfg.json/run"], 1, ["cannot create the folder cfg.json/run"]),
    (["checkpoint.dir=my_model.py/x"], 1, ["my_model.py/x"]),
    (["launch.device=cuda"], 1, ["needs a GPU of its own"]),
    (["zero_optimization={stage: 2, offload_optimizer: {device: nvme}}"], 2, ["nvme needs nvme_path", "local disk"]),
]


@pytest.mark.parametrize(("arguments", "code", "expected"), CASES, ids=[" ".join(case[0]) for case in CASES])
def test_a_mistake_is_named_and_nothing_else_is_printed(
    tmp_path: Path, arguments: list[str], code: int, expected: list[str]
) -> None:
    if arguments == ["launch.device=cuda"] and os.path.exists("/dev/nvidia0"):
        arguments = ["launch.device=cuda", "launch.nproc=99", "trainer.train_batch=99"]
    make_job(tmp_path)
    done = dsjob("cfg.json", *arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    for part in expected:
        assert part in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert len(done.stderr.splitlines()) <= 4


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    make_job(tmp_path)
    done = dsjob("cfg.json", "model._target_=my_model.Crash", "--debug", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_a_traceback_shows_no_value_of_the_environment(tmp_path: Path) -> None:
    make_job(tmp_path, model={"_target_": "refusing.Model", "token": "${oc.env:DSJOB_TOKEN}"})
    (tmp_path / "refusing.py").write_text("def Model(token):\n    raise ValueError(f'refused {token}')\n")
    done = dsjob("cfg.json", "--debug", cwd=tmp_path, DSJOB_TOKEN="hunter2hunter2")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ValueError: refused ***" in done.stderr
    assert "hunter2" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["valdate", "cfg.json"], 'did you mean "validate"?'),
        (["nothing.json"], "no such file: nothing.json"),
        (["run", "nothing"], "no such file or run folder: nothing"),
        (["run", "."], "there is no resolved.json in it"),
        (["cfg.json", "cfg.json", "my_model.py"], "one job file at a time"),
        (["--nonsense"], "--nonsense"),
        (["cfg.json", "a b=c d"], "cannot read"),
        (["convert", "--to", "fp64", "run"], "invalid choice"),
        (["convert", "--to", "fp32", "nowhere"], "nowhere"),
    ],
)
def test_a_wrong_command_exits_2(tmp_path: Path, arguments: list[str], expected: str) -> None:
    make_job(tmp_path)
    done = dsjob(*arguments, cwd=tmp_path)
    assert expected in done.stderr
    assert done.returncode in ((1, 2) if "nowhere" in arguments else (2,))
    assert "Traceback" not in done.stderr


def test_a_disk_that_fills_up_while_saving_keeps_the_earlier_checkpoint(tmp_path: Path) -> None:
    """Files may not grow beyond a limit, which writing hits in the middle of a shard."""
    make_job(tmp_path)
    assert dsjob("cfg.json", "trainer.max_steps=3", cwd=tmp_path).returncode == 0
    before = read_metrics(tmp_path / "run")
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, 16_000))"
    code = f"{limit}; from dsjob.cli import main; sys.exit(main())"
    limited = run_program([sys.executable, "-c", code, "cfg.json"], cwd=tmp_path)
    assert limited.returncode == 1
    assert "cannot write run/checkpoints/step-00000006-a0002" in limited.stderr
    assert "File too large" in limited.stderr
    assert "Traceback" not in limited.stderr
    assert list_commits(tmp_path / "run") == ["step-00000003"]
    assert not (tmp_path / "run/checkpoints/step-00000006-a0002").exists()
    after = dsjob("cfg.json", cwd=tmp_path)
    assert "at step 3" in after.stdout
    assert {step: loss for step, loss in read_metrics(tmp_path / "run").items() if step <= 3} == before
