"""Optimizer state and masters on a disk against the same run in memory, to the bit, on real ranks."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import make_engine, train_engine, whole_state
from ranks import run_ranks
from test_stages import make_net
from torch import nn

import dsjob
from dsjob.engine.engine import Engine
from dsjob.errors import StorageError, UsageError
from dsjob.ops.disk import ScratchFile
from dsjob.optim import on_disk
from dsjob.optim.shards import local
from dsjob.ranks.mesh import World

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "bf16, reduced in fp32": {"bf16": True, "communication_data_type": "fp32"},
}


def on(device: str, folder: str, **more: Any) -> dict[str, Any]:
    """Where the optimizer state goes; "none": nowhere."""
    return {"offload_optimizer": {"device": device, "nvme_path": folder, **more}} if device != "none" else {}


def make(stage: int, offload: dict[str, Any], precision: str = "fp32", kind: str = "plain", **config: Any) -> Engine:
    # The network is small: everything but its biases goes to the disk, in parts of two or three parameters.
    on_disk.SMALL, on_disk.PART = 128, 1 << 11
    section = {"stage": stage, **offload}
    return make_engine(stage, net=make_net(kind), **PRECISIONS[precision], **config, zero_optimization=section)


def find_size(engine: Engine) -> int:
    """Bytes of optimizer state and masters that are mappings of the file."""
    assert engine.strategy.disk is not None
    files: list[ScratchFile] = engine.strategy.disk._files
    state = [value for entry in engine.state().optimizer_tensors().values() for value in [local(entry)]]
    tensors = [*state, *map(local, engine.strategy.masters.values())]
    return sum(tensor.nbytes for tensor in tensors if any(file.find(tensor) is not None for file in files))


def compare(world: World, folder: str, precision: str, accumulation: int) -> list[str]:
    """Cases in which a run with its state on a disk differs from the one in memory."""
    wrong = []
    # Stages 1 and 2 differ in gradients: those that add up tell more.
    for stage in (1, 2, 3) if accumulation > 1 else (1, 3):
        expected = make(stage, {}, precision, accumulation=accumulation)
        losses = train_engine(expected, 0, 3)
        places = [on("nvme", folder, buffer_count=count) for count in ((1, 3) if accumulation > 1 else (stage,))]
        places += [on("nvme", folder, ratio=0.5), {**on("nvme", folder), "offload_param": {"device": "cpu"}}][
            : stage // 3 * 2
        ]
        for place in places:
            ours = make(stage, place, precision, accumulation=accumulation)
            same = train_engine(ours, 0, 3) == losses and ours.get_global_grad_norm() == expected.get_global_grad_norm()
            state, found = whole_state(expected), whole_state(ours)
            same = (
                same
                and set(state) == set(found)
                and all(torch.equal(found[n].to(t.dtype), t) for n, t in state.items())
            )
            if not same or find_size(ours) == 0:
                wrong.append(f"stage {stage}, {place}")
    return wrong


def test_a_model_that_is_not_trained_needs_no_disk(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    section = {"stage": 2, **on("nvme", str(tmp_path / "file" / "below"))}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": section}
    with pytest.raises(StorageError):
        dsjob.initialize(model=make_net("plain"), config=config)
    engine, *_ = dsjob.initialize(model=make_net("plain").requires_grad_(False), config=config)
    assert engine.strategy.disk is None


@pytest.mark.parametrize(
    ("world_size", "precision", "accumulation"),
    [
        (2, "fp32", 1),
        *(
            pytest.param(size, precision, accumulation, marks=pytest.mark.full)
            for size in (1, 2)
            for precision in PRECISIONS
            for accumulation in (1, 3)
            if (size, precision, accumulation) != (2, "fp32", 1)
        ),
    ],
)
def test_state_on_a_disk_changes_no_bit(world_size: int, precision: str, accumulation: int, tmp_path: Path) -> None:
    for wrong in run_ranks(compare, world_size, str(tmp_path), precision, accumulation):
        assert wrong == []


def save_then_load(world: World, folder: str, save_on: dict[str, Any], stage: int, precision: str) -> list[float]:
    first = make(stage, save_on, precision)
    train_engine(first, 0, 2)
    first.save_checkpoint(f"{folder}/checkpoints")
    return train_engine(first, 2, 2)


def load(world: World, folder: str, load_on: dict[str, Any], stage: int, precision: str) -> tuple[list[float], int]:
    engine = make(stage, load_on, precision)
    engine.load_checkpoint(f"{folder}/checkpoints")
    size = find_size(engine) if engine.strategy.disk is not None else 0  # before a step: loaded straight to the disk
    return train_engine(engine, 2, 2), size


@pytest.mark.parametrize(
    ("save_on", "load_on", "stage", "before", "after"),
    [
        ("nvme", "none", 3, 2, 2),
        ("cpu", "nvme", 1, 2, 2),
        ("nvme", "nvme", 2, 2, 1),
        *(
            pytest.param(*case, stage, *sizes, marks=pytest.mark.full)
            for case in (("nvme", "nvme"), ("nvme", "cpu"), ("none", "nvme"))
            for stage in (1, 2, 3)
            for sizes in ((1, 1), (1, 2), (2, 2))
        ),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
@pytest.mark.full("fp32-nvme-none-3-2-2")
def test_a_checkpoint_moves_between_disk_and_memory(
    save_on: str, load_on: str, stage: int, before: int, after: int, precision: str, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    expected = run_ranks(save_then_load, before, folder, on(save_on, folder), stage, precision)
    found = run_ranks(load, after, folder, on(load_on, folder), stage, precision)
    if before == after:
        assert [losses for losses, _ in found] == expected
    else:
        whole = [
            [sum(losses) / len(losses) for losses in zip(*ranks, strict=True)]
            for ranks in (expected, [x for x, _ in found])
        ]
        assert whole[0] == pytest.approx(whole[1], rel=1e-2 if precision == "bf16" else 1e-5)
    assert all(size > 0 for _, size in found) or load_on != "nvme"


def test_states_that_are_on_a_disk_stay_there_when_states_are_moved(tmp_path: Path) -> None:
    engine = make(2, on("nvme", str(tmp_path)), "bf16")
    train_engine(engine, 0, 1)
    before = find_size(engine)
    engine.offload_states()
    assert find_size(engine) == before
    engine.reload_states()
    expected = make(2, {}, "bf16")
    train_engine(expected, 0, 1)
    assert train_engine(engine, 1, 2) == train_engine(expected, 1, 2)


def test_an_optimizer_that_needs_all_parameters_at_once_is_refused(tmp_path: Path) -> None:
    class Own(torch.optim.SGD):
        pass

    for kind in (Own, lambda p, lr: torch.optim.LBFGS(list(p)[:1], lr=lr)):
        net: nn.Module = make_net("plain")
        config = {"train_batch_size": 2, "zero_optimization": {"stage": 1, **on("nvme", str(tmp_path))}}
        with pytest.raises(UsageError, match="cannot step its state from a disk") as caught:
            dsjob.initialize(model=net, config=config, optimizer=lambda p, kind=kind: kind(p, lr=0.1))
        assert "device=cpu" in caught.value.hint


def test_a_disk_that_fails_during_a_save_is_an_error_and_older_checkpoints_remain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(2, on("nvme", str(tmp_path)), "bf16")
    train_engine(engine, 0, 1)
    engine.save_checkpoint(str(tmp_path / "checkpoints"))
    train_engine(engine, 1, 1)

    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", fail)
        with pytest.raises(StorageError, match=r"cannot read from .*Input/output error"):
            engine.save_checkpoint(str(tmp_path / "checkpoints"))
    again = make(2, on("nvme", str(tmp_path)), "bf16")
    again.load_checkpoint(str(tmp_path / "checkpoints"))
    expected = make(2, {}, "bf16")
    train_engine(expected, 0, 1)
    assert train_engine(again, 1, 1) == train_engine(expected, 1, 1)


def measure_first_step(world: World, folder: str) -> float:
    """Memory of the process that the first step adds, per byte of the optimizer state that it creates."""
    net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(48)))
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 1, **on("nvme", folder)}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1}}
    engine = dsjob.initialize(model=net, config=config)[0]
    engine.backward(engine(torch.randn(8, 1024)).sum())
    before = read_own_memory()
    engine.step()
    return (read_own_memory() - before) / (8 * sum(p.numel() for p in net.parameters()))


def read_own_memory() -> int:
    """Bytes of this process that only memory can hold."""
    found = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(found.split()[1]) << 10


@pytest.mark.full
def test_state_that_moves_to_a_disk_leaves_no_holes_in_memory(tmp_path: Path) -> None:
    """192 MiB of weights, so 384 MiB of state; four buffers of 48 MiB stay."""
    (added,) = run_ranks(measure_first_step, 1, str(tmp_path))
    assert added < 0.75
