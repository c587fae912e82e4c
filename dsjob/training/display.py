"""Shows a run to the user, on rank 0: one line per record, and on a terminal a progress bar below.

With `--json`, each line is a JSON object. With `--quiet`, only problems are shown, on standard error.

Of the training room, only this module uses rich (`dsjob.console`).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TextColumn

from dsjob.callbacks.callback import Callback, RunView
from dsjob.console import Console, Table
from dsjob.planning.plot import spark
from dsjob.run_folder import drop_non_finite
from dsjob.terminal import print_error, print_lines
from dsjob.training.form import read_form

_PROBLEMS = ("damaged", "idle", "not saved", "skipped", "unsaved")  # titles of what --quiet shows
_NARROW = 60  # columns of a terminal that is too narrow for a bar
_CURVE = 16  # characters of the curve of losses
_MOST_LOSSES = 256


def make_console() -> Console:
    """A console on standard output. If that is not a terminal, lines are not wrapped.

    A notebook is treated as no terminal, although it sets FORCE_COLOR: rich's progress bars there need ipywidgets.
    """
    shown = sys.stdout.isatty()
    return Console(force_jupyter=False, force_terminal=shown, width=None if shown else 10_000)


def make_display(*, shown: bool) -> Display:
    """The display in the form that the command has chosen; one that shows nothing unless `shown`."""
    if not shown:
        return Display(make_console(), shown=False)
    return {"": Display, "json": JsonDisplay, "quiet": QuietDisplay}[read_form()](make_console(), shown=True)


class Display(Callback):
    """Shows the progress of training on a console."""

    def __init__(self, console: Console, *, shown: bool) -> None:
        self.console, self._shown = console, shown
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._losses: list[float] = []  # of the curve in the bar

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Prints a compact table with two columns."""
        if not self._shown:
            return
        table = Table(title, show_header=False, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(name, value)
        if self.console.is_terminal:
            self.console.print(table)
        else:
            self.console.print(title)
            width = max(10, *(len(name) for name, _ in rows))
            for name, value in rows:
                self.console.print(f"  {name:<{width}} {value}")

    def say(self, title: str, text: str) -> None:
        """Prints `text` after `title`, or below it if it has several lines."""
        if self._shown:
            self.console.say(title, text)

    def on_start(self, run: RunView) -> None:
        if not (self._shown and self.console.is_terminal):
            return
        self._bar = Progress(*_choose_columns(self.console.width), console=self.console, expand=True)
        self._bar.start()
        self._task = self._bar.add_task("train", total=run.expected_steps, completed=run.step, eta="-:--", curve="")

    def on_log(self, run: RunView, record: Mapping[str, float]) -> None:
        if not self._shown:
            return
        total = run.expected_steps
        width, about = len(str(total)), "" if total == run.max_steps else "~"
        line = f"step {run.step:>{width}}/{about}{total} {100 * run.step // total:>3}%  {describe_record(record)}"
        self.console.print(line, soft_wrap=self._bar is None)
        if self._bar is not None:
            if len(self._losses) == _MOST_LOSSES:
                del self._losses[::2]  # a curve of the whole run in bounded memory
            self._losses.append(record["loss"])
            eta = show_seconds(record["eta_seconds"])
            self._bar.update(self._task, completed=run.step, total=total, eta=eta, curve=spark(self._losses, _CURVE))

    def on_eval(self, run: RunView, metrics: Mapping[str, float]) -> None:
        self.say("eval", f"step {run.step}  " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))

    def on_save(self, run: RunView, url: str) -> None:
        # The folders of later saves of a step end with a number: step-00000100-a0001.2.
        again = re.search(r"-a\d+\.\d+$", url)
        self.say("saved", f"{url} (again: its evaluation changed what it contains)" if again else url)

    def on_end(self, run: RunView) -> None:
        self.close()

    def close(self) -> None:
        """Restores the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _choose_columns(width: int) -> Sequence[ProgressColumn]:
    """The columns of the bar. A narrow terminal has only the step and the time left."""
    step, eta = MofNCompleteColumn(), TextColumn("eta {task.fields[eta]}")
    if width < _NARROW:
        return step, eta
    return BarColumn(bar_width=None), step, TextColumn("{task.fields[curve]}"), eta


class QuietDisplay(Display):
    """Shows only problems, on standard error."""

    def __init__(self, console: Console, *, shown: bool) -> None:
        super().__init__(console, shown=False)
        self._tells = shown

    def say(self, title: str, text: str) -> None:
        if self._tells and title in _PROBLEMS:
            print_error(f"dsjob: {title}: {text}")


class JsonDisplay(Display):
    """Prints JSON objects, one on each line: `event` says what happened."""

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        self._print("start", {"title": title, "summary": dict(rows)})

    def say(self, title: str, text: str) -> None:
        self._print("message", {"title": title, "text": text})

    def on_start(self, run: RunView) -> None:
        """There is no bar."""

    def on_log(self, run: RunView, record: Mapping[str, float]) -> None:
        self._print("log", record)

    def on_eval(self, run: RunView, metrics: Mapping[str, float]) -> None:
        self._print("eval", {"step": run.step, **metrics})

    def on_save(self, run: RunView, url: str) -> None:
        self._print("save", {"step": run.step, "url": url})

    def _print(self, event: str, values: Mapping[str, Any]) -> None:
        print_lines(json.dumps({"event": event, **drop_non_finite(values)}))


# The keys of dsjob's own values in log records. A user's step may add others.
RECORD_KEYS = frozenset(
    ["step", "epoch", "loss", "lr", "grad_norm", "loss_scale", "samples_per_second", "tokens_per_second", "eta_seconds"]
)


def describe_record(record: Mapping[str, float]) -> str:
    """A log record as one short line."""
    parts = [f"loss {record['loss']:.4f}", f"lr {record['lr']:.1e}", f"grad {record['grad_norm']:.2f}"]
    if "loss_scale" in record:
        parts.append(f"scale {record['loss_scale']:g}")
    more = {name: value for name, value in record.items() if name not in RECORD_KEYS and "/" not in name}
    parts += [f"{name} {value:.2e}" if 0 < abs(value) < 1e-3 else f"{name} {value:.4f}" for name, value in more.items()]
    parts.append(f"{shorten(record['samples_per_second'])} samples/s")
    if record.get("tokens_per_second"):
        parts.append(f"{shorten(record['tokens_per_second'])} tok/s")
    parts.append(f"eta {show_seconds(record['eta_seconds'])}")
    return "  ".join(parts)


def shorten(number: float) -> str:
    """12345 as 12.3k."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(number) < 1000:
            return f"{number:.3g}{unit}" if unit or number < 100 else f"{number:.0f}"
        number /= 1000
    return f"{number:.3g}P"


def show_seconds(seconds: float) -> str:
    """3725 as 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
