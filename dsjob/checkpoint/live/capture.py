"""What a save takes from an engine: which tensors each rank writes, and all plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.format.values import CLIENT, encode
from dsjob.checkpoint.live.joint import JointState, Savable, view_state
from dsjob.checkpoint.live.objects import Kept, capture_objects
from dsjob.checkpoint.live.prepared import PreparedSave
from dsjob.checkpoint.live.rng import capture_rng
from dsjob.checkpoint.live.shards import Planner
from dsjob.checkpoint.live.stages import merge_values
from dsjob.checkpoint.live.state import TrainingState
from dsjob.ranks.agreement import all_gather, gather_on_rank_0, on_all_ranks, on_rank_0
from dsjob.ranks.mesh import World


class Capture:
    """Captures the state of an engine and of the `objects` beside it. All ranks must call each method."""

    def __init__(self, world: World, objects: Kept) -> None:
        self._everyone, self._parts, self._axes = world.everyone, world.parts, world.axes
        self._stages, self._divided = world.pipe, world.divided
        # One rank for each part of the model is enough: its copies hold the same state.
        whole = world.opaque or world.tensor.rank == 0
        self._speaks = world.data_rank == world.context.rank == 0 and whole
        self._objects, self._planner = objects, Planner(world.everyone)

    def prepare(
        self,
        engine: Savable,
        root: str,
        tag: str,
        client_state: Mapping[str, Any],
        name_folder: Callable[[], str],
        *,
        frozen: bool,
    ) -> PreparedSave:
        """Plans a save below `root`. Its parts are the engine's own tensors, so training would change them.

        name_folder: called on rank 0; names the save's folder. frozen: include parameters that are not trained.
        """
        state = view_state(engine, self._parts)
        state = state if frozen else state.without_frozen()
        tensors = {**state.model_tensors(), **state.optimizer_tensors()}
        stored: dict[str, Tensor] = {}
        client = on_all_ranks(
            self._everyone, lambda: encode(dict(client_state), "client_state", tensors=True, stored=stored)
        )
        # Describe before adding the client's tensors: they are not part of the model, so `state` has no role for them.
        plain, values = self._describe(engine, state, tensors, client)
        tensors.update(stored if self._everyone.rank == 0 else {})  # only rank 0's client state is saved
        parts, described = self._planner.plan(tensors)
        # Only rank 0 knows the attempt, so it chooses the folder for all ranks.
        folder = on_rank_0(self._everyone, name_folder)
        manifest = {
            "format": layout.FORMAT,
            "version": layout.VERSION,
            "tag": tag,
            "step": engine.counters()["global_steps"],
            "world_size": self._everyone.size,
            "zero_stage": engine.zero_stage,
            "aliases": {f"model.{name}": f"model.{target}" for name, target in plain["aliases"].items()},
            **({"models": plain["models"]} if plain["models"] else {}),
            **({"model_ranks": self._parts.size} if self._parts.size > 1 else {}),
            **({"axes": list(self._axes)} if self._divided else {}),
            **({"pretrained": plain["pretrained"]} if plain["pretrained"] else {}),
        }
        return PreparedSave(
            url=storage.join(root, folder),
            folder=folder,
            tag=tag,
            rank=self._everyone.rank,
            world_size=self._everyone.size,
            parts=parts,
            described=described,
            roles={**plain["roles"], **dict.fromkeys(stored, CLIENT)},
            values=values,
            manifest=manifest,
        )

    def describe(self, engine: Savable) -> dict[str, Any]:
        """The plain values that a save without client state would store in state.json. Complete on rank 0 only."""
        state = view_state(engine, self._parts)
        return self._describe(engine, state, {**state.model_tensors(), **state.optimizer_tensors()}, encode({}))[1]

    def _describe(
        self,
        engine: Savable,
        state: TrainingState | JointState,
        tensors: Mapping[str, Any],
        client: Any,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The result of `_list_values` for the whole model, and on rank 0 the content of state.json."""
        own = on_all_ranks(self._everyone, lambda: _list_values(state, tensors))
        plain = self._join_parts(own)
        objects = capture_objects(self._everyone, self._objects)
        # Each rank draws its own random numbers, so state.json has an entry per rank.
        random = gather_on_rank_0(self._everyone, lambda: capture_rng(state.device))
        values = {
            "counters": engine.counters(),
            **{key: plain[key] for key in ("optimizer", "scheduler", "loss_scaler")},
            "rng": {str(rank): entry for rank, entry in enumerate(random)},
            "client_state": client,
            **({"objects": objects} if objects else {}),
        }
        return plain, values

    def _join_parts(self, own: dict[str, Any]) -> dict[str, Any]:
        """Merges the results of `_list_values` of all model-parallel ranks. A collective, if there are several."""
        if self._parts.size == self._stages.size == 1:
            return own
        place = (self._parts.rank, self._stages.rank)
        found = sorted(
            (each for each in all_gather(self._everyone, (place, own) if self._speaks else None) if each is not None),
            key=lambda each: each[0],
        )
        stages = [[own for (part, _), own in found if part == number] for number in range(self._parts.size)]
        parts = [merge_values(each) for each in stages]
        if self._parts.size == 1:
            return parts[0]
        models = sorted(name for part in parts for name in part.pop("models"))
        joined = {key: {name: value for part in parts for name, value in part[key].items()} for key in parts[0]}
        return {**joined, "models": models}


def _list_values(state: TrainingState | JointState, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of a state, which checkpoints store beside tensors. Raises CheckpointError for unsupported
    values."""
    return {
        "optimizer": state.optimizer_values(),
        "scheduler": state.scheduler_values(),
        "loss_scaler": state.scaler_values(),
        "aliases": dict(state.aliases),
        "pretrained": state.pretrained,
        "roles": {name: state.role(name) for name in tensors},
        "models": state.names if isinstance(state, JointState) else [],
    }
