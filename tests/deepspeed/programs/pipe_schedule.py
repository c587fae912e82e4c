"""Trains by schedules of its own, written as the manual describes them."""

import argparse
import json

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe import schedule
from torch import nn


class OneAfterTheOther(schedule.PipeSchedule):
    """The manual's example of data parallelism with gradient accumulation, for one stage."""

    def num_pipe_buffers(self) -> int:
        return 1

    def steps(self):
        for number in range(self.micro_batches):
            commands = [schedule.LoadMicroBatch(buffer_id=0), schedule.ForwardPass(buffer_id=0)]
            commands.append(schedule.BackwardPass(buffer_id=0))
            if number == self.micro_batches - 1:
                commands += [schedule.ReduceGrads(), schedule.OptimizerStep()]
            yield commands


class InPairs(schedule.PipeSchedule):
    """Two micro batches forward, the same two backward, and so on: a stage holds two, whatever the batch."""

    def num_pipe_buffers(self) -> int:
        return 2

    def steps(self):
        for first in range(0, self.micro_batches, 2):
            pair = range(min(2, self.micro_batches - first))
            for buffer in pair:
                commands = []
                if not self.is_first_stage:
                    commands.append(schedule.RecvActivation(buffer_id=buffer))
                if self.is_first_stage or self.is_last_stage:
                    commands.append(schedule.LoadMicroBatch(buffer_id=buffer))
                commands.append(schedule.ForwardPass(buffer_id=buffer))
                if not self.is_last_stage:
                    commands.append(schedule.SendActivation(buffer_id=buffer))
                yield commands
            for buffer in pair:
                commands = [] if self.is_last_stage else [schedule.RecvGrad(buffer_id=buffer)]
                commands.append(schedule.BackwardPass(buffer_id=buffer))
                if not self.is_first_stage:
                    commands.append(schedule.SendGrad(buffer_id=buffer))
                yield commands
        yield [schedule.ReduceTiedGrads(), schedule.ReduceGrads(), schedule.OptimizerStep()]


parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--stages", type=int, default=2)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--own", choices=["none", "pairs", "manual"], default="pairs")
parser.add_argument("--out", default="losses.json")
args = parser.parse_args()

deepspeed.init_distributed(dist_backend="gloo")
layers = [layer for _ in range(4) for layer in (LayerSpec(nn.Linear, 8, 8), LayerSpec(nn.Tanh))]
model = PipelineModule(layers, num_stages=args.stages, loss_fn=nn.MSELoss(), seed_layers=True)
config = {
    "train_batch_size": 20,
    "train_micro_batch_size_per_gpu": 4 // (torch.distributed.get_world_size() // args.stages),
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "steps_per_print": 1000,
}
engine, _, _, _ = deepspeed.initialize(model=model, config=config)
if args.own != "none":
    engine.set_train_schedule({"pairs": InPairs, "manual": OneAfterTheOther}[args.own])
generator, ways = torch.Generator().manual_seed(1), torch.distributed.get_world_size() // args.stages


def read():
    while True:
        rows = torch.randn(4, 8, generator=generator)
        own = rows.chunk(ways)[torch.distributed.get_rank() % ways]
        yield own, own.roll(1, 1).tanh()


data = read()
losses = [float(engine.train_batch(data)) for _ in range(args.steps)]
if engine.is_last_stage() and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
    with open(args.out, "w") as file:
        json.dump(losses, file)
