"""The installed DeepSpeed behind the interface of an engine: `engine: deepspeed` in a job document.

Its purpose is to run the same job on both, and to compare them. Model, optimizer, schedule, data and loop are dsjob's.
Forward, backward and step of a micro batch are DeepSpeed's, with a config derived from the job. `driven_state` reads
and writes the state for checkpoints.

Rules reject what DeepSpeed would silently do differently: optimizers that need whole parameters (it steps flat pieces),
fp16 at stage 0 (with an optimizer passed in, it divides gradients by a scale that the loss was never multiplied by),
compiled blocks, `models`, MiCS and hpZ. `zero_grad` in the middle of a step is rejected at stages 1 and 2, whose
reduced gradients DeepSpeed cannot drop. Its shared-memory op is disabled: it takes minutes to compile, and is only used
for inference.

`get_global_grad_norm` returns 0 at stage 0 in fp32 without clipping, because DeepSpeed computes no norm then. At stage
0 in bf16, DeepSpeed's masters take a step with zero gradients before the first one.
"""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dsjob.checkpoint.live.state import TrainingState, persistent_buffers
from dsjob.checkpoint.pretrained.configuration import describe_pretrained
from dsjob.compute.calls import call_model
from dsjob.compute.precision import Precision, cast_floats
from dsjob.contract.deepspeed_keys import ENGINE_SECTIONS
from dsjob.contract.spec import EngineSpec
from dsjob.engine.blocks import prepare_blocks
from dsjob.engine.driven_state import DeepSpeedState
from dsjob.engine.engine import Engine
from dsjob.errors import LossScaleError, UsageError, how_to_install
from dsjob.optim import build_optimizer, build_scheduler
from dsjob.optim.schedules import settle_length
from dsjob.parallel import Strategy, parameters
from dsjob.parallel.strategy import widen
from dsjob.ranks.mesh import World
from dsjob.trust.grant import Trust

# DeepSpeed 0.19.8 has removed these keys and rejects them. Rules require them to be off, so they can be dropped.
_REMOVED = ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param")


def build_engine(
    model: nn.Module,
    spec: EngineSpec,
    world: World,
    *,
    trust: Trust,
    config: Mapping[str, Any],
    document: Mapping[str, Any],
) -> DrivenEngine:
    """Like `dsjob.engine.build.build_engine`, but DeepSpeed does the training. document: the resolved job.

    Raises UsageError if DeepSpeed is not installed, or refuses the job.
    """
    deepspeed = _import_deepspeed(world)
    precision = Precision.of(spec, world.device)
    if precision.compute == torch.float32:
        widen(model)
    model.to(world.device)
    prepare_blocks(model, spec)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    method = spec.optimizer
    assert method is not None  # a rule requires one

    def make_optimizer(masters: Mapping[str, nn.Parameter]) -> Optimizer:
        return build_optimizer(method, list(masters.values()), trust, {id(p): name for name, p in masters.items()})

    optimizer = make_optimizer(trainable)
    names = {id(parameter): name for name, parameter in trainable.items()}
    # By name: DeepSpeed steps flat pieces in place of these parameters.
    grouped = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    scheduler = None
    if spec.scheduler is not None:
        scheduler = build_scheduler(settle_length(spec.scheduler, spec.trainer.max_steps), optimizer, trust)
    # DeepSpeed needs a process group, even on one rank.
    world.ensure_group()
    try:
        driven = deepspeed.initialize(
            model=model, optimizer=optimizer, config=write_config(document, spec), dist_init_required=False
        )[0]
    except (deepspeed.DeepSpeedConfigError, AssertionError, NotImplementedError, ValueError, RuntimeError) as error:
        raise UsageError(f"DeepSpeed refuses the job: {error}", hint="change it, or remove engine") from error
    state = DeepSpeedState(driven, optimizer, grouped, make_optimizer)
    return DrivenEngine(
        driven,
        state,
        spec=spec,
        world=world,
        precision=precision,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        config=config,
    )


def _import_deepspeed(world: World) -> Any:
    if world.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))
    try:
        import deepspeed
    except ImportError as error:
        raise UsageError(
            f"engine: deepspeed needs the package deepspeed, which cannot be imported ({error})",
            hint=f"{how_to_install('deepspeed')}, or remove engine",
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed would compile this for minutes, although only inference uses it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed calls torch's collectives by deprecated names. Users of a job cannot change that.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    return deepspeed


def write_config(document: Mapping[str, Any], spec: EngineSpec) -> dict[str, Any]:
    """The config for DeepSpeed: the engine sections of a job, without its optimizer and schedule, which are dsjob's."""
    written = {key: _drop_unset(document[key]) for key in ENGINE_SECTIONS if document.get(key) is not None}
    zero = written.get("zero_optimization", {})
    for key in _REMOVED:
        zero.pop(key, None)
    if zero.get("stage", 0):
        # Without these, DeepSpeed refuses optimizers that are not its own.
        written["zero_allow_untested_optimizer"] = True
        written["zero_force_ds_cpu_optimizer"] = False
    return {
        **written,
        "train_micro_batch_size_per_gpu": spec.trainer.micro_batch,
        "gradient_accumulation_steps": spec.trainer.grad_accum,
        # Never: DeepSpeed's progress lines would repeat the log records.
        "steps_per_print": 2**62,
    }


def _drop_unset(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _drop_unset(item) for key, item in value.items() if item is not None}
    return value


class DrivenEngine(Engine):
    """An engine whose passes and steps DeepSpeed runs. `driven`: DeepSpeed's own engine.

    Methods without a counterpart in DeepSpeed raise UsageError.
    """

    driver = "DeepSpeed"
    divides_gradients = False
    _more_names = ". engine.driven is DeepSpeed's own engine"

    def __init__(
        self,
        driven: Any,
        held: DeepSpeedState,
        *,
        spec: EngineSpec,
        world: World,
        precision: Precision,
        optimizer: Optimizer,
        lr_scheduler: LRScheduler | None,
        config: Mapping[str, Any],
    ) -> None:
        self.driven, self._held = driven, held
        self._given: weakref.ref[TrainingState] | None = None  # the last result of `state`, while it is in use
        self._last_norm: Any = None
        self.holds_gradients = False  # there was a backward pass since the last step
        super().__init__(
            _Driven(self, world),
            spec=spec,
            world=world,
            precision=precision,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            config=config,
        )
        parameters.forget(self)  # single parameters are read with deepspeed.utils
        driven.clip_fp32_gradients = self._clip_in_fp32

    def _clip_in_fp32(self) -> None:
        """Replaces DeepSpeed's own method, which does not store the norm."""
        from deepspeed.runtime.utils import clip_grad_norm_

        trained = self.driven.module.parameters()
        self._last_norm = clip_grad_norm_(parameters=trained, max_norm=self.driven.gradient_clipping(), mpu=None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        if self.precision.compute != torch.float32:
            args, kwargs = cast_floats(args, self.precision.compute), cast_floats(kwargs, self.precision.compute)
        # Only at the beginning of a step: DeepSpeed counts its micro steps against these sizes.
        if not self.rhythm.done:
            self._share_batch_sizes()
        with self.strategy.parts("forward") if torch.is_grad_enabled() else nullcontext():
            return self.driven(*args, **kwargs)

    def _share_batch_sizes(self) -> None:
        """Tells DeepSpeed of changes in `rhythm`: both decide where the boundary is."""
        if self.driven.train_micro_batch_size_per_gpu() != self.rhythm.micro_batch:
            self.driven.set_train_micro_batch_size(self.rhythm.micro_batch)
        if self.driven.gradient_accumulation_steps() != self.rhythm.accumulation:
            self.driven.set_train_batch_size(self.rhythm.train_batch)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """See Engine."""
        self.holds_gradients = True
        self.rhythm.passes += 1
        with self.strategy.parts("backward"):
            part: Tensor = self.driven.backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
        return part

    def run_step(
        self,
        micro_batches: Sequence[Any],
        loss: Callable[[Any, Any], Tensor],
        before_step: Callable[[], None] | None = None,
    ) -> Tensor:
        self._require_whole_step(micro_batches)
        parts = []
        for left, batch in zip(reversed(range(len(micro_batches))), micro_batches, strict=True):
            # DeepSpeed divides, scales and counts itself.
            parts.append(self.backward(loss(call_model(self, batch), batch)).detach())
            if before_step is not None and not left:
                before_step()
            self.step()
        return torch.stack(parts).float().sum()

    def scale(self, loss: Tensor) -> Tensor:
        """See Engine."""
        scaled: Tensor = self.driven.scale(loss)
        return scaled

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """See Engine. Raises LossScaleError if DeepSpeed's loss scale is exhausted."""
        boundary: bool = self.driven.is_gradient_accumulation_boundary()
        if boundary:
            # Before the step: afterwards, the schedule has changed the rates.
            self.last_lr = self.get_lr()
        self._last_norm = None
        try:
            with self.strategy.parts("step") if boundary else nullcontext():
                self.driven.step()
        except Exception as error:  # DeepSpeed raises Exception itself
            if "loss scale already at minimum" in str(error):
                raise LossScaleError(
                    f"DeepSpeed: {error}", hint="use bf16.enabled=true, or lower the learning rate"
                ) from error
            raise
        self._update.applied = self.driven.was_step_applied()
        self.holds_gradients = not boundary
        if boundary:
            self._read_step()
        schedule = self.lr_scheduler
        if self._update.applied and schedule is not None and not isinstance(schedule, ReduceLROnPlateau):
            schedule.step(**(lr_kwargs or {}))
        self.rhythm.end_micro_step(stepped=boundary, skipped=boundary and not self._update.applied)
        if self._update.scaler is None:
            self.rhythm.require_progress()

    def _read_step(self) -> None:
        norm = self._last_norm if self._last_norm is not None else self.driven.get_global_grad_norm()
        if not self._update.applied:
            norm = float("inf")
        self._update.norm = None if norm is None else torch.as_tensor(norm)
        if self._update.scaler is not None:
            self._held.read_scaler(self._update.scaler)

    def get_global_grad_norm(self) -> float:
        """See Engine. 0.0 at stage 0 in fp32 without clipping, because DeepSpeed computes no norm then."""
        return super().get_global_grad_norm()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See Engine. DeepSpeed supports it only at stages 0 and 1."""
        if self.zero_stage > 1:
            raise UsageError("DeepSpeed supports no_sync only at stages 0 and 1", hint="remove engine")
        with self.driven.no_sync():
            yield

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """See Engine."""
        super().set_gradient_accumulation_boundary(is_boundary)
        self.driven.set_gradient_accumulation_boundary(is_boundary)

    def divide_gradients(self, by: Tensor) -> None:
        """Not supported with this engine."""
        raise UsageError("engine: deepspeed cannot divide gradients", hint="divide the loss, or remove engine")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See Engine. Raises UsageError at stages 1 and 2 between the backward passes of a step."""
        super().zero_grad()

    def train(self, mode: bool = True) -> Engine:
        """See Engine."""
        self.driven.train(mode)
        return self

    def count_parameters(self) -> tuple[int, int]:
        """See Engine."""
        return self._held.count_parameters()

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Not supported with this engine."""
        raise UsageError("engine: deepspeed cannot move states", hint="call engine.driven.offload_states")

    def reload_states(self, non_blocking: bool = False) -> None:
        """Not supported with this engine."""
        raise UsageError("engine: deepspeed cannot move states", hint="call engine.driven.reload_states")

    def destroy(self) -> None:
        """See Engine."""
        self.driven.destroy()

    def state(self) -> TrainingState:
        """The state for checkpoints: copies on the host, whole on each rank. A collective.

        After loading into the copies that were returned last, `restore_counters` writes them back to DeepSpeed.
        """
        weights, masters, optimizer = self._held.gather()
        state = TrainingState(
            weights=weights,
            buffers=persistent_buffers(self.module),
            aliases=self._aliases,
            masters=masters,
            optimizer=optimizer,
            scheduler=self.lr_scheduler,
            scaler=self._update.scaler,
            device=self.world.device,
            pretrained=describe_pretrained(self.module),
        )
        # Weak, because the copies are as large as the whole state: they are freed once the save or load is over.
        self._given = weakref.ref(state)
        return state

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[str | None, dict[str, Any] | None]:
        """See Engine. Raises UsageError in the middle of a step at stages 1 and 2, before anything is loaded."""
        self.require_droppable()
        return super().load_checkpoint(*args, **kwargs)

    def require_droppable(self) -> None:
        """Raises UsageError if there are gradients that DeepSpeed cannot drop."""
        if self.holds_gradients and self.zero_stage in (1, 2):
            raise UsageError(
                "at stages 1 and 2, DeepSpeed cannot drop gradients in the middle of a step",
                hint="finish the step before zero_grad() or load_checkpoint(), or remove engine",
            )

    def take_back(self) -> None:
        """Writes the state that `state` returned last, and that was loaded into, back to DeepSpeed."""
        state = self._given() if self._given is not None else None
        if state is not None:
            self._held.scatter(state.weights, state.optimizer)
        if self._update.scaler is not None:
            self._held.write_scaler(self._update.scaler)


class _Driven(Strategy):
    """The few methods of a strategy that other parts of the engine need. DeepSpeed does the actual work."""

    def __init__(self, engine: DrivenEngine, world: World) -> None:
        self.world = world
        self.module = engine.driven.module
        # DeepSpeed has its own; `DeepSpeedState` reads them.
        self.masters = {}
        self._engine = weakref.ref(engine)

    def drop_gradients(self) -> None:
        engine = self._engine()
        assert engine is not None
        engine.require_droppable()
        drops = engine.driven.optimizer if hasattr(engine.driven.optimizer, "zero_grad") else engine.driven
        drops.zero_grad()

    def finish_step(self) -> None:
        """Called after loading into the result of `state`."""
        engine = self._engine()
        assert engine is not None
        engine.take_back()
