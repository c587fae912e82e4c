"""The base class of callbacks, whose hooks do nothing, and what they may use of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from dsjob.contract.directions import Direction
from dsjob.contract.spec import JobSpec
from dsjob.engine.engine import Engine
from dsjob.engine.several import Engines


class RunView(Protocol):
    """The part of a run that callbacks may use.

    Requests hold for all ranks, whichever rank makes them. A request from `on_log` or `on_eval` takes effect at the
    same step. Ranks agree on requests from other hooks at most every half second, at the end of a step.
    """

    @property
    def spec(self) -> JobSpec:
        """The job."""

    @property
    def max_steps(self) -> int:
        """The step that training ends at. If `trainer.max_length` counts tokens or time, an upper bound, until the run
        ends."""

    @property
    def expected_steps(self) -> int:
        """`max_steps`, or where tokens or time end the run, an estimate of it from the steps so far."""

    @property
    def engine(self) -> Engine:
        """The engine that counts steps and samples."""

    @property
    def engines(self) -> Engines:
        """All engines by name."""

    @property
    def step(self) -> int:
        """Optimizer steps taken so far."""

    @property
    def folder(self) -> str:
        """The run's folder, which all ranks of a node share."""

    def find_direction(self, metric: str) -> Direction | None:
        """Whether lower (`min`) or higher (`max`) values of a metric of evaluations are better, by its name or by its
        `higher_is_better`. None if neither says so."""

    def say(self, title: str, text: str) -> None:
        """Shows `text` with a `title` to the user. Prints on rank 0 only."""

    def request_stop(self, reason: str) -> None:
        """Asks for the end of training: a last evaluation and save, as after the last step, and exit code 0.

        The reason is shown, and is `stopped` in result.json. Without a reason, nothing is requested. A request from
        `on_start` ends the run before its first step.
        """

    def request_save(self) -> None:
        """Asks for a checkpoint of this step."""

    def request_evaluation(self) -> None:
        """Asks for an evaluation after this step. Raises UsageError without data.eval."""


class Callback:
    """Override the hooks that you need. dsjob calls every hook on every rank, in the same order, so hooks may
    communicate between ranks.

    With methods `state_dict` and `load_state_dict`, a callback's state is part of each checkpoint: a dict of JSON
    values and tensors, at most 1 MiB, saved per rank if ranks differ. State that cannot be saved is left out, with a
    message. A resumed run restores it before `on_start`. Restored tensors are on the CPU: copy them into your own with
    `copy_`.
    """

    def on_setup(self, run: RunView) -> None:
        """Everything is built, and no checkpoint is loaded yet. Of a run that is already finished, nothing follows."""

    def on_start(self, run: RunView) -> None:
        """Training begins, or continues after a resume."""

    def on_step(self, run: RunView) -> None:
        """An optimizer step was taken. Reading a tensor here waits for the device in every step."""

    def on_record(self, run: RunView, record: Mapping[str, float]) -> Mapping[str, float] | None:
        """A log record is complete. Return more values by name, and they become part of it: in metrics.jsonl, in
        monitors, and, if the name has no slash, in the terminal. Those of rank 0 count. The device has finished the
        steps of the record."""
        return None

    def on_log(self, run: RunView, record: Mapping[str, float]) -> None:
        """A log record was written.

        It has step, epoch, loss, lr, grad_norm, samples_per_second, tokens_per_second, eta_seconds and memory/peak_gib
        (the most memory that a rank has used so far: on its GPU, otherwise that of its process). Speeds are those
        of training alone; eta_seconds also accounts for evaluations, saves and callbacks. With fp16, it has loss_scale,
        and grad_norm is not finite if the step was skipped. It also has the other values that trainer.step returned,
        and `<name>/lr` and `<name>/grad_norm` of each further model.
        """

    def on_eval_start(self, run: RunView) -> None:
        """An evaluation begins."""

    def on_eval(self, run: RunView, metrics: Mapping[str, float]) -> None:
        """An evaluation has finished: `eval/loss` and the document's metrics as `eval/<name>`, or the values that
        trainer.eval_step returned."""

    def on_save(self, run: RunView, url: str) -> None:
        """A checkpoint was committed. It contains what `state_dict` returned when the save began; for a background
        save, that was some steps ago."""

    def on_end(self, run: RunView) -> None:
        """Training has ended: after its last step, or because a callback or the file `stop-now` asked for it."""

    def on_error(self, run: RunView, error: BaseException) -> None:
        """Training has failed, or a signal has ended it. Other ranks may be elsewhere: do not communicate with them.
        Errors of this hook are ignored."""


def name_model(run: RunView, model: str) -> str:
    """The start of the names of a model's values in log records: empty if the job has a single model."""
    return f"{model}/" if len(run.engines) > 1 else ""
