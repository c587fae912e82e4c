"""`_zero3_consolidated_16bit_state_dict`: the whole model on rank 0, as accelerate and transformers ask for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import make_deepspeed_engine
from ranks import run_ranks

from dsjob.ranks.mesh import World


def consolidate(world: World, bf16: bool) -> dict[str, Any]:
    engine = make_deepspeed_engine(3, bf16=bf16)
    return {
        "expected": {name: value.clone() for name, value in engine.module_state_dict().items()},
        "found": engine._zero3_consolidated_16bit_state_dict(),
    }


@pytest.mark.parametrize("bf16", [False, True])
def test_rank_0_has_the_whole_model_and_others_nothing(bf16: bool) -> None:
    first, second = run_ranks(consolidate, 2, bf16)
    assert second["found"] == {}
    assert first["found"].keys() == first["expected"].keys()
    assert all(torch.equal(value, first["found"][name]) for name, value in first["expected"].items())


def test_it_is_for_stage_3() -> None:
    with pytest.raises(ValueError, match="stage 3, but the stage is 2"):
        make_deepspeed_engine(2)._consolidated_16bit_state_dict()
