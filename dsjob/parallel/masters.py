"""fp32 masters beside the parameters that a model computes with: gradients go to them, new weights come back.

They are on the model's device, or on the host, where the optimizer then steps. Where masters and parameters are on two
devices, copies between them do not wait for one another if host memory is pinned.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsjob.optim.shards import local
from dsjob.sharding import choose_share

HOST = torch.device("cpu")


@dataclass(slots=True)
class _Pair:
    """A parameter and its master; `sums` is where the master's gradient is kept on the host from step to step."""

    parameter: nn.Parameter
    master: nn.Parameter
    on_host: bool
    sums: Tensor | None = None
    arriving: Tensor | None = None
    arrival: torch.cuda.Event | None = None


class Masters:
    """fp32 copies of parameters. They outlive a cast of the parameters, which has to follow and is the caller's."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], host: Container[str] = (), pin: bool = False) -> None:
        """`host`: names of those whose masters are on the host, in page-locked memory for `pin`."""
        self._pin = pin and torch.cuda.is_available()
        self._pairs: dict[str, _Pair] = {}
        for name, parameter in parameters.items():
            master = nn.Parameter(self._copy(parameter.data, name in host))
            self._pairs[name] = _Pair(parameter, master, name in host)
        self.weights: dict[str, nn.Parameter] = {name: pair.master for name, pair in self._pairs.items()}

    def _copy(self, weight: Tensor, on_host: bool) -> Tensor:
        pin = on_host and self._pin
        device = HOST if on_host else weight.device
        made = torch.empty_like(weight, dtype=torch.float32, device=device, pin_memory=pin)
        local(made).copy_(local(weight))
        return made

    def stream(self, wanted: Callable[[], bool]) -> None:
        """From now on gradients are taken in the midst of backward passes, each as soon as it is there, if `wanted`."""
        for pair in self._pairs.values():

            def take(_: Tensor, pair: _Pair = pair) -> None:
                if wanted():
                    with torch.no_grad():
                        self._take(pair)

            pair.parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def take_gradients(self, wait: bool = True) -> None:
        """Adds the parameters' gradients to the masters', in fp32, and drops them; waits for those on their way."""
        self._take_first()
        for pair in self._pairs.values():
            self._take(pair)
        if wait:
            for pair in self._pairs.values():
                _arrive(pair)

    def _take_first(self) -> None:
        """Takes the first gradients of a step that are where their masters are, all at once."""
        taken, kept = [], []
        for pair in self._pairs.values():
            if pair.parameter.grad is not None and not pair.on_host and pair.master.grad is None:
                pair.master.grad = torch.empty_like(pair.master.data)
                taken.append(local(pair.parameter.grad))
                kept.append(local(pair.master.grad))
                pair.parameter.grad = None
        if taken:
            torch._foreach_copy_(kept, taken)

    def _take(self, pair: _Pair) -> None:
        if pair.parameter.grad is None:
            return
        gradient = local(pair.parameter.grad)
        pair.parameter.grad = None
        if gradient.is_cuda:
            # FSDP2 may have made it on another stream, whose next gradient would get its memory.
            gradient.record_stream(torch.cuda.current_stream(gradient.device))
        if not gradient.is_cuda or not pair.on_host:
            _add(pair, gradient)
            return
        _arrive(pair)  # of an earlier micro step
        pair.arriving = torch.empty_like(gradient, device=HOST, pin_memory=self._pin)
        pair.arriving.copy_(gradient, non_blocking=self._pin)
        if self._pin:
            pair.arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            pair.arrival.record(torch.cuda.current_stream(gradient.device))

    @torch.no_grad()
    def give_weights(self) -> None:
        """Copies the masters' values to the parameters, in the dtype of these."""
        near: tuple[list[Tensor], list[Tensor]] = [], []
        for pair in self._pairs.values():
            target, source = local(pair.parameter.data), local(pair.master.data)
            if target.device == source.device:
                near[0].append(target)
                near[1].append(source)
            else:
                # Cast on the host: half of the bytes travel, and copies that change the dtype would wait.
                sent = torch.empty_like(source, dtype=target.dtype, pin_memory=self._pin)
                target.copy_(sent.copy_(source), non_blocking=self._pin)
        if near[0]:
            torch._foreach_copy_(*near)

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Puts `move(tensor)` in the place of each master, but for those that are on the host anyhow."""
        for pair in self._pairs.values():
            if not pair.on_host:
                pair.master.data = move(pair.master.data)

    def drop_gradients(self) -> None:
        """Forgets what was taken in this step, and what is on its way."""
        for pair in self._pairs.values():
            pair.arriving = pair.arrival = pair.master.grad = None


def _arrive(pair: _Pair) -> None:
    """Adds what is on its way to the host, once it is there."""
    arriving, arrival = pair.arriving, pair.arrival
    pair.arriving = pair.arrival = None
    if arriving is not None:
        if arrival is not None:
            arrival.synchronize()
        _add(pair, arriving)


def _add(pair: _Pair, gradient: Tensor) -> None:
    """Adds to the master's gradient. `gradient`: of this rank's share, on the master's device."""
    if pair.master.grad is not None:
        local(pair.master.grad).add_(gradient)
        return
    kept = pair.sums if pair.sums is not None else torch.empty_like(pair.master.data)
    local(kept).copy_(gradient)
    pair.master.grad = kept
    if pair.on_host:  # of which the system would give new pages each time
        pair.sums = kept


def use_cores(device: torch.device) -> None:
    """Lets what a rank on a GPU computes on the host, as an offloaded optimizer does, use its share of the cores.

    torchrun gives each rank a single thread (OMP_NUM_THREADS=1); a number that somebody has chosen stays.
    """
    if device.type != "cuda" or torch.get_num_threads() > 1 or not hasattr(os, "sched_getaffinity"):
        return
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or (dist.get_world_size() if dist.is_initialized() else 1))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


def choose_host(parameters: Mapping[str, nn.Parameter], ratio: float) -> set[str]:
    """Names of the parameters whose masters a share of all elements on the host takes, as `plan` counts them."""
    names = list(parameters)
    return {names[number] for number in choose_share([p.numel() for p in parameters.values()], ratio)}
