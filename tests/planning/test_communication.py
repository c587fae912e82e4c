"""What `dsjob plan` predicts of communication and checkpoints, against collectives and files of real ranks."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import make_engine
from net import Net
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsjob.parallel import sharded
from dsjob.planning.communication import predict_checkpoint, predict_communication
from dsjob.planning.model import Layout, OptimizerState
from dsjob.ranks.mesh import World
from dsjob.training.probe import size_model

ADAM = OptimizerState(2, 4)
# The whole tensor of a collective is the larger of what goes in and what comes out.
KINDS = {"allgather_base": "all-gather", "reduce_scatter_base": "reduce-scatter", "allreduce": "all-reduce"}


class Collectives(TorchDispatchMode):
    """Counts the bytes of the whole tensors that collectives are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        for part, kind in KINDS.items():
            if name.startswith("c10d.") and part in name:
                self.bytes[kind] += max(t.nbytes for t in tree_leaves(args) if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))


def make_layout(world: World, stage: int, bf16: bool, accumulation: int) -> Layout:
    size = 2 if bf16 else 4
    return Layout(stage, world.data_size, size, size, accumulation)


def count_collectives(world: World) -> list[tuple[str, dict[str, int], dict[str, int]]]:
    rows = []
    sharded.exchange_directly = lambda *_: None  # FSDP2's own collectives can be counted, as a GPU would have them
    for stage, bf16, accumulation in itertools.product(range(4), (False, True), (1, 2)):
        if world.data_size == 2 and (stage + bf16 + accumulation) % 2:  # half of the cells
            continue
        net = Net(1031, 67, 3)
        model = size_model(net)
        engine = make_engine(stage, net=net, bf16=bf16, accumulation=accumulation)
        tokens = torch.zeros(1, 2, dtype=torch.int64)
        for _ in range(2):  # the first step of DDP and FSDP2 sets things up
            with Collectives() as seen:
                for _ in range(accumulation):
                    engine.backward(engine(tokens, tokens))
                    engine.step()
        predicted = predict_communication(model, make_layout(world, stage, bf16, accumulation))
        name = f"stage {stage}, bf16 {bf16}, accumulation {accumulation}"
        rows.append((name, dict(seen.bytes), {transfer.collective: transfer.bytes for transfer in predicted}))
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.full("3")
def test_every_stage_moves_what_is_predicted(world_size: int) -> None:
    for rows in run_ranks(count_collectives, world_size):
        for name, seen, predicted in rows:
            for kind in KINDS.values() if "stage 0" in name else ("all-gather", "reduce-scatter"):
                assert predicted.get(kind, 0) == pytest.approx(seen.get(kind, 0), rel=0.02), f"{name}: {kind}"


def make_half() -> nn.Module:
    """A model as `from_pretrained` builds it from a folder in bf16, partly frozen."""
    net = Net(1031, 67, 3).bfloat16()
    net.blocks[0].requires_grad_(False)
    return net


def save(world: World, folder: str) -> list[tuple[str, int, int]]:
    rows = []
    for stage, bf16, half in itertools.product(range(4), (False, True), (False, True)):
        net = make_half() if half else Net(1031, 67, 3)
        model = size_model(net)
        engine = make_engine(stage, net=net, bf16=bf16)
        tokens = torch.zeros(1, 2, dtype=torch.int64)
        engine.backward(engine(tokens, tokens))
        engine.step()
        path = os.path.join(folder, f"{stage}-{bf16}-{half}")
        engine.save_checkpoint(path)
        size = predict_checkpoint(model, make_layout(world, stage, bf16, 1), ADAM)
        rows.append((path, size.whole, size.rank))
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.full("3", "1")
def test_checkpoints_are_as_large_as_predicted(world_size: int, tmp_path: Path) -> None:
    for path, whole, rank in run_ranks(save, world_size, str(tmp_path))[0]:
        files = [file.stat().st_size for file in Path(path).rglob("*.safetensors")]
        assert whole == pytest.approx(sum(files), rel=0.02), path
        assert rank == pytest.approx(max(files), rel=0.05), path
