"""Saves a program of Hugging Face's Trainer at SIGTERM, Ctrl-C, SIGUSR1, or when `save-now` appears in the run folder.

`transformers.trainer.DEFAULT_CALLBACKS` gets one callback more as soon as the program imports it. The callback leaves
alone a program that handles SIGTERM by itself, or has `enable_jit_checkpoint`.
"""

from __future__ import annotations

import os
import signal
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from transformers import trainer
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from dsjob.contract import schema as contract
from dsjob.contract.spec import Checkpoint, view
from dsjob.errors import Interrupted, Preempted
from dsjob.programs import guard
from dsjob.ranks.mesh import join_world
from dsjob.run_folder import SAVE_REQUEST
from dsjob.training.occasions import Occasions


class SaveOnSignal(TrainerCallback):
    """Asks the Trainer for a checkpoint after the step in which any rank got a signal, and then ends the program."""

    _watching: ClassVar[AbstractContextManager[None] | None] = None  # of the Trainer that trains

    def __init__(self) -> None:
        self._occasions: Occasions | None = None
        self._stops = 0  # the signal that ends the program after the next save

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._end()  # a program may train again after an exception, which no callback is told of
        handled = signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)
        if handled or getattr(args, "enable_jit_checkpoint", False):
            return
        run_dir = guard.guard.run_dir if guard.guard is not None else ""
        defaults = contract.fill_defaults({}, contract.job_schema()["properties"]["checkpoint"])
        request = os.path.join(run_dir, SAVE_REQUEST) if run_dir else None
        self._occasions = Occasions(view(Checkpoint, defaults), join_world(), request)
        SaveOnSignal._watching = self._occasions.watch(state.global_step)
        SaveOnSignal._watching.__enter__()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._occasions is None:
            return
        agreed = self._occasions.agree(state.global_step, news=False)
        self._stops = agreed.stops
        control.should_save = control.should_save or agreed.saves

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._occasions is None:
            return
        self._occasions.note_save()
        if not self._stops:
            return
        saved = os.path.join(str(args.output_dir), f"checkpoint-{state.global_step}")
        hint = f"to resume, run the program again with resume_from_checkpoint={saved}"
        if self._stops == signal.SIGTERM:
            raise Preempted(f"stopped by SIGTERM after saving {saved}", hint=hint)
        raise Interrupted(self._stops, f"stopped by Ctrl-C after saving {saved}", hint=hint)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._end()

    def _end(self) -> None:
        """Stops watching signals, whichever Trainer has begun it."""
        watching, SaveOnSignal._watching = SaveOnSignal._watching, None
        if watching is not None:
            watching.__exit__(None, None, None)
        self._occasions = None


def install() -> None:
    """Makes every Trainer from now on have the callback. Called when `transformers.trainer` has been imported."""
    trainer.DEFAULT_CALLBACKS.append(SaveOnSignal)  # type: ignore[arg-type]
