"""AlexNet as layers, in a pipeline. Written for DeepSpeed: `deepspeed pipe_alexnet.py --stages 2`."""

import argparse
import json

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.utils import RepeatingLoader
from torch import nn


class AlexNet(nn.Module):
    """The network of Krizhevsky et al. (2012) in its one-column form, for images of 63 pixels or more."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(width, 3 * width, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(3 * width, 6 * width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(6 * width, 4 * width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * width, 4 * width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            nn.Dropout(0.0),  # random numbers would depend on the number of stages
            nn.Linear(4 * width * 36, 64 * width),
            nn.ReLU(inplace=True),
            nn.Dropout(0.0),
            nn.Linear(64 * width, 64 * width),
            nn.ReLU(inplace=True),
            nn.Linear(64 * width, classes),
        )
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.kaiming_normal_(parameter)

    def to_layers(self) -> list:
        return [*self.features, self.avgpool, lambda x: torch.flatten(x, 1), *self.classifier]


class Images(torch.utils.data.Dataset):
    """Ten colours, in noise."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.arange(40) % 10
        colours = torch.randn(10, 3, 1, 1, generator=generator)
        self.images = colours[self.labels] + 0.3 * torch.randn(40, 3, size, size, generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple:
        return self.images[index], self.labels[index]


parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--stages", type=int, default=2)
parser.add_argument("--clip", type=float, default=1.0)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--size", type=int, default=64)
parser.add_argument("--out", default="losses.json")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
net = PipelineModule(
    layers=AlexNet(10, args.width).to_layers(),
    loss_fn=nn.CrossEntropyLoss(),
    num_stages=args.stages,
    partition_method="parameters",
    activation_checkpoint_interval=0,
)
config = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.02}},
    "gradient_clipping": args.clip,
    "steps_per_print": 1000,
}
engine, _, _, _ = deepspeed.initialize(
    args=args, model=net, model_parameters=[p for p in net.parameters() if p.requires_grad], config=config
)
engine.set_dataiterator(iter(RepeatingLoader(torch.utils.data.DataLoader(Images(args.size), batch_size=4))))
losses = [float(engine.train_batch()) for _ in range(args.steps)]
if engine.is_last_stage():
    with open(args.out, "w") as file:
        json.dump(losses, file)
