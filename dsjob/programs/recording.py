"""Records what the engines of a program do: their config, and loss, learning rate and gradient norm of each step.

Rank 0 writes `deepspeed.json` and `metrics.jsonl` to the run folder. The loss is that of rank 0, the mean over its
micro batches. Values stay on the device until `steps_per_print` steps are complete, so that no step waits for it.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from dsjob import storage
from dsjob.contract.secrets import hide_secrets
from dsjob.deepspeed import entry
from dsjob.deepspeed.runtime import engine
from dsjob.deepspeed.runtime.pipe import engine as pipe
from dsjob.errors import FencedError, StorageError
from dsjob.files import append_bytes
from dsjob.programs import guard, origins
from dsjob.ranks.watchdog import position
from dsjob.run_folder import METRICS_NAME, Claim, drop_non_finite
from dsjob.terminal import print_error

CONFIG_NAME = "deepspeed"  # .json; deepspeed-2.json for the second engine of a program
_MOST_UNREAD = 10  # steps whose values may stay on the device; also what `steps_per_print` is by default


class Recorder:
    """The records of one engine. run_dir: where they are written; "" keeps none. number: of the engine, from 1."""

    def __init__(self, run_dir: str, number: int, config: Mapping[str, Any]) -> None:
        self._run_dir, self._number = run_dir, number
        every = config.get("steps_per_print")
        self._every = int(every) if isinstance(every, (int, float)) and 1 <= every < _MOST_UNREAD else _MOST_UNREAD
        self._losses: list[Tensor] = []
        self._unread: list[tuple[dict[str, Any], list[Tensor | None]]] = []
        if run_dir:
            self._claim = _claim(run_dir)
            name = CONFIG_NAME if number == 1 else f"{CONFIG_NAME}-{number}"
            text = json.dumps(hide_secrets(dict(config)), indent=2, default=str)
            storage.write_bytes(os.path.join(run_dir, f"{name}.json"), text.encode() + b"\n")
            atexit.register(self._write_rest, os.getpid())

    def add_loss(self, part: Tensor) -> None:
        """Notes a micro batch's part of the step's loss (scalar)."""
        if self._run_dir:
            self._losses.append(part.detach())

    def end_step(self, step: int, lr: list[float], norm: Tensor | None) -> None:
        """Notes an optimizer step: its number, the learning rate of each group, and the norm of its gradients."""
        if not self._run_dir:
            return
        loss = torch.stack([part.float() for part in self._losses]).sum() if self._losses else None
        self._losses = []
        record = {"step": step, **({"engine": self._number} if self._number > 1 else {})}
        self._unread.append(({**record, **({"lr": lr[0]} if lr else {})}, [loss, norm]))
        if len(self._unread) >= self._every:
            self.write()

    def _write_rest(self, process: int) -> None:
        """Writes the last steps at exit. A fork of the process has them, too, but they are not its own."""
        if os.getpid() == process:
            with suppress(RuntimeError):  # the device or another rank has failed, which was reported
                self.write()

    def write(self) -> None:
        """Reads the values from the device, all at once, and appends them to the file."""
        unread, self._unread = self._unread, []
        values = [value.detach().float().reshape(()) for _, pair in unread for value in pair if value is not None]
        numbers = iter(torch.stack([value.to(values[0].device) for value in values]).tolist() if values else ())
        lines = []
        for record, pair in unread:
            names = (name for name, value in zip(("loss", "grad_norm"), pair, strict=True) if value is not None)
            read = {name: next(numbers) for name in names}
            lines.append(json.dumps(drop_non_finite({**record, **read})) + "\n")
        if not lines:
            return
        try:
            with self._claim.writing():
                append_bytes(os.path.join(self._run_dir, METRICS_NAME), "".join(lines).encode())
        except (StorageError, FencedError) as error:  # the disk is full, for example: the program itself can go on
            print_error(f"dsjob exec: no more metrics are recorded: {error.message}")
            self._run_dir = ""


@cache  # all engines of a process share it
def _claim(run_dir: str) -> Claim:
    return Claim(run_dir)


class _Recorded(engine.DeepSpeedEngine):
    """The part of an engine that records its steps. It tells the watchdog where it is."""

    made: ClassVar[int] = 0  # engines of this process

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _Recorded.made += 1
        watch = guard.guard
        writes = watch is not None and watch.is_here and self.global_rank == 0
        self._recorder = Recorder(watch.run_dir if watch is not None and writes else "", self.made, self.config)

    def run_step(self, *args: Any, **kwargs: Any) -> Tensor:
        before = self.global_steps
        loss = super().run_step(*args, **kwargs)
        self._recorder.add_loss(loss)
        self._note_step(before)
        return loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        before = self.global_steps
        super().step(lr_kwargs)
        if not self.rhythm.together:
            self._note_step(before)

    def _note_step(self, before: int) -> None:
        position.micro_steps += 1
        if self.global_steps > before:
            position.step, position.doing = self.global_steps, "training"
            self._recorder.end_step(self.global_steps, self.last_lr, self._update.norm)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> bool:
        with _doing("saving"):
            return super().save_checkpoint(*args, **kwargs)


class DeepSpeedEngine(_Recorded):
    """The engine of `deepspeed.initialize` in a program that `dsjob exec` runs."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        part = super().backward(loss, *args, **kwargs)
        self._recorder.add_loss(part)
        return part


class PipelineEngine(_Recorded, pipe.PipelineEngine):
    """The same for a PipelineModule."""


@contextmanager
def _doing(what: str) -> Iterator[None]:
    before, position.doing = position.doing, what
    try:
        yield
    finally:
        position.doing = before


def install() -> None:
    """Records all engines that `initialize` makes from now on. Called when dsjob.deepspeed has been imported."""
    origins.begin()  # of a program that imports dsjob.deepspeed by this name
    entry.engine_type, entry.pipeline_type = DeepSpeedEngine, PipelineEngine
