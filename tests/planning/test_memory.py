"""The arithmetic of memory: shards as torch cuts them, and DeepSpeed's published estimates beside ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

import dsjob
from dsjob.contract.spec import Method
from dsjob.planning.memory import Memory, predict_memory
from dsjob.planning.model import Layout, Model, OptimizerState, Weight, assume_state, count
from dsjob.planning.shapes import assume_model
from dsjob.ranks.mesh import World

ADAM = OptimizerState(2, 4)
P, L = 2_851_000_000, 32_000_000  # t5-3b, the example of DeepSpeed's documentation
GIB = 1 << 30


def zero2_needs(params: float, ranks: int, nodes: int, *, offload: bool) -> tuple[float, float]:
    """DeepSpeed's bytes on a device and on a host at stage 2, for fp16 and Adam; `ranks`: on each of `nodes` machines.

    Source: DeepSpeed, docs/code-docs/source/memory.rst ("Memory Requirements"), which describes
    deepspeed.runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs.
    """
    total = ranks * nodes
    if offload:
        return 2 * params, params * max(4 * ranks, 16) * 1.5
    return 4 * params + 16 * params / total, params * 4 * ranks * 1.5


def zero3_needs(
    params: float, largest: float, ranks: int, nodes: int, *, offload: str, zero_init: bool
) -> tuple[float, float]:
    """The same at stage 3; `largest`: parameters of the largest layer; `offload`: none, optimizer, or param with both.

    Source: as above, for deepspeed.runtime.zero.stage3.estimate_zero3_model_states_mem_needs.
    """
    total, layer, share = ranks * nodes, 4 * largest, 1 / nodes
    if offload == "none":
        return layer + 18 * params / total, (largest if zero_init else params) * 4 * ranks * 1.5
    device, each = (layer, 18) if offload == "param" else (layer + 2 * params / total, 16)
    host = each * share if zero_init else max(4 * ranks, each * share)
    return device, params * host * 1.5


@pytest.mark.parametrize(
    ("needs", "device", "host"),
    [
        (zero2_needs(P, 8, 1, offload=True), 5.31, 127.45),
        (zero2_needs(P, 8, 1, offload=False), 15.93, 127.45),
        (zero3_needs(P, L, 8, 1, offload="param", zero_init=True), 0.12, 71.69),
        (zero3_needs(P, L, 8, 1, offload="param", zero_init=False), 0.12, 127.45),
        (zero3_needs(P, L, 8, 1, offload="optimizer", zero_init=True), 0.78, 63.72),
        (zero3_needs(P, L, 8, 1, offload="optimizer", zero_init=False), 0.78, 127.45),
        (zero3_needs(P, L, 8, 1, offload="none", zero_init=True), 6.09, 1.43),
        (zero3_needs(P, L, 8, 1, offload="none", zero_init=False), 6.09, 127.45),
    ],
)
def test_the_formulas_here_give_the_numbers_that_deepspeed_prints(
    needs: tuple[float, float], device: float, host: float
) -> None:
    assert needs[0] / GIB == pytest.approx(device, abs=0.006)
    assert needs[1] / GIB == pytest.approx(host, abs=0.006)


def make_model() -> Model:
    """P parameters in layers of L, one of them outside the blocks and the remainder with it."""
    layers = P // L - 1
    return Model((Weight((P - layers * L,)), *(Weight((L,), unit=number) for number in range(1, layers + 1))))


def predict(stage: int, offload: str = "none") -> Memory:
    layout = Layout(stage, world_size=8, compute=2, reduce=2, offload=offload)  # type: ignore[arg-type]
    return predict_memory(make_model(), layout, ADAM)


def without_buffers(memory: Memory) -> int:
    return sum(item.backward for item in memory.items if item.place == "device" and not item.name.endswith("buffers"))


def test_stage_2_needs_less_than_deepspeed_says_by_the_whole_gradients() -> None:
    """DeepSpeed counts 2 bytes a parameter for whole gradients; FSDP2 holds those of one block at a time."""
    device, _ = zero2_needs(P, 8, 1, offload=False)
    assert without_buffers(predict(2)) == pytest.approx(device - 2 * P, rel=0.01)


def test_stage_3_needs_less_than_deepspeed_says_by_the_shards_of_the_compute_copies() -> None:
    """DeepSpeed keeps 2 bytes a parameter of fp16 shards beside the masters; FSDP2 casts as it gathers."""
    device, _ = zero3_needs(P, 0, 8, 1, offload="none", zero_init=True)
    assert predict(3).states == pytest.approx(device - 2 * P / 8, rel=0.01)


def test_stage_2_offloaded_is_deepspeeds_estimate_without_its_margin_and_with_shards() -> None:
    """FSDP2 gathers the compute copies from shards of them that stay beside."""
    device, host = zero2_needs(P, 8, 1, offload=True)
    memory = predict(2, "optimizer")
    assert without_buffers(memory) == pytest.approx(device + 2 * P / 8, rel=0.01)
    building = 4 * P  # on every rank, and more than the 16 bytes a parameter over all of them afterwards
    assert 1.5 * 8 * max(building, memory.host) == pytest.approx(host, rel=0.01)


@pytest.mark.parametrize(("offload", "copies"), [("optimizer", 0), ("param", 2)])
def test_stage_3_offloaded_is_deepspeeds_estimate_without_its_margin(offload: str, copies: int) -> None:
    """With parameters on the host DeepSpeed has 2 bytes a parameter of fp16 copies there; FSDP2 casts as it gathers."""
    device, host = zero3_needs(P, 0, 8, 1, offload=offload, zero_init=True)
    memory = predict(3, offload)
    assert memory.states == pytest.approx(device, rel=0.01)
    assert 1.5 * (8 * memory.host + copies * P) == pytest.approx(host, rel=0.01)


@pytest.mark.parametrize(("stage", "offload"), [(1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "param")])
def test_page_locked_memory_is_counted_in_powers_of_two(stage: int, offload: str) -> None:
    """PyTorch's allocator of page-locked memory rounds each tensor up. Gradients on their way from a GPU are there."""
    ranks, model = 4, Model(tuple(Weight((4096, 1376), unit=number) for number in range(1, 5)))
    layout = Layout(stage, ranks, compute=2, reduce=2, offload=offload)  # type: ignore[arg-type]
    shard = 1024 * 1376
    pageable = {item.name: item.step for item in predict_memory(model, layout, ADAM).items if item.place == "host"}
    locked = predict_memory(model, replace(layout, pinned=True), ADAM)
    found = {item.name: item.step for item in locked.items if item.place == "host"}
    rounded = 4 * (8 << 20)  # a shard has 5.4 MiB in fp32
    if offload == "param":
        assert found == pageable | {"parameters": rounded, "gradients": rounded}
        assert pageable["parameters"] == 4 * 4 * shard
    else:
        assert found == pageable | {"fp32 masters": rounded, "gradients in transit": rounded // 2}
        assert pageable["fp32 masters"] == 4 * 4 * shard


@pytest.mark.parametrize(("stage", "param"), [(2, False), (3, True)])
def test_state_on_a_disk_is_planned_there_and_not_on_the_host(stage: int, param: bool, tmp_path: Path) -> None:
    """The file has the planned size, and the buffers in memory too."""
    offload = "param" if param else "optimizer"
    model = Model(tuple(Weight((1024, 1024), unit=number) for number in range(1, 13)))
    layout = Layout(stage, 1, offload=offload, disk_buffers=2)  # type: ignore[arg-type]
    memory = predict_memory(model, layout, ADAM)
    section = {"stage": stage, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 2}}
    config = {
        "train_batch_size": 1,
        "zero_optimization": {**section, "offload_param": {"device": "cpu"} if param else {}},
    }
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1}}
    file, buffers, _ = run_ranks(measure_disk, 1, config, 12)[0]
    assert memory.disk == pytest.approx(file, rel=0.01)
    planned = {item.name: item.bytes for item in memory.items if item.place == "host"}
    assert planned["disk buffers"] == pytest.approx(buffers, rel=0.01)
    assert "optimizer state" not in planned
    in_memory = predict_memory(model, replace(layout, disk_buffers=0), ADAM)
    assert in_memory.disk == 0
    assert in_memory.host - memory.host == memory.disk - planned["disk buffers"]


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.full
def test_parameters_on_a_disk_are_planned_there_with_their_buffers(state: bool, tmp_path: Path) -> None:
    model = Model(tuple(Weight((1024, 1024), unit=number) for number in range(1, 25)))
    kept = 5 << 20  # elements: five blocks
    layout = Layout(3, 1, offload="param", disk_buffers=2 * state, block_buffers=3, max_in_cpu=kept)
    memory = predict_memory(model, layout, ADAM)
    place = {"device": "nvme", "nvme_path": str(tmp_path)}
    section = {"stage": 3, "offload_param": {**place, "buffer_count": 3, "max_in_cpu": kept}}
    section |= {"offload_optimizer": {**place, "buffer_count": 2}} if state else {}
    config = {"train_batch_size": 1, "zero_optimization": section}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1}}
    file, buffers, blocks = run_ranks(measure_disk, 1, config, 24)[0]
    assert memory.disk == pytest.approx(file, rel=0.01)
    planned = {item.name: item.bytes for item in memory.items if item.place == "host"}
    assert planned["block buffers"] == blocks
    assert planned["disk buffers"] == pytest.approx(buffers, rel=0.01)
    assert planned["parameters"] == 4 * kept


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1024, 1024, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def measure_disk(world: World, config: dict[str, Any], layers: int) -> tuple[int, int, int]:
    """Bytes of the files, of the optimizer's buffers and of those for blocks, after two steps."""
    net = torch.nn.Sequential(*(Block() for _ in range(layers)))
    engine = dsjob.initialize(model=net, config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.randn(1, 1024)).sum())
        engine.step()
    disk = engine.strategy.disk
    assert disk is not None
    shards = getattr(engine.strategy, "_on_disk", None)
    blocks = sum(buffer.bytes.numel() for buffer in shards._free) if shards else 0
    return sum(file.size for file in disk._files), sum(buffer.bytes.numel() for buffer in disk._free), blocks


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 64])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_shards_are_those_of_torch_chunk(rows: int, world_size: int) -> None:
    weight = Weight((rows, 3))
    chunks = [chunk.numel() for chunk in torch.zeros(rows, 3).chunk(world_size)]
    chunks += [0] * (world_size - len(chunks))
    assert [weight.shard(world_size, rank) for rank in range(world_size)] == chunks
    assert weight.padded(world_size) == max(chunks)


def test_a_number_of_parameters_stands_for_a_model() -> None:
    model = assume_model(70_000_000_000)
    assert count(model.weights) == 70_000_000_000
    memory = predict_memory(model, Layout(3, 64, compute=2, reduce=2), ADAM)
    assert memory.states == pytest.approx(16 * 70e9 / 64, rel=1e-6)


def test_frozen_parameters_have_no_gradients_and_no_state() -> None:
    model = Model((Weight((10, 10), trainable=False), Weight((5, 5))))
    items = {item.name: item.step for item in predict_memory(model, Layout(0, 1, compute=2), ADAM).items}
    assert items == {"parameters": 250, "gradients": 100, "fp32 masters": 100, "optimizer state": 204}


@pytest.mark.parametrize(
    ("name", "params", "copies"),
    [
        ("AdamW", {}, 2),
        ("Lamb", {}, 2),
        ("lion", {}, 1),
        ("adam", {"amsgrad": True}, 3),
        ("SGD", {"momentum": 0.9}, 1),
        ("OneBitAdam", {}, 2),
        ("SGD", {"momentum": 0.0}, 0),
    ],
)
def test_the_state_of_known_optimizers_is_assumed_without_a_remark(name: str, params: dict, copies: int) -> None:
    state, remark = assume_state(Method(name, params, None))
    assert (state.copies, remark) == (copies, "")


def test_the_state_of_other_optimizers_is_assumed_with_a_remark() -> None:
    state, remark = assume_state(Method("Adafactor", {}, None))
    assert state.copies == 2
    assert "Adafactor" in remark


def test_sums_of_gradients_in_another_dtype_replace_those_between_micro_steps() -> None:
    model = Model((Weight((100,)),))
    for size, layout in ((100, Layout(2, 1, grad_accum=2)), (50, Layout(2, 2, grad_accum=2))):
        held = replace(layout, accumulate=2, holds=True)
        items = {item.name: item for item in predict_memory(model, held, OptimizerState(2)).items}
        assert (items["gradient sums"].forward, items["gradient sums"].step) == (2 * size, 0)
        assert items["gradients"].forward == 0
