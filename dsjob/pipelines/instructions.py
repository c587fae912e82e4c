"""What a stage of a pipeline can be told to do, in DeepSpeed's words.

A stage holds micro batches in numbered buffers. With several chunks of layers on each rank, instructions on buffers
also have a `chunk`; without it, they are about the first.
"""

from __future__ import annotations

from typing import Any


class PipeInstruction:
    """One instruction. All keyword arguments become attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name, self.kwargs = type(self).__name__, kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PipeInstruction) and (type(self), self.kwargs) == (type(other), other.kwargs)

    def __hash__(self) -> int:
        return hash((self.name, tuple(sorted(self.kwargs.items()))))


class OptimizerStep(PipeInstruction):
    """Steps the optimizer and drops the gradients. Comes after the reductions."""


class ReduceGrads(PipeInstruction):
    """Reduces gradients over the data-parallel ranks of the stage."""


class ReduceTiedGrads(PipeInstruction):
    """Adds up the gradients of tied layers over the stages that have them."""


class BufferOpInstruction(PipeInstruction):
    """An instruction on a buffer. buffer_id: its number. chunk: which of the rank's chunks of layers."""

    buffer_id: int
    chunk: int = 0

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Puts the next micro batch of the data into the buffer."""


class ForwardPass(BufferOpInstruction):
    """Computes the outputs from the inputs in the buffer; on the last stage, also the loss."""


class BackwardPass(BufferOpInstruction):
    """Computes the gradients of the inputs, and adds to those of the parameters."""


class BackwardInputPass(BufferOpInstruction):
    """The first half of `BackwardPass`: computes the gradients of the inputs, which the previous stage waits for."""


class BackwardWeightPass(BufferOpInstruction):
    """The second half of `BackwardPass`: adds to the gradients of the parameters, for which nobody waits."""


class SendActivation(BufferOpInstruction):
    """Sends the outputs in the buffer to the next stage, which must receive them with RecvActivation."""


class RecvActivation(BufferOpInstruction):
    """Receives the inputs of the buffer from the previous stage."""


class SendGrad(BufferOpInstruction):
    """Sends the gradients of the inputs in the buffer to the previous stage, which must receive them with RecvGrad.

    Inputs that need no gradient have none.
    """


class RecvGrad(BufferOpInstruction):
    """Receives the gradients of the outputs in the buffer from the next stage."""
