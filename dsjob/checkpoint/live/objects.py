"""The state of a job's own objects, its callbacks and metrics: plain values and small tensors, as JSON values.

Where ranks have the same state it is kept once; where they do not, by rank. State that cannot be kept is told of and
left out of a save, which loses nothing else by it.

State is taken once before the first step, so that problems are reported then and not hours later. On another number of
ranks the state of rank 0 counts where ranks differ, with a note.
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

MOST_BYTES = 1 << 20  # of one object: state.json holds it


class Stateful(Protocol):
    """An object whose state checkpoints keep."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class Kept(dict[str, Any]):
    """A job's own objects by `<kind>.<name>`, those without state too: the names are the same on every rank.

    `say`: shows a title and a text to the user.
    """

    def __init__(self, say: Callable[[str, str], None] | None = None, **objects: Mapping[str, Any]) -> None:
        super().__init__({f"{kind}.{name}": value for kind, named in objects.items() for name, value in named.items()})
        self._say, self._told = say, set[str]()

    def tell(self, name: str, why: str) -> None:
        """Says, once for each object, that its state is left out of checkpoints."""
        if self._say is not None and name not in self._told:
            self._say("not kept", f"{name} is left out of checkpoints, and begins anew on a resume: {why}")
        self._told.add(name)


def capture_objects(everyone: Ranks, objects: Kept) -> dict[str, list[Any]]:
    """On rank 0 the state of each object by its name: a list of one where all ranks have the same, else by rank.

    What cannot be kept, or not of every rank, is told and left out. A collective, unless there are no objects.
    """
    if not objects:
        return {}
    found: list[dict[str, Any]] = gather_on_rank_0(
        everyone, lambda: {n: _try(n, v) for n, v in objects.items() if _is_stateful(v)}
    )
    states = {}
    for name in (name for name in objects if any(name in of_rank for of_rank in found)):
        own = [of_rank.get(name, "it has no state_dict and load_state_dict there") for of_rank in found]
        refused = [(rank, state) for rank, state in enumerate(own) if isinstance(state, str)]
        if refused:
            rank, why = refused[0]
            objects.tell(name, why if len(refused) == len(own) else f"on rank {rank}, {why}")
        else:
            states[name] = own if any(state != own[0] for state in own) else own[:1]
    return states


def restore_objects(everyone: Ranks, objects: Kept, saved: Mapping[str, list[Any]]) -> tuple[str, ...]:
    """Gives this rank's objects their state back; what of that cannot be done, in words. Raises CheckpointError."""
    notes, stateful = [], {name: value for name, value in objects.items() if _is_stateful(value)}
    for name, value in stateful.items():
        states = saved.get(name)
        if states is None:
            notes.append(f"{name} begins anew: the checkpoint has no state of it")
            continue
        if len(states) not in (1, everyone.size):
            notes.append(f"{name} goes on with the state that rank 0 had: each of {len(states)} ranks had its own")
        _restore(name, value, states[everyone.rank if len(states) == everyone.size else 0])
    unused = sorted(saved.keys() - stateful)
    notes += [f"the state of {name} is not used: there is nothing of that name to take it" for name in unused]
    return tuple(notes)


def _is_stateful(value: object) -> TypeGuard[Stateful]:
    return all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict"))


def _try(name: str, value: Stateful) -> dict[str, Any] | str:
    """The state as JSON values, or why there is none."""
    try:
        return _capture(name, value)
    except Interrupted:  # by a signal, which has nothing to do with what was going on
        raise
    except DsjobError as error:
        return error.message
    except Exception as error:  # it is the user's own code
        return f"{name}.state_dict(): {type(error).__name__}: {error}"


def _capture(name: str, value: Stateful) -> dict[str, Any]:
    state = value.state_dict()
    if not isinstance(state, Mapping):
        raise TypeError(f"it gave {type(state).__name__}, not a dict")
    tensors = {key: item for key, item in state.items() if isinstance(item, Tensor)}
    size = sum(tensor.nbytes for tensor in tensors.values())
    _require_small(size, "tensors")
    values = encode({key: item for key, item in state.items() if key not in tensors}, name)
    _require_small(size + len(encode_json(values)), "state")
    copies = {key: item.detach().cpu().contiguous().clone() for key, item in tensors.items()}
    packed = {"tensors": base64.b64encode(safetensors.torch.save(copies)).decode("ascii")} if copies else {}
    return {"values": values, **packed}


def _require_small(size: int, what: str) -> None:
    if size > MOST_BYTES:
        raise CheckpointError(f"it has {size:,} bytes of {what}, more than {MOST_BYTES:,}")


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
