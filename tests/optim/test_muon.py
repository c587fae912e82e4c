"""Muon against the singular values that its iteration must give, torch's Muon, and torch's AdamW."""

import pytest
import torch
from torch import Tensor, nn

from dsjob.contract.spec import Method
from dsjob.errors import TargetError
from dsjob.optim import build_optimizer
from dsjob.optim.muon import MuonWithAuxAdam, orthogonalize, split_matrices


def bring_near_one(matrix: Tensor) -> Tensor:
    """The quintic iteration, on the singular values alone, in float64."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag_embed(s) @ v


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("shape", [(8, 8), (5, 40), (40, 5), (1, 6), (3, 4, 9)], ids=str)
def test_singular_values_become_what_the_iteration_makes_of_them(shape: tuple[int, ...], method: str) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape) * 100
    made = orthogonalize(matrix, method)
    torch.testing.assert_close(made.double(), bring_near_one(matrix), rtol=0, atol=1e-4)
    values = torch.linalg.svdvals(made)
    assert float(values.max()) < 1.3


@pytest.mark.parametrize(("method", "dtype"), [("gram", torch.float16), ("standard", torch.bfloat16)], ids=str)
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_half_precision_is_enough_for_gradients_of_any_size(method: str, dtype: torch.dtype, size: float) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(32, 128) * size
    made = orthogonalize(matrix, method, dtype)
    assert made.dtype == dtype
    exact = orthogonalize(matrix, method)
    assert float((made.float() - exact).norm() / exact.norm()) < 0.05


def test_a_matrix_of_zeros_stays_one() -> None:
    assert orthogonalize(torch.zeros(3, 5)).tolist() == torch.zeros(3, 5).tolist()


@pytest.mark.parametrize("shape", [(6, 6), (4, 12), (12, 4)], ids=str)
def test_steps_are_those_of_torchs_muon_but_for_its_bf16(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    start = torch.randn(shape)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    mine = MuonWithAuxAdam([{"params": [ours], "use_muon": True}], lr=0.02, weight_decay=0.1)
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1)
    for _ in range(5):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        mine.step()
        reference.step()
    torch.testing.assert_close(mine.state[ours]["momentum_buffer"], reference.state[theirs]["momentum_buffer"])
    moved = float((theirs - start).detach().norm())
    assert float((ours - theirs).detach().norm()) < 0.02 * moved


def test_what_is_no_matrix_of_a_layer_is_stepped_by_adamw() -> None:
    torch.manual_seed(2)
    start = torch.randn(9)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    mine = MuonWithAuxAdam([{"params": [ours], "use_muon": False}], weight_decay=0.1)
    reference = torch.optim.AdamW([theirs], lr=3e-4, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1)
    for _ in range(5):
        ours.grad = torch.randn(9)
        theirs.grad = ours.grad.clone()
        mine.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_filters_are_matrices_of_their_first_dimension() -> None:
    torch.manual_seed(3)
    kernel, matrix = nn.Parameter(torch.zeros(4, 3, 2, 2)), nn.Parameter(torch.zeros(4, 12))
    optimizer = MuonWithAuxAdam([{"params": [kernel, matrix], "use_muon": True}])
    kernel.grad = torch.randn(4, 3, 2, 2)
    matrix.grad = kernel.grad.view(4, 12).clone()
    optimizer.step()
    torch.testing.assert_close(kernel.view(4, 12), matrix)


def make(**params: float) -> MuonWithAuxAdam:
    names = ["embed_tokens.weight", "layer.weight", "layer.bias", "LM_Head.weight"]
    weights = [nn.Parameter(torch.ones(shape)) for shape in ((4, 3), (4, 3), (4,), (4, 3))]
    full = {"momentum": 0.95, "ns_method": "gram", "betas": [0.9, 0.95], "eps": 1e-10, "weight_decay": 0, **params}
    called = {id(weight): name for weight, name in zip(weights, names, strict=True)}
    built = build_optimizer(Method("MUON", full, None), weights, names=called)
    assert isinstance(built, MuonWithAuxAdam)
    assert [[called[id(p)] for p in group["params"]] for group in built.param_groups] == [
        ["layer.weight"],
        ["embed_tokens.weight", "layer.bias", "LM_Head.weight"],
    ]
    return built


@pytest.mark.parametrize(
    ("params", "rates"),
    [
        ({}, [0.02, 3e-4]),
        ({"lr": 0.1}, [0.1, 0.1]),
        ({"lr": 0.1, "muon_lr": 0.5}, [0.5, 0.1]),
        ({"lr": 0.1, "adam_lr": 0.5}, [0.1, 0.5]),
        ({"muon_lr": 1.0, "adam_lr": 0.5}, [1.0, 0.5]),
    ],
)
def test_names_and_shapes_decide_and_each_half_has_its_rate(params: dict[str, float], rates: list[float]) -> None:
    assert [group["lr"] for group in make(**params).param_groups] == rates


def test_groups_are_split_and_what_has_no_name_is_left_to_adam() -> None:
    first, second = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    split = split_matrices([{"params": [first, second], "lr": 1.0}], {id(first): "a.weight"})
    assert [(group["use_muon"], group["lr"], len(group["params"])) for group in split] == [
        (True, 1.0, 1),
        (False, 1.0, 1),
    ]


def test_a_group_may_say_for_itself_who_steps_it() -> None:
    matrix, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    full = {"momentum": 0.95, "ns_method": "gram", "betas": [0.9, 0.95], "eps": 1e-10, "weight_decay": 0}
    names = {id(matrix): "fc.weight", id(bias): "fc.bias"}
    method = Method("Muon", full, None, {"plain": {"match": "*weight", "use_muon": False}})
    built = build_optimizer(method, [matrix, bias], names=names)
    assert [group["use_muon"] for group in built.param_groups] == [False, False]
    wrong = Method("Muon", full, None, {"plain": {"match": "*bias", "use_muon": True}})
    with pytest.raises(TargetError, match="at least two dimensions"):
        build_optimizer(wrong, [matrix, bias], names=names)
