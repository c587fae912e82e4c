"""Reads DeepSpeed's stage 0: whole weights in one file, and optimizer state by parameter number.

In half precision, the fp32 masters are in the optimizer's part: a list of tensors, or one flat tensor per group. Names
for the numbers come from the groups that the program trains now, or from the model's own order if there is one group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.other.deepspeed.layout import Collected, Shapes, list_numbers, place_in_order
from dsjob.checkpoint.other.torch_files import Stored, TorchFile
from dsjob.errors import CheckpointError


def read_whole(found: Collected, file: TorchFile, place: str, groups: Sequence[Sequence[str]] | None) -> None:
    """Reads tied names, masters and optimizer state from a file of model states. groups: parameter names by group."""
    main = file.content
    optimizer = main.get("optimizer")
    stage = (main.get("ds_config") or {}).get("zero_optimization", {}).get("stage", 0)
    if optimizer is None and stage:
        raise layout.Damaged(f"{place} was saved at ZeRO stage {stage}, but has no optimizer states")
    shapes = _list_parameters(found, file)
    if optimizer is None:
        return
    inner = optimizer.get("optimizer_state_dict", optimizer)
    numbered = list_numbers(inner["param_groups"])
    masters = optimizer.get("fp32_groups") or optimizer.get("fp32_groups_flat")
    names = _find_names(numbered, shapes, masters, groups)
    if names is None and groups is not None:
        raise CheckpointError(
            f"{place}: cannot match its optimizer state to this optimizer. At ZeRO stage 0, it has numbers instead of "
            f"names ({', '.join(str(len(group)) for group in numbered)} parameters per group)",
            hint="use the same parameters in the same groups and order, or load only the weights",
        )
    if names is None:
        if masters:
            found.notes.append(
                "the fp32 masters of several groups have no names at stage 0: took the weights in the model's precision"
            )
        return
    for group, of_group in enumerate(names):
        sized = {name: shapes[name] for name in of_group}
        found.trained |= sized
        states = [inner["state"].get(number) or {} for number in numbered[group]]
        master = masters[group] if masters else None
        if isinstance(master, Tensor):
            pieces = list(place_in_order(sized, [master.numel()]))
            found.add_pieces(pieces, [file], [master], "model.{}", "parameter")
            for key, value in states[0].items():
                found.add_entry(key, [value], pieces, [file], sized)
            continue
        for position, name in enumerate(of_group):
            if master is not None:
                found.boxes.add(f"model.{name}", "parameter", file.place_of(master[position]))
            _add_entries(found, file, place, name, states[position], shapes[name])


def _list_parameters(found: Collected, file: TorchFile) -> dict[str, tuple[int, ...]]:
    """The shapes of the model's parameters. Tied parameters lie at the same place; their other names become aliases."""
    main = file.content
    seen: dict[Stored, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    buffers = set(main["buffer_names"])
    for name, tensor in main["module"].items():
        if not isinstance(tensor, Tensor) or name in buffers:
            continue
        place = file.place_of(tensor)
        if tensor.numel() and place in seen:
            found.boxes.aliases[f"model.{name}"] = f"model.{seen[place]}"
            continue
        seen[place] = name
        shapes[name] = tuple(tensor.shape)
    return shapes


def _find_names(
    numbered: list[list[int]], shapes: Shapes, masters: Any, groups: Sequence[Sequence[str]] | None
) -> list[list[str]] | None:
    """The names of the optimizer's parameters by group. None if they are unknown, or do not match the numbers."""
    named = [list(group) for group in groups] if groups is not None else [list(shapes)]
    if len(named) != len(numbered) or any(name not in shapes for group in named for name in group):
        return None
    for group, names in enumerate(named):
        master = masters[group] if masters else None
        if isinstance(master, Tensor):
            if master.numel() != sum(math.prod(shapes[name]) for name in names):
                return None
        elif len(names) != len(numbered[group]) or (
            master is not None and [tuple(t.shape) for t in master] != [shapes[name] for name in names]
        ):
            return None
    return named


def _add_entries(
    found: Collected, file: TorchFile, place: str, name: str, entries: Mapping[str, Any], shape: tuple[int, ...]
) -> None:
    for key, value in entries.items():
        if isinstance(value, Tensor):
            if tuple(value.shape) not in (shape, ()):
                raise CheckpointError(
                    f"{place}: the optimizer's {key} has shape {list(value.shape)}, but {name} has {list(shape)}",
                    hint="pass the parameters to the optimizer in the original order",
                )
            found.boxes.add(f"optimizer.{name}.{key}", "optimizer", file.place_of(value))
        elif type(value) in (int, float, bool):
            found.scalars.setdefault(name, {})[key] = value
