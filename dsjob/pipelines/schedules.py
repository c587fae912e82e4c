"""DeepSpeed's schedules: generators of instructions, from which programs derive schedules of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from dsjob.errors import UsageError
from dsjob.pipelines.instructions import (
    BackwardPass,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)

Step = list[PipeInstruction]


class PipeSchedule(ABC):
    """The instructions of one stage for one batch, in steps between which all stages could wait for one another.

    micro_batches: of the batch. stages: ranks along the pipeline. stage_id: this one's number. Raises UsageError.
    """

    chunks = 1  # chunks of layers on each rank

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        if micro_batches < 1 or not 0 <= stage_id < stages:
            raise UsageError(f"a schedule of {micro_batches} micro batches for stage {stage_id} of {stages}")
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[Step]:
        """Yields the instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """The number of buffers that the instructions use."""
        return self.micro_batches

    def __iter__(self) -> Iterator[Step]:
        return self.steps()

    @property
    def stage(self) -> int:
        """The number of this stage."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """The number of micro batches."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """Whether this stage has no previous one."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this stage has no next one."""
        return self.stage_id == self.stages - 1

    def is_micro_batch(self, number: int) -> bool:
        """Whether there is a micro batch with this number."""
        return 0 <= number < self.micro_batches


class TrainSchedule(PipeSchedule):
    """1F1B: a stage alternates between forward and backward passes, so that it holds few micro batches.

    Stage s takes micro batch m forward in step 2m + s, and backward in step 2m + 2 * stages - 1 - s. What a step has
    computed is sent in the next.
    """

    def num_pipe_buffers(self) -> int:
        """As many as the distance to the end of the pipeline, but at least 2."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def steps(self) -> Iterator[Step]:
        last = 2 * (self.micro_batches + self.stages - 1) - 1
        for number in range(last + 1):
            yield self._make_step(number) + (
                [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()] if number == last else []
            )

    def _make_step(self, number: int) -> Step:
        forward, backward = self._find(number, forward=True), self._find(number, forward=False)
        if (number - self.stage_id) % 2 == 0:
            sent = self._find(number - 1, forward=False)
            found: Step = [] if sent is None or self.is_first_stage else [SendGrad(self._place(sent))]
            if forward is not None:
                buffer = self._place(forward)
                found += [] if self.is_first_stage else [RecvActivation(buffer)]
                found += [LoadMicroBatch(buffer)] if self.is_first_stage or self.is_last_stage else []
                found.append(ForwardPass(buffer))
            return found
        sent, between = self._find(number - 1, forward=True), not self.is_last_stage
        found = [RecvGrad(self._place(backward))] if backward is not None and between else []
        found += [SendActivation(self._place(sent))] if sent is not None and between else []
        return found + ([BackwardPass(self._place(backward))] if backward is not None else [])

    def _find(self, step: int, *, forward: bool) -> int | None:
        """The micro batch whose pass is in a step; None if there is none."""
        first = self.stage_id if forward else 2 * self.stages - 1 - self.stage_id
        number, rest = divmod(step - first, 2)
        return number if rest == 0 and self.is_micro_batch(number) else None

    def _place(self, micro_batch: int) -> int:
        return micro_batch % self.num_pipe_buffers()


class InferenceSchedule(PipeSchedule):
    """Forward passes alone. Stage s takes micro batch m in step m + s; what a step has computed is sent in the next."""

    def num_pipe_buffers(self) -> int:
        """Two: one is computed while the other one is sent."""
        return 2

    def steps(self) -> Iterator[Step]:
        for number in range(self.micro_batches + self.stages - 1):
            own, sent = number - self.stage_id, number - self.stage_id - 1
            # Buffers alternate by step, and neighbours have opposite ones.
            buffer, other = (number + self.stage_id) % 2, (number + self.stage_id + 1) % 2
            found: Step = []
            if self.is_micro_batch(own) and (self.is_first_stage or self.is_last_stage):
                found.append(LoadMicroBatch(buffer))
            messages: Step = []
            if self.is_micro_batch(sent) and not self.is_last_stage:
                messages.append(SendActivation(other))
            if self.is_micro_batch(own) and not self.is_first_stage:
                messages.append(RecvActivation(buffer))
            # Stages with an even number send first, and the others receive first: nobody waits in a circle.
            found += messages if self.stage_id % 2 == 0 else messages[::-1]
            yield found + ([ForwardPass(buffer)] if self.is_micro_batch(own) else [])


class DataParallelSchedule(PipeSchedule):
    """One micro batch after the other, forward and backward, as without a pipeline."""

    def num_pipe_buffers(self) -> int:
        """One."""
        return 1

    def steps(self) -> Iterator[Step]:
        for number in range(self.micro_batches):
            ends = [ReduceGrads(), OptimizerStep()] if number == self.micro_batches - 1 else []
            yield [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0), *ends]
