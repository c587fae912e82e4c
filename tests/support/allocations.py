"""Live bytes of a process, counted in two ways that know nothing of how they came about.

`Ledger`: what torch's own CPU allocator gives out and takes back, as its profiler hears it; all storages, at marked
moments, in a process without other ranks (gloo frees on threads that the profiler does not hear). `count_live`: the
storages of all tensors that Python knows, DDP's buckets included from the first step on.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from types import TracebackType

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function


class Ledger:
    """Counts while it is entered. `live(name)` tells after it was left what was allocated, and not freed, by then."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._moments: dict[str, int] = {}
        self.peak = 0

    def __enter__(self) -> Ledger:
        gc.collect()  # what earlier tests left in cycles is not freed in here, which would count as less than nothing
        self._profile.__enter__()
        return self

    def mark(self, name: str) -> None:
        """Names this moment; of a name that is given twice the last counts."""
        with record_function(f"mark {name}"):
            pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profile.__exit__(kind, error, trace)
        live = 0
        for event in sorted(self._profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                live += event.nbytes()
                self.peak = max(self.peak, live)
            elif event.name().startswith("mark "):
                self._moments[event.name().removeprefix("mark ")] = live

    def live(self, name: str) -> int:
        """Bytes that were live at a marked moment."""
        return self._moments[name]


def start_counting() -> None:
    """What there is by now is not counted, and not looked through each time."""
    gc.collect()
    gc.freeze()


def count_live() -> int:
    """Bytes of all storages under tensors that are alive, gradients among them, since `start_counting`."""
    gc.collect()
    alive = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    alive += [tensor.grad for tensor in alive if tensor.is_leaf and tensor.grad is not None]
    return count_bytes(alive)


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages under some tensors, each once. Tensors on the meta device have none."""
    return sum(dict(_storage(tensor) for tensor in tensors if not tensor.is_meta).values())


def count_settled() -> int:
    """`count_live` once threads of gloo have let go of what they communicated, a moment after it is there."""
    counts = []
    for pause in (0, 0.01, 0.05):
        time.sleep(pause)
        counts.append(count_live())
    return min(counts)


def _storage(tensor: Tensor) -> tuple[int, int]:
    storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
    return storage._cdata, storage.nbytes()
