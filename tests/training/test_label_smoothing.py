"""`label_smoothing`: the numbers of HF Trainer's LabelSmoother, in training and evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import token_jobs
import torch
from torch import nn

from dsjob.data.order import SampleOrder
from dsjob.ranks.seeding import seed_rng
from dsjob.training.objective import SmoothedCrossEntropy

transformers = pytest.importorskip("transformers")
LabelSmoother = transformers.trainer_pt_utils.LabelSmoother


@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize("part", [0.1, 0.6])
def test_it_is_the_loss_of_the_trainer(shifts: bool, part: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 7, generator=generator, requires_grad=True)
    labels = torch.randint(0, 7, (3, 5), generator=generator)
    labels[0, 2:] = -100
    ours = SmoothedCrossEntropy(part, shifts)(logits, labels)
    theirs = LabelSmoother(epsilon=part)({"logits": logits}, labels, shift_labels=shifts)
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("kind", ["Llama", "T5"])
def test_a_job_of_transformers_is_a_loop_with_the_label_smoother(tmp_path: Any, kind: str) -> None:
    """For any micro batch: each target of a step counts once."""
    seed_rng(42)
    model = token_jobs.build_of_transformers(kind)
    data, evaluation = token_jobs.Tagged(), token_jobs.Tagged(11, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    order = SampleOrder(len(data), 42, True)
    smoother, losses = LabelSmoother(epsilon=0.1), []

    def measure(ids: Any, labels: Any) -> Any:
        outputs = model(input_ids=ids, labels=labels)
        return smoother(outputs, labels, shift_labels=kind == "Llama")

    for step in range(token_jobs.STEPS):
        index = order.take(step * token_jobs.BATCH, token_jobs.BATCH)
        loss = measure(data.ids[index], data.labels[index])
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(measure(evaluation.ids, evaluation.labels).item())
    given = {"model": {"_target_": "token_jobs.build_of_transformers", "kind": kind}, "label_smoothing": 0.1}
    for size in (8, 2):
        document = token_jobs.make_document(str(tmp_path / str(size)), micro_batch=size, **given)
        found, weights = token_jobs.run(document)
        assert [line.get("loss", line.get("eval/loss")) for line in found] == pytest.approx(losses, rel=0, abs=2e-6)
        for name, weight in model.named_parameters():
            if name in weights:
                torch.testing.assert_close(weights[name], weight, rtol=0, atol=3e-6)
