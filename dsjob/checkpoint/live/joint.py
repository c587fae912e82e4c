"""Presents the state of several engines as one, so that one checkpoint can hold it.

The tensor `model.<parameter>` of the engine `student` becomes `model.student.<parameter>`, as if its model were a
submodule of a larger one. Optimizer tensors and plain values are named the same way. With model parallelism, each rank
holds one part of the model, named `mp_rank_00`, `mp_rank_01`, ...; its joint state contains only that part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import torch

from dsjob.checkpoint.live.state import Saved, Shapes, TrainingState
from dsjob.ranks.mesh import Ranks


def name_part(model_rank: int) -> str:
    """The name for the part of the model on a model-parallel rank. DeepSpeed's files use the same names."""
    return f"mp_rank_{model_rank:02d}"


class JointState:
    """The interface of TrainingState over several named states, which may be joint states themselves."""

    def __init__(self, states: Mapping[str, TrainingState | JointState]) -> None:
        self._states = states
        self.names = list(states)
        self.device: torch.device = next(iter(states.values())).device
        self.aliases: dict[str, str] = {
            f"{name}.{alias}": f"{name}.{target}" for name, s in states.items() for alias, target in s.aliases.items()
        }

    @property
    def pretrained(self) -> dict[str, Any]:
        """See TrainingState. Maps each model's name to its value."""
        return {name: state.pretrained for name, state in self._states.items() if state.pretrained}

    def model_tensors(self) -> dict[str, Saved]:
        """See TrainingState."""
        return self._join(lambda state: state.model_tensors())

    def optimizer_tensors(self) -> dict[str, Saved]:
        """See TrainingState."""
        return self._join(lambda state: state.optimizer_tensors())

    def without_frozen(self) -> JointState:
        """See TrainingState."""
        return JointState({name: state.without_frozen() for name, state in self._states.items()})

    def role(self, name: str) -> str:
        """See TrainingState."""
        # model.student.layer.weight: the tensor model.layer.weight of the engine `student`.
        kind, owner, rest = name.split(".", 2)
        return self._states[owner].role(f"{kind}.{rest}")

    def make_optimizer_tensors(self, shapes: Shapes) -> dict[str, Saved]:
        """See TrainingState."""
        return {
            _name(full, name): tensor
            for name, state in self._states.items()
            for full, tensor in state.make_optimizer_tensors(_take(shapes, name)).items()
        }

    def load_optimizer(
        self, tensors: Mapping[str, Saved], values: Mapping[str, Any], elsewhere: Collection[str] = ()
    ) -> None:
        """See TrainingState."""
        others = dict.fromkeys(elsewhere)
        for name, state in self._states.items():
            state.load_optimizer(_take(tensors, name), values.get(name, {}), list(_take(others, name)))

    def load_scheduler(self, values: Any, rates: bool = True) -> None:
        """See TrainingState."""
        for name, state in self._states.items():
            state.load_scheduler((values or {}).get(name), rates)

    def load_scaler(self, values: Mapping[str, Any] | None) -> None:
        """See TrainingState."""
        for name, state in self._states.items():
            state.load_scaler((values or {}).get(name))

    def optimizer_values(self) -> dict[str, Any]:
        """See TrainingState."""
        return {name: state.optimizer_values() for name, state in self._states.items()}

    def scheduler_values(self) -> Any:
        """See TrainingState."""
        return {name: state.scheduler_values() for name, state in self._states.items()}

    def scaler_values(self) -> dict[str, Any]:
        """See TrainingState."""
        return {name: state.scaler_values() for name, state in self._states.items()}

    def _join(self, read: Callable[[TrainingState | JointState], dict[str, Saved]]) -> dict[str, Saved]:
        return {_name(full, name): t for name, state in self._states.items() for full, t in read(state).items()}


class Savable(Protocol):
    """What can be saved: one engine, or several together."""

    @property
    def zero_stage(self) -> int: ...
    def state(self) -> TrainingState | JointState: ...
    def counters(self) -> dict[str, int]: ...
    def restore_counters(self, counters: Mapping[str, int]) -> None: ...


def view_state(engine: Savable, parts: Ranks) -> TrainingState | JointState:
    """The state of an engine. With model parallelism, its names include that of this rank's part."""
    state = engine.state()
    return JointState({name_part(parts.rank): state}) if parts.size > 1 else state


def _name(full: str, owner: str) -> str:
    """`model.weight` of `student` becomes `model.student.weight`."""
    kind, _, rest = full.partition(".")
    return f"{kind}.{owner}.{rest}"


def _take(values: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """The entries of `values` that belong to one engine, under the engine's own names."""
    return {
        f"{kind}.{rest}": value
        for full, value in values.items()
        for kind, whose, rest in [full.split(".", 2)]
        if whose == owner
    }
