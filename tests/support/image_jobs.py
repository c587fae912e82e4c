"""Jobs over models of images that know no loss, from whatever library; and the same by hand."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import token_jobs
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsjob.contract.spec import make_target
from dsjob.data.order import SampleOrder
from dsjob.ranks.seeding import seed_rng
from dsjob.trust.targets import call_target

SIZE, CLASSES, STEPS, BATCH = 16, 3, token_jobs.STEPS, token_jobs.BATCH
SMALL = {"num_labels": CLASSES, "image_size": SIZE, "patch_size": 8, "hidden_size": 16, "intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "blocks": {"_target_": "image_jobs.ResNet"},
    "transformers": {
        "_target_": "transformers.AutoModelForImageClassification.from_config",
        "config": {
            "_target_": "transformers.ViTConfig",
            **SMALL,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "hidden_dropout_prob": 0.0,
        },
    },
    "torchvision": {"_target_": "torchvision.models.resnet18", "num_classes": CLASSES},
    "timm": {"_target_": "timm.create_model", "model_name": "resnet10t", "num_classes": CLASSES},
}


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut, each with batch norm."""

    def __init__(self, inner: int, outer: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.bn2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.downsample = None
        if (inner, stride) != (outer, 1):
            self.downsample = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        hidden = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(hidden)) + shortcut)


class ResNet(nn.Module):
    """A residual network as torchvision has them: images [N, 3, H, W] to logits [N, CLASSES]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x)))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(hidden), 1))
        return logits


class Images(torch.utils.data.Dataset[Any]):
    """Pairs of an image [3, SIZE, SIZE] and its class, which is the brightest channel."""

    def __init__(self, n: int = 24, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.label = torch.randint(0, CLASSES, (n,), generator=generator)
        self.image = torch.randn(n, 3, SIZE, SIZE, generator=generator)
        self.image += F.one_hot(self.label, 3)[:, :, None, None]

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.image[i], self.label[i]


@functools.cache
def lacks_library(name: str) -> str | None:
    """Why a library of models cannot be imported. torchvision's operators are compiled for one build of torch; its
    models need none of them, only their names."""
    if name in ("blocks", "transformers"):
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    try:
        importlib.import_module("torchvision")
        importlib.import_module(name)
    except ImportError as error:
        return f"needs {error.name}"
    _KEPT.append(library)
    return None


_KEPT: list[torch.library.Library] = []


def make_document(folder: str | Path, model: str, **sections: Any) -> dict[str, Any]:
    """A job of STEPS steps, evaluated at its end, that needs no code but the images."""
    data = {"_target_": "image_jobs.Images"}
    return token_jobs.make_document(
        str(folder),
        model=MODELS[model],
        inputs=[0],
        targets=[1],
        loss={"_target_": "torch.nn.CrossEntropyLoss"},
        metrics={"accuracy": {"_target_": "torchmetrics.Accuracy", "task": "multiclass", "num_classes": CLASSES}},
        data={"train": data, "eval": {**data, "n": 11, "seed": 1}},
        optimizer={"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        **sections,
    )


def train_by_hand(model: str) -> tuple[list[float], float, dict[str, Tensor]]:
    """Plain PyTorch on whole batches: the losses of each step and, last, of the evaluation; its accuracy; weights."""
    seed_rng(42)
    made, data, evaluation = call_target(make_target(MODELS[model]), trust=token_jobs.TRUST), Images(), Images(11, 1)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.05, momentum=0.9)
    order, losses = SampleOrder(len(data), 42, True), []

    def predict(images: Tensor) -> Tensor:
        outputs = made(images)
        logits: Tensor = getattr(outputs, "logits", outputs)
        return logits

    made.train()
    for step in range(STEPS):
        index = order.take(step * BATCH, BATCH)
        loss = F.cross_entropy(predict(data.image[index]), data.label[index])
        losses.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    made.eval()
    with torch.no_grad():
        logits = predict(evaluation.image)
    losses.append(F.cross_entropy(logits, evaluation.label).item())
    accuracy = (logits.argmax(1) == evaluation.label).float().mean().item()
    return losses, accuracy, {name: p.detach() for name, p in made.named_parameters()}
