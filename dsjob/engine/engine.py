"""The engine: DeepSpeed's calls on top of a strategy, an optimizer and a schedule.

It coordinates forward, backward and step. The strategy spreads the model, `update` steps the optimizer, `rhythm` and
`readings` count and report, and `saving` saves. `dsjob.deepspeed` adds the rest of DeepSpeed's names.
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
from dsjob.compute.precision import Precision
from dsjob.contract.spec import EngineSpec
from dsjob.engine.rhythm import Rhythm
from dsjob.engine.saving import Saving, find_aliases
from dsjob.engine.update import Update
from dsjob.errors import UsageError
from dsjob.parallel import Strategy, parameters, residence
from dsjob.parallel.strategy import MicroBatch
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


class Config(dict[str, Any]):
    """An engine's DeepSpeed config. Attributes that a dict lacks are looked up in the model's own `config`: methods
    written for Hugging Face's Trainer, whose model is no engine, read `self.model.config.num_labels`."""

    def __init__(self, values: Mapping[str, Any], model: nn.Module) -> None:
        super().__init__(values)
        self._model = model

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return getattr(self._model.config, name)
        except AttributeError:
            raise AttributeError(f"neither the DeepSpeed config nor that of the model has {name!r}") from None

    def __reduce__(self) -> Any:  # copies are dicts, without the model
        return dict, (dict(self),)


class Engine(Saving):
    """Trains one model. Created by `dsjob.initialize`.

    One optimizer step consists of `rhythm.accumulation` rounds of `forward`, `backward` and `step`. The last round is
    the boundary: gradients are reduced and clipped, and the optimizer and the schedule step. With
    `managed_gradient_accumulation` off, every call of `step` is a boundary. Instead of `engine.backward(loss)`, a
    program may call `loss.backward()` at any stage (with fp16, `engine.scale(loss).backward()`), also with a loss over
    several engines. Attributes that an engine lacks are looked up in the model.
    """

    driver = ""  # the name of the program that trains the model instead of dsjob, if any
    _reports = False  # whether the config's monitors and breakdowns have an effect
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
        self.config: Mapping[str, Any] = Config(config or {}, strategy.module)
        # 1-bit optimizers decide before each step whether the strategy reduces gradients.
        strategy.optimizer = optimizer
        # Gradients are reduced to the mean over ranks. Multiplying by this factor gives their sum.
        strategy.gradient_factor = world.data_size if spec.gradient_allreduce_op == "sum" else 1
        managed = bool(self.config.get("managed_gradient_accumulation", True))
        self.rhythm = Rhythm.of(spec.trainer, world.data_size, managed)
        self.last_lr: list[float] = []  # the learning rates of the last optimizer step
        self._update = Update(strategy, spec, precision, world.everyone)
        self._syncs = True  # False inside no_sync
        self._scaled = False  # `scale` was called, for the program's own backward pass
        self._aliases = find_aliases(self.module)
        self._meetings = Meetings(world)
        parameters.register(self)

    @property
    def module(self) -> nn.Module:
        """The model itself, sharded or cast in place."""
        return self.strategy.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        # Passes without gradients are evaluations, not micro steps.
        if not torch.is_grad_enabled():
            return self.strategy.forward(*args, **kwargs)
        with self.strategy.parts("forward"):
            self.strategy.start_micro_step(self.rhythm.boundary, self._syncs)
            outputs = self.strategy.forward(*args, **kwargs)
        # Hooks on outputs are needed only to count passes, to divide gradients, or to notice a missing loss scale.
        if self.rhythm.managed and self.rhythm.accumulation == 1 and self._update.scaler is None:
            return outputs
        return watch_outputs(outputs, self.rhythm.count_pass(self._enter_backward))

    def _enter_backward(self, gradient: Tensor) -> Tensor:
        """Divides an output's gradient in a backward pass that the program started itself."""
        if self._update.scaler is not None and not self._scaled:
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
        self.rhythm.passes += 1  # the hooks that count the program's own passes are disabled below
        parts = self.strategy.parts
        with parts("backward"):
            with parts("backward_pass"), drive():  # no hooks on outputs: this loss is divided and scaled already
                self.scale(part).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            if self.rhythm.boundary and self._syncs:
                with parts("backward_rest"):
                    self.strategy.end_backward()
        return part

    def run_step(
        self,
        micro_batches: Sequence[Any],
        loss: Callable[[Any, Any], Tensor],
        before_step: Callable[[], None] | None = None,
    ) -> Tensor:
        """Takes one optimizer step, as `forward`, `backward` and `step` of each micro batch would, perhaps in another
        order. micro_batches: `rhythm.accumulation` batches on the device. Each is passed to the model as
        keyword arguments if it is a mapping, as positional arguments if it is a tuple or list, or else as one argument;
        a `MicroBatch` says so itself. loss(outputs, batch): returns a scalar, the mean over the micro batch.
        before_step: is called after the last backward pass, before gradients are reduced.

        Returns the mean loss over this rank's micro batches, a detached scalar. Raises UsageError in the middle of a
        step, and if the number of micro batches is wrong.
        """
        self._require_whole_step(micro_batches)
        count = len(micro_batches)
        together = [b if isinstance(b, MicroBatch) else MicroBatch(*spread(b), target=b) for b in micro_batches]
        # Read now, because `step` may change it.
        scale = self.loss_scale()
        if self.strategy.pipeline is not None:
            self.strategy.pipeline.begin_step(self.rhythm.micro_steps)
        try:
            with drive(), self.strategy.parts("passes"):
                losses = self.strategy.run_step(together, lambda outputs, b: self.scale(loss(outputs, b) / count))
        except BaseException:
            self.strategy.drop_gradients()  # else a retry would add to them
            raise
        if before_step is not None:
            before_step()
        with self.rhythm.ending_all():
            self.step()
        # Each loss was divided by `count` and multiplied by the loss scale, so this sum is their unscaled mean.
        return torch.stack([each.float() for each in losses]).sum() / scale

    def _require_whole_step(self, micro_batches: Sequence[Any]) -> None:
        """Raises UsageError if a step is already in progress, or the number of micro batches is wrong."""
        # A backward pass of the program's own, without hooks on outputs, shows only in the gradients that it leaves.
        begun = not self._syncs or any(parameter.grad is not None for parameter in self.module.parameters())
        self.rhythm.require_whole_step(len(micro_batches), begun=begun)

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale, for the caller's own backward pass. Without a loss scale, `loss` itself."""
        if loss.numel() != 1:
            raise UsageError(
                f"the loss must be a scalar tensor, but has shape {list(loss.shape)}", hint="use loss.mean()"
            )
        self._scaled = True
        # In fp16, whose largest value is 65,504, a loss of 1 times the initial scale of 2^16 would overflow.
        return loss.float() * self._update.scaler.scale if self._update.scaler is not None else loss

    def divide_gradients(self, by: Tensor) -> None:
        """Makes the next optimizer step divide its gradients by `by` before clipping. by: scalar, equal on all
        ranks."""
        self._update.divisor = by

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
        `rhythm.MAX_SKIPPED` skipped steps in a row (one step later if the device decides: `dsjob/compute/verdict.py`).
        """
        if not self._syncs:
            raise UsageError("step() cannot be called inside no_sync or coalesce_grad_reduction")
        self._update.applied, self._scaled = False, False
        self.rhythm.stepping = True
        try:
            boundary = self.rhythm.boundary
            if boundary:
                with self.strategy.parts("step"):
                    self._take_step(lr_kwargs or {})
            else:
                self.strategy.end_micro_step()
            skipped = None if self._update.pending else not self._update.applied
            self.rhythm.end_micro_step(stepped=boundary, skipped=skipped)
            # With a loss scale, the scale's minimum ends such a run instead.
            if self._update.scaler is None:
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
        # The rates of this step: at its end, the schedule changes them.
        self.last_lr = self.get_lr()
        # A plateau schedule steps with the metric of an evaluation instead (dsjob/training/loop.py).
        plateau = isinstance(self.lr_scheduler, ReduceLROnPlateau)
        self._update.take(self.optimizer, None if plateau else self.lr_scheduler, lr_kwargs)

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
            # While `__init__` runs or a copy is built, there is no `strategy`, and this lookup would call itself for
            # ever.
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
