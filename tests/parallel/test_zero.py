"""Models that are sharded while they are built, parameters gathered for a while, and single values, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from allocations import count_live, start_counting
from engines import ADAMW, build_net, make_engine, make_tokens, train_engine, whole_state
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import dsjob
from dsjob.engine.engine import Engine
from dsjob.errors import ConfigWarning, UsageError
from dsjob.parallel import leaves, zero
from dsjob.parallel.parameters import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
)
from dsjob.parallel.zero_init import Init
from dsjob.ranks.mesh import World

pytestmark = pytest.mark.slow

WIDTH, LAYERS = 128, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.inner(x)


class Stack(nn.Module):
    """Blocks, a head tied to the first layer, initialised as transformers does it: by `apply` in the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale).square().mean()


def engine_of(model: nn.Module, stage: int, **config: Any) -> Engine:
    base = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW, "zero_optimization": {"stage": stage}}
    return dsjob.initialize(model=model, config={**base, **config})[0]


def train_stack(world: World, stage: int, sharded: bool) -> dict[str, Tensor]:
    torch.manual_seed(world.data_rank if sharded else 0)  # rank 0's values count
    with Init(enabled=sharded):
        model = Stack()
    if sharded and world.data_size > 1:
        assert isinstance(model.blocks[0].inner[0].weight, DTensor)  # type: ignore[index,union-attr]
        assert model.head.weight is model.first.weight
    engine = engine_of(model, stage)
    for step in range(2):
        x = torch.randn(2 * world.data_size, WIDTH, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x[2 * world.data_rank : 2 * world.data_rank + 2]))
        engine.step()
    return whole_state(engine)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.full("1", "0")
def test_a_model_built_in_shards_trains_as_one_built_whole(stage: int) -> None:
    expected = run_ranks(train_stack, 2, stage, False)[0]
    for state in run_ranks(train_stack, 2, stage, True):
        assert set(state) == set(expected)
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, msg=name)


class Asking(Stack):
    """Uses its head's weight without calling the head, if it need not be gathered, as TRL does."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.head.weight.ds_status == zero.ShardStatus.AVAILABLE
        return (super().forward(x) + self.head.weight.sum()).square()


def ask(world: World) -> None:
    with Init():
        model = Asking()
    # peft takes a weight on a mesh with names for a part of tensor parallelism, and makes adapters of its part's size.
    assert model.head.weight.device_mesh.mesh_dim_names is None  # type: ignore[attr-defined]
    engine = engine_of(model, 3)
    with torch.no_grad():
        model(torch.ones(2, WIDTH))  # the model itself, before the engine: so does TRL's GRPOTrainer
    for _ in range(2):
        engine.backward(engine(torch.ones(2, WIDTH)))
        engine.step()


def test_libraries_see_that_weights_are_sharded_over_data_and_gathered_in_a_forward_pass() -> None:
    run_ranks(ask, 2)


def test_init_refuses_what_would_change_the_results_and_names_that_do_not_exist() -> None:
    with pytest.raises(UsageError, match="quantized weights would change the results"):
        Init(zero_quantized_weights=True)
    with pytest.raises(TypeError, match="data_paralel_group"):
        Init(data_paralel_group=None)  # type: ignore[call-arg]


def test_init_does_nothing_on_one_rank() -> None:
    with Init():
        model = Stack()
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def measure_building(world: World, sharded: bool) -> tuple[int, int]:
    """Bytes of parameters that live after construction, and after initialize; and the whole model's."""
    start_counting()
    with Init(enabled=sharded):
        model = Stack()
    built = count_live()
    engine = engine_of(model, 3)
    del model
    ready = count_live()
    del engine
    return built, ready


def maybe_whole(parameter: Any) -> Tensor:
    """As programs for DeepSpeed collect weights: by the attributes of its sharded parameters."""
    if hasattr(parameter, "ds_id"):
        assert parameter.ds_status.name == "NOT_AVAILABLE"
        assert parameter.ds_numel == parameter.ds_shape.numel() == WIDTH * WIDTH
        with zero.GatheredParameters([parameter]):
            assert parameter.ds_status.name == "AVAILABLE"
            return parameter.data.detach().cpu().clone()  # type: ignore[no-any-return]
    return parameter.detach().cpu().clone()  # type: ignore[no-any-return]


def collect(world: World) -> list[Tensor]:
    torch.manual_seed(world.data_rank)
    with Init():
        lone = nn.Linear(WIDTH, WIDTH)
        late = nn.Sequential(nn.utils.skip_init(nn.Linear, WIDTH, WIDTH))  # on meta while it is made
    assert isinstance(lone.weight, DTensor)
    assert isinstance(late[0].weight, DTensor)
    assert not late[0].weight.is_meta
    before = maybe_whole(lone.weight)
    engine = engine_of(nn.Sequential(lone), 3)
    return [before, maybe_whole(next(iter(engine.module.parameters())))]


def test_a_lone_module_is_sharded_at_the_end_and_collected_as_programs_do_it() -> None:
    torch.manual_seed(0)
    expected = nn.Linear(WIDTH, WIDTH).weight.detach()
    for collected in run_ranks(collect, 2):
        assert all(type(weight) is Tensor and torch.equal(weight, expected) for weight in collected)


class Watched(nn.Module):
    """A stack whose live bytes are measured after each block is built."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(LAYERS):
            self.blocks.append(Block())
            seen.append(count_live())


def measure_growth(world: World, sharded: bool) -> list[int]:
    start_counting()
    seen: list[int] = []
    with Init(enabled=sharded):
        Watched(seen)
    return seen


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_model_is_never_whole_on_any_rank(ranks: int) -> None:
    whole = sum(p.numel() * p.element_size() for p in Stack().parameters())
    block = sum(p.numel() * p.element_size() for p in Block().parameters())
    for (built, ready), growth in zip(
        run_ranks(measure_building, ranks, True), run_ranks(measure_growth, ranks, True), strict=True
    ):
        assert built < whole / ranks + block
        assert ready < whole / ranks + block
        assert max(growth) < LAYERS * block / ranks + block
    assert run_ranks(measure_building, ranks, False)[0][0] >= whole


# ---- GatheredParameters


def edit(world: World, stage: int, bf16: bool) -> dict[str, Any]:
    engine = make_engine(stage, bf16=bf16)
    head = engine.module.head
    assert isinstance(head, nn.Module)
    seen: dict[str, Any] = {}
    with zero.GatheredParameters([head.weight]):
        seen["shape"] = tuple(head.weight.detach().clone().shape)
        seen["plain"] = type(head.weight.detach().clone()) is Tensor
        if stage and world.data_size > 1:
            head.weight.data.fill_(7)  # lost: nobody was said to modify
    if stage and world.data_size > 1:
        said = r"drops what was changed inside: 1 of 1 parameters \(shapes \[.+\]\); pass modifier_rank=0"
        with pytest.warns(UserWarning, match=said), zero.GatheredParameters(head.weight), torch.no_grad():
            head.weight.add_(1)
    # None: transformers' resize_token_embeddings passes the bias of a layer that has none.
    with zero.GatheredParameters([head.weight, None], modifier_rank=1):
        if world.data_rank == 1:
            nn.init.constant_(head.weight, 0.25)
        with zero.GatheredParameters(list(head.parameters())):
            seen["inside"] = head.weight.detach().clone()
    with zero.GatheredParameters(head.weight, modifier_rank=0, enabled=False):
        pass
    with zero.GatheredParameters(head.weight):
        seen["after"] = head.weight.detach().clone()
    seen["master"] = whole_state(engine)["model.head.weight"]
    train_engine(engine, 0, 1)
    seen["trained"] = whole_state(engine)["model.head.weight"]
    return seen


@pytest.mark.parametrize(
    ("stage", "bf16"),
    [
        *((0, True), (1, False), (3, True)),
        *(pytest.param(*other, marks=pytest.mark.full) for other in ((0, False), (1, True), (3, False))),
    ],
)
def test_gathered_parameters_are_whole_and_edits_of_one_rank_are_everybodys(stage: int, bf16: bool) -> None:
    results = run_ranks(edit, 2, stage, bf16)
    shape = tuple(build_net().head.weight.shape)
    for seen in results:
        assert seen["shape"] == shape
        assert seen["plain"]
        assert torch.equal(seen["after"].float(), torch.full(shape, 0.25))
        assert torch.equal(seen["master"], torch.full(shape, 0.25))
        assert not torch.equal(seen["trained"], seen["master"])
        assert torch.equal(seen["trained"], results[0]["trained"])
    assert torch.equal(results[1]["inside"].float(), torch.full(shape, 0.25))


def gather_in_other_orders(world: World, built: bool) -> tuple[list[Tensor], int]:
    """Gathers parameters in an order that differs between ranks, then on rank 0 alone the values of a state dict."""
    torch.manual_seed(world.data_rank)
    with Init(enabled=built):
        model: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    if not built:
        model = make_engine(3).module
    parameters = list(model.parameters())
    values = list(model.state_dict().values())
    with zero.GatheredParameters(parameters[::-1] if world.data_rank else parameters, modifier_rank=0):
        wholes = [parameter.detach().clone() for parameter in parameters]
    if world.data_rank == 0:
        with zero.GatheredParameters(values):
            pass
    return wholes, sum(isinstance(value, DTensor) for value in values)


@pytest.mark.parametrize("built", [True, False])
def test_parameters_may_be_listed_in_any_order_and_values_of_a_state_dict_are_skipped(built: bool) -> None:
    """transformers 4.57 passes a set of a state dict's values when it loads a model; other versions, of parameters."""
    (first, sharded), (second, _) = run_ranks(gather_in_other_orders, 2, built)
    assert sharded == (len(first) if built else 0)  # the state dict of an engine's model is whole
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Borrower(nn.Module):
    """Uses the weight of a block's inner module outside that block."""

    def __init__(self, registers: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        if registers:
            zero.register_external_parameter(self, self.blocks[1].inner[0].weight)  # type: ignore[index,union-attr]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.blocks[1].inner[0].weight  # type: ignore[index,union-attr]
        for block in self.blocks:
            x = block(x)
        return (x @ weight).square().mean()


def borrow(world: World, sharded: bool) -> Tensor:
    torch.manual_seed(0)
    with Init(enabled=sharded):
        model = Borrower(registers=True)
    engine = engine_of(model, 3)
    engine.backward(engine(torch.ones(2, WIDTH)))
    engine.step()
    with pytest.raises(UsageError, match="too late"):
        zero.register_external_parameter(engine.module, next(iter(engine.module.parameters())))  # type: ignore[arg-type]
    return whole_state(engine)["model.blocks.1.inner.0.weight"]


@pytest.mark.parametrize("sharded", [False, True])
def test_an_external_parameter_is_there_when_another_module_uses_it(sharded: bool) -> None:
    alone = borrow_alone()
    for weight in run_ranks(borrow, 2, sharded):
        torch.testing.assert_close(weight, alone)


def borrow_alone() -> Tensor:
    torch.manual_seed(0)
    engine = engine_of(Borrower(registers=True), 0)
    engine.backward(engine(torch.ones(2, WIDTH)))
    engine.step()
    return whole_state(engine)["model.blocks.1.inner.0.weight"]


# ---- single values


def read_values(world: World, stage: int, bf16: bool) -> dict[str, Tensor | None]:
    engine = make_engine(stage, bf16=bf16, gradient_clipping=0.0)
    train_engine(engine, 0, 1, rows=4)
    x, y = make_tokens(1, 4)
    part = 4 // world.data_size
    engine.backward(engine(x[world.data_rank * part :][:part], y[world.data_rank * part :][:part]))
    weight = engine.module.head.weight  # type: ignore[union-attr]
    assert isinstance(weight, Tensor)
    values = {
        "param": safe_get_full_fp32_param(weight),
        "grad": safe_get_full_grad(weight),
        "exp_avg": safe_get_full_optimizer_state(weight, "exp_avg"),
    }
    shares = safe_get_local_fp32_param(weight), safe_get_local_grad(weight)
    rows = weight.shape[0] if stage == 0 or world.data_size == 1 else len(range(weight.shape[0])[:27])
    assert shares[0] is not None
    assert shares[1] is not None
    assert shares[0].shape == shares[1].shape
    assert shares[0].shape[0] in (rows, weight.shape[0] - rows)
    shape = tuple(weight.shape)
    safe_set_full_grad(weight, torch.full(shape, 0.5))
    assert torch.equal(safe_get_full_grad(weight), torch.full(shape, 0.5))  # type: ignore[arg-type]
    safe_set_full_optimizer_state(weight, torch.full(shape, 0.125), "exp_avg")
    safe_set_full_fp32_param(weight, torch.full(shape, 2.0))
    safe_set_local_fp32_param(weight, torch.full_like(shares[0], 3.0))
    values |= {
        "new": safe_get_full_fp32_param(weight),
        "average": safe_get_full_optimizer_state(weight, "exp_avg"),
    }
    engine.step()
    values |= {"stepped": safe_get_full_fp32_param(weight), "none": safe_get_full_grad(weight)}
    return values


@pytest.mark.parametrize(
    ("stage", "bf16"),
    [
        *((0, True), (1, False), (2, True), (3, False)),
        *(pytest.param(*other, marks=pytest.mark.full) for other in ((0, False), (1, True), (2, False), (3, True))),
    ],
)
def test_values_of_one_parameter_are_the_same_everywhere(stage: int, bf16: bool) -> None:
    (alone,) = run_ranks(read_values_alone, 1, bf16)
    for values in run_ranks(read_values, 2, stage, bf16):
        assert values.pop("none") is None
        for name, value in values.items():
            assert value is not None
            assert value.dtype == torch.float32
            torch.testing.assert_close(value, alone[name], rtol=0, atol=2e-2 if bf16 else 1e-6, msg=name)
        assert torch.equal(values["new"], torch.full_like(values["new"], 3.0))  # type: ignore[arg-type]
        assert torch.equal(values["average"], torch.full_like(values["average"], 0.125))  # type: ignore[arg-type]


def read_values_alone(world: World, bf16: bool) -> dict[str, Tensor | None]:
    return read_values(world, 0, bf16)


def test_a_tensor_of_no_engine_has_no_values() -> None:
    assert safe_get_full_fp32_param(nn.Parameter(torch.zeros(2))) is None
    with pytest.raises(ValueError, match="does not belong to an engine"):
        safe_set_full_fp32_param(nn.Parameter(torch.zeros(2)), torch.ones(2))
    with pytest.raises(UsageError, match="mpu"):
        Init(mpu=object())


class Choice(nn.Module):
    """Uses one of its experts, on each rank another."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: Tensor, number: int) -> Tensor:
        x = self.experts[number](x)
        return x.square().mean() + 0.0 * sum(p.sum() for p in self.experts[1 - number].parameters())


def test_leaves_are_found_by_class_name_or_suffix() -> None:
    model = Choice()
    assert leaves.set_z3_leaf_modules_by_name(model, ["experts.0"]) == ([model.experts[0]], [])
    assert leaves.z3_leaf_module(model.experts[0])
    assert model.experts[0]._z3_leaf  # DeepSpeed's name for it, which programs read
    inner = [block.inner for block in model.experts]
    assert leaves.set_z3_leaf_modules_by_suffix(model, ["inner", "gone"], raise_if_not_found=False) == (inner, ["gone"])
    assert leaves.unset_z3_leaf_modules(model, [Block]) == list(model.experts)
    assert leaves.get_z3_leaf_modules(model) == inner
    assert leaves.set_z3_leaf_modules_by_suffix(model, ["0.inner"], flag=False) == (inner[:1], [])
    assert leaves.get_z3_leaf_modules(model) == inner[1:]
    with pytest.raises(UsageError, match="the model has no module named nothing"):
        leaves.set_z3_leaf_modules_by_name(model, ["nothing"])
    assert leaves.set_z3_leaf_modules(model, ["Nothing"], raise_if_not_found=False) == []


def train_experts(world: World, by_config: bool) -> bool:
    torch.manual_seed(0)
    model = Choice()
    if by_config:
        engine = engine_of(model, 3, zero_optimization={"stage": 3, "leaf_module": {"names": ["experts"]}})
    else:
        assert leaves.set_z3_leaf_modules(model, ["ModuleList"]) == [model.experts]
        engine = engine_of(model, 3)
    assert leaves.get_z3_leaf_modules(model) == [model.experts]
    before = whole_state(engine)
    engine.backward(engine(torch.ones(2, WIDTH), world.data_rank))
    engine.step()
    after = whole_state(engine)
    return all(not torch.equal(before[f"model.experts.{n}.gain"], after[f"model.experts.{n}.gain"]) for n in range(2))


@pytest.mark.parametrize("by_config", [False, True])
def test_ranks_may_use_different_parts_of_a_leaf(by_config: bool) -> None:
    assert run_ranks(train_experts, 2, by_config) == [True, True]


def test_leaves_of_the_config_that_are_not_there_are_told() -> None:
    section = {"classes": ["Block", "Gone"], "names": "experts.7", "name_suffixes": ["inner", "outer"]}
    model = Choice()
    with pytest.warns(ConfigWarning, match=r"does not have: experts\.7, outer$"):
        engine_of(model, 3, zero_optimization={"stage": 3, "leaf_module": section})
    assert len(leaves.get_z3_leaf_modules(model)) == 4
    with pytest.warns(ConfigWarning, match="does not have: Gone"):
        engine_of(Choice(), 3, zero_optimization={"stage": 3, "leaf_module": {"classes": ["Gone"]}})
