"""Pairs of a parameter that the model computes with, and the fp32 master that the optimizer steps, perhaps on the
host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dsjob.ops.disk import read_mapped
from dsjob.optim.shards import local

HOST = torch.device("cpu")


@dataclass(slots=True)
class Pair:
    """A parameter and its master.

    taken: a gradient of the parameter that was not yet added to the master's. sums: memory on the host that is reused
    for the master's gradient. is_sent: the master's new values have been sent to the parameter. on_disk: the master is
    a mapping of a file between steps, so it is read only if its values may have changed.
    """

    parameter: nn.Parameter
    master: nn.Parameter
    on_host: bool
    taken: Tensor | None = None
    sums: Tensor | None = None
    is_sent: bool = False
    on_disk: bool = False


class Pairs:
    """Pairs by name: the base of all kinds of masters."""

    def __init__(self, pairs: dict[str, Pair], side: torch.cuda.Stream | None = None) -> None:
        """side: a stream for copies between host and device through pinned memory. Without it, copies block the
        host."""
        self._pairs, self._side = pairs, side
        # New weights in their parameter's dtype, by master, until they are sent: the parameter's own memory if it is on
        # the same device.
        self._cast: dict[Tensor, Tensor] = {}
        self.masters: dict[str, nn.Parameter] = {name: pair.master for name, pair in pairs.items()}

    def stream(self, wanted: Callable[[], bool]) -> None:
        """Takes each gradient during the backward pass, as soon as it is complete, if `wanted()` is true then."""
        for pair in self._pairs.values():

            def take(_: Tensor, pair: Pair = pair) -> None:
                if wanted():
                    with torch.no_grad():
                        self._take(pair)

            pair.parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def _take(self, pair: Pair) -> None:
        """Takes the gradient of a backward pass from the parameter, if there is one."""
        raise NotImplementedError

    @torch.no_grad()
    def give_weights(self) -> None:
        """Copies the masters' values to the parameters, in their dtype, unless they were sent already. Raises
        StorageError for masters on a disk."""
        self._send([pair for pair in self._pairs.values() if not pair.is_sent])
        for pair in self._pairs.values():
            pair.is_sent = pair.on_disk
        self._join()

    def forget_sent(self) -> None:
        """Makes `give_weights` copy all masters: something else than a step may have written to them."""
        self._cast.clear()
        for pair in self._pairs.values():
            pair.is_sent = False

    def _join(self) -> None:
        """Makes the device wait for all copies before it continues. The host does not wait."""
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)

    def _send(self, pairs: Iterable[Pair]) -> None:
        near: tuple[list[Tensor], list[Tensor]] = [], []
        pins = self._side is not None
        with self._beside():
            for pair in pairs:
                target, cast = local(pair.parameter.data), self._cast.pop(pair.master, None)
                if cast is not None:
                    if cast.device != target.device:
                        target.copy_(cast, non_blocking=pins)
                    continue
                source = local(pair.master.data)
                if pair.on_disk:
                    source = read_mapped(source)
                if pair.on_disk and target.device == source.device:
                    target.copy_(source)  # one by one: together, copies of them would fill the memory
                    continue
                if target.device == source.device:
                    near[0].append(target)
                    near[1].append(source)
                    continue
                # Cast on the host: this halves the bytes to copy, and copies that change the dtype would block.
                cast = torch.empty_like(source, dtype=target.dtype, pin_memory=pins)
                target.copy_(cast.copy_(source), non_blocking=pins)
        if near[0]:
            torch._foreach_copy_(*near)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Copies in this context wait for earlier work on the device, and overlap with later work."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            yield

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replaces each master by `move(tensor)`, except those that are always on the host."""
        for pair in self._pairs.values():
            if not pair.on_host:
                pair.master.data = move(pair.master.data)

    def drop_gradients(self) -> None:
        """Drops the gradients taken in this step."""
        for pair in self._pairs.values():
            pair.taken = pair.master.grad = None
        self.forget_sent()
