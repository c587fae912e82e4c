"""The instructions of schedules: against the manual's, DeepSpeed's and PyTorch's; and what they cost."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

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
from dsjob.pipelines.orders import SCHEDULES, OrderedSchedule
from dsjob.pipelines.schedules import DataParallelSchedule, InferenceSchedule, PipeSchedule, TrainSchedule
from dsjob.pipelines.timeline import require_pairs, require_sound, simulate


def flatten(schedule: PipeSchedule) -> list[PipeInstruction]:
    return [instruction for step in schedule for instruction in step]


def make_all(name: str, micro: int, ranks: int, chunks: int = 1) -> list[OrderedSchedule]:
    return [SCHEDULES[name](micro, ranks, rank, chunks) for rank in range(ranks)]


def test_the_first_stage_of_two_trains_three_micro_batches() -> None:
    assert list(TrainSchedule(3, 2, 0)) == [
        [LoadMicroBatch(0), ForwardPass(0)],
        [SendActivation(0)],
        [LoadMicroBatch(1), ForwardPass(1)],
        [RecvGrad(0), SendActivation(1), BackwardPass(0)],
        [LoadMicroBatch(0), ForwardPass(0)],
        [RecvGrad(1), SendActivation(0), BackwardPass(1)],
        [],
        [RecvGrad(0), BackwardPass(0), ReduceTiedGrads(), ReduceGrads(), OptimizerStep()],
    ]


def test_the_manuals_data_parallel_schedule() -> None:
    steps = [[LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)] for _ in range(3)]
    steps[-1] += [ReduceGrads(), OptimizerStep()]
    schedule = DataParallelSchedule(3, 1, 0)
    assert list(schedule) == steps
    assert (schedule.num_pipe_buffers(), schedule.num_micro_batches, schedule.num_stages) == (1, 3, 1)


def test_the_streams_are_those_of_deepspeed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from deepspeed.runtime.pipe import schedule as theirs
    for own, micro, stages in product((TrainSchedule, InferenceSchedule), (1, 2, 3, 5, 8), (1, 2, 3, 4)):
        for stage in range(stages):
            expected = getattr(theirs, own.__name__)(micro, stages, stage)
            schedule = own(micro, stages, stage)
            assert list(map(repr, schedule)) == list(map(repr, expected))
            assert schedule.num_pipe_buffers() == expected.num_pipe_buffers()


SIZES = [(1, 2, 1), (3, 2, 1), (8, 4, 1), (2, 4, 1), (5, 3, 1), (4, 2, 2), (8, 4, 2), (6, 2, 3), (1, 2, 2), (3, 4, 2)]


_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def ask_torch(name: str, micro: int, ranks: int, chunks: int) -> dict[int, list[Any]]:
    """The order of passes that torch gives each rank."""
    from torch.distributed.pipelining import schedules

    kinds = {
        "gpipe": schedules.ScheduleGPipe,
        "1f1b": schedules.Schedule1F1B,
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    }
    found = {}
    for rank in range(ranks):
        stages = [
            SimpleNamespace(
                num_stages=ranks * chunks, group_size=ranks, group_rank=rank, stage_index=chunk * ranks + rank,
                stage_index_to_group_rank={n: n % ranks for n in range(ranks * chunks)}, is_first=False, is_last=False,
                submod=None, has_backward=True, device="cpu", group=None,
            )
            for chunk in range(chunks)
        ]  # fmt: skip
        single = name in ("gpipe", "1f1b")
        made: Any = kinds[name](stages[0] if single else stages, micro)
        order = made._get_pipeline_order() if single else made.pipeline_order
        found[rank] = [
            (_KINDS[each.computation_type.name], each.stage_index // ranks, each.microbatch_index)
            for each in order[rank]
            if each is not None and each.computation_type.name in _KINDS
        ]
    return found


def split_again(passes: Any, name: str) -> Iterator[tuple[str, int, int]]:
    """The passes as torch lists them, before it merges the halves of a backward pass."""
    for kind, chunk, micro in passes:
        yield from [(half, chunk, micro) for half in ("IW" if kind == "B" and name == "zero-bubble" else kind)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_orders_are_those_of_pytorch(name: str) -> None:
    for micro, ranks, chunks in SIZES:
        if chunks > 1 and name in ("gpipe", "1f1b"):
            continue
        if name == "1f1b" and micro < ranks:
            continue  # torch requires as many micro batches as stages
        expected = ask_torch(name, micro, ranks, chunks)
        if name == "1f1b":  # torch 2.13 numbers the forward passes of the last stage from 1 in what it lists
            expected[ranks - 1] = [(kind, chunk, n - (kind == "F")) for kind, chunk, n in expected[ranks - 1]]
        for rank in range(ranks):
            own = SCHEDULES[name].order(micro, ranks, rank, chunks)
            assert list(split_again(own, name)) == expected[rank], (micro, ranks, chunks, rank)


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_fit_together(name: str) -> None:
    for micro, ranks, chunks in SIZES:
        if chunks == 1 or name in ("interleaved", "zero-bubble"):
            schedules = make_all(name, micro, ranks, chunks)
            require_sound(list(map(flatten, schedules)), chunks, micro, name)
            steps = [list(schedule) for schedule in schedules]
            assert len({len(each) for each in steps}) == 1
            # Between two steps, all stages could wait for one another: what is sent in a step is received in it.
            for number in range(len(steps[0])):
                passes = [[i for i in each[number] if "Pass" not in i.name] for each in steps]
                require_pairs(passes, chunks, name)
            for schedule in schedules:
                held = {i.buffer_id for i in flatten(schedule) if hasattr(i, "buffer_id")}
                assert max(held) < schedule.num_pipe_buffers()


@pytest.mark.parametrize("kind", [TrainSchedule, InferenceSchedule])
def test_deepspeeds_schedules_fit_together(kind: type[PipeSchedule]) -> None:
    for micro, stages in product((1, 3, 4), (1, 2, 3, 4)):
        require_sound([flatten(kind(micro, stages, stage)) for stage in range(stages)], 1, micro, kind.__name__)


@pytest.mark.parametrize(("ranks", "micro"), [(2, 4), (4, 8), (4, 4), (3, 9)])
def test_the_bubble_is_that_of_the_formula(ranks: int, micro: int) -> None:
    """(stages - 1) / (micro batches + stages - 1); less with chunks, and with the gradients of weights apart."""
    expected = (ranks - 1) / (micro + ranks - 1)
    for name in ("gpipe", "1f1b"):
        assert simulate([flatten(each) for each in make_all(name, micro, ranks)]).bubble == pytest.approx(expected)
    streams = [flatten(TrainSchedule(micro, ranks, rank)) for rank in range(ranks)]
    assert simulate(streams).bubble == pytest.approx(expected)
    interleaved = simulate([flatten(each) for each in make_all("interleaved", micro, ranks, 2)], 2)
    assert interleaved.bubble == pytest.approx((ranks - 1) / (2 * micro + ranks - 1))
    # ZB1P: a third of the bubble is left, where there are enough micro batches.
    zero = simulate([flatten(each) for each in make_all("zero-bubble", micro, ranks)])
    assert zero.bubble == pytest.approx((ranks - 1) / (3 * micro + ranks - 1))


class Crossed(PipeSchedule):
    """Both stages send first."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        if self.is_first_stage:
            yield [LoadMicroBatch(0), ForwardPass(0), SendActivation(0), BackwardPass(0), RecvGrad(0)]
        else:
            yield [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0), SendGrad(0), RecvActivation(0)]


class Short(PipeSchedule):
    """Forgets a micro batch."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        yield [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]


def test_schedules_that_cannot_run_are_refused() -> None:
    streams = [flatten(Crossed(1, 2, stage)) for stage in range(2)]
    with pytest.raises(UsageError, match=r"stage 0 in SendActivation\(buffer_id=0\), stage 1 in SendGrad"):
        require_sound(streams, 1, 1, "Crossed")
    with pytest.raises(UsageError, match="stage 0 has 1 forward and 1 backward passes for 2 micro batches"):
        require_sound([flatten(Short(2, 1, 0))], 1, 2, "Short")
    alone = [flatten(DataParallelSchedule(4, 2, stage)) for stage in range(2)]
    with pytest.raises(UsageError, match="stage 0 has 4 backward passes, but 0 RecvGrad"):
        require_sound(alone, 1, 4, "DataParallelSchedule")
    forward = [[each for each in stream if isinstance(each, ForwardPass)] for stream in alone]
    with pytest.raises(UsageError, match="stage 1 has 4 forward passes, but 0 RecvActivation"):
        require_sound(forward, 1, 4, "Forward")
    require_sound(alone[:1], 1, 4, "DataParallelSchedule")
    with pytest.raises(UsageError, match="5 micro batches do not divide into 2 rounds on 2 stages with 2 chunks"):
        SCHEDULES["interleaved"](5, 2, 0, 2)
    with pytest.raises(UsageError, match="stage 2 of 2"):
        TrainSchedule(4, 2, 2)
