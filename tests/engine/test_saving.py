"""An engine's own saving and loading calls, on one rank and on two."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import build_net, make_engine, train_engine, whole_state
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor

import dsjob
from dsjob.checkpoint.live.weights import read_weights
from dsjob.checkpoint.offline.convert import convert_to_deepspeed
from dsjob.checkpoint.other.torch_files import TorchFile
from dsjob.checkpoint.root.source import open_root
from dsjob.engine.engine import Engine
from dsjob.errors import CheckpointError, UsageError
from dsjob.ranks.mesh import World


def test_weights_alone_leave_counters_and_optimizer(tmp_path: Path) -> None:
    saver = make_engine(0)
    train_engine(saver, 0, 2)
    saver.save_checkpoint(str(tmp_path), tag=7, client_state={"epoch": 3, "rates": torch.tensor([0.5, 2])})
    other = make_engine(0)
    train_engine(other, 5, 1)
    moments = {k: v for k, v in whole_state(other).items() if k.startswith("optimizer.")}
    path, client = other.load_checkpoint(str(tmp_path), tag=7, load_module_only=True)
    assert path is not None
    assert client is not None
    assert client["epoch"] == 3
    assert torch.equal(client["rates"], torch.tensor([0.5, 2]))
    assert other.global_steps == 1
    state, saved = whole_state(other), whole_state(saver)
    for name, tensor in state.items():
        assert torch.equal(tensor, moments[name] if name in moments else saved[name]), name


def test_rates_that_are_tensors_stay_those_tensors(tmp_path: Path) -> None:
    """Compiled optimizers read them where they are. They come back in an optimizer that has numbers, too."""

    def make(rate: float | Tensor) -> Engine:
        net = build_net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=rate, foreach=False)
        config = {"train_micro_batch_size_per_gpu": 2}
        return dsjob.initialize(model=net, optimizer=optimizer, config=config)[0]

    saver = make(torch.tensor(0.1))
    train_engine(saver, 0, 1)
    saver.save_checkpoint(str(tmp_path / "own"))
    held = torch.tensor(0.5, dtype=torch.float64)
    for engine, dtype in ((make(held), torch.float64), (make(0.5), torch.float32)):
        engine.load_checkpoint(str(tmp_path / "own"))
        rate = groups_of(engine)[0]["lr"]
        assert (float(rate), rate.dtype) == (float(torch.tensor(0.1)), dtype)
        assert (rate is held) == (dtype == torch.float64)
    convert_to_deepspeed(str(tmp_path / "own"), str(tmp_path / "theirs"), stage=1, world_size=1)
    (name,) = (path.name for path in (tmp_path / "theirs").rglob("*optim_states.pt"))
    (folder,) = (path.parent for path in (tmp_path / "theirs").rglob("*optim_states.pt"))
    content = TorchFile(open_root(str(folder)), name).content
    rates = [group["lr"] for group in content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]]
    assert rates == [float(torch.tensor(0.1))]
    assert type(rates[0]) is float


@pytest.mark.parametrize("empty", [0, 1])
def test_groups_without_parameters_come_back_in_their_places(tmp_path: Path, empty: int) -> None:
    """A Trainer with an adapter has one: nothing of it is trained without weight decay. Schedules know the order."""

    def make() -> Engine:
        net = build_net()
        groups: list[dict[str, Any]] = [{"params": list(net.parameters()), "lr": 0.1, "weight_decay": 0.5}]
        groups.insert(empty, {"params": [], "lr": 0.2})
        optimizer = torch.optim.AdamW(groups)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        config = {"train_micro_batch_size_per_gpu": 2}
        return dsjob.initialize(model=net, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]

    saver, loader = make(), make()
    train_engine(saver, 0, 2)
    saver.save_checkpoint(str(tmp_path))
    loader.load_checkpoint(str(tmp_path))
    for engine in (saver, loader):
        train_engine(engine, 2, 1)
    read = [[(len(group["params"]), group["lr"]) for group in groups_of(engine)] for engine in (saver, loader)]
    assert read[0] == read[1]
    assert read[0][empty] == (0, 0.2 / 4)
    states = whole_state(saver), whole_state(loader)
    assert all(torch.equal(states[1][name], tensor) for name, tensor in states[0].items())


def groups_of(engine: Engine) -> list[dict[str, Any]]:
    assert engine.optimizer is not None
    return engine.optimizer.param_groups


def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    net = build_net()
    net.emb.weight.requires_grad_(False)
    engine = make_engine(0, net=net)
    engine.save_checkpoint(str(tmp_path), exclude_frozen_parameters=True)
    assert set(build_net().state_dict()) - set(read_weights(str(tmp_path))) == {"emb.weight"}
    again = make_engine(0)
    with pytest.raises(CheckpointError, match=r"emb\.weight"):
        again.load_checkpoint(str(tmp_path), load_optimizer_states=False)
    again.load_checkpoint(str(tmp_path), load_optimizer_states=False, load_module_strict=False)
    assert "emb.weight" not in engine.module_state_dict(exclude_frozen_parameters=True)
    engine.save_16bit_model(str(tmp_path), "w.bin", exclude_frozen_parameters=True)
    assert "emb.weight" not in torch.load(tmp_path / "w.bin")


def test_skipped_steps_are_counted_on_without_the_optimizers_state(tmp_path: Path) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}
    engine = make_engine(0, fp16=fp16)
    train_engine(engine, 0, 3)
    assert engine.skipped_steps == 3
    engine.save_checkpoint(str(tmp_path))
    again = make_engine(0, fp16=fp16)
    again.load_checkpoint(str(tmp_path), load_optimizer_states=False)
    assert (again.skipped_steps, again.global_steps) == (3, 3)


WARM = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 8, "warmup_type": "linear"}}
CYCLE = {"type": "OneCycle", "params": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.009, "cycle_first_step_size": 8}}
# Rates (and OneCycle's first beta) of steps 0 to 5 by DeepSpeed's formulas, which this test does not ask dsjob for.
COURSES = {
    "WarmupLR": [(0.01 * max(k - 1, 0) / 8, 0.9) for k in range(6)],
    "OneCycle": [(0.001 + 0.001 * k, 0.9 - 0.1 * k / 8 if k else 0.8) for k in range(6)],
}


@pytest.mark.parametrize("schedule", [WARM, CYCLE], ids=["WarmupLR", "OneCycle"])
@pytest.mark.parametrize("optimizer", [True, False], ids=["optimizer", "no optimizer"])
@pytest.mark.parametrize("counted", [True, False], ids=["scheduler", "no scheduler"])
def test_rates_after_a_partial_load_are_those_of_deepspeed(
    tmp_path: Path, schedule: dict[str, Any], optimizer: bool, counted: bool
) -> None:
    """Groups come with the optimizer, and a schedule sets them when it steps: the first step takes what it finds."""
    saver = make_engine(0, scheduler=schedule)
    train_engine(saver, 0, 3)
    saver.save_checkpoint(str(tmp_path))
    again = make_engine(0, scheduler=schedule)
    again.load_checkpoint(str(tmp_path), load_optimizer_states=optimizer, load_lr_scheduler_states=counted)
    course, found = COURSES[schedule["type"]], []
    for step in range(3):
        group = groups_of(again)[0]
        found.append((group["lr"], group["betas"][0]))
        train_engine(again, 3 + step, 1)
        assert again.last_lr == [found[-1][0]]
    first, later = course[3 if optimizer else 0], course[4:6] if counted else course[1:3]
    assert found == [pytest.approx(values) for values in (first, *later)]


def test_the_newest_checkpoint_is_loaded_and_no_weights_that_were_converted_into_its_root(tmp_path: Path) -> None:
    engine = make_engine(0)
    train_engine(engine, 0, 1)
    engine.save_checkpoint(str(tmp_path))
    torch.save(make_engine(0).module_state_dict(), tmp_path / "pytorch_model.bin")
    again = make_engine(0)
    path, _ = again.load_checkpoint(str(tmp_path))
    assert path is not None
    assert path.endswith("global_step1-a0001")
    assert again.global_steps == 1


@pytest.mark.parametrize("folder", ["", None])
def test_a_folder_is_needed(folder: str | None) -> None:
    with pytest.raises(UsageError, match="must be a path or URL"):
        make_engine(0).save_checkpoint(folder)  # type: ignore[arg-type]


def exchange_weights(world: World, stage: int, bf16: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    first, second = make_engine(stage, bf16=bf16), make_engine(stage, bf16=bf16)
    train_engine(first, 0, 1)
    weights = dict(first.module_state_dict())
    second.load_module_state_dict(weights)
    with pytest.raises(CheckpointError, match="missing"):
        second.load_module_state_dict({"nothing": torch.zeros(1)})
    return weights, whole_state(second)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "bf16"), [(0, True), (1, False), (3, False), (3, True)])
def test_module_state_dicts_are_whole_and_load_at_every_stage(stage: int, bf16: bool) -> None:
    for weights, loaded in run_ranks(exchange_weights, 2, stage, bf16):
        assert set(weights) == set(build_net().state_dict())
        for name, tensor in weights.items():
            if f"model.{name}" in loaded:
                assert torch.equal(loaded[f"model.{name}"], tensor.to(loaded[f"model.{name}"].dtype)), name
        assert weights["head.weight"].dtype == (torch.bfloat16 if bf16 else torch.float32)


def save_apart(world: World, folder: str, mode: str) -> str:
    engine = make_engine(1, checkpoint={"tag_validation": mode})
    try:
        engine.save_checkpoint(folder, tag=f"tag{world.data_rank}")
    except CheckpointError as error:
        return error.message
    return Path(folder, "latest").read_text().strip()


@pytest.mark.slow
def test_ranks_that_disagree_on_a_tag_are_told_or_refused(tmp_path: Path) -> None:
    assert run_ranks(save_apart, 2, str(tmp_path / "a"), "Warn") == ["tag0", "tag0"]
    refused = run_ranks(save_apart, 2, str(tmp_path / "b"), "Fail")
    assert refused == ["ranks save under different tags: tag0, tag1"] * 2


def test_states_are_moved_to_the_host_and_back() -> None:
    engine = make_engine(0, bf16=True)
    train_engine(engine, 0, 1)
    before = whole_state(engine)
    engine.offload_states()
    engine.reload_states()
    after = whole_state(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)
    train_engine(engine, 1, 1)
    with pytest.raises(UsageError, match="unknown state to offload: 'everything'"):
        engine.offload_states(include=["everything"])
    with pytest.raises(UsageError, match="cannot offload states to"):
        engine.offload_states(device="nvme")


def test_an_interrupted_save_beside_plain_weights_loads_nothing(tmp_path: Path) -> None:
    """HF's Trainer writes weights into the folder before it calls `save_checkpoint`."""
    engine = make_engine(0)
    engine.save_16bit_model(str(tmp_path), "model.safetensors")
    engine.save_checkpoint(str(tmp_path))
    shutil.rmtree(tmp_path / "commits")
    (tmp_path / "latest").unlink()
    with pytest.warns(
        UserWarning, match="nothing was loaded: no committed checkpoint in .*: no run has completed a save"
    ):
        assert engine.load_checkpoint(str(tmp_path), load_module_strict=False) == (None, None)


def test_plain_weights_load_with_a_warning_unless_none_matches(tmp_path: Path) -> None:
    engine = make_engine(0)
    train_engine(engine, 0, 1)
    engine.save_16bit_model(str(tmp_path), "model.safetensors")
    again = make_engine(0)
    with pytest.warns(UserWarning, match="it has only weights; optimizer, schedule and counters are unchanged"):
        again.load_checkpoint(str(tmp_path))
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(again.module.state_dict()[name], tensor) for name, tensor in saved.items())
    save_file({f"other.{name}": tensor for name, tensor in saved.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"not in the model: model\.other\."):
        again.load_checkpoint(str(tmp_path), load_module_strict=False)


def test_load_checkpoint_follows_latest(tmp_path: Path) -> None:
    engine = make_engine(0)
    engine.save_checkpoint(str(tmp_path), tag="first")
    train_engine(engine, 0, 1)
    engine.save_checkpoint(str(tmp_path), tag="second", save_latest=False)

    def load() -> int:
        again = make_engine(0)
        again.load_checkpoint(str(tmp_path))
        return again.global_steps

    assert (tmp_path / "latest").read_text() == "first\n"
    assert load() == 0
    (tmp_path / "latest").write_text("second")
    assert load() == 1
    for wrong in ("third", "../first", ""):
        (tmp_path / "latest").write_text(wrong)
        with pytest.warns(UserWarning, match="was never committed; loading the newest checkpoint"):
            assert load() == 1
    (tmp_path / "latest").unlink()
    with pytest.warns(UserWarning, match="there is no file `latest`"):
        assert load() == 1
    (tmp_path / "latest").mkdir()
    with pytest.warns(UserWarning, match="loading the newest checkpoint"):
        assert load() == 1
