"""The sides of benchmarks/engine.py: the same model, batches and optimizer, trained by different libraries."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dsjob.contract.models import SOLE
from dsjob.document.resolve import complete_job, resolve_job
from dsjob.engine.choice import build_job_engine
from dsjob.ranks.mesh import World
from dsjob.recipes.gpt import GPT
from dsjob.trust.grant import Trust

Batch = dict[str, Tensor]
RATE, CLIP, VOCAB = 1e-4, 1.0, 8192
# Width, layers, tokens per sequence. `tiny` is for trying out a benchmark, `300m` and `1b` are for GPUs.
SHAPES = {
    "tiny": (64, 2, 16),
    "10m": (256, 10, 64),
    "50m": (512, 14, 32),
    "300m": (1024, 24, 1024),
    "1b": (2048, 24, 2048),
    "6.5b": (4096, 32, 2048),
}


@dataclass(frozen=True)
class Cell:
    """One configuration that all sides are measured with."""

    size: str
    stage: int
    precision: str  # fp32 or bf16
    accumulation: int
    micro_batch: int = 1
    sequence: int = 0  # tokens; 0: those in SHAPES
    compiled: bool = False  # compile each block

    @property
    def tokens(self) -> int:
        """Tokens per sequence."""
        return self.sequence or SHAPES[self.size][2]

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype of the model."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32


class Side:
    """One way to train. `run` takes optimizer steps and returns their time. what: its description in the table."""

    what = ""
    clock: Callable[[], float] = staticmethod(time.perf_counter)

    @classmethod
    def exists(cls, cell: Cell, world: World) -> bool:
        """Whether this side supports the cell. Every side supports stage 0."""
        return cell.stage == 0 or world.data_size == 1

    def __init__(self, cell: Cell, world: World) -> None:
        self.cell, self.world = cell, world
        self.batches = cycle(make_batches(cell, world))
        self.last_loss: float | None = None

    def step(self) -> Tensor:
        """Takes one optimizer step. Returns the last loss."""
        raise NotImplementedError

    def run(self, steps: int) -> float:
        """Takes `steps` optimizer steps, and returns how many seconds they took. All ranks start together."""
        if self.world.data_size > 1:
            dist.barrier()
        synchronize(self.world)
        started = self.clock()
        for _ in range(steps):
            loss = self.step()
        self.last_loss = float(loss.detach())
        synchronize(self.world)
        return self.clock() - started

    def close(self) -> None:
        """Frees model and optimizer."""


def synchronize(world: World) -> None:
    """Waits for the device."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()


def make_model(cell: Cell) -> GPT:
    """The model, with the same initial weights for all sides."""
    torch.manual_seed(0)
    width, layers, _ = SHAPES[cell.size]
    return GPT(VOCAB, cell.tokens, layers, width, width // 64, 0.0)


def make_batches(cell: Cell, world: World) -> list[Batch]:
    """This rank's eight micro batches: `inputs` and `targets`, int64 [micro batch, tokens]."""
    generator = torch.Generator().manual_seed(world.data_rank)
    shape = (8, cell.micro_batch, cell.tokens + 1)
    tokens = torch.randint(0, VOCAB, shape, generator=generator).to(world.device)
    return [{"inputs": part[:, :-1].contiguous(), "targets": part[:, 1:].contiguous()} for part in tokens]


def make_optimizer(parameters: Any) -> torch.optim.AdamW:
    """The optimizer of all sides."""
    return torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, fused=True)


class Ours(Side):
    """dsjob's engine, called as dsjob's training loop calls it."""

    what, engine_name = "dsjob", "dsjob"
    sections: Mapping[str, Any] = MappingProxyType({})  # of the job document, beside those of the cell

    @classmethod
    def exists(cls, cell: Cell, world: World) -> bool:
        return True

    def __init__(self, cell: Cell, world: World) -> None:
        super().__init__(cell, world)
        job = {
            "model": {"_target_": "dsjob.recipes.gpt.build"},
            "data": {"train": {"_target_": "dsjob.recipes.text.ByteText"}},
            "trainer": {"micro_batch": cell.micro_batch, "grad_accum": cell.accumulation, "max_steps": 10**6},
            "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01, "fused": True}},
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": cell.stage},
            "bf16": {"enabled": cell.precision == "bf16"},
            "compile": {"enabled": cell.compiled},
            "engine": self.engine_name,
            **self.sections,
        }
        document = resolve_job(job, world_size=world.data_size, locate=lambda path: ("benchmark", 0, 0)).document
        self.engine = build_job_engine(self.build_model(), complete_job(document).models[SOLE], world, trust=Trust())

    def build_model(self) -> GPT:
        """The model that the engine is built for."""
        return make_model(self.cell)

    def step(self) -> Tensor:
        for _ in range(self.cell.accumulation):
            loss: Tensor = self.engine(**next(self.batches))["loss"]
            self.engine.backward(loss)
            self.engine.step()
        return loss

    def close(self) -> None:
        self.engine.destroy()


class DeepSpeed(Ours):
    """The installed DeepSpeed, used through `engine: deepspeed`."""

    what, engine_name = "DeepSpeed's engine", "deepspeed"


class ByHand(Side):
    """The shortest loop with the same arithmetic: DDP or the bare module at stage 0, FSDP2 at stages 1 to 3."""

    @classmethod
    def exists(cls, cell: Cell, world: World) -> bool:
        return True

    def __init__(self, cell: Cell, world: World) -> None:
        super().__init__(cell, world)
        model = make_model(cell).to(world.device)
        for block in model.blocks if cell.compiled else ():
            block.compile()
        self.model: nn.Module = model
        self.sharded = world.data_size > 1 and cell.stage > 0
        self.low = cell.precision == "bf16" and not self.sharded
        self.ddp: DistributedDataParallel | None = None
        if self.sharded:
            self._shard()
            self.what = "FSDP2"
        else:
            self.parameters: list[Tensor] = list(self.model.parameters())
            self.masters = self.parameters
            if self.low:
                self.masters = [nn.Parameter(p.detach().clone()) for p in self.parameters]
                self.model.to(torch.bfloat16)
            if world.data_size > 1:
                self.ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
            self.what = "DDP" if self.ddp else "the bare module"
        self.optimizer = make_optimizer(self.model.parameters() if self.sharded else self.masters)

    def _shard(self) -> None:
        mesh = self.world.data_mesh
        policy = MixedPrecisionPolicy(param_dtype=self.cell.dtype, reduce_dtype=self.cell.dtype)
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        for block in cast(GPT, self.model).blocks:
            fully_shard(block, reshard_after_forward=self.cell.stage == 3, **options)
        fully_shard(self.model, reshard_after_forward=False, **options)
        self.masters = list(self.model.parameters())

    def step(self) -> Tensor:
        accumulation = self.cell.accumulation
        for number in range(accumulation):
            last = number == accumulation - 1
            with self._micro_step(last):
                loss: Tensor = (self.ddp or self.model)(**next(self.batches))["loss"]
                (loss / accumulation if accumulation > 1 else loss).backward()  # type: ignore[no-untyped-call]
            if self.low and (last or (self.cell.stage > 1 and self.world.data_size == 1)):
                self._add_to_masters()
        nn.utils.clip_grad_norm_(self.masters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.low:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.masters)
        return loss

    @contextlib.contextmanager
    def _micro_step(self, last: bool) -> Iterator[None]:
        if self.sharded and self.cell.accumulation > 1:
            root = cast(FSDPModule, self.model)
            root.set_requires_gradient_sync(last or self.cell.stage > 1)
            if self.cell.stage < 3:
                root.set_reshard_after_backward(last)
        with contextlib.nullcontext() if self.ddp is None or last else self.ddp.no_sync():
            yield

    @torch.no_grad()
    def _add_to_masters(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad += parameter.grad
            parameter.grad = None


class Accelerate(Side):
    """accelerate's loop: DDP at stage 0, and its FSDP2 at stages 1 to 3 on GPUs. On the CPU, it does not shard."""

    @classmethod
    def exists(cls, cell: Cell, world: World) -> bool:
        return super().exists(cell, world) or world.device.type == "cuda"

    def __init__(self, cell: Cell, world: World) -> None:
        super().__init__(cell, world)
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)
        plugin = self._make_plugin() if world.data_size > 1 and cell.stage > 0 else {}
        self.accelerator = Accelerator(
            cpu=world.device.type == "cpu",
            mixed_precision="bf16" if cell.precision == "bf16" else "no",
            gradient_accumulation_steps=cell.accumulation,
            **plugin,
        )
        kind = "FSDP2" if plugin else "DDP" if world.data_size > 1 else "bare module"
        self.what = f"accelerate ({kind})"
        model = make_model(cell)
        self.model, self.optimizer = self.accelerator.prepare(model, make_optimizer(model.parameters()))
        self.model.train()

    def _make_plugin(self) -> dict[str, Any]:
        from accelerate import FullyShardedDataParallelPlugin

        fsdp = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=self.cell.stage == 3,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
        )
        return {"fsdp_plugin": fsdp}

    def step(self) -> Tensor:
        for _ in range(self.cell.accumulation):
            with self.accelerator.accumulate(self.model):
                loss: Tensor = self.model(**next(self.batches))["loss"]
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return loss

    def close(self) -> None:
        self.accelerator.free_memory()


class Samples(torch.utils.data.Dataset[Batch]):
    """Cycles endlessly through a rank's micro batches."""

    def __init__(self, batches: list[Batch], length: int) -> None:
        self._batches, self._length = batches, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Batch:
        return {name: value[0] for name, value in self._batches[index % len(self._batches)].items()}


class HFTrainer(Side):
    """transformers' Trainer, with DDP on several ranks. (It shards through accelerate, which is a side of its own.)

    Its loop cannot be paused between rounds, so each round builds a new Trainer. The time of the first step, and of all
    before it, is not counted.
    """

    def run(self, steps: int) -> float:
        from accelerate.state import AcceleratorState
        from transformers import Trainer, TrainerCallback, TrainingArguments

        AcceleratorState._reset_state(True)
        self.what = f"Trainer ({'DDP' if self.world.data_size > 1 else 'bare module'})"
        times: list[float] = []

        class Clock(TrainerCallback):
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                times.append(Side.clock())

        cell, ranks = self.cell, self.world.data_size
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                max_steps=steps + 1,
                per_device_train_batch_size=cell.micro_batch,
                gradient_accumulation_steps=cell.accumulation,
                max_grad_norm=CLIP,
                bf16=cell.precision == "bf16",
                use_cpu=self.world.device.type == "cpu",
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                remove_unused_columns=False,
                ddp_find_unused_parameters=False,
            )
            model = make_model(cell)
            optimizer = make_optimizer(model.parameters())
            data = Samples(make_batches(cell, self.world), (steps + 1) * cell.accumulation * cell.micro_batch * ranks)
            trainer = Trainer(
                model=model,
                args=arguments,
                train_dataset=data,
                optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
                callbacks=[Clock()],
            )
            trainer.train()
        return times[-1] - times[0]


SIDES: dict[str, type[Side]] = {
    "dsjob": Ours,
    "hand": ByHand,
    "deepspeed": DeepSpeed,
    "accelerate": Accelerate,
    "trainer": HFTrainer,
}


def use_quiet_libraries() -> None:
    """Silences transformers and tokenizers."""
    os.environ.update(TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
