"""Training from DeepSpeed's checkpoints follows DeepSpeed's own continuation, at any stage and world size."""

import json
import math
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_data import RUNS, about, split
from jobs import dsjob as dsjob_command
from jobs import read_metrics
from ranks import run_ranks
from small_net import ROWS, SmallNet, make_rows

import dsjob
from dsjob.engine.engine import Engine
from dsjob.errors import CheckpointError
from dsjob.ranks.mesh import World

TOLERANCE = {"fp32": 2e-5, "bf16": 8e-3}


def make_engine(name: str, stage: int, world_size: int) -> Engine:
    told = about(name)
    net = SmallNet(told["variant"])
    config = {**told["config"], "zero_optimization": {"stage": stage}}
    config["train_micro_batch_size_per_gpu"] = ROWS // world_size
    groups = None
    if told["variant"] == "groups":
        named = dict(net.named_parameters())
        matrices, rest = ([named[n] for n in part] for part in split(list(named)))
        groups = [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]
    config.pop("data_types", None)
    return dsjob.initialize(model=net, model_parameters=groups, config=config)[0]


def follow(world: World, stages: dict[str, Sequence[int]], universal: bool) -> list[tuple[str, list[float]]]:
    """For each run and its stages: this rank's losses of the steps after the save."""
    found = []
    for name in stages:
        for stage in stages[name]:
            engine = make_engine(name, stage, world.data_size)
            url, client_state = engine.load_checkpoint(f"{RUNS[name]}_universal" if universal else RUNS[name])
            assert url is not None
            assert url.endswith("/global_step3_uc" if universal else "/global_step3")
            assert client_state == {"epoch": 1, "note": "hello", "pair": (1, 2)}
            assert (engine.global_steps, engine.global_samples, engine.skipped_steps) == (3, 36, 0)
            losses = []
            part = ROWS // world.data_size
            for step in range(3, 7):
                x, y = make_rows(step)
                mine = slice(world.data_rank * part, (world.data_rank + 1) * part)
                loss = engine(x[mine], y[mine])
                losses.append(float(loss.detach()))
                engine.backward(loss)
                engine.step()
            assert engine.get_lr()[0] == pytest.approx(0.01 * (20 - 6) / 16)
            found.append((f"{name} at stage {stage} on {world.data_size}", losses))
    return found


def check(stages: dict[str, Sequence[int]], world_size: int, universal: bool = False) -> None:
    ranks: list[list[tuple[str, list[float]]]] = run_ranks(follow, world_size, stages, universal)
    for case, (title, _) in enumerate(ranks[0]):
        wanted: Any = about(title.split()[0])["losses"]
        means = [sum(rank[case][1][step] for rank in ranks) / world_size for step in range(4)]
        worst = max(abs(a - b) for a, b in zip(means, wanted, strict=True))
        assert worst <= TOLERANCE["bf16" if "bf16" in title else "fp32"], (title, means, wanted)


@pytest.mark.slow
def test_every_checkpoint_goes_on_at_some_stage() -> None:
    check({name: (number % 4,) for number, name in enumerate(RUNS)}, 2)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_checkpoint_goes_on_at_every_stage(world_size: int) -> None:
    check(dict.fromkeys(RUNS, range(4)), world_size)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [(1, 3), pytest.param((0, 2), marks=pytest.mark.full)])
def test_a_universal_checkpoint_goes_on(stages: tuple[int, ...]) -> None:
    check({"z3_fp32_ws2_tied": stages}, 2, universal=True)


@pytest.mark.parametrize("name", ["z0_fp32_ws2_groups", "z2_fp32_ws2_robin", "z3_fp32_ws2_tied"])
def test_a_program_with_a_schedule_of_its_own_finds_the_rates_that_were_saved(name: str) -> None:
    net = SmallNet(about(name)["variant"])
    parts = split([n for n, _ in net.named_parameters()]) if "groups" in name else [list(dict(net.named_parameters()))]
    groups = [{"params": [dict(net.named_parameters())[n] for n in part]} for part in parts]
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    engine = dsjob.initialize(model=net, optimizer=optimizer, config={"train_batch_size": ROWS})[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(?s).*schedule")
        engine.load_checkpoint(RUNS[name])
    saved = 0.01 * math.log(3) / math.log(4)  # WarmupDecayLR at its third step
    assert engine.get_lr() == pytest.approx([saved] * len(groups))
    engine.set_lr(0.5)
    engine.load_checkpoint(RUNS[name], load_optimizer_states=False)
    assert engine.get_lr() == [0.5] * len(groups)


DATA = """
import torch
from small_net import ROWS, SmallNet, make_rows

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 20 * ROWS

    def __getitem__(self, i):
        x, y = make_rows(i // ROWS)
        return x[i % ROWS], y[i % ROWS]
"""


def write_job(folder: Path, name: str, **sections: object) -> None:
    for copied in ("small_net.py", "net.py"):
        shutil.copy(Path(__file__).parent.parent / "support" / copied, folder)
    (folder / "my_data.py").write_text(DATA)
    document = {
        "model": {"_target_": "small_net.SmallNet"},
        "data": {"train": {"_target_": "my_data.Data"}, "shuffle": False},
        "trainer": {"train_batch": ROWS, "max_steps": 5, "log_every": 1},
        "checkpoint": {"resume": str(RUNS[name])},
        "output": {"dir": "run"},
        **{key: about(name)["config"][key] for key in ("optimizer", "scheduler", "gradient_clipping")},
        **sections,
    }
    (folder / "cfg.json").write_text(json.dumps(document))


def test_a_job_with_a_schedule_of_torch_begins_at_the_rate_that_was_saved(tmp_path: Path) -> None:
    schedule = {"type": "StepLR", "params": {"step_size": 100}}
    write_job(tmp_path, "z2_fp32_ws4_plain", scheduler=schedule)
    done = dsjob_command("cfg.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    saved = 0.01 * math.log(3) / math.log(4)  # WarmupDecayLR at its third step
    assert list(read_metrics(tmp_path / "run", "lr").values()) == pytest.approx([saved, saved])


@pytest.mark.slow
def test_a_job_goes_on_from_deepspeed_and_then_from_its_own_checkpoints(tmp_path: Path) -> None:
    told = about("z2_fp32_ws4_plain")
    write_job(tmp_path, "z2_fp32_ws4_plain")
    first = dsjob_command("cfg.json", "launch.nproc=2", "zero_optimization.stage=3", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "resumed" in first.stdout
    assert "global_step3 at step 3" in first.stdout
    second = dsjob_command("cfg.json", "trainer.max_steps=7", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert "step-00000005" in second.stdout
    losses = read_metrics(tmp_path / "run")
    assert sorted(losses) == [4, 5, 6, 7]
    assert list(losses.values()) == pytest.approx(told["losses"], abs=2e-5)
    own = dsjob_command("cfg.json", f"checkpoint.resume={tmp_path}/run/checkpoints", "output.dir=other", cwd=tmp_path)
    assert own.returncode == 0
    assert "warm start" in own.stdout
    nothing = dsjob_command("cfg.json", f"checkpoint.resume={tmp_path}/nowhere", "output.dir=third", cwd=tmp_path)
    assert nothing.returncode == 1
    assert f"checkpoint.resume: no such folder: {tmp_path}/nowhere" in nothing.stderr
    tag = dsjob_command("cfg.json", "checkpoint.resume=step-5", cwd=tmp_path)
    assert tag.returncode == 1
    assert "available: step-00000005, step-00000007" in tag.stderr


@pytest.mark.slow
def test_plain_weights_begin_a_training_and_other_optimizers_are_refused(tmp_path: Path) -> None:
    torch.save(SmallNet("plain").state_dict(), tmp_path / "pytorch_model.bin")
    net = SmallNet("plain")
    with torch.no_grad():
        net.emb.weight.zero_()
    config = {**about("z2_fp32_ws4_plain")["config"], "train_micro_batch_size_per_gpu": ROWS}
    engine = dsjob.initialize(model=net, config=config)[0]
    url, _ = engine.load_checkpoint(tmp_path)
    assert url == str(tmp_path)
    assert engine.global_steps == 0
    assert torch.equal(engine.module_state_dict()["emb.weight"], SmallNet("plain").emb.weight)
    other = {**config, "optimizer": {"type": "Muon"}}
    engine = dsjob.initialize(model=SmallNet("plain"), config=other)[0]
    with pytest.raises(CheckpointError, match="MuonWithAuxAdam needs momentum_buffer"):
        engine.load_checkpoint(RUNS["z2_fp32_ws4_plain"])
    engine.load_checkpoint(RUNS["z2_fp32_ws4_plain"], load_optimizer_states=False)
    engine = dsjob.initialize(model=SmallNet("frozen"), config=config)[0]
    with pytest.raises(CheckpointError, match="belongs to other parameters than this run trains"):
        engine.load_checkpoint(RUNS["z2_fp32_ws4_plain"])
