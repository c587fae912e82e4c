"""The state of a job's own objects, its callbacks and metrics: plain values and small tensors, as JSON values.

Where ranks have the same state it is kept once; where they do not, by rank.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn

from dsjob.checkpoint.agreement import gather
from dsjob.checkpoint.values import decode, encode
from dsjob.errors import CheckpointError, DsjobError
from dsjob.mesh import World

MOST_BYTES = 1 << 20  # of the tensors of one object: state.json holds them


class Stateful(Protocol):
    """An object whose state checkpoints keep."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


def list_stateful(say: Callable[[str, str], None], **objects: Mapping[str, Any]) -> dict[str, Stateful]:
    """Those of `objects` that have state, by `<kind>.<name>`; a module with much state, weights then, is told of and
    left out."""
    kept: dict[str, Stateful] = {}
    for name, value in ((f"{kind}.{name}", value) for kind, named in objects.items() for name, value in named.items()):
        if not all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")):
            continue
        size = _count_bytes(value.state_dict()) if isinstance(value, nn.Module) else 0
        if size > MOST_BYTES:
            say("not kept", f"{name} has {size:,} bytes of tensors: no checkpoint holds them, a resume makes it anew")
            continue
        kept[name] = value
    return kept


def capture_objects(world: World, objects: Mapping[str, Stateful]) -> dict[str, list[Any]]:
    """On rank 0 the state of each object by its name: a list of one where all ranks have the same, else by rank.

    A collective, unless there are no objects. Raises CheckpointError for state that cannot be kept.
    """
    if not objects:
        return {}
    found = gather(world, lambda: {name: _capture(name, value) for name, value in objects.items()})
    states = {name: [of_rank[name] for of_rank in found] for name in objects if found}
    return {name: own if any(state != own[0] for state in own) else own[:1] for name, own in states.items()}


def restore_objects(world: World, objects: Mapping[str, Stateful], saved: Mapping[str, list[Any]]) -> tuple[str, ...]:
    """Gives this rank's objects their state back; what of that cannot be done, in words. Raises CheckpointError."""
    notes = []
    for name, value in objects.items():
        states = saved.get(name)
        if states is None:
            notes.append(f"{name} begins anew: the checkpoint has no state of it")
            continue
        if len(states) not in (1, world.world_size):
            notes.append(f"{name} goes on with the state that rank 0 had: each of {len(states)} ranks had its own")
        _restore(name, value, states[world.rank if len(states) == world.world_size else 0])
    unused = sorted(saved.keys() - objects)
    notes += [f"the state of {name} is not used: there is nothing of that name to take it" for name in unused]
    return tuple(notes)


def _capture(name: str, value: Stateful) -> dict[str, Any]:
    try:
        state = value.state_dict()
        if not isinstance(state, Mapping):
            raise TypeError(f"it gave {type(state).__name__}, not a dict")
        if (size := _count_bytes(state)) > MOST_BYTES:
            hint = "weights belong into the model; what a callback or metric keeps is small"
            raise CheckpointError(f"{name} has {size:,} bytes of tensors, more than {MOST_BYTES:,}", hint=hint)
        tensors = {key: item for key, item in state.items() if isinstance(item, Tensor)}
        copies = {key: item.detach().cpu().contiguous().clone() for key, item in tensors.items()}
        packed = {"tensors": base64.b64encode(safetensors.torch.save(copies)).decode("ascii")} if copies else {}
        return {"values": encode({key: item for key, item in state.items() if key not in tensors}, name), **packed}
    except DsjobError:
        raise
    except Exception as error:  # it is the user's own code, and the other ranks have to hear of it
        raise CheckpointError(f"{name}.state_dict(): {type(error).__name__}: {error}") from error


def _restore(name: str, value: Stateful, state: Mapping[str, Any]) -> None:
    try:
        tensors = safetensors.torch.load(base64.b64decode(state["tensors"])) if "tensors" in state else {}
    except SafetensorError as error:
        raise ValueError(f"tensors of {name}: {error}") from error
    given = {**decode(state["values"]), **tensors}
    try:
        value.load_state_dict(given)
    except Exception as error:
        raise CheckpointError(
            f"{name}.load_state_dict(): {type(error).__name__}: {error}",
            hint="it is given what state_dict() gave when the checkpoint was saved",
        ) from error


def _count_bytes(state: Mapping[str, Any]) -> int:
    return sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
