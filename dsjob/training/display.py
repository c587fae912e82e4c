"""Shows a run to the user, on rank 0: a progress bar on a terminal, otherwise one line per record.

Of the training room, only this module uses rich.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from dsjob.training.callbacks import Callback, RunView


def make_console() -> Console:
    """A console on standard output. If that is not a terminal, lines are not wrapped.

    A notebook is treated as no terminal, although it sets FORCE_COLOR: rich's progress bars there need ipywidgets.
    """
    shown = sys.stdout.isatty()
    return Console(highlight=False, force_jupyter=False, force_terminal=shown, width=None if shown else 10_000)


class Display(Callback):
    """Shows the progress of training on a console."""

    def __init__(self, console: Console, *, shown: bool) -> None:
        self.console, self._shown = console, shown
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Prints a compact table with two columns."""
        if not self._shown:
            return
        table = Table(title=title, box=box.SIMPLE_HEAD, show_header=False, title_justify="left", pad_edge=False)
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
                self.console.print(f"  {name:<{width}} {value}", markup=False)

    def say(self, title: str, text: str) -> None:
        """Prints `text` after `title`, or below it if it has several lines."""
        if self._shown:
            separator = "\n" if "\n" in text else "  "
            self.console.print(Text.assemble((title, "bold"), separator, text), soft_wrap=True)

    def on_start(self, run: RunView) -> None:
        if not (self._shown and self.console.is_terminal):
            return
        columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
        self._bar = Progress(*columns, console=self.console, expand=True)
        self._bar.start()
        self._task = self._bar.add_task("train", total=run.max_steps, completed=run.step, text="")

    def on_log(self, run: RunView, record: Mapping[str, float]) -> None:
        if not self._shown:
            return
        text = describe_record(record)
        if self._bar is not None:
            self._bar.update(self._task, completed=run.step, text=text.replace("  ", " "))
        else:
            width = len(str(run.max_steps))
            share = 100 * run.step // run.max_steps
            self.console.print(
                f"step {run.step:>{width}}/{run.max_steps} {share:>3}%  {text}", highlight=False, soft_wrap=True
            )

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


# The keys of dsjob's own values in log records. A user's step may add others.
RECORD_KEYS = frozenset(
    ["step", "epoch", "loss", "lr", "grad_norm", "loss_scale", "samples_per_second", "tokens_per_second", "eta_seconds"]
)


def describe_record(record: Mapping[str, float]) -> str:
    """A log record as one short line."""
    parts = [f"loss {record['loss']:.4f}", f"lr {record['lr']:.1e}", f"grad {record['grad_norm']:.2f}"]
    if "loss_scale" in record:
        parts.append(f"scale {record['loss_scale']:g}")
    parts += [f"{name} {value:.4f}" for name, value in record.items() if name not in RECORD_KEYS and "/" not in name]
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
