"""Sets signal handlers while a block runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def handling(handlers: Mapping[int, Callable[[int, Any], object]]) -> Iterator[None]:
    """Sets `handlers`, by signal number, while the block runs. Ignored signals stay ignored.

    Python can set handlers only on the main thread. On another thread this does nothing, and the program keeps its own
    handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Handlers are global to the process, and dsjob may be running inside a larger program.
    before = {number: signal.signal(number, handlers[number]) for number in list_heeded(list(handlers))}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # None: not set by Python


@contextmanager
def keeping_handler(number: int) -> Iterator[None]:
    """Restores the handler of a signal after the block, on the main thread. On another thread, this does nothing."""
    before = signal.getsignal(number)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(number, before if before is not None else signal.SIG_DFL)  # None: not set by Python


def list_heeded(numbers: Sequence[int]) -> list[int]:
    """The signals that are not ignored. (nohup, and shells that start background jobs, ignore some.)"""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
