"""Trainers of a user: each replaces parts of a job by code that computes the same, and says what was called."""

from __future__ import annotations

from typing import Any

import torch
from token_jobs import Tagged
from torch import nn
from torch.nn import functional as F

import dsjob

CALLED: set[str] = set()


def accuracy(outputs: Any, batch: Any) -> torch.Tensor:
    """The share of all labels, also of -100, that are predicted, where the outputs are classes."""
    return (outputs["logits"] == batch["labels"]).double().mean()


class OwnLoss(dsjob.Trainer):
    """As in HF's guide: it takes the labels out of the batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        CALLED.add("compute_loss")
        labels = inputs.pop("labels")
        outputs = model(**inputs, labels=torch.zeros_like(labels))
        loss = F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())
        return (loss, outputs) if return_outputs else loss


class OwnStep(dsjob.Trainer):
    def training_step(self, model: Any, inputs: Any) -> Any:
        CALLED.add("training_step")
        return self.backward(self.compute_loss(model, inputs))


class WrappedStep(dsjob.Trainer):
    def training_step(self, model: Any, inputs: Any) -> Any:
        CALLED.add("training_step")
        return {"loss": super().training_step(model, inputs), "samples": len(inputs["labels"])}


class OwnOptimizer(dsjob.Trainer):
    def __init__(self, momentum: float = 0.9) -> None:
        self.momentum = momentum

    def create_optimizer(self, parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        CALLED.add("create_optimizer")
        assert "emb.weight" in parameters
        biases = [parameter for name, parameter in parameters.items() if name.endswith("bias")]
        others = [parameter for name, parameter in parameters.items() if not name.endswith("bias")]
        groups: Any = [{"params": others, "weight_decay": 0.0}, {"params": biases}]
        return torch.optim.SGD(groups, lr=0.5, momentum=self.momentum)

    def create_scheduler(self, num_training_steps: int, optimizer: Any) -> Any:
        CALLED.add("create_scheduler")
        assert num_training_steps == 3
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


class OwnData(dsjob.Trainer):
    """Data that the document does not name."""

    def get_train_dataloader(self) -> Any:
        CALLED.add("get_train_dataloader")
        assert isinstance(super().get_train_dataloader(), Tagged)
        return Tagged()

    def get_eval_dataloader(self, name: str = "") -> Any:
        CALLED.add("get_eval_dataloader")
        return torch.utils.data.DataLoader(Tagged(11, 1), batch_size=3)

    def get_test_dataloader(self, name: str = "") -> Any:
        CALLED.add("get_test_dataloader")
        return torch.utils.data.Subset(Tagged(11, 1), range(5))


class OwnPrediction(dsjob.Trainer):
    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool = False) -> Any:
        CALLED.add("prediction_step")
        assert not torch.is_grad_enabled()
        loss, logits, labels = super().prediction_step(model, inputs)
        return loss, logits.argmax(-1), labels


class OwnRun(dsjob.Trainer):
    def log(self, logs: dict[str, float]) -> None:
        CALLED.add("log")
        super().log({**logs, "double": 2 * logs["loss"]})

    def evaluate(self) -> dict[str, float]:
        CALLED.add("evaluate")
        return {**super().evaluate(), "eval/mine": 0.25}

    def predict(self) -> dict[str, str]:
        CALLED.add("predict")
        return super().predict()


class All(OwnRun, OwnPrediction, OwnData, OwnOptimizer, OwnStep, OwnLoss):
    pass


class Unused(dsjob.Trainer):
    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        pass


class Forgets(dsjob.Trainer):
    """What people forget in each method."""

    def __init__(self, what: str) -> None:
        self.what = what

    def training_step(self, model: Any, inputs: Any) -> Any:
        return self.compute_loss(model, inputs) if self.what == "backward" else super().training_step(model, inputs)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        return loss if self.what == "outputs" or not return_outputs else (loss, outputs)

    def create_optimizer(self, parameters: Any) -> Any:
        made = super().create_optimizer(parameters)
        return None if self.what == "optimizer" else made

    def evaluate(self) -> Any:
        found = super().evaluate()
        found |= {"eval/text": "high"} if self.what == "numbers" else {}
        return None if self.what == "metrics" else found

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool = False) -> Any:
        loss, logits, labels = super().prediction_step(model, inputs)
        return loss if self.what == "prediction" else (loss, logits, labels)


def take_all(engines: Any, batches: Any) -> Any:
    """A trainer.step that aggregates gradients itself."""
    CALLED.add("take_all")
    total, count = 0.0, 0
    for batch in batches:
        loss = engines.first(**batch)["loss"]
        engines.first.backward(loss)
        engines.first.step()
        total, count = total + loss.detach(), count + 1
    return total / count


def take_one(engines: Any, batch: Any) -> Any:
    """The same step by dsjob's own accumulation."""
    return take_all(engines, [batch])


def take_first(engines: Any, batches: Any) -> Any:
    """Forgets all micro batches but the first."""
    return take_all(engines, [next(batches)])
