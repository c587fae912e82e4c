"""The kernels of cpu_optimizers against formulas in float64, in every instruction set of this processor."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from machine import lacks_commands
from programs import clean_env, run_program
from torch import Tensor

from dsjob.home import find_again
from dsjob.ops import cpu_optimizers as kernels

LACKING = lacks_commands(os.environ.get("CXX", "c++"))
pytestmark = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))

SIZES = (0, 1, 3, 15, 16, 17, 1000, 16384, 16385, 40000)  # around vectors (16) and stretches (16384)


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    assert kernels.find_problem() == ""


def draw(seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # Views at odd addresses: no tensor begins at a multiple of a vector.
    return [torch.randn(size + 1, generator=generator)[1:] * scale for size in SIZES]


def widen(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    """Within the rounding of fp32: of weights around 1, of which five updates of up to 0.1 were subtracted."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-6, atol=2e-6)


ADAM = {"rate": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "decay": 0.1}


def adam(w: Tensor, g: Tensor, m: Tensor, v: Tensor, t: float, decoupled: bool, corrects: bool) -> None:
    """Kingma and Ba's algorithm 1, in float64; Loshchilov and Hutter's algorithm 2 if decoupled."""
    (b1, b2), rate, decay = (0.9, 0.99), 0.01, 0.1
    if decoupled:
        w.mul_(1 - rate * decay)
    else:
        g = g + decay * w
    m.copy_(b1 * m + (1 - b1) * g)
    v.copy_(b2 * v + (1 - b2) * g * g)
    c1, c2 = (1 - b1**t, 1 - b2**t) if corrects else (1.0, 1.0)
    w.sub_(rate * (m / c1) / ((v / c2).sqrt() + 1e-6))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("corrects", [True, False])
def test_adam(decoupled: bool, corrects: bool) -> None:
    weights, averages, squares = draw(0), [torch.zeros(s) for s in SIZES], [torch.zeros(s) for s in SIZES]
    w, m, v = widen(weights), widen(averages), widen(squares)
    for step in range(1, 6):
        gradients = draw(step)
        options: Any = {**ADAM, "decoupled": decoupled, "bias_correction": corrects}
        # Every parameter has its own count of steps.
        steps = [float(step + number) for number in range(len(SIZES))]
        kernels.adam_(weights, gradients, averages, squares, steps, **options)
        for number, g in enumerate(widen(gradients)):
            adam(w[number], g, m[number], v[number], steps[number], decoupled, corrects)
    for found, expected in ((weights, w), (averages, m), (squares, v)):
        assert_close(found, expected)


def test_lion() -> None:
    weights, averages = draw(0), [torch.zeros(s) for s in SIZES]
    w, m = widen(weights), widen(averages)
    for step in range(1, 6):
        gradients = draw(step)
        gradients[6][:10] = 0.0  # at first, the direction of these is 0, which has no sign
        kernels.lion_(weights, gradients, averages, rate=0.01, betas=(0.9, 0.99), decay=0.1)
        for number, g in enumerate(widen(gradients)):
            direction = (0.9 * m[number] + 0.1 * g).sign()
            w[number].copy_(w[number] * (1 - 0.01 * 0.1) - 0.01 * direction)
            m[number].copy_(0.99 * m[number] + 0.01 * g)
    assert_close(weights, w)
    assert_close(averages, m)


def test_adagrad() -> None:
    weights, sums = draw(0), [torch.full((s,), 0.1) for s in SIZES]
    w, total = widen(weights), widen(sums)
    for step in range(1, 6):
        gradients = draw(step)
        rates = [0.01 / (1 + number) for number in range(len(SIZES))]
        kernels.adagrad_(weights, gradients, sums, rates, eps=1e-10, decay=0.1)
        for number, g in enumerate(widen(gradients)):
            g += 0.1 * w[number]
            total[number] += g * g
            w[number] -= rates[number] * g / (total[number].sqrt() + 1e-10)
    assert_close(weights, w)
    assert_close(sums, total)


@pytest.mark.parametrize("inside", [True, False])
def test_lamb(inside: bool) -> None:
    weights, averages, squares = draw(0), [torch.zeros(s) for s in SIZES], [torch.zeros(s) for s in SIZES]
    w, m, v = widen(weights), widen(averages), widen(squares)
    form: Any = {"eps": 1e-6, "eps_inside_root": inside, "decay": 0.1}
    for step in range(1, 6):
        gradients = draw(step)
        norms = kernels.lamb_average_(weights, gradients, averages, squares, betas=(0.9, 0.99), **form)
        rates = [0.01 * (number + 1) for number in range(len(SIZES))]
        kernels.lamb_apply_(weights, averages, squares, rates, **form)
        for number, g in enumerate(widen(gradients)):
            m[number].copy_(0.9 * m[number] + 0.1 * g)
            v[number].copy_(0.99 * v[number] + 0.01 * g * g)
            root = (v[number] + 1e-6).sqrt() if inside else v[number].sqrt() + 1e-6
            update = m[number] / root + 0.1 * w[number]
            expected = torch.stack([w[number].square().sum(), update.square().sum()])
            torch.testing.assert_close(norms[number], expected, rtol=1e-5, atol=0)
            w[number] -= rates[number] * update
    assert_close(weights, w)


STEPS: dict[str, Callable[..., None]] = {
    "adam": lambda w, g, m, v, **more: kernels.adam_(w, g, m, v, [1.0] * len(w), **ADAM, **more),
    "lion": lambda w, g, m, v, **more: kernels.lion_(w, g, m, rate=0.01, betas=(0.9, 0.99), decay=0.1, **more),
    "adagrad": lambda w, g, m, v, **more: kernels.adagrad_(w, g, m, [0.01] * len(w), eps=1e-10, decay=0.1, **more),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_the_factor_and_copies(name: str, dtype: torch.dtype) -> None:
    """The same bits as widening, multiplying and casting apart."""
    step, low = STEPS[name], [gradient.to(dtype) for gradient in draw(1, 1e-3)]
    low[7][:4] = torch.tensor([6e-8, -6e-8, 0.0, 6e4])  # in fp16: the smallest subnormals, and nearly the largest
    state = [[torch.zeros(s) for s in SIZES] for _ in range(4)]
    apart, together = draw(0), draw(0)
    copies = [torch.empty(size, dtype=dtype) for size in SIZES]
    step(apart, [gradient.float() * 0.125 for gradient in low], *state[:2])
    step(together, low, *state[2:], gradient_factor=0.125, copies=copies)
    for one, other, copy in zip(apart, together, copies, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(copy, other.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_round_as_torch_does(dtype: torch.dtype) -> None:
    """Weights of every exponent, ties, the largest finite numbers, infinities and NaN; a step of nothing keeps them."""
    bits = torch.arange(0, 1 << 32, 65521, dtype=torch.int64).to(torch.int32)
    special = torch.tensor([65504.0, 65519.9, 65520.0, 2**-24, 2**-25, 3 * 2**-25, 1 + 2**-8, 1 + 3 * 2**-9, -0.0])
    weights = torch.cat([bits.view(torch.float32), special])
    copy = torch.empty(len(weights), dtype=dtype)
    zero = torch.zeros(len(weights))
    kernels.lion_([weights], [zero], [zero.clone()], rate=0.0, betas=(0.9, 0.99), decay=0.0, copies=[copy])
    torch.testing.assert_close(copy, weights.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(copy.signbit()[~copy.isnan()], weights.signbit()[~copy.isnan()])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_spread_as_in_torch(bad: float) -> None:
    weights, gradient = torch.ones(40), torch.ones(40)
    gradient[7] = bad
    parameter = torch.nn.Parameter(weights.clone())
    parameter.grad = gradient.clone()
    torch.optim.AdamW([parameter], lr=0.01, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1).step()
    kernels.adam_([weights], [gradient], [torch.zeros(40)], [torch.zeros(40)], [1.0], **ADAM)
    torch.testing.assert_close(weights, parameter.data, equal_nan=True)


def test_threads_and_places_change_no_bit() -> None:
    before = torch.get_num_threads()
    found = []
    try:
        for threads, start in ((1, 0), (4, 5)):
            torch.set_num_threads(threads)
            generator = torch.Generator().manual_seed(0)
            w, g = (torch.randn(100_000, generator=generator) for _ in range(2))
            m, v = torch.zeros(100_000), torch.zeros(100_000)
            parts = [[tensor[start:] for tensor in (w, g, m, v)], [tensor[:start] for tensor in (w, g, m, v)]]
            kernels.adam_(*map(list, zip(*parts, strict=True)), [1.0, 1.0], **ADAM)
            sums = kernels.lamb_average_(
                [w], [g], [m], [v], betas=(0.9, 0.99), eps=1e-6, eps_inside_root=False, decay=0.1
            )
            found.append((w, sums))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_autograd_notices_the_change() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    with torch.no_grad():
        kernels.lion_([weight], [torch.ones(3)], [torch.zeros(3)], rate=0.1, betas=(0.9, 0.99), decay=0.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lists: lists[0].append(torch.ones(2)), "lists of different lengths"),
        (lambda lists: lists[1].__setitem__(0, torch.ones(3)), "gradients: 3 elements instead of 4"),
        (lambda lists: lists[2].__setitem__(0, torch.ones(4, 2)[:, 0]), "averages must be contiguous"),
        (lambda lists: lists[3].__setitem__(0, torch.ones(4).double()), "squares must be fp32"),
        (lambda lists: lists[1].__setitem__(0, torch.ones(4, dtype=torch.int32)), "gradients and copies must be"),
    ],
)
def test_wrong_tensors_are_refused(change: Callable[[list[list[Tensor]]], None], message: str) -> None:
    lists = [[torch.ones(4)] for _ in range(4)]
    change(lists)
    with pytest.raises((ValueError, TypeError), match=message):
        kernels.adam_(*lists, [1.0], **ADAM)


def test_the_registration_is_complete() -> None:
    """torch's own check: schema, what is mutated, fake tensors, and tracing."""
    lists = [[torch.randn(5), torch.randn(3, 2)] for _ in range(4)]
    lists[3] = [tensor.abs() for tensor in lists[3]]
    arguments = (*lists, [], [1.0, 2.0], 0.01, 0.9, 0.99, 1e-6, 0.1, True, True, 1.0)
    torch.library.opcheck(torch.ops.dsjob.cpu_adam_.default, arguments)
    torch.library.opcheck(torch.ops.dsjob.cpu_lion_.default, (*lists[:3], [], 0.01, 0.9, 0.99, 0.1, 1.0))
    torch.library.opcheck(torch.ops.dsjob.cpu_adagrad_.default, (*lists[:3], [], [0.01, 0.02], 1e-10, 0.1, 1.0))
    torch.library.opcheck(torch.ops.dsjob.cpu_lamb_average_.default, (*lists, 0.9, 0.99, 1e-6, False, 0.1, 1.0))
    applied = (lists[0], lists[2], lists[3], [], [0.01, 0.02], 1e-6, False, 0.1)
    torch.library.opcheck(torch.ops.dsjob.cpu_lamb_apply_.default, applied)


def test_a_compiled_step_has_no_graph_break() -> None:
    def step(w: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
        torch.ops.dsjob.cpu_adam_([w], [g], [m], [v], [], [1.0], 0.01, 0.9, 0.99, 1e-6, 0.1, True, True, 1.0)
        return w * 2

    plain, traced = ([torch.ones(9), torch.ones(9), torch.zeros(9), torch.zeros(9)] for _ in range(2))
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(step(*plain), compiled(*traced))
    assert torch.equal(plain[0], traced[0])


@pytest.mark.parametrize("limit", ["plain", "avx2"])
@pytest.mark.full("plain")
def test_every_instruction_set_agrees(limit: str, tmp_path: Path) -> None:
    """A new process, since the processor is asked once per call but a limit is an environment variable."""
    code = """
import json, sys, torch
from dsjob.ops import cpu_optimizers as kernels
assert not kernels.find_problem()
w, g = (torch.linspace(-2, 3, 1001) for _ in range(2))
m, v, copy = torch.zeros(1001), torch.zeros(1001), torch.empty(1001, dtype=torch.float16)
for step in (1.0, 2.0, 3.0):
    kernels.adam_([w], [g], [m], [v], [step], rate=.01, betas=(.9, .99), eps=1e-6, decay=.1, copies=[copy])
print(json.dumps([torch.ops.dsjob.cpu_instruction_set(), w.tolist(), copy.tolist()]))
"""
    runs = []
    for chosen in (limit, ""):
        environment = clean_env(**find_again(), DSJOB_CPU_ISA=chosen)
        done = run_program([sys.executable, "-c", code], env=environment, cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout))
    if limit == "plain":
        assert runs[0][0] == "plain"
    torch.testing.assert_close(torch.tensor(runs[0][1]), torch.tensor(runs[1][1]), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(torch.tensor(runs[0][2]), torch.tensor(runs[1][2]), rtol=1e-3, atol=1e-6)
