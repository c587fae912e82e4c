"""Reading what the real DeepSpeed saved: every tensor equal to the bit, and a run's state; nothing big in memory."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from deepspeed_data import FOLDERS, RUNS, about, digest, split
from programs import run_program
from safetensors.torch import load_file, save_file
from test_convert import upload
from torch import Tensor

from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.format.dtypes import DTYPES
from dsjob.checkpoint.offline.convert import convert
from dsjob.checkpoint.other.elsewhere import find_elsewhere
from dsjob.checkpoint.other.foreign import Foreign, split_range
from dsjob.errors import CheckpointError, CorruptCheckpointError, NoCheckpointError

GROUPS_OF_TWO = "z0_fp32_ws2_groups"


def read_all(found: Foreign) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, tied ones under each name."""
    shards, tensors = layout.Shards(found.open(), found.checkpoint), {}
    for name, entry in found.checkpoint.tensors.items():
        data = bytearray(b"".join(bytes(block) for block in shards.stream(name)))
        tensors[name] = torch.frombuffer(data, dtype=DTYPES[entry.dtype]).reshape(entry.shape)
    shards.close()
    return {**tensors, **{alias: tensors[name] for alias, name in found.checkpoint.aliases.items()}}


@pytest.mark.parametrize("name", RUNS)
def test_every_tensor_is_equal_to_the_bit(name: str) -> None:
    wanted = about(name)["digests"]
    parameters = [n.removeprefix("model.") for n in wanted if n.endswith(("weight", "bias")) and n.startswith("model.")]
    found = find_elsewhere(str(RUNS[name]), groups=split(parameters) if name == GROUPS_OF_TWO else None)
    assert found is not None
    tensors = {n: t for n, t in read_all(found).items() if not n.endswith(".step")}
    assert {n: digest(tensor) for n, tensor in tensors.items() if n in wanted} == wanted
    assert set(tensors) - set(wanted) == ({"model.head.weight"} if "tied" in name else set())
    run = found.run
    assert run is not None
    assert run.counters == {"global_steps": 3, "global_samples": 36, "skipped_steps": 0, "micro_steps": 0}
    assert run.scheduler == {"last_epoch": 3}
    assert run.client_state == {"epoch": 1, "note": "hello", "pair": (1, 2)}
    assert found.notes == ()
    steps = {n for n in found.checkpoint.tensors if n.endswith(".step")}
    assert len(steps) + len(run.scalars) == len(run.trained) == len([n for n in wanted if n.endswith(".exp_avg")])


def test_a_universal_checkpoint_holds_the_same(tmp_path: Path) -> None:
    name = "z3_fp32_ws2_tied"
    folder = RUNS[name].with_name(f"{name}_universal")
    found, wanted = find_elsewhere(str(folder)), about(name)["digests"]
    assert found is not None
    assert {n: digest(t) for n, t in read_all(found).items() if n in wanted} == wanted
    assert found.run is not None
    assert found.run.counters["global_steps"] == 3
    assert read_all(found)["optimizer.emb.weight.step"] == 3
    assert found.run.scaler is not None


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("below", ["", "/global_step3"])
def test_converted_fixtures_are_equal_to_what_was_expected(folder: Path, below: str, tmp_path: Path) -> None:
    convert(f"{folder}{below}", str(tmp_path / "out"), to="fp32")
    converted, expected = load_file(tmp_path / "out" / "model.safetensors"), load_file(f"{folder}.expected.safetensors")
    assert set(converted) == set(expected)
    for name, tensor in expected.items():
        assert tensor.dtype == converted[name].dtype, name
        assert torch.equal(tensor, converted[name]), name


@pytest.mark.parametrize("to", ["bf16", "fp16"])
def test_other_dtypes_and_urls(to: str, tmp_path: Path) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[to]
    url = upload(RUNS["z3_bf16_ws4_groups"])
    convert(url, str(tmp_path / "out"), to=to)  # type: ignore[arg-type]
    converted = load_file(tmp_path / "out" / "model.safetensors")
    found = find_elsewhere(str(RUNS["z3_bf16_ws4_groups"]))
    assert found is not None
    for name, tensor in read_all(found).items():
        if name.startswith("model."):
            wanted = tensor.to(dtype) if tensor.is_floating_point() else tensor
            assert torch.equal(converted[name.removeprefix("model.")], wanted), name


def test_tags_and_latest(tmp_path: Path) -> None:
    shutil.copytree(RUNS["z2_fp32_ws4_plain"], tmp_path / "run")
    shutil.copytree(tmp_path / "run" / "global_step3", tmp_path / "run" / "best")
    found = find_elsewhere(str(tmp_path / "run"), "best")
    assert found is not None
    assert found.checkpoint.tag == "best"
    with pytest.raises(NoCheckpointError, match="no checkpoint other"):
        find_elsewhere(str(tmp_path / "run"), "other")
    (tmp_path / "run" / "latest").unlink()
    with pytest.raises(NoCheckpointError, match="no file `latest`"):
        find_elsewhere(str(tmp_path / "run"))
    assert find_elsewhere(str(tmp_path)) is None


def test_a_save_that_did_not_end_is_told(tmp_path: Path) -> None:
    shutil.copytree(RUNS["z2_fp32_ws4_plain"], tmp_path / "run")
    (tmp_path / "run" / "global_step3" / "zero_pp_rank_3_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CorruptCheckpointError, match="saved by 4 ranks, but has files of 3"):
        convert(str(tmp_path / "run"), None, to="fp32")
    for path in (tmp_path / "run" / "global_step3").glob("*optim*"):
        path.unlink()
    with pytest.raises(CorruptCheckpointError, match="files of 0"):
        convert(str(tmp_path / "run"), None, to="fp32")


def test_files_of_an_older_larger_world_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "global_step3"
    shutil.copytree(RUNS["z2_bf16_ws3_tied"], tmp_path / "run")
    name = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    shutil.copy(folder / name.format(2), folder / name.format(3))
    found = find_elsewhere(str(tmp_path / "run"))
    assert found is not None
    assert "beyond 3" in found.notes[0]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("layer_3_expert_1_mp_rank_00_model_states.pt", "mixture of experts"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "mixture of experts"),
        ("layer_02-model_00-model_states.pt", "pipeline-parallel model"),
        ("mp_rank_01_model_states.pt", "tensor- or pipeline-parallel"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor- or pipeline-parallel"),
        ("offloaded_tensors", "NVMe"),
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "two runs"),
    ],
)
def test_layouts_that_are_not_read_are_refused_by_name(name: str, what: str, tmp_path: Path) -> None:
    shutil.copytree(RUNS["z1_fp32_ws3_groups"], tmp_path / "run")
    (tmp_path / "run" / "global_step3" / name).touch()
    with pytest.raises(CheckpointError, match=what):
        find_elsewhere(str(tmp_path / "run"))


def test_optimizer_state_without_names_is_left_out_of_a_conversion_and_refused_on_a_resume() -> None:
    url = str(RUNS[GROUPS_OF_TWO])
    found = find_elsewhere(url)
    assert found is not None
    assert not any(name.startswith("optimizer.") for name in found.checkpoint.tensors)
    with pytest.raises(CheckpointError, match="numbers instead of names"):
        find_elsewhere(url, groups=[["emb.weight"], ["ln_f.bias"]])


# --- plain weights ---


@pytest.mark.parametrize("form", ["bin", "sharded", "safetensors", "file", "nested"])
def test_plain_weights(form: str, tmp_path: Path) -> None:
    weights = {"a.w": torch.randn(5, 3), "b": torch.randn(7).bfloat16(), "n": torch.arange(4)}
    place = str(tmp_path)
    if form == "bin":
        torch.save(weights, tmp_path / "pytorch_model.bin")
    elif form == "nested":
        torch.save({"state_dict": weights, "epoch": 3}, tmp_path / "last.ckpt")
        place = str(tmp_path / "last.ckpt")
    elif form == "file":
        save_file(weights, tmp_path / "some.safetensors")
        place = str(tmp_path / "some.safetensors")
    elif form == "safetensors":
        save_file(weights, tmp_path / "model.safetensors")
    else:
        torch.save({"a.w": weights["a.w"]}, tmp_path / "pytorch_model-00001-of-00002.bin")
        torch.save({n: weights[n] for n in ("b", "n")}, tmp_path / "pytorch_model-00002-of-00002.bin")
        index = '{"weight_map": {"a.w": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}}'
        (tmp_path / "pytorch_model.bin.index.json").write_text(index)
    found = find_elsewhere(place)
    assert found is not None
    assert found.run is None
    tensors = read_all(found)
    assert set(tensors) == {f"model.{name}" for name in weights}
    for name, tensor in weights.items():
        assert torch.equal(tensors[f"model.{name}"], tensor), name
    convert(place, str(tmp_path / "out"), to="bf16")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a.w"], weights["a.w"].bfloat16())


# --- parts ---


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4), (1, 1, 6), (5, 1), (4, 2, 1, 3)])
def test_any_range_of_a_tensor_is_a_few_boxes(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(max(1, torch.Size(shape).numel())).reshape(shape)
    for low in range(numbers.numel()):
        for high in range(low, numbers.numel() + 1):
            parts = list(split_range(shape, low, high))
            assert len(parts) <= 2 * len(shape) + 1
            found = []
            for first, offsets, sizes in parts:
                box = numbers[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].flatten().tolist()
                assert box == list(range(first, first + len(box)))
                found += box
            assert found == list(range(low, high))


@pytest.mark.slow
@pytest.mark.full
def test_converting_takes_64_mib_above_the_imports(tmp_path: Path) -> None:
    """Three tensors of 100 MB in one flat group of two ranks; measured in a child."""
    size, shapes = 3 * 25_000_000, {f"layers.{i}.weight": torch.Size((5000, 5000)) for i in range(3)}
    folder = tmp_path / "run" / "global_step1"
    folder.mkdir(parents=True)
    (tmp_path / "run" / "latest").write_text("global_step1")
    common = {"dp_world_size": 2, "mp_world_size": 1, "global_steps": 1, "global_samples": 2, "skipped_steps": 0}
    torch.save(
        {"module": {}, "buffer_names": [], "param_shapes": [shapes], "optimizer": None, **common},
        folder / "mp_rank_00_model_states.pt",
    )
    for rank in range(2):
        part = torch.arange(rank * size // 2, (rank + 1) * size // 2, dtype=torch.float32)
        state = {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"params": [0]}]}
        inner = {"base_optimizer_state": state, "single_partition_of_fp32_groups": [part], "partition_count": [2]}
        torch.save({"optimizer_state_dict": inner}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    del part, inner
    code = (
        "import sys, torch, dsjob.checkpoint.other.elsewhere\n"
        "from dsjob.checkpoint.offline.convert import convert\n"
        "def memory(name): return [int(line.split()[1]) for line in open('/proc/self/status') if name in line][0]\n"
        "before = memory('VmRSS')\n"
        "convert(sys.argv[1], sys.argv[2], to='fp32')\n"
        "print(before, memory('VmHWM'))"
    )
    done = run_program([sys.executable, "-c", code, tmp_path / "run", tmp_path / "out"], cwd=tmp_path)
    before, peak = map(int, done.stdout.split())
    assert peak - before < 64 << 10, f"{(peak - before) >> 10} MiB"
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights["layers.1.weight"][-1, -1] == 49_999_999
