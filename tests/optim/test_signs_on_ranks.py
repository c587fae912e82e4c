"""The mean that travels as signs, on real ranks, against numpy going through all ranks in one process."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from machine import lacks_commands
from ranks import run_ranks
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dsjob.ops import onebit
from dsjob.optim.onebit.signs import average_signs, chunk_width
from dsjob.ranks.mesh import World

SHAPES = [(5, 7), (64,), (1,), (3, 2, 9), (130,), (0,)]
ROUNDS = 4
LACKING = lacks_commands(os.environ.get("CXX", "c++"))


def make_values(rank: int, turn: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return [torch.randn(shape, generator=generator) * 10.0**-place for place, shape in enumerate(SHAPES)]


def make_masks() -> list[Tensor]:
    masks = [torch.ones(shape, dtype=torch.bool) for shape in SHAPES]
    masks[1][::3] = False
    masks[3][:] = False
    return masks


def average_on_rank(
    world: World, one_scale: bool, native: bool = False
) -> list[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
    widths = [chunk_width(torch.Size(shape).numel(), world.data_size) for shape in SHAPES]
    workers, servers = [torch.zeros(world.data_size, w) for w in widths], [torch.zeros(w) for w in widths]
    rounds = []
    for turn in range(ROUNDS):
        values = make_values(world.data_rank, turn)
        means = average_signs(values, make_masks(), workers, servers, one_scale=one_scale, native=native)
        rounds.append((means, [w.clone() for w in workers], [s.clone() for s in servers]))
    return rounds


class Simulation:
    """All ranks in float64: each tensor flat, cut into `ranks` pieces of whole bytes."""

    def __init__(self, ranks: int, one_scale: bool) -> None:
        self.ranks, self.one_scale = ranks, one_scale
        self.live = [mask.numpy().reshape(-1) for mask in make_masks()]
        self.workers = [[np.zeros(live.size) for live in self.live] for _ in range(ranks)]
        self.servers = [np.zeros(live.size) for live in self.live]

    def compress(self, parts: list[np.ndarray], live: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """What travels of `parts`, and what it leaves out."""
        together = [np.concatenate(parts)] * len(parts) if self.one_scale else parts
        counted = [np.concatenate(live)] * len(parts) if self.one_scale else live
        scales = [np.linalg.norm(x) / np.sqrt(max(m.sum(), 1)) for x, m in zip(together, counted, strict=True)]
        sent = [np.where(x >= 0, s, -s) * m for x, s, m in zip(parts, scales, live, strict=True)]
        return sent, [x - y for x, y in zip(parts, sent, strict=True)]

    def average(self, values: list[list[np.ndarray]]) -> list[np.ndarray]:
        sent = []
        for rank in range(self.ranks):
            parts = [(x + e) * m for x, e, m in zip(values[rank], self.workers[rank], self.live, strict=True)]
            travelled, self.workers[rank] = self.compress(parts, self.live)
            sent.append(travelled)
        means = [np.mean([own[place] for own in sent], axis=0) for place in range(len(self.live))]
        result = [np.zeros_like(mean) for mean in means]
        for rank in range(self.ranks):
            cuts = []
            for mean in means:
                width = -(-mean.size // (8 * self.ranks)) * 8
                cuts.append(slice(rank * width, (rank + 1) * width))
            parts = [
                (x[cut] + e[cut]) * m[cut] for x, e, m, cut in zip(means, self.servers, self.live, cuts, strict=True)
            ]
            travelled, errors = self.compress(parts, [m[cut] for m, cut in zip(self.live, cuts, strict=True)])
            for place, cut in enumerate(cuts):
                result[place][cut], self.servers[place][cut] = travelled[place], errors[place]
        return result


@pytest.mark.parametrize(("ranks", "one_scale"), [(2, False), (3, True), (4, False)])
def test_means_and_errors_are_those_of_one_process_that_plays_all_ranks(ranks: int, one_scale: bool) -> None:
    found: list[Any] = run_ranks(average_on_rank, ranks, one_scale)
    simulation = Simulation(ranks, one_scale)
    for turn in range(ROUNDS):
        values = [[v.double().numpy().reshape(-1) for v in make_values(rank, turn)] for rank in range(ranks)]
        expected = simulation.average(values)
        for rank in range(ranks):
            means, workers, servers = found[rank][turn]
            for place, shape in enumerate(SHAPES):
                assert torch.equal(means[place], found[0][turn][0][place])
                assert means[place].shape == shape
                assert np.allclose(means[place].numpy().reshape(-1), expected[place], rtol=1e-4, atol=1e-6)
                size = expected[place].size
                worker = workers[place].numpy().reshape(-1)
                assert np.allclose(worker[:size], simulation.workers[rank][place], rtol=1e-4, atol=1e-5)
                assert not worker[size:].any()
                own = simulation.servers[place][rank * servers[place].numel() :][: servers[place].numel()]
                assert np.allclose(servers[place].numpy()[: own.size], own, rtol=1e-4, atol=1e-5)


def compare_with_native(world: World) -> bool:
    """Whether means and errors of the compiled op are the same, bit for bit."""
    assert onebit.find_problem(torch.device("cpu"), build=True) == ""
    sides = [average_on_rank(world, one_scale, native) for one_scale in (False, True) for native in (False, True)]
    pairs = [zip(tree_leaves(sides[place]), tree_leaves(sides[place + 1]), strict=True) for place in (0, 2)]
    return all(torch.equal(one, other) for pair in pairs for one, other in pair)


@pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
def test_the_compiled_op_changes_nothing() -> None:
    assert run_ranks(compare_with_native, 3) == [True] * 3


def test_error_feedback_loses_nothing_over_time() -> None:
    """The sum of what arrived is the sum of what was sent, but for the errors that are still waiting."""
    found: list[Any] = run_ranks(average_on_rank, 2, False)
    for place, mask in enumerate(make_masks()):
        sent = sum((make_values(r, t)[place] * mask for r in range(2) for t in range(ROUNDS)), torch.tensor(0.0)) / 2
        arrived = sum((found[0][turn][0][place] for turn in range(ROUNDS)), torch.tensor(0.0))
        waiting = sum(found[rank][-1][1][place].reshape(-1)[: sent.numel()] for rank in range(2)) / 2
        servers = torch.cat([found[rank][-1][2][place] for rank in range(2)])[: sent.numel()]
        torch.testing.assert_close(arrived.reshape(-1) + waiting + servers, sent.reshape(-1), rtol=1e-4, atol=1e-5)
