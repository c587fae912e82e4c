"""The programs of benchmarks/programs.py: written for DeepSpeed, and paced by the benchmark between steps."""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Tensor]
RATE, CLIP, VOCAB, MICRO_BATCH = 1e-4, 1.0, 2048, 4
# Width, layers, tokens per sequence. A Llama of the first size has 6 million parameters.
SHAPES = {"6m": (256, 6, 64), "tiny": (32, 2, 16)}


@dataclass(frozen=True)
class Cell:
    """One configuration of a program."""

    program: str
    size: str
    stage: int
    precision: str  # fp32 or bf16


class StopError(Exception):
    """The benchmark wants no further step."""


class Pace:
    """Waits between steps until the benchmark asks for some, and reports what they took.

    The first report says that the warm-up is over.
    """

    def __init__(self, connection: Connection, warm_up: int) -> None:
        self._connection, self._left = connection, warm_up
        self._began = (0.0, 0.0)

    def take_step(self) -> None:
        """Called after each step. Raises StopError."""
        self._left -= 1
        if self._left:
            return
        wall, processor = (now - began for now, began in zip(self._read(), self._began, strict=True))
        self._connection.send({"wall": wall, "processor": processor, "peak": read_peak()})
        self._left = self._connection.recv()
        if self._left == 0:
            raise StopError
        self._began = self._read()

    @staticmethod
    def _read() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


def read_peak() -> int:
    """The most bytes of memory that this process has had. A fork begins with those of its parent at that time."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def make_config(cell: Cell) -> dict[str, Any]:
    """The DeepSpeed config. DeepSpeed's own AdamW would be compiled, so both programs pass torch's."""
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": cell.stage},
        "bf16": {"enabled": cell.precision == "bf16"},
    }


class Sequences(torch.utils.data.Dataset[Batch]):
    """Made samples: `input_ids`, int64 [tokens], and `labels`: the same, or one class."""

    def __init__(self, tokens: int, classes: bool) -> None:
        draw = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(0, VOCAB, (64, tokens), generator=draw)
        self._classes = classes

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> Batch:
        tokens = self._tokens[index % len(self._tokens)]
        return {"input_ids": tokens, "labels": tokens[0] % 2 if self._classes else tokens}


def train_llama(cell: Cell, pace: Pace) -> None:
    """A Llama with transformers' Trainer."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Paced(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            check_engine(trainer.model_wrapped)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            pace.take_step()

    width, layers, tokens = SHAPES[cell.size]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=10**5,
            per_device_train_batch_size=MICRO_BATCH,
            learning_rate=RATE,
            max_grad_norm=CLIP,
            bf16=cell.precision == "bf16",
            use_cpu=True,
            deepspeed=make_config(cell),
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=width,
                intermediate_size=2 * width,
                num_hidden_layers=layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=tokens,
            )
        )
        data = Sequences(tokens, classes=False)
        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Paced()])
        trainer.train()


def train_classifier(cell: Cell, pace: Pace) -> None:
    """A BERT classifier with accelerate."""
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
    from transformers import BertConfig, BertForSequenceClassification

    plugin = DeepSpeedPlugin(hf_ds_config=make_config(cell))
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    width, layers, tokens = SHAPES[cell.size]
    torch.manual_seed(0)
    model: Any = BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCAB,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=2 * width,
            max_position_embeddings=tokens,
        )
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=RATE)
    loader: Any = torch.utils.data.DataLoader(Sequences(tokens, classes=True), batch_size=MICRO_BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    check_engine(model)
    model.train()
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        pace.take_step()


def check_engine(model: Any) -> None:
    """Raises RuntimeError unless the program trains with an engine of `deepspeed`. On a CPU, accelerate may use DDP."""
    import deepspeed

    if not isinstance(model, deepspeed.DeepSpeedEngine):
        raise RuntimeError(f"the program trains {type(model)}, which is no engine of {deepspeed.__file__}")


PROGRAMS: dict[str, Callable[[Cell, Pace], None]] = {"trainer": train_llama, "accelerate": train_classifier}


def run_program(cell: Cell, pace: Pace) -> None:
    """Runs the program of a cell until the benchmark wants no further step."""
    torch.set_num_threads(1)
    try:
        PROGRAMS[cell.program](cell, pace)
    except StopError:
        pass
