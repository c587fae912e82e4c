"""Trains a small residual network with batch norms on made images: accelerate, OneCycleLR, a frozen first layer."""

import argparse
import json

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, images: Tensor) -> Tensor:
        return images + torch.relu(self.norm(self.conv(images)))


class Network(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stem(images)
        for block in self.blocks:
            features = block(features)
        return self.head(features.mean((2, 3)))


def make_images(count: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=draw)
    shades = labels[:, None, None, None] / 4 + torch.rand(count, 3, 8, 8, generator=draw)
    return TensorDataset(shades, labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument(
        "--checkpoints", action="store_true", help="save after each epoch, and load the first at the end"
    )
    args = parser.parse_args()
    plugin = DeepSpeedPlugin(zero_stage=args.stage, gradient_accumulation_steps=1, gradient_clipping=1.0)
    groups = InitProcessGroupKwargs(backend=None if torch.cuda.is_available() else "gloo")
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[groups])
    set_seed(3)
    train = DataLoader(make_images(72, seed=1), shuffle=True, batch_size=6)
    held_out = DataLoader(make_images(20, seed=2), batch_size=6)
    model = Network(8, 4)
    model.stem.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02 / 25)
    schedule = OneCycleLR(optimizer, max_lr=0.02, epochs=2, steps_per_epoch=len(train))
    model, optimizer, train, held_out, schedule = accelerator.prepare(model, optimizer, train, held_out, schedule)
    mean = torch.full((1, 3, 1, 1), 0.5, device=accelerator.device)
    records: list[dict] = []
    for epoch in range(2):
        model.train()
        for images, labels in train:
            loss = nn.functional.cross_entropy(model(images - mean), labels)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            records.append({"loss": accelerator.gather(loss.detach()).tolist(), "lr": schedule.get_last_lr()})
        model.eval()
        right = seen = 0
        for images, labels in held_out:
            with torch.no_grad():
                predicted = model(images - mean).argmax(-1)
            predicted, labels = accelerator.gather_for_metrics((predicted, labels))
            right, seen = right + int((predicted == labels).sum()), seen + len(labels)
        records.append({"epoch": epoch, "right": right, "seen": seen})
        if args.checkpoints:
            accelerator.save_state(f"epoch_{epoch}")
    if accelerator.is_main_process:
        with open("records.json", "w") as file:
            json.dump(records, file)
    accelerator.end_training()


if __name__ == "__main__":
    main()
