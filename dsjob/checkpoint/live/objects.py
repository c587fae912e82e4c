"""Saves and restores the state of callbacks and metrics: plain values and small tensors, as JSON values.

If all ranks have the same state, it is saved once, otherwise per rank. State that cannot be saved is left out with a
message; the rest of the checkpoint is not affected.

The state is captured once before the first step, so that problems are reported then and not hours later. If ranks
differ and the number of ranks has changed, all ranks restore the state of rank 0, with a note.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeGuard

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from dsjob.checkpoint.format.values import decode, encode, encode_json
from dsjob.errors import CheckpointError, DsjobError, Interrupted
from dsjob.ranks.agreement import gather_on_rank_0
from dsjob.ranks.mesh import Ranks

MOST_BYTES = 1 << 20  # per object, because its state is part of state.json


class Stateful(Protocol):
    """An object whose state is part of checkpoints.

    With `load_state_dicts(states)`, it receives the states of all ranks that saved, on any number of ranks.
    """

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class Kept(dict[str, Any]):
    """A job's callbacks and metrics by `<kind>.<name>`. Includes those without state, so that all ranks have the same
    names.

    say: shows a title and a text to the user.
    """

    def __init__(self, say: Callable[[str, str], None] | None = None, **objects: Mapping[str, Any]) -> None:
        super().__init__({f"{kind}.{name}": value for kind, named in objects.items() for name, value in named.items()})
        self._say, self._warned = say, set[str]()

    def list_of(self, kind: str) -> dict[str, Any]:
        """The objects of a kind by name."""
        return {name.removeprefix(f"{kind}."): made for name, made in self.items() if name.startswith(f"{kind}.")}

    def warn(self, name: str, why: str) -> None:
        """Tells the user, once per object, that checkpoints do not contain its state."""
        if self._say is not None and name not in self._warned:
            self._say("not saved", f"checkpoints will not contain the state of {name}; a resume resets it: {why}")
        self._warned.add(name)


def capture_objects(everyone: Ranks, objects: Kept) -> dict[str, list[Any]]:
    """The states of all objects by name, on rank 0: a list of one state if all ranks have the same, else one per rank.

    State that cannot be saved, even on a single rank, is left out with a message. A collective, unless there are no
    objects.
    """
    if not objects:
        return {}
    found: list[dict[str, Any]] = gather_on_rank_0(
        everyone, lambda: {n: _try(n, v) for n, v in objects.items() if _is_stateful(v)}
    )
    states = {}
    # Names with state on at least one rank. Only rank 0 has `found`; elsewhere it is empty.
    for name in (name for name in objects if any(name in of_rank for of_rank in found)):
        own = [of_rank.get(name, "it has no state_dict and load_state_dict there") for of_rank in found]
        refused = [(rank, state) for rank, state in enumerate(own) if isinstance(state, str)]
        if refused:
            rank, why = refused[0]
            objects.warn(name, why if len(refused) == len(own) else f"on rank {rank}, {why}")
        else:
            # States are JSON values here, so comparing them is comparing what would be stored.
            states[name] = own if any(state != own[0] for state in own) else own[:1]
    return states


def restore_objects(everyone: Ranks, objects: Kept, saved: Mapping[str, list[Any]]) -> tuple[str, ...]:
    """Restores the state of this rank's objects. Returns notes about what was not restored. Raises CheckpointError."""
    notes, stateful = [], {name: value for name, value in objects.items() if _is_stateful(value)}
    for name, value in stateful.items():
        states = saved.get(name)
        if states is None:
            notes.append(f"{name} was reset: the checkpoint does not contain its state")
            continue
        # Such an object divides the states itself, so the number of ranks may differ.
        if hasattr(value, "load_state_dicts"):
            _restore(name, value.load_state_dicts, [_unpack(name, state) for state in states])
            continue
        if len(states) not in (1, everyone.size):
            notes.append(f"{name} resumes with rank 0's state on all ranks: it was saved on {len(states)} ranks")
        state = states[everyone.rank if len(states) == everyone.size else 0]
        _restore(name, value.load_state_dict, _unpack(name, state))
    unused = sorted(saved.keys() - stateful)
    notes += [f"the state of {name} was not restored: this job has no stateful object of that name" for name in unused]
    return tuple(notes)


def _is_stateful(value: object) -> TypeGuard[Stateful]:
    return all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict"))


def _try(name: str, value: Stateful) -> dict[str, Any] | str:
    """The state as JSON values, or why it cannot be saved."""
    try:
        return _capture(name, value)
    except Interrupted:  # a signal; it has nothing to do with this state
        raise
    except DsjobError as error:
        return error.message
    except Exception as error:  # user code may raise anything
        return f"{name}.state_dict(): {type(error).__name__}: {error}"


def _capture(name: str, value: Stateful) -> dict[str, Any]:
    state = value.state_dict()
    if not isinstance(state, Mapping):
        raise TypeError(f"it returned {type(state).__name__}, not a dict")
    tensors = {key: item for key, item in state.items() if isinstance(item, Tensor)}
    size = sum(tensor.nbytes for tensor in tensors.values())
    # Before encoding: base64 of a huge tensor would take even more memory.
    _require_small(size, "tensors")
    values = encode({key: item for key, item in state.items() if key not in tensors}, name)
    _require_small(size + len(encode_json(values)), "state")
    # clone: safetensors refuses tensors that share memory.
    copies = {key: item.detach().cpu().contiguous().clone() for key, item in tensors.items()}
    packed = {"tensors": base64.b64encode(safetensors.torch.save(copies)).decode("ascii")} if copies else {}
    return {"values": values, **packed}


def _require_small(size: int, what: str) -> None:
    if size > MOST_BYTES:
        raise CheckpointError(f"it has {size:,} bytes of {what}; the limit is {MOST_BYTES:,}")


def _unpack(name: str, state: dict[str, Any]) -> dict[str, Any]:
    try:
        tensors = safetensors.torch.load(base64.b64decode(state["tensors"])) if "tensors" in state else {}
    except SafetensorError as error:
        raise ValueError(f"tensors of {name}: {error}") from error
    return {**decode(state["values"]), **tensors}


def _restore(name: str, load: Callable[[Any], Any], given: Any) -> None:
    try:
        load(given)
    except Exception as error:
        raise CheckpointError(
            f"{name}.{load.__name__}(): {type(error).__name__}: {error}",
            hint="it receives what state_dict() returned when the checkpoint was saved",
        ) from error
