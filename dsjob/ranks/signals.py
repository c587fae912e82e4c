"""Signal handlers for as long as a block runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def handling(handlers: Mapping[int, Callable[[int, Any], object]]) -> Iterator[None]:
    """Sets `handlers` by the number of their signal while the block runs, but for signals that are ignored.

    Python sets handlers on the main thread alone. On another thread this does nothing, and the program that started
    the thread keeps its own.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handlers[number]) for number in list_heeded(list(handlers))}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # None: not set by Python


def list_heeded(numbers: Sequence[int]) -> list[int]:
    """Those signals that are not ignored: nohup, and a shell that starts a job in the background, ask for that."""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
