"""The part of an engine that saves and loads, with DeepSpeed's calls. `checkpoint` handles files and formats."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from dsjob.checkpoint.live import export
from dsjob.checkpoint.live.checkpointer import Checkpointer
from dsjob.checkpoint.live.state import TrainingState, persistent_buffers
from dsjob.checkpoint.pretrained.configuration import describe_pretrained
from dsjob.contract.paths import get_at
from dsjob.engine.readings import Readings
from dsjob.errors import CheckpointError, NoCheckpointError, UsageError
from dsjob.parallel import Strategy
from dsjob.parallel.strategy import broadcast
from dsjob.parallel.zero import GatheredParameters
from dsjob.ranks.agreement import all_gather
from dsjob.ranks.joint import Meetings
from dsjob.terminal import warn
from dsjob.torch_private import own_parameters

_SAVED_BY_ALL = (
    "every rank must call it, because each one saves its own part: move it out of `if rank == 0:`. The ranks do not "
    "overwrite each other's files"
)
_LOADED_BY_ALL = "every rank must call it, because each one loads its own part: move it out of `if rank == 0:`"
_GATHERED_BY_ALL = (
    "every rank must call it, because each one has only a part of the model: move it out of `if rank == 0:`. Rank 0 "
    "alone may write the result"
)
_NOT_GATHERED = (
    "at stage 3, save_16bit_model needs zero_optimization.stage3_gather_16bit_weights_on_model_save; or call "
    "save_checkpoint, then `dsjob convert`"
)


class Saving(Readings):
    """The part of an engine that saves and loads. All ranks must call each of these methods."""

    config: Mapping[str, Any]
    lr_scheduler: LRScheduler | None
    _aliases: dict[str, str]
    _meetings: Meetings

    def state(self) -> TrainingState:
        """The state for checkpoints. Loading writes into the same tensors."""
        self._settle()
        return TrainingState(
            weights=self.strategy.weights(),
            buffers=persistent_buffers(self.strategy.module),
            aliases=self._aliases,
            masters=self.strategy.masters,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            scaler=self._update.scaler,
            device=self.world.device,
            pretrained=describe_pretrained(self.strategy.module),
            averages=self.strategy.averages,
            disk=self.strategy.disk,
            splits=self.strategy.splits,
        )

    def counters(self) -> dict[str, int]:
        """The counters for checkpoints."""
        self._settle()
        return self.rhythm.counts()

    def restore_counters(self, counters: Mapping[str, int]) -> None:
        """Restores the counters of a checkpoint. Accumulation starts at the beginning of a step."""
        self._settle()
        self.rhythm.restore(counters)
        # Gradients belong to the weights before the load. `finish_step` refreshes the compute copies from the masters.
        self.strategy.drop_gradients()
        if self.strategy.disk is not None:
            self.strategy.disk.sync()
        self.strategy.finish_step()

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves everything to `save_dir` (a path or URL).

        `tag`: the default is `global_step<n>`. An existing checkpoint with this tag is replaced once the new one is
        complete. If ranks pass different tags, `checkpoint.tag_validation` decides whether that is a warning or an
        error; rank 0's tag is used.
        `save_latest`: whether the file `latest`, which `load_checkpoint` reads, then names this checkpoint.
        `client_state`: returned by `load_checkpoint`. Rank 0's is saved. It may contain numbers, strings, lists,
        tuples, dicts, sets, bytes, dates, paths, namespaces, and arrays and tensors of any size, such as states of
        random generators.
        """
        self._meetings.meet("engine.save_checkpoint()", _SAVED_BY_ALL)
        # A checkpointer per call: programs may save to a different folder each time.
        checkpointer = Checkpointer(_require_folder(save_dir), world=self.world)
        saved = checkpointer.save(
            self,
            tag=self._agree_on_tag(str(tag) if tag is not None else f"global_step{self.rhythm.global_steps}"),
            client_state=client_state,
            latest=save_latest,
            replace=True,
            frozen=not exclude_frozen_parameters,
        )
        for note in saved.notes:
            warn(f"{saved.url} was saved, but: {note}", stacklevel=2)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., None] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Loads the checkpoint `tag` from `load_dir`, whatever number of ranks saved it.

        Without a tag, loads the checkpoint named in the file `latest`, as in DeepSpeed: the last one saved with
        `save_latest`. If that is not a committed checkpoint, loads the one with the most steps, with a warning.
        Without `load_optimizer_states`, the next step uses the optimizer's current learning rates; the schedule, if it
        is loaded, sets later ones, as in DeepSpeed.
        `load_module_only`: load only the weights, without optimizer, schedule and counters.
        `custom_load_fn(src=weights, dst=module)`: loads the weights into the model instead of dsjob. `src` has them by
        name, whole and in host memory on every rank. The parameters of `dst` are whole during the call; rank 0's values
        are kept.
        Returns the checkpoint's folder and client_state; (None, None) if there is no checkpoint, as in DeepSpeed.
        """
        self._meetings.meet("engine.load_checkpoint()", _LOADED_BY_ALL)
        checkpointer = Checkpointer(_require_folder(load_dir), world=self.world)
        # Loading restores the checkpoint's counters. With `load_module_only`, these are put back.
        counters = self.counters()
        chosen, note = (str(tag), "") if tag is not None else checkpointer.follow_latest()
        if note and self.world.everyone.rank == 0:
            warn(f"{load_dir}: {note}", stacklevel=2)
        try:
            loaded = checkpointer.load(
                self,
                tag=chosen,
                strict=load_module_strict,
                optimizer=load_optimizer_states and not load_module_only,
                scheduler=load_lr_scheduler_states and not load_module_only,
                take=self._call_with_whole_model(custom_load_fn) if custom_load_fn is not None else None,
            )
        except NoCheckpointError as error:
            if tag is not None:
                raise
            if self.world.everyone.rank == 0:
                warn(f"nothing was loaded: {error.message}", stacklevel=2)
            return None, None
        if load_module_only:
            self.restore_counters(counters)
        for note in loaded.notes:
            warn(f"{loaded.url}: {note}", stacklevel=2)
        return loaded.url, loaded.client_state

    def _call_with_whole_model(self, custom_load_fn: Callable[..., None]) -> Callable[[dict[str, Tensor]], None]:
        module = self.strategy.module
        if self.strategy.splits:
            raise UsageError("custom_load_fn needs whole layers, but tensor_parallel divides them", hint="omit it")

        def take(weights: dict[str, Tensor]) -> None:
            # After an evaluation, or if the engine keeps parameters gathered, the model shows tensors that its own
            # methods, such as load_state_dict, would exchange for shards in the middle.
            self.strategy.free_gathered()
            # Ranks gather whole parameters, which are sharded again on exit. Rank 0's values win.
            with _widened(self.strategy) as others, GatheredParameters(others, modifier_rank=0):
                custom_load_fn(src=weights, dst=module)

        return take

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the weights of the whole model to one file, in the compute dtype.

        The format is safetensors if the name ends in `.safetensors`, otherwise that of torch.save. At stage 3 this
        requires stage3_gather_16bit_weights_on_model_save; without it, warns, writes nothing and returns False.
        """
        if self.world.opaque or self.world.pipe.size > 1:
            raise UsageError(
                "save_16bit_model writes one file, but each model-parallel rank has only a part of the model",
                hint="call save_checkpoint, then `dsjob convert --model mp_rank_00` for each part"
                if self.world.opaque
                else "call save_checkpoint, then `dsjob convert --to fp32`",
            )
        zero = self.spec.zero_optimization
        if zero.stage == 3 and self.world.data_size > 1 and not zero.stage3_gather_16bit_weights_on_model_save:
            if self.world.everyone.rank == 0:
                warn(f"nothing was saved in {save_dir}: {_NOT_GATHERED}", stacklevel=2)
            return False
        state, url = self.state(), os.path.join(_require_folder(save_dir), save_filename)
        if exclude_frozen_parameters:
            state = state.without_frozen()
        self._meet_if_sharded("engine.save_16bit_model()", state)
        writes = self.world.data_rank == self.world.model.rank == 0
        export.save_model(url, state, dtype=self.precision.compute, writes=writes)
        return True

    def module_state_dict(
        self,
        destination: MutableMapping[str, Tensor] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> MutableMapping[str, Tensor]:
        """The model's weights and buffers by name, whole on every rank and in the compute dtype, at any stage.

        At stage 3, this needs memory for the whole model on each rank; `save_16bit_model` writes a file instead.
        `keep_vars` has no effect: this returns copies.
        """
        found = {} if destination is None else destination
        state = self.state().without_frozen() if exclude_frozen_parameters else self.state()
        self._meet_if_sharded("engine.module_state_dict()", state)
        found.update({prefix + name: value for name, value in self._gather(state)})
        found.update(
            # A tied parameter appears under each of its names, as in the model's own state_dict.
            {prefix + n: found[prefix + first] for n, first in state.aliases.items() if prefix + first in found}
        )
        return found

    def _state_dict_on_rank_0(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Like `module_state_dict`, but in host memory and only on rank 0; None elsewhere. Gathers tensor by tensor."""
        state = self.state().without_frozen() if exclude_frozen_parameters else self.state()
        self._meet_if_sharded("engine._zero3_consolidated_16bit_state_dict()", state)
        keeps = self.world.everyone.rank == 0
        # Every rank walks through the generator, because each item is gathered by a collective. Only rank 0 keeps them.
        found = {name: value.cpu() for name, value in self._gather(state) if keeps}
        found.update({name: found[first] for name, first in state.aliases.items() if first in found})
        return found if keeps else None

    def _meet_if_sharded(self, what: str, state: TrainingState) -> None:
        if any(isinstance(tensor, DTensor) for tensor in state.weights.values()):
            self._meetings.meet(what, _GATHERED_BY_ALL)

    def _gather(self, state: TrainingState) -> Iterator[tuple[str, Tensor]]:
        """Copies of the weights and buffers, whole and in the compute dtype. All ranks must take all of them."""
        for name in state.weights:
            value = state.gather(name)
            low = self.precision.compute if value.is_floating_point() else value.dtype
            # copy=True: a tensor that is not sharded may be the live weight itself.
            yield name, value.to(low, copy=True)
        for name, buffer in state.buffers.items():
            yield name, buffer.detach().clone()

    @torch.no_grad()
    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Loads whole weights and buffers, by name (or below the key `module`), into the model and its masters.

        Raises CheckpointError for wrong shapes, and with `strict`, for missing or unknown names.
        """
        given = state_dict["module"] if isinstance(state_dict.get("module"), Mapping) else state_dict
        state = self.state()
        places = {**state.weights, **state.buffers}
        missing = [name for name in places if name not in given]
        unknown = [name for name in given if name not in places and name not in state.aliases]
        if strict and (missing or unknown):
            raise CheckpointError(
                f"the state dict does not match the model: missing {missing[:3]}, unknown {unknown[:3]}"
            )
        for name in places:
            if name in given:
                state.fill(name, given[name])
        self.strategy.drop_gradients()
        self.strategy.finish_step()

    def _agree_on_tag(self, tag: str) -> str:
        """Rank 0's tag. Raises CheckpointError if other ranks' tags differ and `checkpoint.tag_validation` is Fail."""
        everyone = self.world.everyone
        tags = all_gather(everyone, tag)
        if len(set(tags)) > 1:
            mode = str(get_at(self.config, ("checkpoint", "tag_validation"))).lower()
            message = f"ranks save under different tags: {', '.join(sorted(set(tags)))}"
            if mode == "fail":
                raise CheckpointError(message, hint="pass the same tag on every rank")
            if mode == "warn" and everyone.rank == 0:
                warn(f"{message}; using rank 0's", stacklevel=3)
        return tags[0]


@contextmanager
def _widened(strategy: Strategy) -> Iterator[list[nn.Parameter]]:
    """Within the block, a replicated model in low precision has parameters in the precision of its masters, which
    become the masters at the end. Rank 0's values win. Yields all other parameters.

    They are new parameters: a changed dtype would take DDP's hooks away from the model's own.
    """
    masters, module = strategy.masters, strategy.module
    named = {name: p for name, p in module.named_parameters() if not isinstance(p, DTensor)}
    low = {name: p for name, p in named.items() if masters.get(name, p) is not p}
    wide = {p: nn.Parameter(masters[name].detach().to(p.device, copy=True)) for name, p in low.items()}
    others = [p for p in module.parameters() if p not in wide]
    found = [(own_parameters(each), key, p) for each in module.modules() for key, p in own_parameters(each).items()]
    places = [(own, key, p) for own, key, p in found if p in wide]
    for own, key, p in places:
        own[key] = wide[p]
    try:
        yield others
    finally:
        for own, key, p in places:
            own[key] = p
    if wide and strategy.world.data_size > 1:
        broadcast([value.data for value in wide.values()], strategy.world)
    for name, p in low.items():
        masters[name].data.copy_(wide[p].data)
    strategy.weights_changed()


def find_aliases(module: nn.Module) -> dict[str, str]:
    """The other names of tied parameters, mapped to the name under which they are saved."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            aliases[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
    return aliases


def _require_folder(url: str | os.PathLike[str]) -> str:
    if not url:
        raise UsageError(f"the checkpoint folder must be a path or URL, not {url!r}")
    return os.fspath(url)
