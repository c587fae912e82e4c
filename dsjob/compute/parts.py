"""The parts of a training step, which callbacks may watch: data, forward, backward, step, evaluation and save."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")
Watch = Callable[[str], AbstractContextManager[Any]]  # makes the context for a part, by its name
_UNWATCHED = nullcontext()
_END: Any = object()


class Parts:
    """Enters the contexts of all `watches` around each part. `data`, `evaluation` and `save` are those of the job, and
    are told to its first engine; the others are those of one engine. `forward` is a pass that will be differentiated,
    and `step` the end of the last micro step. Parts may contain others: `backward` consists of `backward_pass`, in
    which most gradients are reduced, and at the boundary of `backward_rest`, which reduces the others."""

    def __init__(self) -> None:
        self.watches: list[Watch] = []
        # Called before reduced gradients are clipped, with what they are still to be divided by (the loss scale, ...).
        self.gradient_watches: list[Callable[[float | Tensor], None]] = []

    def __call__(self, name: str) -> AbstractContextManager[Any]:
        """The context in which the part `name` runs."""
        return self._watch(name) if self.watches else _UNWATCHED

    def reading(self, items: Iterable[T]) -> Iterator[T]:
        """`items`, whose reading is the part `data`."""
        iterator = iter(items)
        while True:
            with self("data"):
                item = next(iterator, _END)
            if item is _END:
                return
            yield item

    @contextmanager
    def _watch(self, name: str) -> Iterator[None]:
        with ExitStack() as stack:
            for watch in self.watches:
                stack.enter_context(watch(name))
            yield
