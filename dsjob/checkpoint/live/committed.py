"""Reads and verifies committed checkpoints: the steps that all ways of loading share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.live.state import BY_RANK, Shapes
from dsjob.checkpoint.live.state import Saved as Saved_
from dsjob.checkpoint.root.source import renamed
from dsjob.errors import CheckpointError, CorruptCheckpointError, DsjobError


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint: its folder, the bytes of its shards, and how many seconds the save took.

    `notes`: what failed after the commit.
    """

    tag: str
    url: str
    size: int
    seconds: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Loaded:
    """A loaded checkpoint. `job`: the resolved document stored in it.

    `exact`: the run continues bit for bit (same world size, all state restored). `notes`: what was not restored.
    """

    tag: str
    url: str
    step: int
    client_state: dict[str, Any]
    exact: bool
    job: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Matched:
    """How the weights of a checkpoint match those of a model, by the model's names."""

    url: str
    taken: list[str]
    missing: list[str]  # from the checkpoint
    unused: list[str]  # in the checkpoint only
    reshaped: list[str]  # in both, with different shapes
    averages: bool = False  # whether the checkpoint also has averages of weights

    @property
    def is_foreign(self) -> bool:
        """Whether the checkpoint has weights, but none of the model's."""
        return bool(self.unused) and not (self.taken or self.reshaped)


def read_checkpoint(root: layout.Folder, record: dict[str, Any]) -> layout.Checkpoint:
    with renamed(f"read {root.root}"):
        return layout.read_checkpoint(root, record)


def require_sizes(url: str, checkpoint: layout.Checkpoint) -> None:
    """Raises CorruptCheckpointError if a shard is missing or has the wrong size. Called before a load changes
    anything."""
    for name, size in checkpoint.files.items():
        place = storage.join(url, name)
        found = storage.size(place) if storage.exists(place) else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes; the manifest says {size}"
            raise CorruptCheckpointError(f"{place} {what}", hint=layout.ELSEWHERE)


def match(ours: Mapping[str, Saved_], checkpoint: layout.Checkpoint, url: str, start: str) -> Matched:
    """Compares names and shapes of the model's tensors with those of a checkpoint's tensors that begin with `start`."""
    theirs = {n: t.shape for n, t in checkpoint.tensors.items() if t.role != "optimizer" and n.startswith(start)}
    common = [name for name in ours if name in theirs]
    reshaped = [name for name in common if tuple(ours[name].shape) != theirs[name]]
    missing, unused = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
    return Matched(url, [name for name in common if name not in reshaped], missing, unused, reshaped)


def require_match(
    found: Matched, ours: Mapping[str, Saved_], checkpoint: layout.Checkpoint, *, strict: bool, hint: str
) -> None:
    """Raises CheckpointError if shapes differ, or with `strict` if names do."""
    lines = [f"not in the checkpoint: {_list(found.missing)}"] if found.missing and strict else []
    lines += [f"not in the model: {_list(found.unused)}"] if found.unused and strict else []
    for name in found.reshaped[:3]:
        there = list(checkpoint.tensors[name].shape)
        lines.append(f"{name} is {list(ours[name].shape)} in the model, {there} in the checkpoint")
    if lines:
        raise CheckpointError(f"{found.url} does not match the model: {'; '.join(lines)}", hint=hint)


def _list(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def run_dcp(call: Callable[..., Any]) -> None:
    """Runs a DCP load. DCP collects the errors of all ranks; this raises the first one under its own type."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP warns when it runs in a single process
            call(no_dist=alone)
    except dcp.CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, (DsjobError, layout.Problem)):
            raise cause from None
        raise CheckpointError(f"rank {rank}: {type(cause).__name__}: {cause}") from cause


def describe_left_out(saved: Shapes, loaded: Mapping[str, Any]) -> tuple[str, ...]:
    """Notes about optimizer state that was saved but not loaded."""
    left_out = [name for name in saved if name.endswith(BY_RANK) and name not in loaded]
    gone = sorted({name.rpartition(".")[2].removesuffix(BY_RANK) for name in left_out})
    if not gone:
        return ()
    return (f"the optimizer's {', '.join(gone)} were reset: they were saved on a different number of ranks",)
