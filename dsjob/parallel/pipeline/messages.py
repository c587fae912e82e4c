"""What neighbouring stages send each other: nested tuples, lists and dicts of tensors of any shape and dtype.

A message is a header on the host, and one transfer per tensor. The header numbers the layout of the value, so that the
receiver can allocate memory for it; a layout that is new to the receiver follows the header. So shapes may change with
every micro batch.

Sends never wait for their receiver. What is sent is kept until it has arrived, or until `finish` with gloo, which does
not tell.

With gloo, messages along different edges have different tags, so their order does not matter. NCCL transfers between
two ranks run in the order in which both ranks start them. So on a GPU, a receive is started where the schedule has it,
which is in the same order as the sends (`dsjob.pipelines.orders`). Headers travel by gloo, whose waiting does not hold
up the device.

A stage that fails sends its neighbours an error in place of the next message, which they pass on: no stage waits for
ever, and each names the stage that failed.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dsjob.errors import DsjobError, LostRankError, UsageError
from dsjob.ranks.agreement import find_host_group
from dsjob.ranks.failures import follows_from_another
from dsjob.ranks.mesh import Ranks
from dsjob.torch_private import tree_flatten, tree_unflatten

_FAILED = -1  # in place of the number of micro batches: the sender has failed
_UNSEEN = -1  # the last element of a header that has not arrived
_HEADER, _LAYOUT, _TENSOR, _ON_HOST = range(4)  # kinds of transfers, which have different tags
PATIENCE = 2.0  # seconds for neighbours to receive the news of a failure
_made = count()  # all ranks create the mail of their engines in the same order
_TAGS = 1 << 12  # of each


class Edge(NamedTuple):
    """A direction in which a rank's neighbour sends it values: activations (forward) or gradients, for one chunk of the
    receiver's layers. `peer`: the other rank of the pipeline."""

    peer: int
    forward: bool
    chunk: int

    def number(self, kind: int) -> int:
        """Tells transfers of a kind along this edge from all others between the same two ranks."""
        return (2 * self.chunk + self.forward) * 4 + kind


class _Shape(NamedTuple):
    """A tensor in a layout. on_host: a program on a GPU may send one that is on the host."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    needs_grad: bool
    on_host: bool


class _Plain(NamedTuple):
    """Anything else in a layout. kind: its type, since True equals 1."""

    kind: type
    value: Any


class _Layout(NamedTuple):
    """A value without the contents of its tensors."""

    spec: Any
    leaves: tuple[_Shape | _Plain, ...]


class Incoming:
    """A message that is expected: its header, and once that has arrived, its tensors."""

    def __init__(self, edge: Edge, micro: int, header: Tensor, work: Any) -> None:
        self.edge, self.micro, self.header, self.work = edge, micro, header, work
        self.layout: _Layout | None = None  # None until the header has arrived
        self.tensors: list[Tensor] = []
        self.works: list[Any] = []

    @property
    def has_arrived(self) -> bool:
        """Whether the header seems to be complete. gloo's own works only tell after `wait`."""
        return int(self.header[-1]) != _UNSEEN


class Mail:
    """The messages of one rank of a pipeline, during one pass over `count` micro batches at a time."""

    def __init__(self, pipe: Ranks, device: torch.device) -> None:
        self._pipe, self._device = pipe, device
        self._hosts = find_host_group(pipe)
        self._in_order = device.type == "cuda"  # see above
        self._ids: dict[Edge, dict[_Layout, int]] = {}  # of layouts that were sent
        self._layouts: dict[Edge, list[_Layout]] = {}  # that were received
        self._sent: list[tuple[Any, Tensor]] = []  # from the host
        self._sent_by_device: deque[tuple[Any, Tensor]] = deque()
        self._expected: dict[Edge, deque[Incoming]] = {}
        self._failed, self._first_tag = "", _TAGS * next(_made)
        self.count = 1

    def begin(self, count: int) -> None:
        """Begins a pass over `count` micro batches. Raises LostRankError if an earlier one failed."""
        if self._failed:
            raise LostRankError(self._failed, hint="the stages have lost track of one another: start the program again")
        self.count = count

    def send(self, edge: Edge, micro: int, value: Any) -> None:
        """Sends a value. edge: as its receiver sees it, but with the receiver as `peer`. Does not wait."""
        layout, tensors = _describe(value)
        known = self._ids.setdefault(edge, {})
        number, blob = known.get(layout, len(known)), b""
        if layout not in known:
            # The places of the leaves, since a spec of torch's cannot be pickled without warnings.
            places = tree_unflatten(list(range(len(layout.leaves))), layout.spec)
            known[layout], blob = number, pickle.dumps((places, layout.leaves))
        self._send_header(edge, [self.count, micro, len(blob), number], blob)
        # Otherwise, all micro batches' activations and gradients would stay in memory until the end of the step.
        while self._sent_by_device and self._sent_by_device[0][0].is_completed():
            self._sent_by_device.popleft()
        for tensor in tensors:
            if tensor.numel():
                self._start(dist.isend, _as_bytes(tensor.detach().contiguous()), edge, *self._choose(tensor.is_cpu))

    def _send_header(self, edge: Edge, header: list[int], blob: bytes) -> None:
        self._start(dist.isend, torch.tensor(header), edge, _HEADER, self._hosts)
        if blob:
            self._start(dist.isend, torch.frombuffer(bytearray(blob), dtype=torch.uint8), edge, _LAYOUT, self._hosts)

    def _start(self, call: Any, tensor: Tensor, edge: Edge, kind: int, group: Any) -> None:
        kept = self._sent if tensor.is_cpu else self._sent_by_device
        with self._naming(edge.peer):
            kept.append((call(tensor, group=group, group_dst=edge.peer, tag=self._tag(edge, kind)), tensor))

    def _choose(self, on_host: bool) -> tuple[int, Any]:
        """The kind of the transfer of a tensor, and its group."""
        return (_ON_HOST, self._hosts) if on_host and self._in_order else (_TENSOR, self._pipe.group)

    def _tag(self, edge: Edge, kind: int) -> int:
        return self._first_tag + edge.number(kind)

    def expect(self, edge: Edge, micro: int) -> Incoming:
        """Starts to receive a message."""
        header = torch.full((4,), _UNSEEN, dtype=torch.int64)
        with self._naming(edge.peer):
            work = dist.irecv(header, group=self._hosts, group_src=edge.peer, tag=self._tag(edge, _HEADER))
        found = Incoming(edge, micro, header, work)
        self._expected.setdefault(edge, deque()).append(found)
        if self._in_order:
            self._open(found)
        return found

    def progress(self) -> None:
        """Starts to receive the tensors of all messages whose header has arrived."""
        for waiting in self._expected.values():
            while waiting and waiting[0].has_arrived:
                self._open(waiting[0])

    def take(self, message: Incoming) -> Any:
        """The value of a message. Waits for it. Tensors require gradients if those that were sent do.

        Raises LostRankError if a stage has failed or does not answer, UsageError if the stages disagree.
        """
        waiting = self._expected[message.edge]
        while message.layout is None:
            self._open(waiting[0])
        with self._naming(message.edge.peer):
            for work in message.works:
                work.wait()
        tensors = iter(message.tensors)
        leaves = [
            next(tensors).requires_grad_(leaf.needs_grad) if isinstance(leaf, _Shape) else leaf.value
            for leaf in message.layout.leaves
        ]
        return tree_unflatten(leaves, message.layout.spec)

    def _open(self, message: Incoming) -> None:
        """Reads the header of the first message that is expected along an edge, and starts to receive its tensors."""
        edge = message.edge
        with self._naming(edge.peer):
            message.work.wait()
            total, micro, size, number = message.header.tolist()
            blob = torch.empty(size, dtype=torch.uint8)
            if size:
                dist.recv(blob, group=self._hosts, group_src=edge.peer, tag=self._tag(edge, _LAYOUT))
        self._expected[edge].popleft()
        if total == _FAILED:
            self._failed = bytes(blob.tolist()).decode()
            raise LostRankError(self._failed)
        if (total, micro) != (self.count, message.micro):
            raise UsageError(
                f"stage {edge.peer} sent micro batch {micro + 1} of {total}, but stage {self._pipe.rank} expects"
                f" {message.micro + 1} of {self.count}",
                hint="all stages need the same number of micro batches in each step",
            )
        known = self._layouts.setdefault(edge, [])
        if size:
            places, leaves = pickle.loads(bytes(blob.numpy()))
            known.append(_Layout(tree_flatten(places)[1], leaves))
        message.layout = known[number]
        for leaf in message.layout.leaves:
            if isinstance(leaf, _Shape):
                tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu" if leaf.on_host else self._device)
                message.tensors.append(tensor)
                if tensor.numel():
                    with self._naming(edge.peer):
                        kind, group = self._choose(leaf.on_host)
                        tag = self._tag(edge, kind)
                        work = dist.irecv(_as_bytes(tensor), group=group, group_src=edge.peer, tag=tag)
                        message.works.append(work)

    def finish(self) -> None:
        """Waits until all sends are done. On a GPU, the device waits, not the host."""
        sent, self._sent = [*self._sent, *self._sent_by_device], []
        self._sent_by_device.clear()
        for number, (work, _) in enumerate(sent):
            try:
                work.wait()
            except RuntimeError as error:
                self._sent = sent[number:]  # gloo may still read their memory
                raise self._lose(None, error) from error

    def fail(self, error: BaseException, edges: list[Edge]) -> None:
        """Tells the neighbours that this stage has failed. edges: along which they expect messages of it."""
        if not self._failed:
            what = f"{error.message}" if isinstance(error, DsjobError) else f"{type(error).__name__}: {error}"
            told = (
                what if isinstance(error, LostRankError) else f"stage {self._pipe.rank} of the pipeline failed: {what}"
            )
            self._failed = told
        with suppress(RuntimeError, DsjobError):
            for edge in edges:
                blob = self._failed.encode()
                self._send_header(edge, [_FAILED, self._pipe.rank, len(blob), 0], blob)
        # gloo's own thread sends, as soon as the neighbours receive. Its `wait` closes the connection when its time is
        # up, and a thread that still waits when the interpreter exits can abort the process.
        time.sleep(PATIENCE)

    def _naming(self, peer: int) -> _Naming:
        return _Naming(self, peer)

    def _lose(self, peer: int | None, error: BaseException) -> LostRankError:
        stage = f"stage {peer}" if peer is not None else "a stage"
        text = " ".join(str(error).split())
        told = "did not answer in time" if "imed out" in text else "has ended or cannot be reached"
        return LostRankError(f"{stage} of the pipeline {told} (stage {self._pipe.rank} was waiting for it): {text}")


class _Naming:
    """Turns errors of transfers into a LostRankError that names the stage."""

    def __init__(self, mail: Mail, peer: int) -> None:
        self._mail, self._peer = mail, peer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError) and follows_from_another(error):
            raise self._mail._lose(self._peer, error) from error


def _describe(value: Any) -> tuple[_Layout, list[Tensor]]:
    """The layout of a value, and its tensors."""
    found, spec = tree_flatten(value)
    tensors = [leaf for leaf in found if isinstance(leaf, Tensor)]
    leaves = tuple(
        _Shape(leaf.dtype, tuple(leaf.shape), leaf.requires_grad, leaf.is_cpu)
        if isinstance(leaf, Tensor)
        else _Plain(type(leaf), leaf)
        for leaf in found
    )
    return _Layout(spec, leaves), tensors


def list_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a nested value, in order."""
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, Tensor):
            yield leaf


def _as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as uint8 [bytes], which any backend can send."""
    return tensor.reshape(-1).view(torch.uint8)
