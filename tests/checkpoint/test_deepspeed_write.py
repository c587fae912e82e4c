"""`dsjob convert --to deepspeed`: the state comes back equal to the bit, and the real DeepSpeed goes on from it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_data import about, split
from jobs import dsjob as dsjob_command
from ranks import run_ranks
from safetensors.torch import load_file
from small_net import ROWS, SmallNet, make_rows

import dsjob
from dsjob.checkpoint.format.zero_to_fp32 import Shards, find_commit, read_checkpoint
from dsjob.checkpoint.offline.convert import convert, convert_to_deepspeed
from dsjob.checkpoint.other.elsewhere import find_elsewhere
from dsjob.checkpoint.other.torch_files import TorchFile
from dsjob.checkpoint.root.source import open_root
from dsjob.engine.driven import _import_deepspeed
from dsjob.engine.engine import Engine
from dsjob.errors import UsageError
from dsjob.ranks.mesh import World

CONFIG = about("z2_fp32_ws4_plain")["config"]
CASES = {"plain": False, "frozen": False, "tied": True, "groups": False, "bf16": True}
VARIANTS = {"bf16": "plain"}
ONE_EACH = {case: (1 + number % 3,) for number, case in enumerate(CASES)}


def make_groups(net: SmallNet) -> list[dict[str, Any]]:
    named = dict(net.named_parameters())
    matrices, rest = ([named[n] for n in part] for part in split(list(named)))
    return [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]


def make(case: str, world_size: int = 1, stage: int = 0) -> tuple[SmallNet, dict[str, Any], Any]:
    net = SmallNet(VARIANTS.get(case, case))
    config = {**CONFIG, "train_micro_batch_size_per_gpu": ROWS // world_size, "bf16": {"enabled": CASES[case]}}
    config["zero_optimization"] = {"stage": stage}
    return net, config, make_groups(net) if case == "groups" else None


def train(engine: Any, first: int, steps: int, world: World | None = None) -> list[float]:
    rank, world_size = (world.data_rank, world.data_size) if world else (0, 1)
    part, losses = ROWS // world_size, []
    for step in range(first, first + steps):
        x, y = make_rows(step)
        mine = slice(rank * part, (rank + 1) * part)
        loss = engine(x[mine], y[mine])
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    return losses


def save(folder: Path, case: str) -> list[float]:
    """Trains three steps, saves, and returns the losses of the next four."""
    net, config, groups = make(case)
    engine: Engine = dsjob.initialize(model=net, model_parameters=groups, config=config)[0]
    train(engine, 0, 3)
    engine.save_checkpoint(folder, client_state={"epoch": 1, "pair": (1, 2)})
    return train(engine, 3, 4)


def read_all(source: Any, checkpoint: Any) -> dict[str, bytes]:
    shards = Shards(source, checkpoint)
    names = {**{name: name for name in checkpoint.tensors}, **checkpoint.aliases}
    return {name: b"".join(map(bytes, shards.stream(target))) for name, target in names.items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_is_written_reads_back_equal_to_the_bit(case: str, tmp_path: Path) -> None:
    save(tmp_path / "own", case)
    root = open_root(str(tmp_path / "own"))
    own = read_checkpoint(root, find_commit(root))
    wanted = {name: data for name, data in read_all(root, own).items() if not name.endswith(".step")}
    for stage in (1, 2, 3):
        for world_size in (1, 2, 5):
            out = tmp_path / f"{stage}-{world_size}"
            dtype = "bf16" if CASES[case] else "fp32"
            written = convert_to_deepspeed(
                str(tmp_path / "own"), str(out), stage=stage, world_size=world_size, to=dtype
            )  # type: ignore[arg-type]
            assert sorted(os.listdir(out)) == ["global_step3", "latest"]
            assert sorted(os.listdir(out / "global_step3")) == sorted(map(os.path.basename, written))
            found = find_elsewhere(str(out))
            assert found is not None
            assert read_all(found.open(), found.checkpoint) == wanted
            assert found.run is not None
            assert found.run.counters["global_samples"] == 36
            assert found.run.scheduler is not None
            assert found.run.scheduler["last_epoch"] == 3
            assert found.run.client_state == {"epoch": 1, "pair": (1, 2)}
            assert {entry["step"] for entry in found.run.scalars.values()} == {3}
            assert found.notes == ()


def follow(world: World, folder: str, stages: dict[str, Sequence[int]]) -> dict[str, list[float]]:
    """In DeepSpeed itself: the losses of the four steps after each checkpoint, at these stages."""
    deepspeed = _import_deepspeed(world)
    deepspeed.init_distributed("gloo", verbose=False)
    found = {}
    for case in CASES:
        for stage in stages[case]:
            net, config, groups = make(case, world.data_size, stage)
            engine = deepspeed.initialize(model=net, model_parameters=groups, config=config)[0]
            path, client_state = engine.load_checkpoint(f"{folder}/{case}-{stage}")
            assert path is not None
            assert client_state["epoch"] == 1
            assert (engine.global_steps, engine.global_samples) == (3, 36)
            found[f"{case} at stage {stage}"] = train(engine, 3, 4, world)
            assert engine.get_lr()[0] == pytest.approx(0.01 * (20 - 6) / 16)
    return found


@pytest.mark.slow
@pytest.mark.full("one each-3", "all-2", "all-3")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stages", [ONE_EACH, dict.fromkeys(CASES, (1, 2, 3))], ids=["one each", "all"])
def test_deepspeed_goes_on_from_it(
    stages: dict[str, Sequence[int]], world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed", reason="needs the real library: pip install deepspeed==0.19.6")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    wanted = {}
    for case, half in CASES.items():
        wanted[case] = save(tmp_path / "own" / case, case)
        for stage in stages[case]:
            convert_to_deepspeed(
                str(tmp_path / "own" / case),
                str(tmp_path / f"{case}-{stage}"),
                stage=stage,
                world_size=world_size,
                to="bf16" if half else "fp32",
            )
    ranks: list[dict[str, list[float]]] = run_ranks(follow, world_size, str(tmp_path), stages)
    for title in ranks[0]:
        case = title.split()[0]
        means = [sum(rank[title][step] for rank in ranks) / world_size for step in range(4)]
        worst = max(abs(a - b) for a, b in zip(means, wanted[case], strict=True))
        assert worst <= (8e-3 if CASES[case] else 2e-5), (title, means, wanted[case])


def test_the_command_says_what_it_needs_and_what_it_wrote(tmp_path: Path) -> None:
    save(tmp_path / "own", "plain")
    without = dsjob_command("convert", "--to", "deepspeed", "own", "out", "--zero-stage", "2", cwd=tmp_path)
    assert without.returncode == 2
    assert "--world-size" in without.stderr
    arguments = ["convert", "--to", "deepspeed", "own", "out", "--zero-stage", "2", "--world-size", "2"]
    done = dsjob_command(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "These files are pickles" in done.stdout
    again = dsjob_command(*arguments, cwd=tmp_path)
    assert again.returncode == 2
    assert "--overwrite" in again.stderr
    convert(str(tmp_path / "own"), str(tmp_path / "a"), to="fp32")
    convert(str(tmp_path / "out"), str(tmp_path / "b"), to="fp32")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert set(first) == set(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_checkpoint_without_an_optimizer_is_refused(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 2}
    engine = dsjob.initialize(model=SmallNet("plain"), config=config)[0]
    engine.save_checkpoint(tmp_path / "own")
    with pytest.raises(UsageError, match="no optimizer"):
        convert_to_deepspeed(str(tmp_path / "own"), str(tmp_path / "out"), stage=1, world_size=2)


def test_the_loss_scale_of_fp16_goes_there_and_back(tmp_path: Path) -> None:
    """In the layout of DeepSpeed's source: on CPU the library itself refuses fp16."""
    config = {**CONFIG, "train_micro_batch_size_per_gpu": ROWS, "zero_optimization": {"stage": 2}}
    config["fp16"] = {"enabled": True, "initial_scale_power": 9, "loss_scale_window": 2, "hysteresis": 2}
    engine = dsjob.initialize(model=SmallNet("plain"), config=config)[0]
    train(engine, 0, 4)
    engine.save_checkpoint(tmp_path / "own")
    before = engine.state().scaler_values()
    assert before is not None
    assert before["scale"] != 2**9
    for stage in (2, 3):
        out = str(tmp_path / f"{stage}")
        convert_to_deepspeed(str(tmp_path / "own"), out, stage=stage, world_size=2, to="fp16")
        again = dsjob.initialize(model=SmallNet("plain"), config=config)[0]
        again.load_checkpoint(out)
        assert again.state().scaler_values() == before
        assert (again.global_steps, again.skipped_steps) == (4, engine.skipped_steps)


def test_adam_without_bias_correction_goes_there_and_back(tmp_path: Path) -> None:
    config = {**CONFIG, "train_micro_batch_size_per_gpu": ROWS, "zero_optimization": {"stage": 0}}
    config["optimizer"] = {"type": "Adam", "params": {"lr": 0.01, "bias_correction": False}}
    engine = dsjob.initialize(model=SmallNet("plain"), config=config)[0]
    train(engine, 0, 3)
    engine.save_checkpoint(tmp_path / "own")
    convert_to_deepspeed(str(tmp_path / "own"), str(tmp_path / "out"), stage=2, world_size=2, to="fp32")
    written = next((tmp_path / "out").glob("*/*optim_states.pt"))
    content = TorchFile(open_root(str(written.parent)), written.name).content
    (group,) = content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]
    assert (group["bias_correction"], group["step"]) == (False, 3)
    again = dsjob.initialize(model=SmallNet("plain"), config=config)[0]
    again.load_checkpoint(tmp_path / "out")
    assert again.optimizer is not None
    assert [group["bias_correction"] for group in again.optimizer.param_groups] == [False]
    assert train(again, 3, 3) == train(engine, 3, 3)
