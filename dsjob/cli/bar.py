"""A progress bar for long operations, shown if stderr is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def show_progress(what: str, *, bytes_: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """Yields a function to call with the amount done and the total amount; None if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%")]
    moving = [DownloadColumn(), TransferSpeedColumn()] if bytes_ else []
    from dsjob.console import Console

    console = Console(stderr=True)
    with Progress(*columns, *moving, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)

        def update(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield update
