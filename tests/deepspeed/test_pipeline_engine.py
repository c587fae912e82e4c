"""`deepspeed.pipe` as programs use it: the manual's AlexNet and tied layers, schedules of one's own, ends of data."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipelines import Block, deal, find_loss, list_specs, make_engine, train
from programs import DSJOB, run_program
from ranks import run_ranks
from torch import Tensor, nn

import dsjob.deepspeed as deepspeed
from dsjob.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec, TiledLayerSpec
from dsjob.deepspeed.runtime.pipe.engine import EndOfDataError, PipelineEngine, PipelineError
from dsjob.deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)
from dsjob.deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from dsjob.errors import DataError, LostRankError, UsageError
from dsjob.parallel.pipeline import messages
from dsjob.ranks.mesh import World


class AlexNet(nn.Module):
    """As torchvision writes it, but small: features, then a classifier."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.ReLU(),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(nn.Dropout(0.0), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, classes))

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))

    def to_layers(self) -> list[Any]:
        return [*self.features, self.avgpool, lambda x: torch.flatten(x, 1), *self.classifier]


def make_images(step: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [
        (torch.randn(4, 3, 8, 8, generator=generator), torch.randint(3, (4,), generator=generator)) for _ in range(2)
    ]


def train_alexnet(world: World) -> list[float]:
    torch.manual_seed(0)
    net = PipelineModule(layers=AlexNet().to_layers(), loss_fn=nn.CrossEntropyLoss(), num_stages=world.everyone.size)
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    data = [sample for step in range(3) for pair in make_images(step) for sample in zip(*pair, strict=True)]
    engine, _, loader, _ = deepspeed.initialize(
        model=net, model_parameters=[p for p in net.parameters() if p.requires_grad], config=config, training_data=data
    )
    assert type(engine) is PipelineEngine
    assert engine.is_first_stage() == (engine.stage_id == 0)
    assert engine.count_parameters()[0] == sum(p.numel() for p in AlexNet().parameters())  # on each stage
    given = iter([pair for step in range(3) for pair in make_images(step)])
    losses = [float(engine.train_batch(data_iter=given)) for _ in range(3)]
    assert torch.equal(next(iter(loader))[0], make_images(0)[0][0])  # in order, as in DeepSpeed
    engine.set_dataloader(loader)
    return [*losses, *(float(engine.train_batch()) for _ in range(4))]


def test_alexnet_as_layers() -> None:
    """In a program, and against plain PyTorch."""
    first, second = run_ranks(train_alexnet, 2)
    assert first == second
    (alone,) = run_ranks(train_alexnet, 1)
    assert first == pytest.approx(alone, rel=1e-6)
    torch.manual_seed(0)
    net = AlexNet()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(3):
        losses = [nn.functional.cross_entropy(net(images), labels) for images, labels in make_images(step)]
        mean = torch.stack(losses).mean()
        assert first[step] == pytest.approx(float(mean.detach()), rel=1e-5)
        mean.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def begin_in_place(world: World) -> list[float]:
    layers = [LayerSpec(nn.Linear, 8, 8), nn.ReLU(inplace=True), LayerSpec(nn.Linear, 8, 3)]
    stages = world.everyone.size
    engine = make_engine(world, stages, layers=layers, loss_fn=nn.CrossEntropyLoss(), partition_method="uniform")
    assert stages == 1 or engine.module.parts == [0, 1, 3]
    inputs, labels = torch.randn(32, 8, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 3
    data = list(zip(inputs.chunk(4), labels.chunk(4), strict=True))
    return [float(engine.train_batch(iter(data))) for _ in range(4)]


def test_the_first_layer_of_a_stage_may_change_its_input_in_place() -> None:
    (alone,) = run_ranks(begin_in_place, 1)
    assert run_ranks(begin_in_place, 2) == [pytest.approx(alone, rel=1e-6)] * 2
    assert alone[-1] < alone[0]


class AllForwardFirst(PipeSchedule):
    """A schedule of a program's own, written with blocking messages in mind."""

    def num_pipe_buffers(self) -> int:
        return self.micro_batches

    def steps(self) -> Iterator[list[Any]]:
        first, last = self.is_first_stage, self.is_last_stage
        for number in range(self.micro_batches):
            yield [
                *([] if first else [RecvActivation(number)]),
                *([LoadMicroBatch(number)] if first or last else []),
                ForwardPass(number),
                *([] if last else [SendActivation(number)]),
            ]
        for number in reversed(range(self.micro_batches)):
            yield [
                *([] if last else [RecvGrad(number)]),
                BackwardPass(number),
                *([] if first else [SendGrad(number)]),
            ]
        yield [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]


class Backwards(AllForwardFirst):
    """Its stages disagree about the order of gradients."""

    def steps(self) -> Iterator[list[Any]]:
        steps = list(super().steps())
        if self.is_first_stage:
            steps[0] = [*steps[0], RecvGrad(0)]
        yield from steps


def use_own_schedules(world: World) -> list[Any]:
    own = train(make_engine(world, 2, schedule=AllForwardFirst), 3)
    usual = train(make_engine(world, 2), 3)
    with pytest.raises(UsageError) as found:
        train(make_engine(world, 2, schedule=Backwards), 1)
    return [own["losses"], usual["losses"], found.value.message]


def test_a_schedule_of_ones_own() -> None:
    for own, usual, refused in run_ranks(use_own_schedules, 2):
        assert own == pytest.approx(usual, rel=1e-6)
        assert refused == (
            "Backwards: the stages would wait for one another for ever: stage 0 in RecvGrad(buffer_id=0), stage 1 in"
            " RecvActivation(buffer_id=1)"
        )


def call_everything(world: World) -> dict[str, Any]:
    engine = make_engine(world, 2)
    refused = []
    for call in (engine.forward, engine, engine.backward, engine.step):
        with pytest.raises(PipelineError) as error:
            call()
        refused.append(error.value.message)
    with pytest.raises(DataError, match="train_batch has no data"):
        make_engine(world, 2).train_batch()
    pairs = deal(engine.world, engine.micro_batches, 3)
    engine.set_dataiterator(({"x": inputs, "y": labels} for inputs, labels in pairs))
    engine.set_batch_fn(lambda batch: (batch["x"], batch["y"]))
    losses = [float(engine.train_batch()) for _ in range(3)]
    engine.set_batch_fn(lambda batch: batch)
    data = list(deal(engine.world, engine.micro_batches, 1))
    loss, logits = engine.eval_batch(iter(data), return_logits=True)
    only = engine.eval_batch(iter(data), compute_loss=False)
    last = engine.is_last_stage()
    each = engine.eval_batch(iter(data), reduce_output=None)
    if last:
        assert torch.equal(logits, only)
        assert float(find_loss(logits, torch.cat([labels for _, labels in data]))) == pytest.approx(float(loss))
        assert float(each.mean()) == pytest.approx(float(loss))
    else:
        assert (logits, only, each) == (None, None, None)
    engine.grid.stage_to_global(1)
    return {
        "refused": refused,
        "losses": losses,
        "loss": float(loss),
        "place": (engine.num_stages, engine.get_pipeline_parallel_rank(), engine.grid.stage_to_global(1)),
        "bound": engine.is_gradient_accumulation_boundary(),
        "names": TiledLayerSpec is TiedLayerSpec and repr(LayerSpec(Block, 3, width=4)),
        "steps": (engine.global_steps, engine.global_samples),
    }


def test_calls_of_a_pipeline_engine() -> None:
    first, last = run_ranks(call_everything, 2)
    assert first["refused"] == [
        *["a pipeline has no forward() of its own"] * 2,
        "a pipeline has no backward() of its own",
        "a pipeline has no step() of its own",
    ]
    assert (first["losses"], first["loss"]) == (last["losses"], last["loss"])
    assert (first["place"], last["place"]) == ((2, 0, 1), (2, 1, 1))
    assert (first["bound"], first["names"], first["steps"]) == (False, "Block(3, width=4)", (3, 96))


def fail(world: World, how: str) -> tuple[str, str, float]:
    """How each of three stages learns that something is wrong on one of them."""
    messages.PATIENCE = 0.5
    rank = world.everyone.rank
    micro = {"unequal": 4 if rank == 0 else 3, "more": 4 if rank == 2 else 3}.get(how, 4)
    config = {"train_batch_size": micro * 4}
    engine = make_engine(world, 3, micro=micro, config=config)
    batches: Iterator[Any] = deal(engine.world, micro, 1, rows=micro * 4)
    if (how, rank) in {("data", 0), ("labels", 2), ("evaluated", 0)}:
        batches = iter(list(batches)[:2])
    if (how, rank) == ("list", 0):
        batches = list(batches)  # type: ignore[assignment]
    if how == "layer" and engine.stage_id == 1:
        engine.module.get_submodule("2").forward = lambda given: given[0].no_such_thing
    if how == "loss":
        engine.module.loss_fn = lambda outputs, labels: outputs[:, :2]
    started = time.monotonic()
    try:
        engine.eval_batch(batches) if how == "evaluated" else engine.train_batch(batches)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", 0.0


@pytest.mark.parametrize("how", ["data", "labels", "list", "evaluated", "layer", "loss", "unequal", "more"])
@pytest.mark.full("data", "list", "evaluated", "more")
def test_a_stage_that_fails_is_named_on_all_stages(how: str) -> None:
    found = run_ranks(fail, 3, how)
    guilty, kind, told = {
        "data": (0, "EndOfDataError", "the data ended after 2 of 4 micro batches"),
        "labels": (2, "EndOfDataError", "the data ended after 2 of 4 micro batches"),
        "list": (0, "DataError", "a pipeline reads its data from an iterator, but got list"),
        "evaluated": (0, "EndOfDataError", "the data ended after 2 of 4 micro batches"),
        "layer": (1, "AttributeError", "no_such_thing"),
        "loss": (2, "UsageError", "the loss must be a scalar tensor"),
        "more": (2, "UsageError", "stage 1 sent micro batch 1 of 3, but stage 2 expects 1 of 4"),
        "unequal": (1, "UsageError", "stage 0 sent micro batch 1 of 4, but stage 1 expects 1 of 3"),
    }[how]
    assert issubclass(EndOfDataError, StopIteration)
    for rank, (name, text, seconds) in enumerate(found):
        assert told in text
        assert name == (kind if rank == guilty else "LostRankError"), (rank, name, text)
        if rank != guilty:
            assert f"stage {guilty} of the pipeline failed" in text
        assert seconds < 20
    assert LostRankError.exit_code == 76


def end_on_both(world: World) -> tuple[str, set[str]]:
    messages.PATIENCE = 0.5
    before = set(threading.enumerate())
    engine = make_engine(world, 2, micro=4, config={"train_batch_size": 16})
    with pytest.raises(EndOfDataError) as told:
        engine.train_batch(iter(list(deal(engine.world, 4, 1, rows=16))[:2]))
    return str(told.value), {thread.name for thread in set(threading.enumerate()) - before}


def test_a_stage_whose_data_ended_leaves_no_thread_that_waits_for_its_neighbours() -> None:
    """Neither stage receives what the other tells it. A thread that waits in gloo when the interpreter exits is ended
    in the midst of C++, which aborts the process: exit code -6 in place of 1."""
    for text, threads in run_ranks(end_on_both, 2):
        assert (text.partition("\n")[0], threads) == ("the data ended after 2 of 4 micro batches", set())


def build_grid(world: World) -> tuple[Any, ...]:
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=1))
    summed = torch.tensor([world.everyone.rank])
    dist.all_reduce(summed, group=grid.get_pipe_parallel_group())
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "pipeline": {"activation_checkpoint_interval": 2},
    }
    net = PipelineModule([nn.Linear(2, 2), nn.Linear(2, 2)], num_stages=2, loss_fn=nn.MSELoss())
    engine, *_ = deepspeed.initialize(model=net, config=config)
    interval = engine.module.activation_checkpoint_interval
    engine.module.set_checkpoint_interval(0)
    engine.train_batch(iter([(torch.ones(2, 2), torch.ones(2, 2))]))
    return grid.pp_group, grid.dp_group, int(summed), interval, engine.module.activation_checkpoint_interval


def test_a_programs_own_grid_and_the_configs_interval() -> None:
    first, last = run_ranks(build_grid, 2)
    assert (first, last) == (([0, 1], [0], 1, 2, 0), ([0, 1], [1], 1, 2, 0))


def test_specs_are_listed() -> None:
    assert [type(spec).__name__ for spec in list_specs(2)] == [
        "TiedLayerSpec", "LayerSpec", "LayerSpec", "TiedLayerSpec",
    ]  # fmt: skip


PROGRAM = """
import torch
from torch import nn
import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule

deepspeed.init_distributed()
layers = [LayerSpec(nn.Linear, 4, 8), nn.ReLU(), LayerSpec(nn.Linear, 8, 1)]
net = PipelineModule(layers=layers, num_stages=2, loss_fn=nn.MSELoss(), seed_layers=True)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}
engine, *_ = deepspeed.initialize(model=net, config=config)
data = iter([(torch.ones(2, 4), torch.zeros(2, 1))] * 6)
print("losses", [round(float(engine.train_batch(data)), 6) for _ in range(3)])
"""


@pytest.mark.full
def test_a_program_runs_unmodified(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    done = run_program([DSJOB, "exec", "--nproc", "2", "train.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("outputs/*/*/metrics.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    told = json.loads(done.stdout.split("losses", 1)[1].splitlines()[0])
    assert [round(record["loss"], 6) for record in records] == told
    assert told[0] > told[-1]
