"""What `torch.load` reads, written without torch: by the script alone, in DeepSpeed's words, and by `dsjob convert`."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plain_checkpoint import STORED, floats, random_raw, run_script, save
from torch import Tensor

from dsjob.checkpoint.format import zero_to_fp32 as plain
from dsjob.checkpoint.format.dtypes import DTYPES
from dsjob.cli import main
from dsjob.deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

SCRIPT = Path(plain.__file__)


def run(*arguments: object, code: int = 0) -> str:
    """What the script printed."""
    done = run_script(*arguments)
    assert done.returncode == code, done.stderr
    return done.stdout if not code else done.stderr


def load(path: Path, mmap: bool = False) -> dict[str, Tensor]:
    found = torch.load(path, weights_only=True, mmap=mmap)
    assert isinstance(found, dict)
    return found


def bits(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Every dtype and several shapes, a tied weight, a frozen one, a buffer, and an optimizer's moment."""
    tensors = {
        f"model.{dtype}.{i}": random_raw(dtype, shape, i)
        for dtype in STORED
        for i, shape in enumerate([(7, 5), (3, 2, 2), (), (0, 4), (2, 0)])
    }
    tensors["model.frozen"] = floats(4, role="frozen")
    tensors["model.mean"] = floats(3, role="buffer")
    tensors["optimizer.F32.0.exp_avg"] = floats(7, 5, role="optimizer")
    aliases = {"model.a_tied": "model.F32.0", "model.z_frozen": "model.frozen"}
    save(tmp_path / "c", tensors, world=3, aliases=aliases)
    return tmp_path / "c"


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_what_the_safetensors_file_holds(checkpoint: Path, tmp_path: Path, mmap: bool) -> None:
    from safetensors.torch import load_file

    run(checkpoint, tmp_path / "pytorch_model.bin")
    run(checkpoint, tmp_path / "model.safetensors")
    found, expected = load(tmp_path / "pytorch_model.bin", mmap), load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].stride() == tensor.stride(), name
        assert bits(found[name]) == bits(tensor), name
    assert found["a_tied"].data_ptr() == found["F32.0"].data_ptr()
    assert not found["frozen"].requires_grad


def test_every_dtype_of_the_format_has_a_form(tmp_path: Path) -> None:
    entries = {d: plain.Entry(d, d, (3,), 3 * width) for d, width in plain.WIDTH.items()}
    data = b"".join(map(bytes, plain.pack_torch(entries, lambda names: (bytes(entries[name].size) for name in names))))
    found = torch.load(io.BytesIO(data), weights_only=True)
    assert {name: tensor.dtype for name, tensor in found.items()}.items() >= DTYPES.items()
    assert all(tensor.shape == (3,) and not bits(tensor).strip(b"\0") for tensor in found.values())


def test_the_file_is_a_plain_zip_whose_tensors_are_aligned(checkpoint: Path, tmp_path: Path) -> None:
    run(checkpoint, tmp_path / "w.pt")
    with zipfile.ZipFile(tmp_path / "w.pt") as archive:
        assert archive.testzip() is None
        for info in archive.infolist():
            assert info.compress_type == zipfile.ZIP_STORED
            with open(tmp_path / "w.pt", "rb") as file:
                file.seek(info.header_offset + 26)
                name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
            assert (info.header_offset + 30 + name + extra) % 64 == 0


@pytest.mark.slow
@pytest.mark.full
def test_a_tensor_beyond_4_gib(tmp_path: Path) -> None:
    """Only lengths are looked at: the bytes are holes in the file."""
    size, block = (1 << 32) + 64, memoryview(bytes(1 << 26))
    entries = {
        "large": plain.Entry("large", "U8", (size,), size),
        "small": plain.Entry("small", "I32", (1,), 4),
    }

    def read(name: str) -> list[memoryview | bytes]:
        return [block] * 64 + [bytes(64)] if name == "large" else [b"\7\0\0\0"]

    with open(tmp_path / "w.pt", "wb") as file:
        for data in plain.pack_torch(entries, lambda names: (part for name in names for part in read(name))):
            file.seek(len(data), 1) if data is block else file.write(data)
    found = load(tmp_path / "w.pt", mmap=True)
    assert found["large"].shape == (size,)
    assert found["small"].tolist() == [7]


def test_shards_and_their_index_as_transformers_names_them(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(checkpoint, out, "--format", "torch", "--max_shard_size", "200B")
    names = sorted(path.name for path in out.iterdir())
    assert names[0].startswith("pytorch_model-00001-of-000")
    assert names[-1] == "pytorch_model.bin.index.json"
    index = json.loads((out / names[-1]).read_text())
    whole: dict[str, Tensor] = {}
    for name in names[:-1]:
        found = load(out / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == found.keys()
        whole |= found
    assert whole["a_tied"].data_ptr() == whole["F32.0"].data_ptr()
    assert len(whole) == 5 * len(STORED) + 4
    assert "already" in run(checkpoint, out, code=2)
    text = run(checkpoint, out, "--overwrite")
    assert {path.name for path in out.iterdir()} == {"model.safetensors", *names}
    assert "load_file" in text


def convert_by_script(checkpoint: Path, out: Path, form: str) -> None:
    run(checkpoint, out, "--overwrite", "--format", form)


def convert_by_command(checkpoint: Path, out: Path, form: str) -> None:
    assert main(["convert", str(checkpoint), str(out), "--overwrite", "--format", form]) == 0


def convert_as_deepspeed(checkpoint: Path, out: Path, form: str) -> None:
    convert_zero_checkpoint_to_fp32_state_dict(checkpoint, out, safe_serialization=form == "safetensors")


@pytest.mark.parametrize("call", [convert_by_script, convert_by_command, convert_as_deepspeed])
@pytest.mark.parametrize(
    ("form", "new", "other", "last"),
    [
        ("torch", "pytorch_model", "model", "safetensors"),
        ("safetensors", "model", "pytorch_model", "bin"),
    ],
)
def test_overwriting_leaves_weights_of_the_other_form_alone(
    checkpoint: Path, tmp_path: Path, call: Callable[..., None], form: str, new: str, other: str, last: str
) -> None:
    out, own = tmp_path / "out", "bin" if form == "torch" else "safetensors"
    out.mkdir()
    stale = [f"{new}-00001-of-00002.{own}", f"{new}.{own}.index.json"]
    mine = [f"{other}.{last}", f"{other}-00001-of-00002.{last}", f"{other}.{last}.index.json", f"{new}.{last}"]
    for name in stale + mine:
        (out / name).write_text("mine")
    call(checkpoint, out, form)
    assert {path.name for path in out.iterdir()} == {f"{new}.{own}", *mine}
    assert [(out / name).read_text() for name in mine] == ["mine"] * 4


@pytest.mark.parametrize("option", ["--exclude_frozen_parameters", "--exclude-frozen-parameters"])
def test_parameters_that_were_not_trained_are_left_out(checkpoint: Path, tmp_path: Path, option: str) -> None:
    run(checkpoint, tmp_path / "all.bin")
    run(checkpoint, tmp_path / "trained.bin", option)
    left_out = load(tmp_path / "all.bin").keys() - load(tmp_path / "trained.bin").keys()
    assert left_out == {"frozen", "z_frozen"}


def test_nothing_is_written_where_no_weights_are_left(tmp_path: Path) -> None:
    save(tmp_path / "c", {"model.frozen": floats(4, role="frozen")})
    said = run(tmp_path / "c", tmp_path / "all.bin", "--exclude-frozen-parameters", code=2)
    assert "has no parameters and no buffers" in said
    assert not (tmp_path / "all.bin").exists()


def test_the_arguments_of_deepspeeds_script(checkpoint: Path, tmp_path: Path) -> None:
    step = next(checkpoint.glob("step-*"))
    run(step, tmp_path / "pytorch_model.bin")
    run(checkpoint, tmp_path / "d", "--safe_serialization", "--max_shard_size", "1GB", "-t", "step-00000120", "-d")
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["model.safetensors"]
    help_text = run("--help")
    for word in ("--exclude_frozen_parameters", "--safe_serialization", "--max_shard_size", "pytorch_model.bin"):
        assert word in help_text
    assert "Traceback" in run(tmp_path / "nothing", "-d", code=1)


def test_a_name_of_one_format_with_another(checkpoint: Path, tmp_path: Path) -> None:
    for name, form in (("w.safetensors", "torch"), ("w.bin", "safetensors")):
        assert "does not have the extension of format" in run(checkpoint, tmp_path / name, "--format", form, code=2)


def test_the_same_bytes_whenever_it_is_written(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt"):
        run(checkpoint, tmp_path / name)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_the_printed_way_to_load_works(tmp_path: Path) -> None:
    save(tmp_path / "c", {"model.weight": floats(3, 4), "model.bias": floats(3)})
    for limit in ("5GB", "20B"):
        text = run(tmp_path / "c", tmp_path / limit, "--format", "torch", "--max-shard-size", limit)
        model = torch.nn.Linear(4, 3)
        exec(text.split("load with: ")[1].replace("\n           ", "\n"), {"model": model})
        assert bits(model.weight.detach()) == floats(3, 4).array.tobytes()
