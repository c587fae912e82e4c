"""Parameters that a model computes with, beside the fp32 masters that the optimizer steps, perhaps on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dsjob.optim.shards import local

HOST = torch.device("cpu")


@dataclass(slots=True)
class Pair:
    """A parameter and its master.

    `taken`: of the parameter's gradients, what is not in the master's yet. `sums`: where the master's gradient is kept
    on the host from step to step. `is_sent`: the parameter has the master's new values, or they are on their way.
    """

    parameter: nn.Parameter
    master: nn.Parameter
    on_host: bool
    taken: Tensor | None = None
    sums: Tensor | None = None
    is_sent: bool = False


class Pairs:
    """Pairs by name; what all kinds of masters have in common."""

    def __init__(self, pairs: dict[str, Pair], side: torch.cuda.Stream | None = None) -> None:
        """`side`: for copies between host and device, through page-locked memory; without it they block the host."""
        self._pairs, self._side = pairs, side
        self.masters: dict[str, nn.Parameter] = {name: pair.master for name, pair in pairs.items()}

    def stream(self, wanted: Callable[[], bool]) -> None:
        """From now on gradients are taken in the midst of backward passes, each as soon as it is there, if `wanted`."""
        for pair in self._pairs.values():

            def take(_: Tensor, pair: Pair = pair) -> None:
                if wanted():
                    with torch.no_grad():
                        self._take(pair)

            pair.parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def _take(self, pair: Pair) -> None:
        """Takes a gradient that a backward pass has left, if there is one."""
        raise NotImplementedError

    @torch.no_grad()
    def give_weights(self) -> None:
        """Copies the masters' values to the parameters, in the dtype of these, where they are not on their way yet."""
        self._send([pair for pair in self._pairs.values() if not pair.is_sent])
        for pair in self._pairs.values():
            pair.is_sent = False
        self._join()

    def _join(self) -> None:
        """Has the device wait with what follows for all copies; not the host."""
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)

    def _send(self, pairs: Iterable[Pair]) -> None:
        near: tuple[list[Tensor], list[Tensor]] = [], []
        pins = self._side is not None
        with self._beside():
            for pair in pairs:
                target, source = local(pair.parameter.data), local(pair.master.data)
                if target.device == source.device:
                    near[0].append(target)
                    near[1].append(source)
                    continue
                # Cast on the host: half of the bytes travel, and copies that change the dtype would block.
                cast = torch.empty_like(source, dtype=target.dtype, pin_memory=pins)
                target.copy_(cast.copy_(source), non_blocking=pins)
        if near[0]:
            torch._foreach_copy_(*near)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Copies in this context wait for what the device was given before, and run beside what follows."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            yield

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Puts `move(tensor)` in the place of each master, but for those that are on the host anyhow."""
        for pair in self._pairs.values():
            if not pair.on_host:
                pair.master.data = move(pair.master.data)

    def drop_gradients(self) -> None:
        """Forgets what was taken in this step."""
        for pair in self._pairs.values():
            pair.taken = pair.master.grad = None
            pair.is_sent = False
