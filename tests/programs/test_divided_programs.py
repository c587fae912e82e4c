"""Programs of Trainer and accelerate with `autotp_size`: two ranks that divide the layers compute what one rank does.

`-m full` runs more stages, and DeepSpeed beside dsjob.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from side_by_side import TIMINGS, Engine, Run, compare, run_on

from dsjob import deepspeed
from dsjob.errors import UsageError
from dsjob.ranks.mesh import World

PROGRAM = Path(__file__).parent / "programs" / "divided_lm.py"
KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
IMPORTED = ["torch", "deepspeed", "accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama"]


def make_run(folder: Path, kind: str, stage: int, ranks: int) -> Run:
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    config = {**dict.fromkeys(KEYS, "auto"), "zero_optimization": zero}
    config |= {"tensor_parallel": {"autotp_size": ranks}} if ranks > 1 else {}
    folder.mkdir(parents=True)
    (folder / "ds.json").write_text(json.dumps(config))
    return Run(PROGRAM, folder, [kind, "ds.json"], ranks)


def run_pair(folder: Path, kind: str, stage: int, engines: tuple[Engine, Engine], ranks: tuple[int, int]) -> list[str]:
    found = [
        run_on(engine, [make_run(folder / str(number), kind, stage, ranks[number])], imported=IMPORTED)[0]
        for number, engine in enumerate(engines)
    ]
    return compare(*found, 1e-4, ignored=TIMINGS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trainer", "accelerate"])
@pytest.mark.parametrize("stage", [1, 0, 2, 3])
@pytest.mark.full("0-trainer", "0-accelerate", "1-accelerate", "2-trainer", "2-accelerate", "3-trainer", "3-accelerate")
def test_two_ranks_with_divided_layers_record_what_one_rank_does(tmp_path: Path, kind: str, stage: int) -> None:
    pytest.importorskip("transformers")
    assert not run_pair(tmp_path, kind, stage, ("dsjob", "dsjob"), (2, 1))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trainer", "accelerate"])
def test_divided_layers_record_what_they_do_on_deepspeed(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("transformers")
    found = run_pair(tmp_path, kind, 1, ("dsjob", "deepspeed"), (2, 2))
    # What accelerate saves of DeepSpeed's model lacks the weights that are not divided.
    lacking = [each for each in found if kind == "accelerate" and each.endswith("DeepSpeed None")]
    assert found == lacking
    assert all("norm.weight" in each for each in lacking)


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))


def divide(world: World) -> list[Any]:
    plan = {"plan": {"0": "colwise", "2": "rowwise"}}
    found: list[Any] = []
    whole = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    for sizes in (whole, {"train_batch_size": 6}):
        model = deepspeed.tp_model_init(build(), tp_size=2, dtype=torch.float32)
        engine = deepspeed.initialize(model=model, config={**sizes, "tensor_parallel": plan})[0]
        found.append((tuple(engine.module[0].weight.shape), engine.get_batch_info()))
    for given in ({"tensor_parallel": {"autotp_size": 4}}, {"bf16": {"enabled": True}}):
        with pytest.raises(UsageError) as caught:
            deepspeed.initialize(
                model=deepspeed.tp_model_init(build(), 2, torch.float16), config={"train_batch_size": 2, **given}
            )
        found.append(str(caught.value).partition("\n")[0])
    return found


def test_tp_model_init_is_heeded_by_initialize() -> None:
    expected = [
        ((4, 4), (2, 2, 1)),  # DeepSpeed's train batch of 4 counts the samples of both ranks, which are the same
        ((4, 4), (6, 6, 1)),
        "tp_model_init got tp_size=2, but tensor_parallel.autotp_size is 4",
        "Conflicting dtypes: tp_model_init got torch.float16, but the config says torch.bfloat16",
    ]
    assert run_ranks(divide, 2) == [expected] * 2


@pytest.mark.parametrize(
    ("given", "told"),
    [({"tp_size": 0}, "tp_size=0"), ({"tp_size": 2, "tp_group": object()}, "tp_group, but dsjob divides the ranks")],
)
def test_wrong_arguments_of_tp_model_init_are_told(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        deepspeed.tp_model_init(build(), **given)
