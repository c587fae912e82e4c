"""All errors that dsjob raises on purpose, with the exit codes of commands.

    DsjobError                      1
    |-- UsageError                  2   the command line is wrong
    |-- DocumentError               2   the job document is wrong: holds all problems at once
    |   `-- ConfigError             2   a DeepSpeed config passed to `initialize` is wrong
    |-- TargetError                 2   a `_target_` cannot be imported or called
    |-- ContractError               1   a model, loss or metric returned something that cannot be used
    |   `-- MetricError             1   the code of a metric raised an error
    |-- DataError                   1   a dataset is missing, broken or empty
    |-- NonFiniteLossError          1   the loss or its gradients became nan or inf
    |-- LossScaleError              1   gradients overflow fp16 even at the smallest loss scale
    |-- ExitError                   1   the user's own code called exit() before the job was done
    |-- UnsavedError                4   training finished, but the final state could not be saved
    |-- FitError                    3   the job does not fit (`dsjob plan --require-fit`)
    |-- LaunchError                 1   ranks could not be started, or one of them failed
    |   `-- LostRankError           76  this rank lost another one, where the cause is
    |-- BuildError                  1   a native op that the document requires cannot be built
    |-- StorageError                1   reading or writing failed (permission, no space, no such bucket)
    |-- CheckpointError             1
    |   |-- NoCheckpointError       1   there is no checkpoint to load
    |   |-- CorruptCheckpointError  1   the checkpoint is damaged
    |   `-- FencedError             1   a newer run of the job has started: this one may not save any more
    |-- Preempted                   75  a signal ended the job after it had saved: run it again
    `-- Interrupted                 130 / 143   a signal ended the job

The module that is a third party's only home translates the third party's errors to this tree. `message` says what is
wrong, what was found and where; `hint` says what to do.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from dsjob.terminal import make_printable, split_text

MAX_PROBLEMS = 200  # that are reported for one document
MAX_MESSAGE, _MAX_KEY = 2_000, 200  # characters of a message or hint, and of a key in a dotted path


def _dot(path: Sequence[str | int]) -> str:
    text = ""
    for part in path:
        if isinstance(part, str) and len(part) > _MAX_KEY:
            part = part[:_MAX_KEY] + "..."
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a document, as data: it can be sorted, counted and printed in any format.

    `source`: file or URL. `line` and `column` are 1-based, 0 if unknown. `severity`: error or warning.
    """

    message: str
    path: tuple[str | int, ...] = ()
    rule: str = ""
    hint: str = ""
    source: str = ""
    line: int = 0
    column: int = 0
    severity: str = "error"

    def __post_init__(self) -> None:
        """Shortens texts that a value from outside has made too long."""
        for name in ("message", "hint"):
            if len(text := getattr(self, name)) > MAX_MESSAGE:
                object.__setattr__(self, name, text[: MAX_MESSAGE - 3] + "...")

    @property
    def dotted(self) -> str:
        """The path as messages show it: `trainer.micro_batch`, `data.files[0]` (`data.files.0` in overrides)."""
        return _dot(self.path)

    @property
    def place(self) -> str:
        """`file:line:column`, or as much of it as is known."""
        column = f":{self.column}" if self.column else ""
        return f"{self.source}:{self.line}{column}" if self.line else self.source

    def __str__(self) -> str:
        """`place: error[rule]: path: message; hint`, as `dsjob validate` prints it."""
        place = f"{self.place}: " if self.place else ""
        path = f"{self.dotted}: " if self.path else ""
        hint = f"; {self.hint}" if self.hint else ""
        rule = f"[{self.rule}]" if self.rule else ""
        return make_printable(f"{place}{self.severity}{rule}: {path}{self.message}{hint}")


def limit_problems(problems: Sequence[Problem]) -> list[Problem]:
    """The first problems, and a last one that counts the others."""
    more = len(problems) - MAX_PROBLEMS
    if more <= 0:
        return list(problems)
    rest = problems[MAX_PROBLEMS:]
    worst = "error" if any(problem.severity == "error" for problem in rest) else "warning"
    hint, source = "fix these first", problems[0].source
    return [*problems[:MAX_PROBLEMS], Problem(f"and {more:,} more", (), "more", hint, source, severity=worst)]


# The optional packages that hints name, with the versions that the extras in pyproject.toml ask for.
OPTIONAL = {
    "datasets": "datasets>=4",
    "deepspeed": "deepspeed>=0.19,<0.20",
    "peft": "peft>=0.17",
    "plotly": "plotly>=6",
    "pyarrow": "pyarrow>=15",
    "scikit-learn": "scikit-learn>=1.4",
    "transformers": "transformers>=4.57",
}


def how_to_install(package: str) -> str:
    """The command that installs an optional package. It works from any folder, unlike `pip install '.[extra]'`."""
    return f"pip install '{OPTIONAL[package]}'"


class DsjobError(Exception):
    """Base class of all errors that dsjob raises on purpose.

    `path`: the place in the document that is at fault, if known; the message then starts with it.
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
        """The message and, below it, the hint, as they are printed."""
        return "\n".join(split_text(f"{self.message}\n  {self.hint}" if self.hint else self.message))

    def put_at(self, path: tuple[str | int, ...]) -> None:
        """Sets the path of the part of the document that is at fault, unless it is known already."""
        if path and not self.path:
            self.path = path
            name = name_target(path)
            if not self.message.startswith((f"{name}: ", f"{name} ")):  # such as "data.train is empty"
                self.message = f"{name}: {self.message}"

    def to_problem(self) -> Problem:
        """This error as a problem of the document; the caller fills in file, line and column."""
        message = self.message.removeprefix(f"{_dot(self.path)}: ").removeprefix(f"{name_target(self.path)}: ")
        return Problem(message, self.path, "target", self.hint)


def name_target(path: Sequence[str | int]) -> str:
    """The name of the target at `path` in messages; `path` may end with `_target_`."""
    return _dot(path[:-1] if path[-1:] == ("_target_",) else path)


class UsageError(DsjobError, ValueError):
    """The command line, or a call from Python, is wrong. Also a ValueError, for callers that do not know dsjob's."""

    exit_code = 2


class DocumentError(DsjobError):
    """A job document is wrong. `problems`: all errors, ordered by file, line and column. `warnings`: all warnings."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem], warnings: Sequence[Problem] = ()) -> None:
        placed = sorted(problems, key=lambda p: (p.rule == "more", p.source, p.line, p.column, p.dotted))
        self.problems = tuple(limit_problems(placed))
        self.warnings = tuple(limit_problems(warnings))
        super().__init__("\n".join(str(p) for p in self.problems))

    def __str__(self) -> str:
        return self.message  # its lines are dsjob's own

    def __reduce__(self) -> tuple[type[DocumentError], tuple[tuple[Problem, ...], tuple[Problem, ...]]]:
        return type(self), (self.problems, self.warnings)


class ConfigError(DocumentError, ValueError):
    """A DeepSpeed config passed to `dsjob.initialize` is wrong. Also a ValueError, as UsageError."""


class ConfigWarning(UserWarning):
    """Warns that a setting of a DeepSpeed config has no effect, or is implemented differently."""


class TargetError(DsjobError):
    """A `_target_` cannot be imported, or does not accept the arguments that the document gives it."""

    exit_code = 2


class ContractError(DsjobError):
    """A model, loss or metric returned something that the loop cannot use."""


class MetricError(ContractError):
    """The code of a metric raised an error, which is this error's `__cause__`."""


class DataError(DsjobError):
    """A dataset is missing, broken or empty."""


class NonFiniteLossError(DsjobError):
    """The loss, or the norm of its gradients, became nan or inf."""


class LossScaleError(DsjobError):
    """Gradients overflow fp16 even at the smallest loss scale."""


class ExitError(DsjobError):
    """The user's own code ended the process (`sys.exit`, `os._exit`) before the job was done."""


class UnsavedError(DsjobError):
    """A job trained to its last step, but its final state could not be saved (`checkpoint.save_on_error: warn`)."""

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
    """A rank waited for another one that failed or did not respond. The cause is on the other rank."""

    exit_code = 76  # EX_PROTOCOL: an error of the other side

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint, exit_code=self.exit_code)


class BuildError(DsjobError):
    """A native op cannot be built or loaded, and the document requires it (`ops.<name>: require`)."""


class StorageError(DsjobError):
    """Reading or writing a path or URL failed."""


class CheckpointError(DsjobError):
    """A checkpoint cannot be saved or loaded."""


class NoCheckpointError(CheckpointError):
    """There is no committed checkpoint to load."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is damaged: its bytes differ from those that were committed."""


class FencedError(CheckpointError):
    """A newer run of the same job has started, so this one may not commit checkpoints any more."""


class Preempted(DsjobError):  # noqa: N818 (an event rather than an error)
    """A signal ended the job after it had saved. The same command resumes it."""

    exit_code = 75


class Interrupted(DsjobError):  # noqa: N818 (an event rather than an error)
    """A signal ended the job. `exit_code` is 128 + the signal's number, as in shells."""

    def __init__(self, signal_number: int, message: str = "", *, hint: str = "") -> None:
        super().__init__(
            message or ("interrupted" if signal_number == 2 else f"stopped by {signal.Signals(signal_number).name}"),
            hint=hint,
        )
        self.exit_code = 128 + signal_number

    def __reduce__(self) -> tuple[type[Interrupted], tuple[int, str], dict[str, str]]:
        return type(self), (self.exit_code - 128, self.message), {"hint": self.hint}
