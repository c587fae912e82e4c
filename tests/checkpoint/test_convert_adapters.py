"""`dsjob convert --to hf` of models with adapters: what peft itself would have saved, or have merged."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import dsjob
from dsjob.checkpoint.pretrained.adapters import describe_adapters
from dsjob.cli import main

pytestmark = pytest.mark.usefixtures("forked_builds")

LORA: dict[str, dict[str, Any]] = {
    "linear": {"target_modules": ["q_proj", "down_proj"]},
    "rslora": {"target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"q_proj": 2}},
    "alphas": {"target_modules": ["q_proj", "v_proj"], "alpha_pattern": {"layers.1.self_attn.q_proj": 3}},
    "tied embedding": {"target_modules": ["embed_tokens", "o_proj"]},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "bias": "lora_only"},
}
GPT2 = {"conv1d": {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "dora": ("LoraConfig", {"target_modules": ["q_proj"], "use_dora": True}),
    "loha": ("LoHaConfig", {"target_modules": ["q_proj"], "r": 2}),
    "ia3": ("IA3Config", {"target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
}


class Lazy:
    """peft, imported at its first use: that takes seconds, and other tests need not wait for it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("peft"), name)


peft: Any = Lazy()


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind in GPT2:
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=32)
        return transformers.GPT2LMHeadModel(config)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    llama = transformers.LlamaConfig(
        **sizes, vocab_size=40, tie_word_embeddings=kind == "tied embedding", attention_bias=kind == "saved head"
    )
    return transformers.LlamaForCausalLM(llama)


def make_config(kind: str) -> Any:
    if kind in OTHERS:
        name, options = OTHERS[kind]
        return getattr(peft, name)(**options)
    return peft.LoraConfig(r=4, lora_alpha=16, task_type="CAUSAL_LM", **{**LORA, **GPT2}[kind])


def train_and_save(model: Any, folder: Path) -> None:
    """Three steps through the engine, and a checkpoint."""
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.05}}}
    engine = dsjob.initialize(model=model, config=config)[0]
    ids = torch.arange(16).reshape(2, 8) % 40
    for _ in range(3):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(str(folder))


def save(kind: str, folder: Path) -> Any:
    model = peft.get_peft_model(build(kind), make_config(kind))
    train_and_save(model, folder)
    return model.eval()


def convert(folder: Path, *more: str) -> tuple[int, Path]:
    out = folder / f"out{'-'.join(more)}".replace("/", "_")
    return main(["convert", "--to", "hf", str(folder / "c"), str(out), *more]), out


def same(found: dict[str, Tensor], expected: dict[str, Tensor], **bounds: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, **(bounds or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("kind", [*LORA, *GPT2, *OTHERS])
def test_an_adapter_is_what_peft_saves(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save(kind, tmp_path / "c")
    model.save_pretrained(tmp_path / "peft")
    code, out = convert(tmp_path)
    assert code == 0, capsys.readouterr().err
    same(load_file(out / "adapter_model.safetensors"), load_file(tmp_path / "peft" / "adapter_model.safetensors"))
    ours, theirs = (json.loads((folder / "adapter_config.json").read_text()) for folder in (out, tmp_path / "peft"))
    for values in (ours, theirs):
        values["target_modules"] = sorted(values["target_modules"])
    assert ours == theirs
    again = peft.PeftModel.from_pretrained(build(kind), out).eval()
    ids = torch.arange(16).reshape(2, 8) % 40
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits)
    assert "peft.PeftModel.from_pretrained(base_model, " in capsys.readouterr().out


@pytest.mark.parametrize("kind", [*LORA, *GPT2])
def test_merged_weights_are_those_that_peft_merges(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save(kind, tmp_path / "c")
    code, out = convert(tmp_path, "--merge")
    assert code == 0
    merged = model.merge_and_unload()
    assert f"load with:  {type(merged).__name__}.from_pretrained({str(out)!r})" in capsys.readouterr().out
    again, info = type(merged).from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    same(again.state_dict(), merged.state_dict(), rtol=1e-6, atol=1e-6)
    changed = (new - old for new, old in zip(again.parameters(), build(kind).parameters(), strict=True))
    assert max(float(difference.detach().abs().max()) for difference in changed) > 1e-3


@pytest.mark.parametrize("kind", OTHERS)
def test_what_has_another_arithmetic_is_not_merged(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(kind, tmp_path / "c")
    code, out = convert(tmp_path, "--merge")
    assert (code, out.exists()) == (2, False)
    error = capsys.readouterr().err
    assert "cannot merge" in error
    assert "merge_and_unload()" in error


def test_one_of_several_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = peft.get_peft_model(build("linear"), make_config("linear"), adapter_name="first")
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj"]))
    train_and_save(model, tmp_path / "c")
    assert convert(tmp_path)[0] == 2
    assert "several adapters: first, second" in capsys.readouterr().err
    model.save_pretrained(tmp_path / "peft")
    for name in ("first", "second"):
        code, out = convert(tmp_path, "--adapter", name)
        assert code == 0
        saved = load_file(tmp_path / "peft" / name / "adapter_model.safetensors")
        same(load_file(out / "adapter_model.safetensors"), saved)


def test_an_adapter_in_a_model_of_transformers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers 5.24 asks for a peft that is not released yet, and needs nothing of it here.
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)
    model: Any = build("linear")
    model.add_adapter(make_config("linear"))
    train_and_save(model, tmp_path / "c")
    model.save_pretrained(tmp_path / "theirs")
    code, out = convert(tmp_path)
    assert code == 0
    same(load_file(out / "adapter_model.safetensors"), load_file(tmp_path / "theirs" / "adapter_model.safetensors"))


class Own(nn.Module):
    """A base of the user's own, of which nobody else can build a skeleton."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc, self.head = nn.Embedding(40, 8), nn.Linear(8, 8), nn.Linear(8, 40)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.fc(self.embed(input_ids)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), (input_ids if labels is None else labels).flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def test_an_adapter_over_a_model_of_ones_own(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["fc", "embed"], modules_to_save=["head"])
    model = peft.get_peft_model(Own(), config)
    train_and_save(model, tmp_path / "c")
    model.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    assert convert(tmp_path)[0] == 0
    saved = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    same(load_file(tmp_path / "out" / "adapter_model.safetensors"), saved)


def test_a_checkpoint_without_the_adapters_configuration_takes_it_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "dsjob.checkpoint.pretrained.configuration.describe_adapters", lambda model: {}
    )  # as it was saved before
    model = save("linear", tmp_path / "c")
    assert convert(tmp_path)[0] == 2
    assert "--adapter-config FILE" in capsys.readouterr().err
    model.save_pretrained(tmp_path / "peft")
    code, out = convert(tmp_path, "--adapter-config", str(tmp_path / "peft" / "adapter_config.json"))
    assert code == 0
    same(load_file(out / "adapter_model.safetensors"), load_file(tmp_path / "peft" / "adapter_model.safetensors"))
    (tmp_path / "wrong.json").write_text("[]")
    assert convert(tmp_path, "--adapter-config", str(tmp_path / "wrong.json"))[0] == 2
    assert "has no peft_type" in capsys.readouterr().err


class Headed(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """A model with one part more than its architecture."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.score = nn.Linear(config.hidden_size, 1)


def test_names_that_the_architecture_does_not_have_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_and_save(Headed(build("linear").config), tmp_path / "c")
    code, out = convert(tmp_path)
    assert (code, out.exists()) == (2, False)
    error = capsys.readouterr().err
    assert "does not match LlamaForCausalLM: unexpected tensors: score.bias, score.weight" in error


def test_a_configuration_names_an_architecture_of_transformers() -> None:
    from dsjob.checkpoint.pretrained.architecture import CannotBuildError, build_skeleton

    plain = build("linear").config.to_dict()  # type: ignore[union-attr, operator]
    for change in ({"architectures": ["RagModel"]}, {"architectures": ["pipeline"]}):
        with pytest.raises(CannotBuildError):
            build_skeleton({**plain, **change})
    kernel = {"_attn_implementation": "some/kernel", "auto_map": {"AutoModel": "some/repo--module.Class"}}
    assert build_skeleton({**plain, "architectures": ["LlamaForCausalLM"], **kernel})
    assert describe_adapters(nn.Linear(1, 1)) == {}
