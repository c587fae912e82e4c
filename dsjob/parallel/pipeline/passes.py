"""Runs the passes of an optimizer step over the stages of a pipeline, and keeps tied layers equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsjob.errors import UsageError
from dsjob.optim.shards import local
from dsjob.parallel.pipeline.as_whole import as_whole
from dsjob.parallel.pipeline.executor import Executor, Inputs, Work
from dsjob.parallel.pipeline.layers import LayerSequence, Received
from dsjob.parallel.pipeline.stage import Stage
from dsjob.parallel.strategy import ELSEWHERE, MicroBatch, Strategy
from dsjob.pipelines.instructions import BackwardInputPass, BackwardPass, BackwardWeightPass, PipeInstruction
from dsjob.pipelines.orders import InferenceOrder
from dsjob.pipelines.schedules import PipeSchedule
from dsjob.pipelines.timeline import require_sound
from dsjob.ranks.divide import join_along
from dsjob.ranks.mesh import Ranks, World
from dsjob.ranks.mpu import mark_tied
from dsjob.ranks.watchdog import position
from dsjob.torch_private import tree_map_only

MakeSchedule = Callable[[int, int, int], PipeSchedule]  # (micro batches, stages, stage) -> its instructions
Steps = list[list[PipeInstruction]]


class StagePasses:
    """The passes of a strategy whose module is one stage of a model: `Strategy.pipeline`.

    schedule: for training. Raises UsageError for a schedule that cannot be carried out, when it is first used.
    """

    def __init__(self, stage: Stage, world: World, schedule: MakeSchedule) -> None:
        self.stage, self.world, self.schedule = stage, world, schedule
        self._executor = Executor(world.pipe, world.device, stage.chunks)
        self._plan = cache(self._make_steps)
        # By name, for parameters that this rank shares with others: the ranks that have them.
        self._tied = _form_groups(stage.owners, world)
        for name, parameter in stage.module.named_parameters():
            if stage.owners[name][0] != world.pipe.rank:
                mark_tied(parameter)
        self.sizes = (0, 0)
        if world.pipe.size > 1:
            position.stage = world.pipe.rank

    def count(self, strategy: Strategy) -> None:
        """Sets `sizes`. A collective."""
        ranks, owners = self.world.pipe, self.stage.owners
        summed = torch.tensor(strategy.count(lambda name: owners[name][0] == ranks.rank), device=self.world.device)
        if ranks.size > 1:
            dist.all_reduce(summed, group=ranks.group)
        total, trained = summed.tolist()
        self.sizes = (total, trained)

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last layers, and so the model's output."""
        return self.world.pipe.rank == self.world.pipe.size - 1

    def forward(self, strategy: Strategy, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """See `parallel.strategy.Pipeline`. Raises UsageError if gradients are enabled."""
        if torch.is_grad_enabled():
            raise UsageError(
                "a pipeline runs all micro batches of a step together, but forward() was called for one of them",
                hint="call run_step() of the engine, or train_batch() of a PipelineEngine",
            )
        return self.infer(strategy, [MicroBatch(args, kwargs)], None)[0]

    def as_whole(self, strategy: Strategy) -> nn.Module:
        """See `parallel.strategy.Pipeline`."""
        return as_whole(strategy.module, self.world, strategy.forward)

    @torch.no_grad()
    def infer(
        self, strategy: Strategy, micro_batches: Sequence[MicroBatch], finish: Callable[[Any, Any], Any] | None
    ) -> list[Any]:
        """Forward passes over micro batches: on the last stage the model's outputs, or `finish(outputs, target)` of
        them; `ELSEWHERE` on the others."""
        count = len(micro_batches)
        given = [(each.args, dict(each.kwargs), each.target) for each in micro_batches]
        ranks = self.world.pipe
        steps = InferenceOrder(count, ranks.size, ranks.rank, self.stage.chunks)
        found = self._executor.run(steps, Work(given, self._compute_with(strategy), finish=finish))
        return found if self.is_last else [ELSEWHERE] * count

    def begin_step(self, micro_steps: int) -> None:
        """See `parallel.strategy.Pipeline`."""
        layers = self.stage.module.forward
        if isinstance(layers, LayerSequence):
            layers.begin_step(micro_steps)

    def run_step(
        self, strategy: Strategy, micro_batches: Sequence[MicroBatch], loss: Callable[[Any, Any], Tensor]
    ) -> list[Tensor]:
        """See `Strategy.run_step`."""
        count = len(micro_batches)
        steps, splits = self._plan(count)
        left = [count] * self.stage.chunks  # backward passes, by chunk

        def prepare(chunk: int, *, backward: bool) -> None:
            left[chunk] -= backward
            # FSDP2 reads whether to reduce in the backward pass. Halves of backward passes are too early for that:
            # `reduce_gradients` does it.
            strategy.start_micro_step(backward and not left[chunk] and not splits)

        work = Work(
            [(each.args, dict(each.kwargs), each.target) for each in micro_batches],
            self._compute_with(strategy),
            loss,
            prepare=prepare,
            splits=splits,
        )
        with self._drawing_apart():
            losses = self._executor.run(steps, work)
        return list(self.share(losses, count))

    def use_schedule(self, schedule: MakeSchedule) -> None:
        """Trains by another schedule from now on."""
        self.schedule = schedule
        self._plan = cache(self._make_steps)

    def fail(self, error: BaseException) -> None:
        """Tells the other stages that this one cannot begin its next step."""
        self._executor.fail(error)

    def _compute_with(self, strategy: Strategy) -> Callable[[int, Inputs], Any]:
        first, takes_batch = self.world.pipe.rank == 0, self.stage.takes_batch

        def compute(chunk: int, inputs: Inputs) -> Any:
            begins = first and chunk == 0
            own = {} if begins else {"pipe_received": Received(inputs.received)}
            args, kwargs = (inputs.args, inputs.kwargs) if begins or takes_batch else ((), {})
            if takes_batch and chunk < self.stage.chunks - 1:  # the next chunk gets it as it was
                args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
            return strategy.compute(*args, **kwargs, **own, pipe_chunk=chunk)

        return compute

    def _make_steps(self, count: int) -> tuple[Steps, bool]:
        """The instructions of this stage, and whether they divide backward passes."""
        ranks = self.world.pipe
        made = [self.schedule(count, ranks.size, rank) for rank in range(ranks.size)]
        name = type(made[0]).__name__
        listed = [[list(step) for step in each] for each in made]
        streams = [[instruction for step in steps for instruction in step] for steps in listed]
        require_sound(streams, self.stage.chunks, count, name)
        kinds = {type(instruction) for stream in streams for instruction in stream}
        if not kinds & {BackwardPass, BackwardInputPass}:
            raise UsageError(f"{name} has no backward passes", hint="a schedule for training needs BackwardPass")
        return listed[ranks.rank], BackwardWeightPass in kinds

    @contextmanager
    def _drawing_apart(self) -> Iterator[None]:
        """Draws the random numbers of the passes from a seed of this stage. Afterwards, the generators of all stages
        are equal again: whatever else draws, such as a transform of the data, does the same on all of them."""
        if self.world.pipe.size == 1:
            yield
            return
        seed = int(torch.randint(2**62, (1,)))
        with torch.random.fork_rng([self.world.device] if self.world.device.type == "cuda" else []):
            torch.manual_seed(seed + self.world.pipe.rank)
            yield

    def share(self, losses: Sequence[Tensor], count: int) -> Tensor:
        """The scalars of `count` micro batches, which the last stage has, on all stages: fp32 [count]."""
        ranks = self.world.pipe
        together = torch.stack(list(losses)).float() if self.is_last else torch.empty(count, device=self.world.device)
        if ranks.size > 1:
            dist.broadcast(together, group=ranks.group, group_src=ranks.size - 1)
        return together

    @torch.no_grad()
    def add_tied_gradients(self, masters: Mapping[str, nn.Parameter]) -> None:
        """See `parallel.strategy.Pipeline`. A gradient that a stage lacks counts as zero."""
        for name, ranks in self._tied.items():
            master = masters.get(name)
            if master is None:
                continue
            if master.grad is None:
                master.grad = torch.zeros_like(master.data)
            own = local(master.grad)
            sent = own.to(self.world.device)
            dist.all_reduce(sent, group=ranks.group)
            if sent.data_ptr() != own.data_ptr():
                own.copy_(sent)

    @torch.no_grad()
    def align_tied(self, weights: Mapping[str, Tensor]) -> None:
        """Gives parameters that several stages have the values of the first of these stages. A collective."""
        for name, ranks in self._tied.items():
            own = local(weights[name])
            sent = own.to(self.world.device)
            dist.broadcast(sent, group=ranks.group, group_src=0)
            if sent.data_ptr() != own.data_ptr():
                own.copy_(sent)


def _form_groups(owners: Mapping[str, tuple[int, ...]], world: World) -> dict[str, Ranks]:
    """The ranks that have each parameter of this rank that other stages have too. A collective if there are any."""
    shared = {name: ranks for name, ranks in owners.items() if len(ranks) > 1}
    groups = {ranks: join_along(world, "pipe", ranks) for ranks in dict.fromkeys(shared.values())}
    return {name: groups[ranks] for name, ranks in shared.items() if world.pipe.rank in ranks}
