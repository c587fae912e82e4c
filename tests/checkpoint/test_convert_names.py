"""`dsjob convert`: torch's files, other names, without frozen parameters; and folders for transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from plain_checkpoint import floats, read_safetensors, save
from torch import nn

import dsjob
from dsjob.checkpoint.offline.convert import Names, convert
from dsjob.cli import main
from dsjob.errors import UsageError

pytestmark = pytest.mark.usefixtures("forked_builds")

TENSORS = {
    "model.module.w": floats(4, 3),
    "model.module.ice": floats(3, role="frozen"),
    "model.mean": floats(2, role="buffer"),
    "optimizer.module.w.exp_avg": floats(4, 3, role="optimizer"),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save(tmp_path / "c", TENSORS, aliases={"model.module.tied": "model.module.w", "model.a": "model.module.ice"})
    return tmp_path / "c"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (Names(), {"module.w", "module.tied", "module.ice", "a", "mean"}),
        (Names(strip="module."), {"w", "tied", "ice", "a", "mean"}),
        (Names(prefix="net."), {"net.module.w", "net.module.tied", "net.module.ice", "net.a", "net.mean"}),
        (Names(strip="module.", prefix="x.", trained=True), {"x.w", "x.tied", "x.mean"}),
        (Names(trained=True), {"module.w", "module.tied", "mean"}),
    ],
)
@pytest.mark.parametrize("file", ["o.safetensors", "o.bin"])
def test_names(root: Path, tmp_path: Path, names: Names, expected: set[str], file: str) -> None:
    (written,) = convert(str(root), str(tmp_path / file), to="fp32", names=names)
    assert written.tensors == len(expected)
    if file == "o.safetensors":
        assert read_safetensors(tmp_path / file).keys() == expected
        return
    state = torch.load(tmp_path / file, weights_only=True)
    assert state.keys() == expected
    tied = {name: value for name, value in state.items() if name.endswith((".w", "tied"))}
    assert len({id(value) for value in tied.values()}) == 1
    assert next(iter(tied.values())).numpy().tobytes() == floats(4, 3).array.tobytes()


def test_names_that_cannot_be(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no name begins with 'modul:'"):
        convert(str(root), str(tmp_path / "o"), to="fp32", names=Names(strip="modul:"))
    save(tmp_path / "d", {"model.a.x": floats(2), "model.x": floats(2)})
    with pytest.raises(UsageError, match="two tensors would be named x"):
        convert(str(tmp_path / "d"), str(tmp_path / "o"), to="fp32", names=Names(strip="a."))
    assert not (tmp_path / "o").exists()


def test_the_command(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    given = ["--to", "bf16", "--format", "torch", "--strip", "module.", "--exclude-frozen", "--max-shard-size", "20B"]
    assert main(["convert", str(root), out, *given]) == 0
    text = capsys.readouterr().out
    assert "pytorch_model.bin.index.json" in text
    assert "weights_only=True" in text
    assert "sha256" in text
    index = json.loads((tmp_path / "out" / "pytorch_model.bin.index.json").read_text())
    assert index["weight_map"].keys() == {"w", "tied", "mean"}
    for wrong in (["--dtype", "bf16"], ["--tokenizer", "x"], ["--to", "hf"], ["--to", "hf", out, "--prefix", "a."]):
        assert main(["convert", str(root), *wrong]) == 2


# --- transformers ---


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "num_layers": 2, "vocab_size": 40}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def train_and_save(name: str, folder: Path) -> nn.Module:
    """Two steps of a tiny model through the engine, and its checkpoint."""
    model = build(name)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.05}}}
    engine = dsjob.initialize(model=model, config=config)[0]
    for _ in range(2):
        engine.backward(engine(**inputs(name)).loss)
        engine.step()
    engine.save_checkpoint(str(folder))
    return model


def inputs(name: str) -> dict[str, torch.Tensor]:
    ids = torch.arange(16).reshape(2, 8) % 40
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("name", ["t5", "gpt2"])
def test_a_folder_for_from_pretrained(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = train_and_save(name, tmp_path / "c").eval()
    for more in ([], ["--format", "torch"], ["--max-shard-size", "10KB"]):
        out = tmp_path / f"hf{len(more)}{more[-1:]}"
        assert main(["convert", "--to", "hf", str(tmp_path / "c"), str(out), *more]) == 0
        loaded: Any = type(model).from_pretrained(out, output_loading_info=True)  # type: ignore[attr-defined]
        again, info = loaded
        assert not any(info.values()), info
        with torch.no_grad():
            assert torch.equal(again.eval()(**inputs(name)).logits, model(**inputs(name)).logits)
        tied = again.get_output_embeddings().weight.data_ptr() == again.get_input_embeddings().weight.data_ptr()
        assert tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)  # type: ignore[operator]
    auto = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    assert type(auto.from_pretrained(out)) is type(model)
    config = json.loads((out / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == ([type(model).__name__], "float32")
    assert (out / "generation_config.json").exists()
    assert "from_pretrained" in capsys.readouterr().out


def test_half_precision_and_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_and_save("gpt2", tmp_path / "c")
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text("{}")
    (tmp_path / "tok" / "secret").write_text("mine")
    given = ["convert", "--to", "hf", str(tmp_path / "c"), str(tmp_path / "hf")]
    assert main([*given, "--dtype", "bf16", "--tokenizer", str(tmp_path / "tok")]) == 0
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf", dtype="auto").dtype == torch.bfloat16
    assert main(given) == 2
    assert "already contains config.json" in capsys.readouterr().err
    assert main([*given, "--overwrite"]) == 0
    assert transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf", dtype="auto").dtype == torch.float32
    assert main([*given, "--overwrite", "--tokenizer", str(tmp_path / "c")]) == 2
    assert main(["convert", "--to", "hf", str(tmp_path / "c"), str(tmp_path / "w.safetensors")]) == 2


def test_a_model_that_is_not_of_transformers(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--to", "hf", str(root), str(tmp_path / "hf")]) == 2
    assert "no configuration of a transformers model" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()
