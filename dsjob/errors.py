"""Every error that dsjob raises on purpose, with the exit code that it ends a command with.

    DsjobError                      1
    |-- UsageError                  2   the command line is wrong
    |-- DocumentError               2   the job document is wrong: all problems at once
    |   `-- ConfigError             2   a DeepSpeed config given to `initialize` is wrong
    |-- TargetError                 2   a `_target_` cannot be imported or called
    |-- ContractError               1   model, loss or metric return something that cannot be used
    |   `-- MetricError             1   the code of a metric raised an error
    |-- DataError                   1   a dataset is missing, broken or empty
    |-- NonFiniteLossError          1   the loss or its gradients became nan or inf
    |-- LossScaleError              1   gradients overflow fp16 even at the smallest loss scale
    |-- ExitError                   1   the user's own code has called exit() before the job was done
    |-- UnsavedError                4   trained to the last step, and the final state could not be saved
    |-- FitError                    3   the job does not fit, where it was required to
    |-- LaunchError                 1   ranks could not be started, or one of them failed
    |   `-- LostRankError           76  this rank lacks another one, which has the cause
    |-- StorageError                1   reading or writing failed (permission, no space, no such bucket)
    |-- CheckpointError             1
    |   |-- NoCheckpointError       1   nothing there to load
    |   |-- CorruptCheckpointError  1   what is there is damaged
    |   `-- FencedError             1   a newer run of the job has begun: this one may not save any more
    |-- Preempted                   75  a signal ended the job after it had saved: run it again
    `-- Interrupted                 130 / 143   a signal ended the job

Errors of third parties are renamed into this tree where their library is at home. `message` says what was found and
where; `hint` says what is allowed or what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_PROBLEMS = 200  # that are told of one document
MAX_MESSAGE, _MAX_KEY = 2_000, 200  # characters of a message or hint, and of a key on the way to its place


def _dot(path: Sequence[str | int]) -> str:
    text = ""
    for part in path:
        if isinstance(part, str) and len(part) > _MAX_KEY:
            part = part[:_MAX_KEY] + "..."
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a document: data, so that it can be sorted, counted and printed in any form."""

    message: str
    path: tuple[str | int, ...] = ()
    rule: str = ""
    hint: str = ""
    source: str = ""
    line: int = 0
    column: int = 0
    severity: str = "error"

    def __post_init__(self) -> None:
        """Cuts what a value from outside has made long."""
        for name in ("message", "hint"):
            if len(text := getattr(self, name)) > MAX_MESSAGE:
                object.__setattr__(self, name, text[: MAX_MESSAGE - 3] + "...")

    @property
    def dotted(self) -> str:
        """The path as the command line spells it: `trainer.micro_batch`, `data.files[0]`."""
        return _dot(self.path)

    @property
    def place(self) -> str:
        """`file:line:column`, or as much of it as is known."""
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source

    def __str__(self) -> str:
        """`place: error[rule]: path: message; hint`: the form that `dsjob validate` prints."""
        place = f"{self.place}: " if self.place else ""
        path = f"{self.dotted}: " if self.path else ""
        hint = f"; {self.hint}" if self.hint else ""
        rule = f"[{self.rule}]" if self.rule else ""
        return make_printable(f"{place}{self.severity}{rule}: {path}{self.message}{hint}")


def make_printable(text: str) -> str:
    """`text` on one line, what would steer a terminal or turn the text around written as escapes."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def limit_problems(problems: Sequence[Problem]) -> list[Problem]:
    """The first problems and how many more there are."""
    more = len(problems) - MAX_PROBLEMS
    if more <= 0:
        return list(problems)
    rest = problems[MAX_PROBLEMS:]
    worst = "error" if any(problem.severity == "error" for problem in rest) else "warning"
    hint, source = "mend these first", problems[0].source
    return [*problems[:MAX_PROBLEMS], Problem(f"and {more:,} more", (), "more", hint, source, severity=worst)]


class DsjobError(Exception):
    """Base of all errors that dsjob raises on purpose.

    `path`: the place in the document that is at fault, where one is; the message then begins with it.
    """

    exit_code = 1
    path: tuple[str | int, ...] = ()

    def __init__(self, message: str, *, hint: str = "") -> None:
        if len(message) > MAX_MESSAGE * 10 and not isinstance(self, DocumentError):
            message = message[: MAX_MESSAGE * 10] + "..."
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message

    def put_at(self, path: tuple[str | int, ...]) -> None:
        """Says which place in the document is at fault, unless that is known."""
        if path and not self.path:
            self.path = path
            if not self.message.startswith(f"{name_target(path)}: "):
                self.message = f"{_dot(path)}: {self.message}"

    def to_problem(self) -> Problem:
        """The same as a problem of the document; the caller fills in file, line and column."""
        message = self.message.removeprefix(f"{_dot(self.path)}: ").removeprefix(f"{name_target(self.path)}: ")
        return Problem(message, self.path, "target", self.hint)


def name_target(path: Sequence[str | int]) -> str:
    """What a message calls the target at `path`, which may be that of its `_target_`."""
    return _dot(path[:-1] if path[-1:] == ("_target_",) else path)


class UsageError(DsjobError, ValueError):
    """The command line is wrong, or a call from Python: a ValueError to those who know no other."""

    exit_code = 2


class DocumentError(DsjobError):
    """A job document is wrong; `problems` holds every error that was found, in the order of its places, and
    `warnings` what was found besides."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem], warnings: Sequence[Problem] = ()) -> None:
        placed = sorted(problems, key=lambda p: (p.rule == "more", p.source, p.line, p.column, p.dotted))
        self.problems = tuple(limit_problems(placed))
        self.warnings = tuple(limit_problems(warnings))
        super().__init__("\n".join(str(p) for p in self.problems))

    def __reduce__(self) -> tuple[type[DocumentError], tuple[tuple[Problem, ...], tuple[Problem, ...]]]:
        return type(self), (self.problems, self.warnings)


class ConfigError(DocumentError, ValueError):
    """A DeepSpeed config given to `dsjob.initialize` is wrong: a ValueError to those who know no other."""


class ConfigWarning(UserWarning):
    """Of what a DeepSpeed config asks for and does not get, or gets in another way."""


class TargetError(DsjobError):
    """A `_target_` cannot be imported, or does not take the arguments that the document gives it."""

    exit_code = 2


class ContractError(DsjobError):
    """A model, loss or metric returned something that the loop cannot use."""


class MetricError(ContractError):
    """The code of a metric raised an error, which is its cause."""


class DataError(DsjobError):
    """A dataset is missing, broken or empty."""


class NonFiniteLossError(DsjobError):
    """The loss, or the norm of its gradients, became nan or inf."""


class LossScaleError(DsjobError):
    """Gradients overflow fp16 even at the smallest loss scale."""


class ExitError(DsjobError):
    """The user's own code asked for the end of the process (`sys.exit`, `os._exit`) before the job was done."""


class UnsavedError(DsjobError):
    """A job trained to its last step, and its final state could not be saved (`checkpoint.save_on_error: warn`)."""

    exit_code = 4


class FitError(DsjobError):
    """The job needs more memory than a device has (`dsjob plan --require-fit`)."""

    exit_code = 3


class LaunchError(DsjobError):
    """The ranks could not be started, or one of them failed."""

    def __init__(self, message: str, *, hint: str = "", exit_code: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


class LostRankError(LaunchError):
    """A rank lacks another one, which has failed or does not come: the cause is there."""

    exit_code = 76  # EX_PROTOCOL: an error of the other side

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint, exit_code=self.exit_code)


class StorageError(DsjobError):
    """Reading or writing a path or URL failed."""


class CheckpointError(DsjobError):
    """A checkpoint cannot be saved or loaded."""


class NoCheckpointError(CheckpointError):
    """There is no committed checkpoint where one was asked for."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is damaged: its bytes are not those that were committed."""


class FencedError(CheckpointError):
    """A newer run of the same job has begun: this one may not commit checkpoints any more."""


class Preempted(DsjobError):  # noqa: N818 (what happened, not an error of anybody's)
    """A signal ended the job, which has saved before: the same command goes on with it."""

    exit_code = 75


class Interrupted(DsjobError):  # noqa: N818 (what happened, not an error of anybody's)
    """A signal ended the job; `exit_code` is 128 + the signal's number, as shells count."""

    def __init__(self, signal_number: int, message: str = "", *, hint: str = "") -> None:
        super().__init__(
            message or ("interrupted" if signal_number == 2 else f"stopped by signal {signal_number}"), hint=hint
        )
        self.exit_code = 128 + signal_number

    def __reduce__(self) -> tuple[type[Interrupted], tuple[int, str], dict[str, str]]:
        return type(self), (self.exit_code - 128, self.message), {"hint": self.hint}
