"""Jobs over sequences with very different numbers of targets, and the same by hand on the whole batch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from job_documents import make_job, resolve
from torch import Tensor, nn
from torch.nn import functional as F

from dsjob import storage
from dsjob.callbacks.callback import Callback, RunView
from dsjob.data.order import SampleOrder
from dsjob.document.resolve import complete_job
from dsjob.parallel import Strategy
from dsjob.ranks.mesh import World, join_world
from dsjob.training import job
from dsjob.training.trainer import Trainer
from dsjob.trust.grant import Trust

TRUST = Trust(folders=(str(Path(__file__).parent),))
VOCAB, LENGTH, STEPS, BATCH = 13, 9, 3, 8
ENDS: list[dict[str, Tensor]] = []  # the weights at the end of each job, on this process


class Tagger(nn.Module):
    """Names each token: the loss is the mean over labels other than -100, as transformers' models have it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.emb, self.fc, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, width), nn.Linear(width, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.fc(self.emb(input_ids).cumsum(1))))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class HeadApart(Tagger):
    """A Tagger that leaves its last layer to the loss. It returns views: DDP fails on parameters themselves."""

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        hidden = torch.tanh(self.fc(self.emb(input_ids).cumsum(1)))
        return {"hidden": hidden, "weight": self.head.weight[:], "bias": self.head.bias[:]}


def build_of_transformers(kind: str) -> nn.Module:
    """A tiny model of transformers: Llama, which shifts labels, T5, which does not, Llama inside peft's, Granite, which
    divides its logits, or GPT2, whose head shares the weight of its embedding."""
    import transformers

    if kind == "GPT2":
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
        gpt2 = transformers.GPT2Config(vocab_size=VOCAB, n_embd=8, n_layer=1, n_head=2, n_positions=16, **dropouts)
        return transformers.GPT2LMHeadModel(gpt2)

    if kind == "T5":
        config = transformers.T5Config(
            vocab_size=VOCAB,
            d_model=8,
            d_kv=4,
            d_ff=8,
            num_layers=1,
            num_heads=2,
            dropout_rate=0,
            decoder_start_token_id=0,
        )
        return transformers.T5ForConditionalGeneration(config)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "Granite":
        return transformers.GraniteForCausalLM(transformers.GraniteConfig(vocab_size=VOCAB, **sizes))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, **sizes))
    if kind != "Lora":
        return model
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False))


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return float((logits.argmax(-1) == labels).float().mean())


def build_adapted_head() -> nn.Module:
    """Llama with an adapter of peft at its head."""
    import peft

    options: Any = {"task_type": "CAUSAL_LM", "r": 2, "target_modules": ["lm_head"]}
    return peft.get_peft_model(build_of_transformers("Llama"), peft.LoraConfig(**options))


class Reads(Trainer):
    """Adds to the loss what depends on the logits."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        loss = loss + 0.1 * outputs.logits.float().logsumexp(-1).square().mean()
        return (loss, outputs) if return_outputs else loss


class Tagged(torch.utils.data.Dataset[Any]):
    """Sequences of which from none to all tokens are targets; `targets`: of each the same number."""

    def __init__(self, n: int = 24, seed: int = 0, targets: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, VOCAB, (n, LENGTH), generator=generator)
        self.labels = torch.randint(0, VOCAB, (n, LENGTH), generator=generator)
        counts = (
            torch.randint(0, LENGTH + 1, (n, 1), generator=generator)
            if targets is None
            else torch.full((n, 1), targets)
        )
        self.labels[torch.arange(LENGTH) >= counts] = -100
        if targets is None:
            self.labels[5] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def make_unlike() -> torch.utils.data.Dataset[Any]:
    """Data with labels on rank 0 alone."""
    return Tagged() if os.environ.get("RANK", "0") == "0" else Untagged()


class Untagged(Tagged):
    """Sequences without labels."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index]}


def sum_up(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of the loss over the even labels, and their number: nothing that labels other than -100 tell."""
    kept = torch.where(batch["labels"] % 2 == 0, batch["labels"], -100)
    total = F.cross_entropy(outputs["logits"].flatten(0, 1), kept.flatten(), reduction="sum")
    return total, kept.ne(-100).sum()


class KeepsWeights(Callback):
    """Puts the weights at the end of a job into ENDS, whole."""

    def on_end(self, run: RunView) -> None:
        strategy: Strategy = run.engine.strategy
        whole = {
            name: getattr(tensor, "full_tensor", lambda t=tensor: t)() for name, tensor in strategy.weights().items()
        }
        ENDS.append({name: tensor.detach().clone() for name, tensor in whole.items()})


def make_document(folder: str, *, stage: int = 0, micro_batch: int = 8, **sections: Any) -> dict[str, Any]:
    """A job of STEPS steps of BATCH sequences, evaluated at its end."""
    trainer = {"train_batch": BATCH, "micro_batch": micro_batch, "max_steps": STEPS, "log_every": 1}
    return make_job(
        **{
            "model": {"_target_": "token_jobs.Tagger"},
            "data": {
                "train": {"_target_": "token_jobs.Tagged"},
                "eval": {"_target_": "token_jobs.Tagged", "n": 11, "seed": 1},
            },
            "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
            "zero_optimization": {"stage": stage},
            "callbacks": {"weights": {"_target_": "token_jobs.KeepsWeights"}},
            "checkpoint": {"at_end": False},
            "output": {"dir": folder},
            **sections,
            "trainer": {**trainer, **sections.pop("trainer", {})},
        }
    )


def run(document: dict[str, Any], world: World | None = None) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Runs a job on this rank: what it has logged (where it is rank 0), and its weights at the end."""
    world = world or join_world(device="cpu")
    resolved = resolve(document, world_size=world.data_size)
    folder = resolved["output"]["dir"]
    storage.make_folder(folder)
    ENDS.clear()
    job.run_job(complete_job(resolved), folder, world, TRUST)
    path = Path(folder, "metrics.jsonl")
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines], ENDS[-1] if ENDS else {}


def train_by_hand(loss: Any = None) -> tuple[list[float], list[float], float, dict[str, Tensor]]:
    """Plain PyTorch on whole batches: losses, norms of gradients, the loss of the evaluation, and the weights."""
    from dsjob.ranks.seeding import seed_rng

    seed_rng(42)
    model, data, evaluation = Tagger(), Tagged(), Tagged(11, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    order = SampleOrder(len(data), 42, True)
    losses, norms = [], []

    def measure(ids: Tensor, labels: Tensor) -> Tensor:
        outputs = model(ids, labels)
        if loss is None:
            return outputs["loss"]
        total, count = loss(outputs, {"labels": labels})
        return total / count

    for step in range(STEPS):
        index = order.take(step * BATCH, BATCH)
        found = measure(data.ids[index], data.labels[index])
        found.backward()
        losses.append(found.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    evaluated = measure(evaluation.ids, evaluation.labels).item()
    return losses, norms, evaluated, {name: p.detach() for name, p in model.named_parameters()}
