"""Models as layers, for pipelines: with tied layers, masks, integers and changing shapes between stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dsjob.deepspeed as deepspeed
from dsjob.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from dsjob.ranks.mesh import World

WORDS, WIDTH, ROWS = 11, 16, 32  # ROWS: samples of a whole batch
Values = tuple[Tensor, ...]


class Embed(nn.Module):
    """[rows, tokens] -> what the blocks hand on: hidden states, a boolean mask, and the number of the next block."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, tokens: Tensor) -> Values:
        mask = tokens != 0
        return (
            self.words(tokens),
            mask[:, None, :].expand(-1, tokens.shape[1], -1),
            torch.zeros(1, dtype=torch.int64, device=tokens.device),
        )

    @property
    def weight(self) -> Tensor:
        return self.words.weight


class Block(nn.Module):
    def __init__(self, number: int = 0, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, given: Values) -> Values:
        hidden, mask, number = given
        query, key, value = self.mix(self.norm(hidden)).chunk(3, -1)
        scores = (query @ key.transpose(-1, -2)).masked_fill(~mask, -1e4)
        return hidden + self.out(torch.tanh(scores.softmax(-1) @ value)), mask, number + 1


def read_out(embed: Embed, given: Values) -> Tensor:
    hidden, _, number = given
    return F.linear(hidden, embed.weight) * (1 + 0 * number)


def list_specs(blocks: int = 4) -> list[Any]:
    return [
        TiedLayerSpec("embed", Embed),
        *(LayerSpec(Block, number) for number in range(blocks)),
        TiedLayerSpec("embed", Embed, forward_fn=read_out),
    ]


def find_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_batch(step: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Tokens and labels of a whole batch, int64 [rows, tokens]: other lengths in other steps."""
    generator = torch.Generator().manual_seed(100 + step)
    shape = (rows, 5 + step % 3)
    return torch.randint(WORDS, shape, generator=generator), torch.randint(WORDS, shape, generator=generator)


def deal(world: World, micro_batches: int, steps: int, rows: int = ROWS) -> Iterator[tuple[Tensor, Tensor]]:
    """This pipeline's micro batches: pairs of tokens and labels."""
    for step in range(steps):
        parts = [part.chunk(micro_batches * world.data_size) for part in make_batch(step, rows)]
        for number in range(world.data_rank, micro_batches * world.data_size, world.data_size):
            yield parts[0][number], parts[1][number]


def make_config(world_size: int, stages: int, micro: int, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": micro,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3}},
        **more,
    }


def make_engine(world: World, stages: int, *, micro: int = 4, stage: int = 0, **given: Any) -> Any:
    """A PipelineEngine. given: for PipelineModule, and `config`."""
    config = {"zero_optimization": {"stage": stage}, **given.pop("config", {})}
    specs = given.pop("layers", None) or list_specs()
    schedule = given.pop("schedule", None)
    placed = {"topology": given.pop("topology")} if "topology" in given else {"num_stages": stages}
    module = PipelineModule(specs, **placed, **{"loss_fn": find_loss, "seed_layers": True, **given})
    engine = deepspeed.initialize(model=module, config=make_config(world.everyone.size, stages, micro, **config))[0]
    if schedule is not None:
        engine.set_train_schedule(schedule)
    return engine


def train(engine: Any, steps: int) -> dict[str, Any]:
    """Losses and norms of some steps, the loss of an evaluation, and this rank's weights."""
    batches = deal(engine.world, engine.micro_batches, steps)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for _ in range(steps):
        found["losses"].append(float(engine.train_batch(batches)))
        found["norms"].append(engine.get_global_grad_norm())
    found["eval"] = float(engine.eval_batch(deal(engine.world, engine.micro_batches, 1)))
    found["weights"] = {name: tensor.clone() for name, tensor in engine.module_state_dict().items()}
    found["place"] = (engine.world.pipe.rank, engine.world.data_rank)
    return found
