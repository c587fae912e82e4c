"""A GPT whose first and last layers share the embedding, in a pipeline. Written for DeepSpeed."""

import argparse
import json

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn
from torch.nn import functional

WORDS, WIDTH, TOKENS = 32, 32, 16


class Embedding(nn.Module):
    """(ids, mask) -> (hidden states, mask). The last stage uses its weight, to predict words."""

    def __init__(self, words: int, width: int, tokens: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(words, width)
        self.position_embeddings = nn.Embedding(tokens, width)
        for part in (self.word_embeddings, self.position_embeddings):
            nn.init.normal_(part.weight, std=0.1)

    @property
    def word_embeddings_weight(self) -> torch.Tensor:
        return self.word_embeddings.weight

    def forward(self, given: tuple) -> tuple:
        ids, mask = given
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.word_embeddings(ids) + self.position_embeddings(places), mask


class TransformerLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, given: tuple) -> tuple:
        x, mask = given
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.attention_norm(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x)), mask


def to_logits(embedding: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return functional.linear(hidden, embedding.word_embeddings_weight)


def find_loss(logits: torch.Tensor, labels: tuple) -> torch.Tensor:
    words, weights = labels
    losses = functional.cross_entropy(logits.float().flatten(0, 1), words.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


class GPTPipe(PipelineModule):
    def __init__(self, layers: int, **given: object) -> None:
        specs = [
            TiedLayerSpec("embed", Embedding, WORDS, WIDTH, TOKENS, tied_weight_attr="word_embeddings_weight"),
            *(LayerSpec(TransformerLayer, WIDTH, 4) for _ in range(layers)),
            lambda given: given[0],
            LayerSpec(nn.LayerNorm, WIDTH),
            TiedLayerSpec(
                "embed",
                Embedding,
                WORDS,
                WIDTH,
                TOKENS,
                forward_fn=to_logits,
                tied_weight_attr="word_embeddings_weight",
            ),
        ]
        super().__init__(layers=specs, loss_fn=find_loss, **given)


def read(steps: int):
    """Sequences that count up from a random word, as (ids, mask), (labels, weights of the labels)."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None].expand(4, -1, -1, -1)
    for _ in range(steps):
        first = torch.randint(WORDS, (4, 1), generator=generator)
        words = (first + torch.arange(TOKENS + 1)) % WORDS
        weights = torch.ones(4, TOKENS)
        weights[:, :2] = 0
        yield {"ids": words[:, :-1], "mask": mask, "labels": words[:, 1:], "weights": weights}


parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--stages", type=int, default=2)
parser.add_argument("--clip", type=float, default=1.0)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--partition", default="type:transformer")
parser.add_argument("--recompute", type=int, default=1)
parser.add_argument("--out", default="losses.json")
args = parser.parse_args()

deepspeed.init_distributed(dist_backend="gloo")
model = GPTPipe(
    4,
    num_stages=args.stages,
    seed_layers=True,
    base_seed=7,
    partition_method=args.partition,
    activation_checkpoint_interval=args.recompute,
)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "eps": 1e-4, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 5}},
    "gradient_clipping": args.clip,
    "steps_per_print": 1000,
}
engine, _, _, _ = deepspeed.initialize(model=model, config=config)
engine.set_batch_fn(lambda batch: ((batch["ids"], batch["mask"]), (batch["labels"], batch["weights"])))
data = read((args.steps + 1) * 4)
losses = [float(engine.train_batch(data_iter=data)) for _ in range(args.steps)]
losses.append(float(engine.eval_batch(data)))
if engine.is_last_stage():
    with open(args.out, "w") as file:
        json.dump(losses, file)
