"""DeepSpeed's script for another number of ranks copies a checkpoint, which loads under its new tag."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines import make_deepspeed_engine
from programs import run_program
from ranks import run_ranks
from torch import nn

from dsjob.checkpoint.offline.transfer import copy
from dsjob.deepspeed.checkpoint.ds_to_universal import main
from dsjob.errors import UsageError
from dsjob.ranks.mesh import World


def _train(world: World, folder: str, load: str = "") -> list[float]:
    torch.manual_seed(0)
    checkpoint = {"load_universal": True} if load else {}
    engine = make_deepspeed_engine(1, net=nn.Linear(4, 1), checkpoint=checkpoint)
    if load:
        engine.load_checkpoint(folder, tag=load)
    engine.backward(engine(torch.ones(2, 4)).mean())
    engine.step()
    if not load:
        engine.save_checkpoint(folder, tag="step1")
        engine.backward(engine(torch.ones(2, 4)).mean())
        engine.step()
    weight: torch.Tensor = engine.module_state_dict()["weight"]
    return weight.flatten().tolist()


def test_a_copy_continues_on_another_number_of_ranks(tmp_path: Path) -> None:
    first = run_ranks(_train, 2, str(tmp_path))[0]
    main(SimpleNamespace(input_folder=str(tmp_path / "step1"), output_folder=str(tmp_path / "step1_universal")))
    assert run_ranks(_train, 1, str(tmp_path), "step1_universal")[0] == pytest.approx(first)
    main(SimpleNamespace(input_folder=f"{tmp_path}/step1", output_folder=str(tmp_path / "elsewhere" / "step1")))
    assert run_ranks(_train, 1, str(tmp_path / "elsewhere"), "step1")[0] == pytest.approx(first)


def test_a_copy_needs_another_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the same folder"):
        main(SimpleNamespace(input_folder=f"{tmp_path}/a", output_folder=f"{tmp_path}/a/"))
    with pytest.raises(UsageError, match="invalid tag 'b c'"):
        main(SimpleNamespace(input_folder=f"{tmp_path}/a", output_folder=f"{tmp_path}/b c"))


def test_the_script_tells_of_a_missing_folder_without_a_traceback(tmp_path: Path) -> None:
    script = [sys.executable, "-m", "dsjob.deepspeed.checkpoint.ds_to_universal"]
    done = run_program([*script, "--input_folder", "nothing/a", "--output_folder", "there/b"], cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("dsjob: error: ")
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_one_of_several_checkpoints_has_to_be_named(tmp_path: Path) -> None:
    run_ranks(_train, 1, str(tmp_path))
    with pytest.raises(UsageError, match="only one can be b"):
        copy(str(tmp_path), str(tmp_path), new_tag="b")
