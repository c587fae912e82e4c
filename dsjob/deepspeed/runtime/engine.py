"""`deepspeed.runtime.engine`: the engine with all method and property names of DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from dsjob.data import Epochs
from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.breakdowns import Breakdowns
from dsjob.deepspeed.program_monitors import Monitor
from dsjob.deepspeed.runtime.progressive_layer_drop import ProgressiveLayerDrop
from dsjob.deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from dsjob.deepspeed.settings import Settings
from dsjob.deepspeed.utils.logging import set_log_level_from_string
from dsjob.deepspeed.utils.timer import ThroughputTimer
from dsjob.engine.batches import load_batches
from dsjob.engine.blocks import compile_blocks
from dsjob.engine.engine import Engine
from dsjob.errors import UsageError
from dsjob.torch_private import is_compiled as _is_compiled
from dsjob.torch_private import replace_child


class _EngineModule(Engine, nn.Module):
    """An engine that is a module, as in DeepSpeed: its only child is the model, so names of parameters begin with
    `module.`, and it can be a part of another module."""

    def __init__(self, *args: Any, **given: Any) -> None:
        nn.Module.__init__(self)
        Engine.__init__(self, *args, **given)
        replace_child(self, "module", self.module)

    __call__ = nn.Module.__call__  # with the hooks that a program registers on the engine

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "module":
            raise UsageError("engine.module cannot be replaced", hint="call initialize with the new model")
        super().__setattr__(name, value)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            with suppress(AttributeError):
                return nn.Module.__getattr__(self, name)
            return super().__getattr__(name)

    def train(self, mode: bool = True) -> Self:
        self.training = mode
        super().train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)


class DeepSpeedEngine(Settings, _EngineModule):
    """An `Engine` with DeepSpeed's getters, setters and older names. Made by `dsjob.deepspeed.initialize`."""

    _reports = True
    _more_names = ". docs/explanation/deepspeed-tests.md lists what dsjob has of DeepSpeed"

    sparse_tensor_module_names: Collection[str] = ()  # gradients are never reduced as sparse tensors
    client_lr_scheduler: Any = None  # the argument `lr_scheduler` of `initialize`: a schedule, or a callable
    mpu: Any = None  # the argument `mpu` of `initialize`
    progressive_layer_drop: ProgressiveLayerDrop | None = None
    _compiled = False  # whether `compile` was called
    training_dataloader: Epochs | None = None  # built from the argument `training_data` of `initialize`

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.monitor = Monitor(self.config, self.global_rank)
        self.tput_timer = ThroughputTimer(self.train_batch_size())
        asked = self.wall_clock_breakdown() or self.memory_breakdown() or self.flops_profiler_enabled()
        self._breakdowns = Breakdowns(self) if asked and self.global_rank == 0 else None
        # What libraries read from the wrapper that DeepSpeed puts around an optimizer.
        optimizer: Any = self.optimizer
        if optimizer is not None and self._update.scaler is not None:
            optimizer.overflow = False
        if optimizer is not None and isinstance(self.optimizer, Adam):
            optimizer.adam_w_mode = bool(optimizer.defaults["decoupled_weight_decay"])
        if optimizer is not None and self.zero_stage == 3:
            optimizer.parameter_offload = DeepSpeedZeRoOffload()
        # As DeepSpeed does: programs evaluate and save on rank 0 alone.
        self.strategy.keep_gathered()

    def obey(self, own: Mapping[str, Any]) -> None:
        """Obeys the keys of a config that only engines with DeepSpeed's names know (`config.take_own`)."""
        self.config = {**self.config, **own}
        if level := self.log_level():
            set_log_level_from_string(level)
        if self.pld_enabled():
            section = self.config["progressive_layer_drop"]
            self.progressive_layer_drop = ProgressiveLayerDrop(section["theta"], section["gamma"])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.module.training:
            self.tput_timer.start()
        if self.progressive_layer_drop is not None and self.module.training:
            kwargs |= self.progressive_layer_drop.get_state()
        return super().forward(*args, **kwargs)

    def get_pld_theta(self) -> float | None:
        """The share of layers that progressive layer drop keeps; None without it."""
        return self.progressive_layer_drop.get_theta() if self.progressive_layer_drop is not None else None

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        before = self.global_steps
        super().step(lr_kwargs)
        self.tput_timer.stop(global_step=self.global_steps > before)
        if self.global_steps == before:
            return
        if self.progressive_layer_drop is not None:
            self.progressive_layer_drop.update_state(before)
        times = self._breakdowns.end_step() if self._breakdowns is not None else []
        if self.monitor.enabled and self.global_rank == 0:
            self._write_events(times)

    def _write_events(self, times: list[tuple[str, float, int]]) -> None:
        """Writes what DeepSpeed writes after each optimizer step."""
        events = [("Train/Samples/lr", rate, self.global_samples) for rate in self.get_lr()[:1]]
        if self.spec.fp16.enabled:
            events.append(("Train/Samples/loss_scale", self.loss_scale(), self.global_samples))
        self.monitor.write_events(events + times)

    def _take_step(self, lr_kwargs: Mapping[str, Any]) -> None:
        super()._take_step(lr_kwargs)
        # accelerate asks the optimizer whether fp16 overflowed. In bf16, the host may not know it yet.
        if self._update.scaler is not None:
            optimizer: Any = self.optimizer
            optimizer.overflow = not self._update.applied

    @property
    def basic_optimizer(self) -> Optimizer | None:
        """The optimizer. Unlike in DeepSpeed, no wrapper surrounds it."""
        return self.optimizer

    @property
    def is_compiled(self) -> bool:
        """Whether the model or its blocks are compiled: by the config, by `compile` or by `model.compile()`."""
        return self.spec.compile.enabled or self._compiled or _is_compiled(self.module)

    def compile(
        self,
        backend: str = "inductor",
        compile_kwargs: Mapping[str, Any] = MappingProxyType({}),
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compiles the model's repeated blocks, or the whole model if it has none, unless it is compiled already.

        compile_kwargs: more arguments of torch.compile. Raises UsageError for a schedule of compiler passes and for
        compiled autograd.
        """
        if schedule is not None or compiled_autograd_enabled:
            given = "a schedule of compiler passes" if schedule is not None else "compiled_autograd_enabled"
            raise UsageError(f"engine.compile does not support {given}", hint="leave it out: torch compiles the blocks")
        if not self.is_compiled:
            options = {key: value for key, value in compile_kwargs.items() if key != "backend"}
            compile_blocks(self.module, backend, **options)
            self._compiled = True

    @property
    def micro_steps(self) -> int:
        """Calls of `step` so far."""
        return self.rhythm.micro_steps

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The whole model on rank 0, in the compute dtype; empty on other ranks. accelerate and transformers save it.

        DeepSpeed gives other ranks None. `save_pretrained(state_dict=None)` would ask the sharded model on these ranks
        alone, which would wait for rank 0 for ever.
        """
        if self.zero_stage != 3:
            raise ValueError(f"this is for ZeRO stage 3, but the stage is {self.zero_stage}")
        return self._state_dict_on_rank_0(exclude_frozen_parameters) or {}

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The same, at any stage if ranks divide layers; then accelerate calls it."""
        if self.world.tensor.size > 1:
            return self._state_dict_on_rank_0(exclude_frozen_parameters) or {}
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    def get_wall_clock_timers(self) -> dict[str, float]:
        """The milliseconds of the parts `fwd`, `bwd`, `bwd_inner`, `bwd_allreduce` and `step` that
        `wall_clock_breakdown` printed last on rank 0; empty without it."""
        return dict(self._breakdowns.times) if self._breakdowns is not None else {}

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts to overflows."""
        return self._update.scaler is not None and self._update.scaler.dynamic

    def train_batch_size(self) -> int:
        """Samples in one optimizer step, over all ranks."""
        return self.rhythm.train_batch

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples in one forward pass of one rank."""
        return self.rhythm.micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Backward passes in one optimizer step."""
        return self.rhythm.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Train batch, micro batch and accumulation steps."""
        return self.rhythm.train_batch, self.rhythm.micro_batch, self.rhythm.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the train batch by changing the number of accumulation steps. Raises UsageError unless it is a
        multiple of the micro batch times the data-parallel ranks."""
        self.rhythm.set_train_batch(train_batch_size)
        self.tput_timer.batch_size = self.train_batch_size()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the micro batch. The number of accumulation steps stays, so the train batch changes with it."""
        self.rhythm.micro_batch = micro_batch_size
        self.tput_timer.batch_size = self.train_batch_size()

    def get_mom(self) -> list[Any]:
        """The momentum of each parameter group: `momentum` if the optimizer has it, or else `betas`."""
        return self._read_groups("momentum" if self._read_groups("momentum") else "betas")

    def get_type(self) -> list[Any]:
        """`type` of each parameter group; 0.0 for a group without one."""
        return [group.get("type", 0.0) for group in self.optimizer.param_groups] if self.optimizer else []

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> Epochs:
        """A loader of this rank's micro batches. Each iteration over it is one epoch; `route` "train" shuffles.

        If `dataset` is already a loader, such as torch's DataLoader, it is used unchanged.
        """
        if data_sampler is not None:
            raise UsageError(
                "deepspeed_io does not support data_sampler",
                hint="pass a torch DataLoader with that sampler as dataset",
            )
        return load_batches(
            self,
            dataset,
            batch_size=batch_size,
            shuffle=route == "train",
            pin_memory=pin_memory,
            collate=collate_fn,
            num_workers=num_local_io_workers or 0,
        )

    def _backward_epilogue(self) -> None:
        """Reduces gradients that a joint backward pass through several engines left unreduced on this rank."""
        if self.rhythm.boundary and self._syncs:
            self.strategy.reduce_gradients()

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Immediately reduces all gradients that are not yet reduced. `bucket_size` has no effect."""
        self.strategy.reduce_gradients()

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Inside this context, backward passes do not communicate. Their gradients are reduced once, on exit; call
        `step` after that."""
        self.rhythm.require_managed("coalesce_grad_reduction()")
        with self.no_sync():
            yield
        self.strategy.reduce_gradients()

    def empty_partition_cache(self) -> None:
        """Frees the full parameters that forward passes have gathered at stage 3. Below it, they stay whole."""
        if self.zero_optimization_partition_weights():
            self.strategy.free_gathered()

    save_fp16_model = Engine.save_16bit_model


__getattr__ = _explain_names(__name__)
