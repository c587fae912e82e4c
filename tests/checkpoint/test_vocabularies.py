"""Tokenizers that give other ids than the pretrained model was trained with are found before the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job_documents import make_job
from jobs import dsjob
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dsjob.checkpoint.pretrained.vocabularies import check_tokenizers

WORDS = [f"word{number}" for number in range(1000)]
TEXT: dict[str, Any] = {"_target_": "dsjob.text.Text", "source": "texts.txt", "max_length": 8}


def save_tokenizer(folder: str, words: list[str]) -> None:
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token=words[0]).save_pretrained(folder)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with its tokenizer; the same tokenizer, with a few words more, and another one; a model without any."""
    monkeypatch.chdir(tmp_path)
    for name, words in (("model", WORDS), ("more", [*WORDS, "new"]), ("other", WORDS[::-1])):
        save_tokenizer(name, words)
    for name, size in (("model", 1024), ("bare", 1024), ("small", 256)):
        Path(name).mkdir(exist_ok=True)
        Path(name, "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": size}))
    return tmp_path


def load(name: str) -> dict[str, Any]:
    return {"_target_": "transformers.AutoModelForCausalLM.from_pretrained", "pretrained_model_name_or_path": name}


def find(model: Any, **tokenizers: str | None) -> list[tuple[str, str, str]]:
    sets = {key: {**TEXT, **({"tokenizer": name} if name else {})} for key, name in tokenizers.items()}
    document = {"model": load(model) if isinstance(model, str) else model, "data": sets}
    return [(each.dotted, each.rule, each.severity) for each in check_tokenizers(document)]


FOREIGN = "foreign-tokenizer"


@pytest.mark.usefixtures("folders")
@pytest.mark.parametrize(
    ("model", "tokenizer", "expected"),
    [
        ("model", "model", []),
        ("model", "./model", []),
        ("model", "more", []),
        ("model", "other", [("data.train.tokenizer", FOREIGN, "error")]),
        ("model", "bytes", [("data.train.tokenizer", FOREIGN, "error")]),
        ("model", None, [("data.train._target_", FOREIGN, "error")]),
        ("model", "nobody/nothing", []),
        ("bare", None, [("data.train._target_", FOREIGN, "warning")]),
        ("bare", "other", []),
        ("small", None, [("data.train._target_", FOREIGN, "error")]),
        ("small", "other", [("data.train.tokenizer", FOREIGN, "warning")]),
        ("nobody/nothing", None, []),
    ],
)
def test_a_tokenizer_has_to_fit_the_pretrained_model(model: str, tokenizer: str | None, expected: Any) -> None:
    assert find(model, train=tokenizer) == expected
    adapted = {"_target_": "peft.get_peft_model", "model": load(model)}
    assert find(adapted, train=tokenizer) == expected


@pytest.mark.usefixtures("folders")
def test_a_model_with_new_weights_may_have_any_tokenizer() -> None:
    config = {"_target_": "transformers.AutoConfig.from_pretrained", "pretrained_model_name_or_path": "model"}
    for model in ({"_target_": "mine.build"}, {"_target_": "transformers.AutoModel.from_config", "config": config}):
        assert find(model, train="other") == find(model, train=None) == []
        assert find(model, train="other", test=None) == [("data.test._target_", "two-tokenizers", "warning")]
        assert find(model, train="model", test="more") == []
    document = {"model": load("model"), "data": {"train": {**TEXT, "tokenizer": "model"}}}
    generation = {"generation": {"tokenizer": "bytes"}}
    assert [each.dotted for each in check_tokenizers({**document, **generation})] == ["generation.tokenizer"]


@pytest.mark.parametrize("kind", ["vocab.txt", "vocab.json", "unigram", "broken", "deep"])
def test_other_formats_of_vocabularies_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name, words in (("model", WORDS), ("same", WORDS), ("other", WORDS[::-1])):
        Path(name).mkdir()
        ids = {word: number for number, word in enumerate(words)}
        written = {
            "vocab.txt": ("vocab.txt", "\n".join(words)),
            "vocab.json": ("vocab.json", json.dumps(ids)),
            "unigram": ("tokenizer.json", json.dumps({"model": {"vocab": [[word, -1.0] for word in words]}})),
            "broken": ("tokenizer.json", '{"model": ' + name),
            "deep": ("tokenizer.json", "[" * 100_000),
        }
        file, text = written[kind]
        Path(name, file).write_text(text)
    assert find("model", train="same") == []
    assert bool(find("model", train="other")) == (kind not in ("broken", "deep"))


@pytest.mark.usefixtures("folders")
def test_a_run_is_refused_before_anything_is_imported() -> None:
    Path("texts.txt").write_text("word1 word2\n" * 50)
    document = make_job(model=load("model"), data={"train": TEXT})
    Path("job.json").write_text(json.dumps(document))
    for command in ("validate", "run"):
        done = dsjob(command, "job.json", cwd=Path.cwd())
        assert done.returncode == 2
        assert "bytes gives other ids than the tokenizer of the model model" in done.stderr + done.stdout
