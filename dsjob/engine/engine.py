"""The engine: DeepSpeed's calls on top of a strategy, an optimizer and a schedule.

It coordinates forward, backward and step. The strategy spreads the model, `rhythm` and `readings` count and report, and
`saving` saves. `dsjob.deepspeed` adds the rest of DeepSpeed's names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dsjob.compute.backward import drive, watch_outputs
from dsjob.compute.calls import spread
from dsjob.compute.loss_scale import LossScaler
from dsjob.compute.precision import Precision
from dsjob.compute.verdict import Verdict, can_decide
from dsjob.contract.spec import EngineSpec
from dsjob.engine.rhythm import Rhythm
from dsjob.engine.saving import Saving, find_aliases
from dsjob.errors import UsageError
from dsjob.parallel import Strategy, parameters, residence
from dsjob.parallel.strategy import MicroBatch
from dsjob.ranks.agreement import all_gather
from dsjob.ranks.joint import Meetings
from dsjob.ranks.mesh import World

# DeepSpeed's most common names that only the engine of `dsjob.deepspeed` has, and what Engine has instead.
OWN_WORDS = {
    "bfloat16_enabled": "spec.bf16.enabled",
    "fp16_enabled": "spec.fp16.enabled",
    "gradient_accumulation_steps": "rhythm.accumulation",
    "gradient_clipping": "spec.gradient_clipping",
    "local_rank": "world.local_rank",
    "micro_steps": "rhythm.micro_steps",
    "set_train_batch_size": "rhythm.set_train_batch",
    "train_batch_size": "rhythm.train_batch",
    "train_micro_batch_size_per_gpu": "rhythm.micro_batch",
    "zero_optimization_stage": "zero_stage",
}


class Engine(Saving):
    """Trains one model. Created by `dsjob.initialize`.

    One optimizer step consists of `rhythm.accumulation` rounds of `forward`, `backward` and `step`. The last round is
    the boundary: gradients are reduced and clipped, and the optimizer and the schedule step. With
    `managed_gradient_accumulation` off, every call of `step` is a boundary. Instead of `engine.backward(loss)`, a
    program may call `loss.backward()` at any stage (with fp16, `engine.scale(loss).backward()`), also with a loss over
    several engines. Attributes that an engine lacks are looked up in the model.
    """

    driver = ""  # the name of the program that trains the model instead of dsjob, if any
    divides_gradients = True  # whether `divide_gradients` is supported
    _more_names = ". The engine that dsjob.deepspeed.initialize returns has all of DeepSpeed's names"

    def __init__(
        self,
        strategy: Strategy,
        *,
        spec: EngineSpec,
        world: World,
        precision: Precision,
        optimizer: Optimizer | None,
        lr_scheduler: LRScheduler | None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.strategy, self.spec, self.world, self.precision = strategy, spec, world, precision
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.config = config or {}
        strategy.optimizer = optimizer
        # Gradients are reduced to the mean over ranks. Multiplying by this factor gives their sum.
        strategy.gradient_factor = world.data_size if spec.gradient_allreduce_op == "sum" else 1
        managed = bool(self.config.get("managed_gradient_accumulation", True))
        self.rhythm = Rhythm.of(spec.trainer, world.data_size, managed)
        self.last_lr: list[float] = []  # the learning rates of the last optimizer step
        self._grad_norm: Tensor | None = None
        self._scaler = LossScaler(spec.fp16) if precision.needs_scale else None
        self._skips = precision.needs_scale or (precision.compute == torch.bfloat16 and spec.bf16.check_grad_overflow)
        self._divisor: Tensor | None = None  # of this step's gradients
        self._step_applied: bool | None = False  # None: not known until the verdict is read
        self._verdict: Verdict | None = None  # the device's decision about the last step, until the host reads it
        self._syncs = True  # False inside no_sync
        self._scaled = False  # `scale` was called, for the program's own backward pass
        self._aliases = find_aliases(self.module)
        self._meetings = Meetings(world)
        parameters.register(self)

    def __repr__(self) -> str:
        """Such as `Engine(Net, 1,234 parameters, ZeRO stage 2, bf16, 4 ranks, step 10)`."""
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        size = f"{self.count_parameters()[0]:,} parameters"
        about = f"ZeRO stage {self.zero_stage}, {self.precision.name}, {ranks}, step {self.global_steps}"
        return f"{type(self).__name__}({type(self.module).__name__}, {size}, {about})"

    @property
    def module(self) -> nn.Module:
        """The model itself, sharded or cast in place."""
        return self.strategy.module

    @property
    def device(self) -> torch.device:
        """Where the model and its batches are."""
        return self.world.device

    @property
    def global_rank(self) -> int:
        """This process's rank among all ranks of the job."""
        return self.world.everyone.rank

    @property
    def world_size(self) -> int:
        """The number of all ranks of the job. `world` says how they are divided."""
        return self.world.everyone.size

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        # Passes without gradients are evaluations, not micro steps.
        if torch.is_grad_enabled():
            self.strategy.start_micro_step(self.rhythm.boundary, self._syncs)
        outputs = self.strategy.forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            return outputs
        # Hooks on outputs are needed only to count passes, to divide gradients, or to notice a missing loss scale.
        if self.rhythm.managed and self.rhythm.accumulation == 1 and self._scaler is None:
            return outputs
        return watch_outputs(outputs, self.rhythm.count_pass(self._enter_backward))

    def _enter_backward(self, gradient: Tensor) -> Tensor:
        """Divides an output's gradient in a backward pass that the program started itself."""
        if self._scaler is not None and not self._scaled:
            raise UsageError(
                "Loss scaling is required with fp16, but backward() was called on a loss that is not scaled",
                hint="call engine.backward(loss), or engine.scale(loss).backward()",
            )
        return gradient / self.rhythm.accumulation if self.rhythm.accumulation > 1 else gradient

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Backpropagates `loss` (scalar, the mean over this rank's micro batch), divided by the accumulation steps.

        With fp16, the loss is also multiplied by the loss scale. Returns the loss divided by the number of accumulation
        steps, not scaled. With `scale_wrt_gas=False`, the caller does that division.
        """
        accumulation = self.rhythm.accumulation if scale_wrt_gas else 1
        # Gradients are summed over micro steps, so dividing each loss gives the gradient of their mean.
        part = loss / accumulation if accumulation > 1 else loss
        self.rhythm.passes += 1
        # Disable the hooks on outputs: this loss is divided and scaled already.
        with drive():
            self.scale(part).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        if self.rhythm.boundary and self._syncs:
            self.strategy.end_backward()
        return part

    def run_step(self, micro_batches: Sequence[Any], loss: Callable[[Any, Any], Tensor]) -> Tensor:
        """Takes one optimizer step: the forward and backward passes of all its micro batches, then `step`.

        The result is the same as with `forward`, `backward` and `step` for each micro batch, but a strategy may
        reorder the passes. micro_batches: `rhythm.accumulation` batches on the device. Each is passed to the model as
        keyword arguments if it is a mapping, as positional arguments if it is a tuple or list, or else as one argument.
        loss(outputs, batch): returns a scalar, the mean over the micro batch.

        Returns the mean loss over this rank's micro batches, a detached scalar. Raises UsageError in the middle of a
        step, and if the number of micro batches is wrong.
        """
        self._require_whole_step(micro_batches)
        count = len(micro_batches)
        together = [MicroBatch(*spread(batch), target=batch) for batch in micro_batches]
        scale = self.loss_scale()
        try:
            with drive():
                losses = self.strategy.run_step(together, lambda outputs, b: self.scale(loss(outputs, b) / count))
        except BaseException:
            self.strategy.drop_gradients()  # else a retry would add to them
            raise
        # Count all micro steps but the last, so that the rhythm is at the boundary; `step` counts the last.
        for _ in range(count - 1):
            self.rhythm.end_micro_step(stepped=False)
        self.step()
        # Each loss was divided by `count` and multiplied by the loss scale, so this sum is their unscaled mean.
        return torch.stack([each.float() for each in losses]).sum() / scale

    def _require_whole_step(self, micro_batches: Sequence[Any]) -> None:
        """Raises UsageError if a step is already in progress, or the number of micro batches is wrong."""
        self.rhythm.require_managed("run_step()")
        begun = self.rhythm.done or self.rhythm.passes or self.rhythm.forced is not None or not self._syncs
        # A backward pass of the program's own, without hooks on outputs, shows only in the gradients that it leaves.
        if begun or any(parameter.grad is not None for parameter in self.module.parameters()):
            raise UsageError(
                "run_step() runs a whole optimizer step, but a step is already in progress",
                hint="call it after step() at a boundary or zero_grad(), outside no_sync, and let the engine set the "
                "boundary",
            )
        if len(micro_batches) != self.rhythm.accumulation:
            raise UsageError(
                f"run_step() got {len(micro_batches)} micro batches, but a step has {self.rhythm.accumulation}",
                hint="pass one for each micro step: engine.rhythm.accumulation",
            )

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale, for the caller's own backward pass. Without a loss scale, `loss` itself."""
        if loss.numel() != 1:
            raise UsageError(
                f"the loss must be a scalar tensor, but has shape {list(loss.shape)}", hint="use loss.mean()"
            )
        self._scaled = True
        # In fp16, whose largest value is 65,504, a loss of 1 times the initial scale of 2^16 would overflow.
        return loss.float() * self._scaler.scale if self._scaler is not None else loss

    def divide_gradients(self, by: Tensor) -> None:
        """Makes the next optimizer step divide its gradients by `by` before clipping. by: scalar, equal on all
        ranks."""
        self._divisor = by

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside this context do not reduce gradients, at any stage. A later backward pass reduces
        them.

        Do not call `step` inside.
        """
        if not self._syncs:
            raise UsageError("no_sync and coalesce_grad_reduction cannot be nested")
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = True

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Ends a micro step. At the boundary, steps the optimizer and the schedule. lr_kwargs: for the schedule's
        `step`.

        If gradients of any rank are not finite (in fp16, or in bf16 with `check_grad_overflow`), all ranks skip the
        step: they drop the gradients, and neither the optimizer nor the schedule steps, but counters do. Raises
        LossScaleError if the loss scale is already at its minimum, and in bf16 NonFiniteLossError after
        `rhythm.MAX_SKIPPED` skipped steps in a row (one step later if the device decides: see
        `dsjob/compute/verdict.py`).
        """
        if not self._syncs:
            raise UsageError("step() cannot be called inside no_sync or coalesce_grad_reduction")
        self._step_applied, self._scaled = False, False
        self.rhythm.stepping = True
        try:
            boundary = self.rhythm.boundary
            if boundary:
                self._take_step(lr_kwargs or {})
            skipped = None if self._verdict is not None else not self._step_applied
            self.rhythm.end_micro_step(stepped=boundary, skipped=skipped)
            if self._scaler is None:
                self.rhythm.require_progress()
        finally:
            self.rhythm.stepping = False

    def _take_step(self, lr_kwargs: Mapping[str, Any]) -> None:
        if self.optimizer is None:
            raise UsageError("step() needs an optimizer: name one in the config, or pass one to initialize()")
        # First settle the last step: if the device skipped it, the schedule is one step ahead.
        self._settle()
        self.strategy.reduce_gradients()
        self.strategy.finish_gradients()
        self.last_lr = self.get_lr()
        self._grad_norm, self._divisor = self._clip(), None
        if self._skips and self._scaler is None and self.strategy.guard is None and can_decide(self.optimizer):
            self._step_unread(self.optimizer, self._grad_norm.isfinite(), lr_kwargs)
            return
        # bool() waits for the device. The norm is over all ranks, so they decide alike.
        overflow = (self._skips or self.strategy.guard is not None) and not bool(self._grad_norm.isfinite())
        if not overflow:
            self.strategy.step(self.optimizer)
        # Only after the step: `update` may change the scale, but these gradients were scaled by the old one.
        if self._scaler is not None:
            self._scaler.update(overflow, self._find_culprits() if overflow and self._scaler.exhausted else ())
        # Needed after an overflow too: it drops gradients and frees gathered weights.
        self.strategy.finish_step()
        # A plateau schedule steps with the metric of an evaluation instead (dsjob/training/loop.py).
        if not (overflow or self.lr_scheduler is None or isinstance(self.lr_scheduler, ReduceLROnPlateau)):
            self.lr_scheduler.step(**lr_kwargs)
        self._step_applied = not overflow

    def _clip(self) -> Tensor:
        """Unscales and clips the gradients, and returns their norm before clipping (0-dim)."""
        # Dividing by a factor of 1 / ranks multiplies the mean over ranks by their number.
        scale, limit = self.loss_scale() / self.strategy.gradient_factor, self.spec.gradient_clipping
        if self.strategy.guard is None:
            return self.strategy.clip(limit, scale, self._divisor)
        # Clipping by a norm that is not finite would make all gradients so: find the culprits before.
        norm = self.strategy.clip(0.0, scale, self._divisor)
        if not bool(norm.isfinite()):
            self.strategy.guard(self._find_culprits())
            return norm
        return self.strategy.clip(limit) if limit > 0 else norm

    def _step_unread(self, optimizer: Optimizer, finite: Tensor, lr_kwargs: Mapping[str, Any]) -> None:
        """Takes a step that the device skips if gradients are not `finite`. The host learns of it at the next step."""
        self._verdict, self._step_applied = Verdict(optimizer, finite), None
        self.strategy.finish_step()
        if self.lr_scheduler is not None and not isinstance(self.lr_scheduler, ReduceLROnPlateau):
            self._verdict.step_schedule(self.lr_scheduler, lr_kwargs)

    def _find_culprits(self) -> list[str]:
        """Names of parameters whose gradients are not finite on some rank."""
        names = self.strategy.find_non_finite()
        everyone = self.world.everyone
        if everyone.size == 1:
            return names
        found = all_gather(everyone, names)
        return [name for name in self.strategy.masters if any(name in names for names in found)]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, including those accumulated so far in this step."""
        self.strategy.drop_gradients()
        self.rhythm.passes = 0

    def train(self, mode: bool = True) -> Engine:
        """Like nn.Module.train."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Like nn.Module.eval."""
        return self.train(False)

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Moves state to the host until `reload_states`, to free device memory. See `residence.offload`."""
        residence.offload(self.strategy, self.optimizer, *args, **kwargs)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Moves the state back that `offload_states` moved."""
        residence.reload(self.strategy, self.optimizer, self.device, non_blocking=non_blocking)

    def destroy(self) -> None:
        """Frees gradients and optimizer state. The engine cannot train afterwards."""
        self.strategy.close()
        parameters.forget(self)
        if self.optimizer is not None:
            self.optimizer.state.clear()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__") or "strategy" not in self.__dict__:
                raise AttributeError(name)
            try:
                return getattr(self.strategy.module, name)
            except AttributeError:
                raise AttributeError(self._explain(name)) from None

    def _explain(self, name: str) -> str:
        """The message for an attribute that neither the engine nor its model has."""
        kind, model = type(self).__name__, type(self.strategy.module).__name__
        instead = f"; use engine.{OWN_WORDS[name]}" if name in OWN_WORDS else ""
        return f"neither {kind} nor its model {model} has an attribute {name!r}{instead}{self._more_names}"
