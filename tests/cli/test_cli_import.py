"""`dsjob import` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import dsjob

from dsjob.cli import main
from dsjob.document import parse

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2, "overlap_com": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a DeepSpeed config, which is the current one."""
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED, indent=1))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_yaml_with_its_notes_at_the_top(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "ds.json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert '#   ds.json:5:3: zero_optimization.overlap_com=true: did you mean "overlap_comm"?' in shown.out
    assert "_target_: my_module.build_model  # placeholder" in shown.out
    assert parse(shown.out, "job.yaml").value["optimizer"] == DEEPSPEED["optimizer"]


def test_json_with_its_notes_beside_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "ds.json", "--format", "json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["zero_optimization"] == {"stage": 2}
    assert "did you mean" in shown.err


def test_a_job_that_was_filled_in_validates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--", "deepspeed", "--num_gpus", "2", "train.py", "--learning_rate", "3e-5", "--output_dir", "a b"]
    assert main(["import", "ds.json", "-o", "job.yaml", *command, "--max_steps", "10"]) == 0
    assert "job.yaml: " in capsys.readouterr().err
    assert main(["validate", "job.yaml"]) == 0
    document = parse((folder / "job.yaml").read_text(), "job.yaml").value
    assert document["output"]["dir"] == "a b"
    assert document["optimizer"]["params"]["lr"] == 3e-5


CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 1)

    def forward(self, x, y):
        return {"loss": nn.functional.mse_loss(self.line(x), y)}

def build_model(pretrained):
    return Net()

def build_train_data(path, max_samples=None):
    x = torch.randn(max_samples, 4, generator=torch.Generator().manual_seed(0))
    return [{"x": one, "y": one.sum(0, keepdim=True)} for one in x]
"""


@pytest.mark.slow
def test_a_launch_command_becomes_a_job_that_trains(folder: Path) -> None:
    """The placeholders name a module that the user writes: with it in place the document runs as it is."""
    (folder / "run.sh").write_text(
        "#!/bin/bash\nSAMPLES=64\n"
        "torchrun --nproc_per_node=2 finetune.py --model_name_or_path my/net --train_file mine.bin --no_cuda \\\n"
        "  --output_dir out --max_train_samples $SAMPLES --per_device_train_batch_size 4 --num_train_epochs 2 \\\n"
        "  --learning_rate 0.05 --lr_scheduler_type linear --warmup_ratio 0.1 --fsdp 'full_shard auto_wrap' --bf16\n"
    )
    (folder / "my_module.py").write_text(CODE)
    done = dsjob("import", "run.sh", "-o", "job.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    done = dsjob("run", "job.yaml", "--unpinned", cwd=folder)  # the model's name is on a hub
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((folder / "out" / "result.json").read_text())
    assert result["step"] == 16  # 64 samples, twice, 8 a step
    resolved = json.loads((folder / "out" / "resolved.json").read_text())
    assert resolved["scheduler"]["type"] == "linear"
    assert resolved["zero_optimization"]["stage"] == 3


def test_a_file_is_replaced_only_when_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "job.yaml").write_text("mine")
    assert main(["import", "ds.json", "-o", "job.yaml"]) == 2
    assert (folder / "job.yaml").read_text() == "mine"
    assert "job.yaml already exists" in capsys.readouterr().err
    assert main(["import", "ds.json", "-o", "job.yaml", "--force"]) == 0
    assert (folder / "job.yaml").read_text().startswith("# Made by dsjob import.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to import"),
        (["no.json"], "no such file"),
        (["--", "ls", "-l"], "not a launch command: ls -l"),
        (["ds.json", "-o", "no/where/job.yaml"], "no such file or folder"),
        (["bad.json"], "bad.json:1:7: error[syntax]: expected a value"),
        (["odd.json"], "--kind deepspeed|arguments|command|accelerate"),
    ],
)
def test_mistakes(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    (folder / "bad.json").write_text('{"a": ,}')
    (folder / "odd.json").write_text('{"a": 1}')
    assert main(["import", *arguments]) in (1, 2)
    assert words in capsys.readouterr().err


def test_what_is_wrong_with_several_files_is_told_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bad.json").write_text('{"a": ,}')
    (folder / "worse.json").write_text('{"zero_optimization": {"stage": 9}}')
    command = ["--", "deepspeed", "--num_gpus=x", "t.py", "--deepspeed", "no.json"]
    assert main(["import", "bad.json", "worse.json", "none.json", *command]) == 2
    told = capsys.readouterr().err
    for words in (
        "bad.json:1:7: error[syntax]",
        "worse.json:1:24: error[enum]: zero_optimization.stage",
        "none.json: error[unreadable]",
        "--num_gpus=x: must be",
        "--deepspeed=no.json: no such file",
    ):
        assert words in told


def test_standard_input_is_a_file_too(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", (folder / "ds.json").open())
    assert main(["import", "-"]) == 0
    assert "#   <stdin>:5:3: zero_optimization.overlap_com=true" in capsys.readouterr().out


def test_no_value_ends_the_comment_that_tells_of_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = "x\u2028evil: 1\x85more: 2\r\nlast: 3\x1b[31m"
    (folder / "args.json").write_text(json.dumps({"output_dir": "o", "max_steps": 5, "run_name": odd, odd: 1}))
    assert main(["import", "args.json"]) == 0
    shown = capsys.readouterr().out
    assert set(parse(shown, "job.yaml").value) & {"evil", "more", "last"} == set()
    assert "\x1b" not in shown


def test_a_mistyped_command_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["imprt", "ds.json"]) == 2
    assert 'did you mean "import"?' in capsys.readouterr().err


@pytest.mark.parametrize("before", [(), ("--fp16",), ("--do_train",)])
def test_a_debug_flag_of_the_command_is_not_that_of_dsjob(
    capsys: pytest.CaptureFixture[str], before: tuple[str, ...]
) -> None:
    words = ["--output_dir", "out", *before, "--debug", "underflow_overflow"]
    assert main(["import", "--", "deepspeed", "train.py", *words]) == 0
    assert "_target_: dsjob.callbacks.NanGuard" in capsys.readouterr().out
    assert main(["import", "--", "deepspeed", "train.py", "--output_dir", "out", "--fp16", "maybe", "--debug"]) == 2
    error = capsys.readouterr().err
    assert "--fp16=maybe: must be true or false" in error
    assert "Traceback" not in error
    assert main(["import", "--debug", "--", "deepspeed", "train.py", "--output_dir", "out", "--fp16", "maybe"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--skip_memory_metrics=False", "memory/peak_gib"),
        ('--parallelism_config={"tp_size": 2}', "set tensor_parallel.size, context_parallel.size and pipeline.stages"),
    ],
)
def test_notes_say_what_dsjob_has_instead(capsys: pytest.CaptureFixture[str], argument: str, expected: str) -> None:
    assert main(["import", "--", "deepspeed", "train.py", "--output_dir", "out", argument]) == 0
    assert expected in capsys.readouterr().out
