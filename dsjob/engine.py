"""The engine: DeepSpeed's call names over a strategy, an optimizer and a schedule.

It owns the counters and the rhythm of forward, backward and step. How the model is spread is the strategy's matter,
what a checkpoint looks like that of `checkpoint`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dsjob.autocast import cast_operators
from dsjob.checkpoint import export
from dsjob.checkpoint.checkpointer import Checkpointer
from dsjob.checkpoint.state import TrainingState, persistent_buffers
from dsjob.errors import NoCheckpointError
from dsjob.mesh import World
from dsjob.optim.scaler import LossScaler
from dsjob.parallel import Strategy
from dsjob.precision import Precision
from dsjob.spec import EngineSpec


class Engine:
    """A model in training. Made by `dsjob.initialize`.

    One optimizer step is `gradient_accumulation_steps()` rounds of `forward`, `backward`, `step`; the last of them is
    the boundary, at which gradients are reduced and clipped and the optimizer and the schedule step.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        spec: EngineSpec,
        world: World,
        precision: Precision,
        optimizer: Optimizer | None,
        lr_scheduler: LRScheduler | None,
    ) -> None:
        self.strategy, self.spec, self.world, self.precision = strategy, spec, world, precision
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        strategy.optimizer = optimizer
        self.training_dataloader: Any = None
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self.last_lr: list[float] = []  # the rates that the last optimizer step used
        self._grad_norm: Tensor | None = None
        self._accumulation = spec.trainer.grad_accum
        self._scaler = LossScaler(spec.fp16) if precision.needs_scale else None
        self._step_applied = False
        self._aliases = _find_aliases(self.module)

    @property
    def module(self) -> nn.Module:
        """The model itself, sharded or cast in place."""
        return self.strategy.module

    @property
    def device(self) -> torch.device:
        """Where the model and its batches are."""
        return self.world.device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        if torch.is_grad_enabled():
            self.strategy.start_micro_step(self.is_gradient_accumulation_boundary())
        with cast_operators(self.device, self.precision.autocast):
            return self.strategy.forward(*args, **kwargs)

    def backward(self, loss: Tensor) -> Tensor:
        """Back-propagates `loss` (scalar, the mean over this rank's micro batch) over the accumulation steps.

        With fp16 it is multiplied by the loss scale for that. Returns the loss divided by the number of accumulation
        steps, not scaled.
        """
        part = loss / self._accumulation if self._accumulation > 1 else loss
        self.scale(part).backward()  # type: ignore[no-untyped-call]
        return part

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale, for a backward pass of the caller's own; `loss` itself where there is none."""
        return loss.float() * self._scaler.scale if self._scaler is not None else loss

    def step(self) -> None:
        """Ends a micro step; at the boundary steps the optimizer and the schedule.

        Where gradients of any rank overflowed fp16, all ranks drop them: neither optimizer nor schedule step, but the
        counters do. Raises LossScaleError where the loss scale is at its minimum already.
        """
        self._step_applied = False
        if self.is_gradient_accumulation_boundary():
            self._take_step()
        self.micro_steps += 1

    def _take_step(self) -> None:
        if self.optimizer is None:
            raise ValueError("step() needs an optimizer: name one in the config, or give one to initialize()")
        self.strategy.finish_gradients()
        self.last_lr = self.get_lr()
        # Ranks are averaged; their sum comes out of the division that takes the loss scale out again.
        ranks = self.world.world_size if self.spec.gradient_allreduce_op == "sum" else 1
        self._grad_norm = self.strategy.clip(self.spec.gradient_clipping, self.loss_scale() / ranks)
        overflow = self._scaler is not None and not bool(self._grad_norm.isfinite())
        if not overflow:
            self.optimizer.step()
        if self._scaler is not None:
            self._scaler.update(overflow, self._find_culprits() if overflow and self._scaler.exhausted else ())
        self.strategy.finish_step()
        if not (overflow or self.lr_scheduler is None or isinstance(self.lr_scheduler, ReduceLROnPlateau)):
            self.lr_scheduler.step()
        self._step_applied = not overflow
        self.global_steps += 1
        self.global_samples += self.train_batch_size()

    def _find_culprits(self) -> list[str]:
        """Names of parameters whose gradients are not finite on any rank."""
        names = self.strategy.find_non_finite()
        if self.world.world_size == 1:
            return names
        found: list[Any] = [None] * self.world.world_size
        dist.all_gather_object(found, names)
        return [name for name in self.strategy.masters if any(name in names for names in found)]

    def was_step_applied(self) -> bool:
        """Whether the last call of `step` has changed the weights: False off the boundary, and after an overflow."""
        return self._step_applied

    @property
    def skipped_steps(self) -> int:
        """Steps that were left out since gradients overflowed fp16; `global_steps` counts them too."""
        return self._scaler.skipped if self._scaler is not None else 0

    def loss_scale(self) -> float:
        """What the next backward pass multiplies the loss by; 1.0 where losses are not scaled."""
        return self._scaler.scale if self._scaler is not None else 1.0

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self._scaler is not None and self._scaler.dynamic

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this micro step ends with an optimizer step."""
        return (self.micro_steps + 1) % self._accumulation == 0

    def zero_grad(self) -> None:
        """Drops all gradients, those that are still being accumulated too."""
        self.strategy.drop_gradients()

    def train(self, mode: bool = True) -> Engine:
        """As nn.Module.train."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """As nn.Module.eval."""
        return self.train(False)

    def train_batch_size(self) -> int:
        """Samples in one optimizer step, over all ranks."""
        return self.spec.trainer.train_batch

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples in one forward pass of one rank."""
        return self.spec.trainer.micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Backward passes in one optimizer step."""
        return self._accumulation

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage that was asked for."""
        return self.spec.zero_optimization.stage

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group, as the next optimizer step will use it."""
        return [float(group["lr"]) for group in self.optimizer.param_groups] if self.optimizer else []

    def get_global_grad_norm(self) -> float:
        """The L2 norm of the gradients of the last optimizer step, over all ranks, before clipping; 0.0 before any.

        Loss scaling does not show in it; inf or nan after an overflow of fp16.
        """
        return float(self._grad_norm) if self._grad_norm is not None else 0.0

    def state(self) -> TrainingState:
        """What a checkpoint of this engine holds; loading writes into the same tensors."""
        return TrainingState(
            weights=self.strategy.weights(),
            buffers=persistent_buffers(self.module),
            aliases=self._aliases,
            masters=self.strategy.masters,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            scaler=self._scaler,
            device=self.device,
        )

    def counters(self) -> dict[str, int]:
        """The counters that a checkpoint keeps."""
        return {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "micro_steps": self.micro_steps,
        }

    def restore_counters(self, counters: Mapping[str, int]) -> None:
        """Continues counting where a checkpoint left off; accumulation starts at the beginning of a step."""
        self.global_steps, self.global_samples = counters["global_steps"], counters["global_samples"]
        self.micro_steps = self.global_steps * self._accumulation
        self.strategy.drop_gradients()
        self.strategy.finish_step()

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """Saves everything to `save_dir` (a path or URL). Every rank must call it.

        `tag`: `global_step<n>` where absent; a checkpoint of that tag is replaced once the new one is whole.
        `client_state`: JSON values to be given back by `load_checkpoint`.
        """
        checkpointer = Checkpointer(save_dir, world=self.world, keep=0)
        checkpointer.save(
            self,
            tag=tag or f"global_step{self.global_steps}",
            client_state=client_state,
            latest=save_latest,
            replace=True,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Loads the checkpoint `tag`, or the newest one, from `load_dir`. Every rank must call it.

        Returns its folder and client_state; (None, None) where there is no checkpoint, as DeepSpeed does.
        """
        checkpointer = Checkpointer(load_dir, world=self.world, keep=0)
        try:
            loaded = checkpointer.load(
                self,
                tag=tag,
                strict=load_module_strict,
                optimizer=load_optimizer_states and not load_module_only,
                scheduler=load_lr_scheduler_states and not load_module_only,
            )
        except NoCheckpointError:
            if tag is not None:
                raise
            return None, None
        for note in loaded.notes:
            warnings.warn(f"{loaded.url}: {note}", stacklevel=2)
        return loaded.url, loaded.client_state

    def save_16bit_model(self, save_dir: str, save_filename: str = "pytorch_model.bin") -> bool:
        """Writes the whole model's weights in the compute dtype to one file. Every rank must call it.

        A name ending in `.safetensors` gives safetensors, any other torch.save's format. At stage 3 it needs
        stage3_gather_16bit_weights_on_model_save; returns False, having written nothing, where that is not set.
        """
        zero = self.spec.zero_optimization
        if zero.stage == 3 and self.world.world_size > 1 and not zero.stage3_gather_16bit_weights_on_model_save:
            return False
        state = self.state()
        dtype = self.precision.compute
        export.save_model(os.path.join(save_dir, save_filename), state, dtype=dtype, writes=self.world.rank == 0)
        return True


def _find_aliases(module: nn.Module) -> dict[str, str]:
    """Other names of tied parameters: name -> the name under which it is saved."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            aliases[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
    return aliases
