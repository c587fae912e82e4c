"""Reads DeepSpeed's checkpoints: ZeRO 0 to 3, and universal ones. `layout` computes where the bytes lie.

The files of model states describe the rest (`_common_checkpoint_state` in `runtime/engine.py` of DeepSpeed 0.19.6).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.other.deepspeed.folder import DeepSpeedFolder, find_folder
from dsjob.checkpoint.other.deepspeed.layout import (
    Collected,
    Piece,
    Shapes,
    list_entries,
    place_by_address,
    place_in_order,
    place_stage3,
    read_shapes,
)
from dsjob.checkpoint.other.deepspeed.state import Groups, read_run
from dsjob.checkpoint.other.deepspeed.whole import read_whole
from dsjob.checkpoint.other.foreign import Boxes, Foreign
from dsjob.checkpoint.other.torch_files import TorchFile
from dsjob.contract.shown import cut, shorten
from dsjob.errors import CheckpointError


def find_deepspeed(url: str, tag: str | None = None, groups: Groups | None = None) -> Foreign | None:
    """The DeepSpeed checkpoint at a path or URL: the folder that contains `latest`, or that of one tag. None for
    anything else.

    groups: the parameter names in each of the optimizer's groups, which files of stage 0 do not contain. Raises
    CheckpointError, NoCheckpointError, or Damaged (see `zero_to_fp32`).
    """
    folder = find_folder(url, tag)
    if folder is None:
        return None
    try:
        return _Reader(folder, groups).read()
    except (
        AttributeError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
        MemoryError,
        OverflowError,
        RecursionError,
        RuntimeError,  # a tensor where a number is expected
    ) as error:
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise layout.Damaged(f"{folder.place} does not follow DeepSpeed's format: {cut(what, 300)}") from None


class _Reader:
    """Reads one checkpoint."""

    def __init__(self, folder: DeepSpeedFolder, groups: Groups | None) -> None:
        self.folder, self.groups = folder, groups
        self.boxes = Boxes(folder.tag)
        self.found = Collected(self.boxes)

    def read(self) -> Foreign:
        """The checkpoint."""
        first = self._open(self.folder.models[0])
        main = first.content
        self._refuse_parallel(main)
        world_size, shapes = main["dp_world_size"], main["param_shapes"]
        zero = shapes is not None
        if zero and not self.folder.universal:
            self._check_ranks(world_size)
        ranks: list[TorchFile] = []
        optims: list[Any] = []
        if self.folder.universal:
            optims = [{"optimizer_state_dict": self._read_universal(shapes or [])}]
        elif zero:
            ranks = [self._open(name) for name in self.folder.optims[:world_size]]
            self._read_flat(ranks, shapes, world_size)
            optims = [file.content for file in ranks]
        else:
            read_whole(self.found, first, self.folder.place, self.groups)
        if main.get("frozen_param_shapes"):
            self._read_frozen(first, world_size)
        self._read_module(first)
        run = read_run(first, optims, self.found)
        checkpoint = self.boxes.finish(self.folder.tag, run.counters["global_steps"])
        url = self.folder.root.root
        return Foreign(url, "DeepSpeed", checkpoint, self.boxes.members, run, tuple(self.found.notes))

    def _open(self, name: str) -> TorchFile:
        return self.boxes.know(TorchFile(self.folder.root, f"{self.folder.tag}/{name}"))

    def _refuse_parallel(self, main: Mapping[str, Any]) -> None:
        if not isinstance(main.get("module"), dict):
            raise CheckpointError(f"{self.folder.place} contains a pipeline-parallel model, which is not supported")
        parallel = main.get("mp_world_size", 1)
        if type(parallel) is not int:
            raise ValueError(f"mp_world_size is {shorten(parallel)}")
        if parallel != 1:
            raise CheckpointError(
                f"{self.folder.place} was saved by {shorten(parallel)} tensor-parallel ranks, which is not supported",
                hint="merge their parts with the program that saved them",
            )
        if any(main.get(key) for key in ("num_experts", "ds_autoep_layers", "autoep_layers")):
            raise CheckpointError(f"{self.folder.place} contains a mixture of experts, which is not supported")

    def _check_ranks(self, world_size: int) -> None:
        """Raises Damaged if files of a rank are missing."""
        there = len(self.folder.optims)
        if type(world_size) is not int or world_size < 1:
            raise ValueError(f"dp_world_size is {shorten(world_size)}")
        if there < world_size or (self.folder.sharded and len(self.folder.models) < world_size):
            raise layout.Damaged(
                f"{self.folder.place} was saved by {world_size} ranks, but has files of {there}: "
                "the save did not complete, or files are missing"
            )
        if there > world_size:
            self.found.notes.append(f"ignored the files of ranks beyond {world_size}: they belong to another save")

    def _read_flat(self, ranks: Sequence[TorchFile], shapes: Sequence[Any], world_size: int) -> None:
        """Stages 1 to 3: reads fp32 weights and optimizer state."""
        states = [file.content["optimizer_state_dict"] for file in ranks]
        stage3 = "fp32_flat_groups" in states[0]
        weights = "fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"
        if any(state.get("ds_zero_partition_groups") for state in states):
            raise CheckpointError(f"{self.folder.place} contains a mixture of experts, which is not supported")
        counts = states[0]["partition_count"]
        if any(count != world_size for count in (counts if isinstance(counts, list) else [counts])):
            raise CheckpointError(
                f"{self.folder.place} partitions over {shorten(counts)} of {world_size} ranks (MiCS), "
                "which is not supported"
            )
        if any(len(state[weights]) != len(shapes) for state in states):
            raise ValueError(f"it has shapes of {len(shapes)} groups, but weights of another number of groups")
        for group, named in enumerate(shapes):
            flats = [state[weights][group] for state in states]
            if any(not isinstance(flat, Tensor) or flat.ndim != 1 for flat in flats):
                raise ValueError(f"group {group} of the weights is not a flat tensor (offloaded to NVMe?)")
            sized = read_shapes(named)
            pieces = list(
                place_stage3(sized, world_size, flats[0].numel())
                if stage3
                else self._place(sized, [f.numel() for f in flats], states, group)
            )
            kept = [list_entries(state, group, stage3) for state in states]
            self.found.add_pieces(pieces, ranks, flats, "model.{}", "parameter")
            for key in kept[0]:
                self.found.add_entry(key, [entry[key] for entry in kept], pieces, ranks, sized)
            self.found.trained |= sized
            for name, shape in sized.items():
                if not math.prod(shape):
                    self.boxes.entries.setdefault(
                        f"model.{name}", {"role": "parameter", "dtype": "F32", "shape": list(shape), "chunks": []}
                    )

    def _place(self, shapes: Shapes, lengths: Sequence[int], states: Sequence[Any], group: int) -> Iterator[Piece]:
        aligned = states[0].get("param_alignment_paddings")
        if aligned and any(aligned[group]):
            return place_by_address(shapes, [state["param_slice_mappings"][group] for state in states])
        return place_in_order(shapes, lengths)

    def _read_frozen(self, first: TorchFile, world_size: int) -> None:
        """Reads frozen parameters: whole at stage 2, partitioned over the ranks at stage 3."""
        shapes = read_shapes(first.content["frozen_param_shapes"])
        files = [first, *(self._open(name) for name in self.folder.models[1:world_size] if self.folder.sharded)]
        fragments = [file.content["frozen_param_fragments"] for file in files]
        for piece in place_stage3(shapes, len(files)):
            stored = files[piece.rank].place_of(fragments[piece.rank][piece.name])
            self.boxes.add_piece(f"model.{piece.name}", "frozen", piece.shape, stored, piece.at, 0, piece.length)

    def _read_module(self, first: TorchFile) -> None:
        """Reads buffers, tied names, and parameters found nowhere else: the frozen ones of stages 0 and 1."""
        module, buffers = first.content["module"], set(first.content["buffer_names"])
        shared = first.content.get("shared_params") or {}
        self.boxes.aliases.update({f"model.{alias}": f"model.{name}" for alias, name in shared.items()})
        for name, tensor in module.items():
            full = f"model.{name}"
            if full in self.boxes.entries or full in self.boxes.aliases or not isinstance(tensor, Tensor):
                continue
            if self.folder.sharded and name not in buffers:
                continue  # a placeholder: its parts were read already, or were not saved
            trained = name in self.found.trained or not self.found.trained
            role = "buffer" if name in buffers else "parameter" if trained else "frozen"
            self.boxes.add(full, role, first.place_of(tensor))

    def _read_universal(self, shapes: Sequence[Any]) -> Mapping[str, Any]:
        """Reads a universal checkpoint: one folder per parameter, one file per tensor. Returns the shared state."""
        sized = {name: shape for named in shapes for name, shape in read_shapes(named).items()}
        common = self._open("zero/optimizer_state.pt")
        inner = common.content.get("optimizer_state_dict") or common.content
        step = ((inner.get("state") or {}).get(0) or {}).get("step", _group_step(inner))
        for name in self.folder.universal:
            for file_name in sorted(self.folder.root.names(f"{self.folder.tag}/zero/{name}")):
                if layout.NAME.fullmatch(file_name) and file_name.endswith(".pt"):
                    file = self._open(f"zero/{name}/{file_name}")
                    self._add_universal(file, name, file_name.removesuffix(".pt"), sized.get(name))
            if isinstance(step, Tensor) and f"optimizer.{name}.step" not in self.boxes.entries:
                self.boxes.add(f"optimizer.{name}.step", "optimizer", common.place_of(step))
            elif type(step) in (int, float):
                self.found.scalars.setdefault(name, {}).setdefault("step", step)
            if name in sized:
                self.found.trained[name] = sized[name]
        content: Mapping[str, Any] = common.content
        return content

    def _add_universal(self, file: TorchFile, name: str, key: str, shape: tuple[int, ...] | None) -> None:
        content = file.content
        value = content.get("param") if isinstance(content, dict) else content
        full, role = (f"model.{name}", "parameter") if key == "fp32" else (f"optimizer.{name}.{key}", "optimizer")
        if key == "step" and type(value) in (int, float):
            self.found.scalars.setdefault(name, {})["step"] = value
            return
        stored = file.place_of(value)
        if shape is not None and len(stored.shape) == 1 and math.prod(stored.shape) >= math.prod(shape):
            self.boxes.add_piece(full, role, shape, stored, 0, 0, math.prod(shape))
        else:
            self.boxes.add(full, role, stored)


def _group_step(inner: Mapping[str, Any]) -> int | None:
    """The step of an optimizer that counts steps per group."""
    return next((group["step"] for group in inner.get("param_groups") or [] if type(group.get("step")) is int), None)
