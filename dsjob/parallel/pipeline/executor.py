"""Runs the instructions of one stage of a pipeline: passes over micro batches, and messages to its neighbours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dsjob.compute.aliases import alias
from dsjob.compute.later_weights import Later
from dsjob.errors import UsageError
from dsjob.parallel.pipeline.messages import Edge, Incoming, Mail, list_tensors
from dsjob.pipelines.instructions import (
    BackwardInputPass,
    BackwardPass,
    BackwardWeightPass,
    BufferOpInstruction,
    ForwardPass,
    LoadMicroBatch,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
)
from dsjob.pipelines.timeline import find_peer
from dsjob.ranks.mesh import Ranks


class Inputs(NamedTuple):
    """What a chunk of layers computes from: the micro batch, and the value from the previous stage, which is None on
    the first."""

    args: Sequence[Any]
    kwargs: dict[str, Any]
    received: Any
    number: int


# (chunk of layers, inputs) -> its outputs: on the last stage the model's, elsewhere a value to send.
Compute = Callable[[int, Inputs], Any]


@dataclass
class _Slot:
    """A buffer: one micro batch on its way through a chunk of layers."""

    micro: int = 0
    message: Incoming | None = None
    received: Any = None
    outputs: Any = None
    gradients: Incoming | None = None
    later: Later = field(default_factory=Later)  # the gradients that the second half of a backward pass computes


class Prepare(Protocol):
    """Is called before each pass of a chunk of layers, except for the second half of a backward pass."""

    def __call__(self, chunk: int, *, backward: bool) -> None: ...


class Work(NamedTuple):
    """What is computed in one run of a schedule. loss: (outputs, target) -> a scalar to back-propagate; None in
    inference, which calls `finish` instead, if there is one. splits: whether the schedule divides backward passes."""

    micro_batches: Sequence[tuple[Sequence[Any], dict[str, Any], Any]]
    compute: Compute
    loss: Callable[[Any, Any], Tensor] | None = None
    finish: Callable[[Any, Any], Any] | None = None
    prepare: Prepare | None = None
    splits: bool = False


class Executor:
    """The passes and messages of one rank. `chunks`: chunks of layers on each rank."""

    def __init__(self, pipe: Ranks, device: torch.device, chunks: int = 1) -> None:
        self._pipe, self._chunks = pipe, chunks
        self._mail = Mail(pipe, device) if pipe.size > 1 else None
        self._last = pipe.size * chunks - 1

    def run(self, steps: Iterable[Sequence[PipeInstruction]], work: Work) -> list[Any]:
        """Runs the instructions of a schedule, except for those about reductions and the optimizer.

        Returns on the last stage, for each micro batch, the loss (detached), or in inference the model's outputs; []
        elsewhere. If a pass fails, raises its error here, and LostRankError on the other stages.
        """
        if self._mail is not None:
            self._mail.begin(len(work.micro_batches))
        pass_ = _Passes(self._pipe, self._chunks, self._mail, work)
        try:
            for step in steps:
                for instruction in step:
                    pass_.run(instruction)
            if self._mail is not None:
                self._mail.finish()
        except BaseException as error:
            if self._mail is not None:
                self._mail.fail(error, self._list_edges())
            raise
        return pass_.results

    def fail(self, error: BaseException) -> None:
        """Tells the neighbours that this stage has failed before its first pass."""
        if self._mail is not None:
            self._mail.begin(0)
            self._mail.fail(error, self._list_edges())

    def _list_edges(self) -> list[Edge]:
        """All edges along which this rank sends."""
        found = []
        for chunk in range(self._chunks):
            for instruction in (SendActivation(0, chunk=chunk), SendGrad(0, chunk=chunk)):
                peer = find_peer(instruction, self._pipe.rank, self._pipe.size, self._chunks)
                if peer is not None:
                    found.append(Edge(peer[0], isinstance(instruction, SendActivation), peer[1]))
        return found


class _Passes:
    """One run of a schedule. results: see `Executor.run`."""

    def __init__(self, pipe: Ranks, chunks: int, mail: Mail | None, work: Work) -> None:
        self._pipe, self._chunks, self._mail, self._work = pipe, chunks, mail, work
        self._slots: dict[tuple[int, int], _Slot] = {}
        self._counts: Counter[tuple[type, int]] = Counter()
        self._last = pipe.size * chunks - 1
        self.results: list[Any] = []

    def run(self, instruction: PipeInstruction) -> None:
        """Runs one instruction. Unknown ones, and those about optimizer and reductions, do nothing."""
        if not isinstance(instruction, BufferOpInstruction):
            return
        place = (instruction.chunk, instruction.buffer_id)
        act = _ACTIONS.get(type(instruction))
        if act is None:
            return
        starts = isinstance(instruction, (LoadMicroBatch, RecvActivation))
        if starts:
            self._start(instruction, place)
        slot = self._slots.get(place)
        if slot is None:
            raise UsageError(f"{instruction} comes before anything was put into the buffer")
        act(self, instruction, slot)
        if self._mail is not None:
            self._mail.progress()

    def _start(self, instruction: BufferOpInstruction, place: tuple[int, int]) -> None:
        """Puts the next micro batch into a buffer. Where one is both loaded and received, both are the same one."""
        key = (type(instruction), instruction.chunk)
        micro, slot = self._counts[key], self._slots.get(place)
        self._counts[key] += 1
        if micro >= len(self._work.micro_batches):
            raise UsageError(f"{instruction}: there are only {len(self._work.micro_batches)} micro batches")
        if slot is None or slot.micro != micro:
            self._slots[place] = _Slot(micro)

    def _peer(self, instruction: BufferOpInstruction) -> tuple[int, int]:
        found = find_peer(instruction, self._pipe.rank, self._pipe.size, self._chunks)
        if found is None or self._mail is None:
            raise UsageError(f"{instruction} on stage {self._pipe.rank}: there is no such neighbour")
        return found

    def _load(self, instruction: BufferOpInstruction, slot: _Slot) -> None:
        pass  # micro batches were read before the pass

    def _receive_activation(self, instruction: BufferOpInstruction, slot: _Slot) -> None:
        peer, _ = self._peer(instruction)
        assert self._mail is not None
        slot.message = self._mail.expect(Edge(peer, True, instruction.chunk), slot.micro)

    def _receive_gradient(self, instruction: BufferOpInstruction, slot: _Slot) -> None:
        peer, _ = self._peer(instruction)
        assert self._mail is not None
        slot.gradients = self._mail.expect(Edge(peer, False, instruction.chunk), slot.micro)

    def _send_activation(self, instruction: BufferOpInstruction, slot: _Slot) -> None:
        peer, chunk = self._peer(instruction)
        assert self._mail is not None
        self._mail.send(Edge(peer, True, chunk), slot.micro, slot.outputs)
        if not torch.is_grad_enabled():
            slot.outputs = None

    def _send_gradient(self, instruction: BufferOpInstruction, slot: _Slot) -> None:
        peer, chunk = self._peer(instruction)
        assert self._mail is not None
        wanted = [tensor for tensor in list_tensors(slot.received) if tensor.requires_grad]
        self._mail.send(Edge(peer, False, chunk), slot.micro, [tensor.grad for tensor in wanted])
        slot.received = None

    def _forward(self, instruction: BufferOpInstruction, slot: _Slot) -> None:
        args, kwargs, target = self._work.micro_batches[slot.micro]
        if slot.message is not None:
            assert self._mail is not None
            slot.received, slot.message = self._mail.take(slot.message), None
        self._prepare(instruction, backward=False)
        # The gradients of what was received are sent back; the first layer may change it in place.
        received = alias(slot.received, lambda tensor: tensor.requires_grad)
        inputs = Inputs(args, kwargs, received, slot.micro)
        with slot.later.deferring() if self._work.splits else nullcontext():
            outputs = self._work.compute(instruction.chunk, inputs)
        if instruction.chunk * self._pipe.size + self._pipe.rank != self._last:
            slot.outputs = outputs
        elif self._work.loss is None:
            finish = self._work.finish
            self.results.append(finish(outputs, target) if finish is not None else outputs)
        else:
            slot.outputs = self._work.loss(outputs, target)
            self.results.append(slot.outputs.detach())

    def _prepare(self, instruction: BufferOpInstruction, *, backward: bool) -> None:
        if self._work.prepare is not None:
            self._work.prepare(instruction.chunk, backward=backward)

    def _take_gradients(self, slot: _Slot) -> tuple[list[Tensor], list[Tensor | None]]:
        """The outputs to start a backward pass from, and their gradients (None: 1, for a loss)."""
        outputs, slot.outputs = slot.outputs, None
        if slot.gradients is None:
            return [outputs], [None]
        assert self._mail is not None
        given, slot.gradients = self._mail.take(slot.gradients), None
        wanted = [tensor for tensor in list_tensors(outputs) if tensor.requires_grad]
        if len(wanted) != len(given):
            raise UsageError(f"the next stage sent {len(given)} gradients for {len(wanted)} tensors")
        pairs = [(tensor, gradient) for tensor, gradient in zip(wanted, given, strict=True) if gradient is not None]
        return [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]

    def _backward(self, instruction: BufferOpInstruction, slot: _Slot) -> None:
        self._backward_input(instruction, slot)
        self._backward_weight(instruction, slot)

    def _backward_input(self, instruction: BufferOpInstruction, slot: _Slot) -> None:
        outputs, gradients = self._take_gradients(slot)
        self._prepare(instruction, backward=True)
        with slot.later.deferring() if self._work.splits else nullcontext():
            if outputs:
                torch.autograd.backward(outputs, gradients)

    def _backward_weight(self, instruction: BufferOpInstruction, slot: _Slot) -> None:
        slot.later.run()


_ACTIONS: dict[type, Callable[[_Passes, Any, _Slot], None]] = {
    LoadMicroBatch: _Passes._load,
    RecvActivation: _Passes._receive_activation,
    RecvGrad: _Passes._receive_gradient,
    SendActivation: _Passes._send_activation,
    SendGrad: _Passes._send_gradient,
    ForwardPass: _Passes._forward,
    BackwardPass: _Passes._backward,
    BackwardInputPass: _Passes._backward_input,
    BackwardWeightPass: _Passes._backward_weight,
}
