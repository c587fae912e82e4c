"""`dsjob.convert` and `dsjob.load_model`: what a checkpoint holds."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import make_job
from safetensors.torch import load_file

import dsjob
from dsjob import errors


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = make_job(tmp_path_factory.mktemp("trained"), trainer={"train_batch": 8, "max_steps": 2, "log_every": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        dsjob.run("cfg.json", overrides=["+checkpoint.every=1"])
    sys.modules.pop("my_model", None)
    yield folder
    sys.modules.pop("my_model", None)


@pytest.fixture
def folder(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    return trained


def test_weights_are_converted_and_loaded(folder: Path, tmp_path: Path) -> None:
    (written,) = dsjob.convert("run", tmp_path / "weights.safetensors")
    weights = load_file(written.path)
    model = dsjob.load_model("run")
    assert not model.training
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    older = dsjob.load_model("run", tag="step-00000001").state_dict()
    assert not torch.equal(older["head.weight"], weights["head.weight"])
    checkpoint = max((folder / "run" / "checkpoints").glob("step-00000002-a*"))
    assert torch.equal(dsjob.load_model(checkpoint).state_dict()["head.weight"], weights["head.weight"])


def test_names_of_weights_are_changed(folder: Path, tmp_path: Path) -> None:
    (written,) = dsjob.convert("run", tmp_path / "weights.safetensors", strip="head.", prefix="net.")
    assert {"net.weight", "net.blocks.0.fc.weight"} <= load_file(written.path).keys()


def test_a_checkpoint_from_elsewhere_imports_only_what_is_trusted(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "run" / "checkpoints", tmp_path / "copied")
    with pytest.raises(errors.TargetError, match=r"my_model\.build is not trusted"):
        dsjob.load_model(tmp_path / "copied")
    assert dsjob.load_model(tmp_path / "copied", trust=["my_model"]).state_dict()


def test_a_folder_that_does_not_exist_is_named(folder: Path) -> None:
    for call in (dsjob.convert, dsjob.load_model):
        with pytest.raises(errors.NoCheckpointError, match=r"^no such folder: .*nowhere"):
            call("nowhere")


def test_weights_that_no_longer_fit_the_code_are_told(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    resolved = tmp_path / "run" / "resolved.json"
    document = json.loads(resolved.read_text())
    resolved.write_text(json.dumps({**document, "model": {"_target_": "my_model.Block"}}))
    with pytest.raises(errors.ContractError, match=r"the weights do not fit my_model\.Block"):
        dsjob.load_model(tmp_path / "run")


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(errors.NoCheckpointError):
        dsjob.load_model(tmp_path)
    with pytest.raises(errors.UsageError, match="needs an output folder"):
        dsjob.convert(tmp_path, to="hf")


def test_a_checkpoint_is_written_for_deepspeed(folder: Path, tmp_path: Path) -> None:
    written = dsjob.convert("run", tmp_path / "ds", to="deepspeed", zero_stage=2, world_size=2)
    names = sorted(Path(file.path).name for file in written)
    assert names == sorted(path.name for path in (tmp_path / "ds" / "global_step2").iterdir())
    assert [file.size for file in written] == [Path(file.path).stat().st_size for file in written]
    dsjob.convert(tmp_path / "ds", tmp_path / "back.safetensors")
    back, model = load_file(tmp_path / "back.safetensors"), dsjob.load_model("run").state_dict()
    assert all(torch.equal(back[name], model[name]) for name in model)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"to": "deepspeed", "out": "ds", "zero_stage": 2}, "world_size"),
        ({"to": "deepspeed", "zero_stage": 2, "world_size": 2}, "needs out"),
        ({"to": "deepspeed", "out": "ds", "zero_stage": 4, "world_size": 2}, "zero_stage"),
        ({"to": "deepspeed", "out": "ds", "zero_stage": 2, "world_size": 2, "model": "a"}, "model has no effect"),
        ({"to": "fp33", "out": "w9"}, 'to="fp33" is not supported\n  use fp32, bf16, fp16, hf or deepspeed'),
        ({"to": "bf16", "world_size": 2}, "world_size has no effect"),
        ({"to": "bf16", "dtype": "fp16"}, "dtype has no effect"),
        ({"to": "bf16", "dtype": "fp32"}, 'leave it out; it is for to="hf" or to="deepspeed"'),
        ({"to": "fp32", "merge": True}, 'merge has no effect with to="fp32"'),
        ({"to": "fp32", "tokenizer": "words"}, 'leave it out; it is for to="hf"'),
        ({"to": "hf", "out": "model", "prefix": "a."}, 'prefix has no effect with to="hf"'),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(folder: Path, given: dict[str, Any], told: str) -> None:
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(errors.UsageError, match=told):
        dsjob.convert("run", **given)
    assert sorted(path.name for path in folder.iterdir()) == before
