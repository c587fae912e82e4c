"""T5: sizes, tokens, span corruption, batches, and that it learns."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from dsjob.errors import DataError, TargetError
from dsjob.recipes.spans import corrupt_spans, find_length
from dsjob.recipes.t5 import SIZES, build, build_dataset, collate
from dsjob.recipes.text import ByteText
from dsjob.recipes.tokens import BYTE_VOCAB, ByteTokenizer

transformers = pytest.importorskip("transformers")
SENTINELS = ByteTokenizer.sentinels


def restore(source: list[int], target: list[int]) -> list[int]:
    """The tokens before corruption: each sentinel of the source replaced by what follows it in the target."""
    spans: dict[int, list[int]] = {}
    for token in target:
        if token in SENTINELS:
            spans[token] = []
        else:
            spans[next(reversed(spans))].append(token)
    return list(itertools.chain.from_iterable(spans.get(token, [token]) for token in source))


class TestTokens:
    def test_ids_are_those_of_byt5(self) -> None:
        other = transformers.ByT5Tokenizer()
        text = "naïve: def f(x):\n\treturn 'x'"
        assert [*ByteTokenizer().encode(text.encode()), ByteTokenizer.eos] == other(text).input_ids
        assert len(other) == BYTE_VOCAB
        names = [f"<extra_id_{i}>" for i in range(125)]
        assert list(SENTINELS) == other.convert_tokens_to_ids(names)

    def test_pretrained_tokenizer_from_a_folder(self, tmp_path: Path) -> None:
        transformers.ByT5Tokenizer().save_pretrained(tmp_path)
        ours, theirs = build_dataset(), build_dataset(tokenizer=str(tmp_path))
        assert torch.equal(ours[0]["input_ids"], theirs[0]["input_ids"])
        assert torch.equal(ours[0]["labels"], theirs[0]["labels"])

    def test_missing_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="cannot load tokenizer"):
            build_dataset(tokenizer=str(tmp_path))


class TestSpans:
    @pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 20, 141, 500])
    def test_round_trip(self, length: int) -> None:
        for seed in range(5):
            rng = np.random.default_rng(seed)
            tokens = rng.integers(3, 259, length).tolist()
            source, target = corrupt_spans(tokens, SENTINELS, rng)
            assert restore(source, target) == tokens
            used = [token for token in source if token in SENTINELS]
            assert used == list(SENTINELS[: len(used)])
            assert used == [token for token in target if token in SENTINELS]

    def test_share_and_mean_length_are_those_of_the_paper(self) -> None:
        source, target = corrupt_spans(list(range(1000, 1400)), SENTINELS, np.random.default_rng(0))
        spans = sum(token in SENTINELS for token in target)
        assert len(target) - spans == 60
        assert spans == 20
        assert len(source) == 400 - 60 + 20

    def test_longest_that_fits(self) -> None:
        for limits in ((128, 64), (128, 10), (3, 3), (60, 60)):
            length = find_length(*limits, len(SENTINELS))
            for tokens, fits in ((length, True), (length + 1, False)):
                source, target = corrupt_spans([3] * tokens, SENTINELS, np.random.default_rng(0))
                assert (len(source) + 1 <= limits[0] and len(target) + 1 <= limits[1]) is fits
        assert find_length(10**6, 10**6, 100) < 2100  # no more spans than sentinels

    def test_dataset_is_the_text_with_spans_left_out(self) -> None:
        data = build_dataset("validation", max_source=64)
        text = ByteText("validation", context=data.length)
        for index in (0, 5, len(data) - 1):
            source, target = (data[index][key].tolist() for key in ("input_ids", "labels"))
            assert (source[-1], target[-1]) == (1, 1)
            assert len(source) <= 64
            tokens = restore(source[:-1], target[:-1])
            assert [token - 3 for token in tokens] == text[index]["inputs"].tolist()

    def test_item_depends_on_seed_and_index_alone(self) -> None:
        data = build_dataset()
        first = data[7]["input_ids"]
        _ = data[3], torch.rand(3), np.random.rand(3)
        assert torch.equal(data[7]["input_ids"], first)
        assert torch.equal(build_dataset(max_samples=10)[7]["input_ids"], first)
        assert not torch.equal(build_dataset(seed=1)[7]["input_ids"], first)
        loader = DataLoader(Subset(data, [7, 8]), batch_size=2, num_workers=1, collate_fn=collate)
        assert torch.equal(next(iter(loader))["input_ids"][0], first)

    def test_max_samples_ends_the_dataset(self) -> None:
        assert len(list(build_dataset(max_samples=4))) == 4


class TestPairs:
    def test_items_and_batch(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text('{"source": "abc", "target": "x"}\n{"source": "a", "target": "xyzw"}\n')
        data = build_dataset("all", path=str(path), max_target=4)
        batch = collate([data[0], data[1]])
        assert batch["input_ids"].tolist() == [[100, 101, 102, 1], [100, 1, 0, 0]]
        assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
        assert batch["labels"].tolist() == [[123, 1, -100, -100], [123, 124, 125, 1]]  # "xyzw" is cut
        assert all(value.dtype == torch.int64 for value in batch.values())

    def test_csv_columns(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        path.write_text("q,a\none,1\n")
        assert len(build_dataset("all", path=str(path), source="q", target="a")) == 1
        with pytest.raises(DataError, match=r"no column 'source'\n.*q, a"):
            build_dataset("all", path=str(path))

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [({"max_samples": 0}, "max_samples is 0"), ({"max_source": 2}, "max_source is 2; .* at least 3")],
    )
    def test_refuses(self, arguments: dict[str, Any], words: str) -> None:
        with pytest.raises(DataError, match=words):
            build_dataset(**arguments)


class TestModel:
    @pytest.mark.parametrize(
        ("size", "millions"),
        [("t5-small", 60.5), ("t5-base", 222.9), ("t5-large", 737.7), ("t5-3b", 2851.6), ("t5-11b", 11307.3)],
    )
    def test_published_sizes(self, size: str, millions: float) -> None:
        with torch.device("meta"):
            model = build(size)
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)

    def test_learns(self) -> None:
        torch.manual_seed(0)
        model = build()
        batch = collate([build_dataset()[i] for i in range(8)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(30):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert all(map(math.isfinite, losses))
        assert losses[-1] < losses[0] - 1.5

    def test_padding_does_not_change_the_loss(self) -> None:
        torch.manual_seed(0)
        model = build().eval()
        data = build_dataset(max_source=40)
        alone = collate([data[0]])
        longer = {"input_ids": torch.zeros(60).long(), "labels": torch.zeros(60).long()}
        padded = {key: value[:1] for key, value in collate([data[0], longer]).items()}
        assert padded["labels"].shape[1] > alone["labels"].shape[1]
        torch.testing.assert_close(model(**alone).loss, model(**padded).loss)

    def test_pretrained_from_a_folder(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        saved = build().bfloat16()
        saved.save_pretrained(tmp_path)
        loaded = build(pretrained=str(tmp_path))
        weights = dict(saved.named_parameters())
        for name, parameter in loaded.named_parameters():
            assert parameter.dtype == torch.float32
            assert torch.equal(parameter, weights[name].float())
        assert loaded.config.use_cache is False

    def test_vocabulary(self) -> None:
        assert build(vocab_size=500).get_input_embeddings().num_embeddings == 500

    def test_refuses(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ValueError, match=f"unknown size 'huge'; allowed: {', '.join(SIZES)}"):
            build("huge")
        with pytest.raises(ValueError, match="vocab_size is for new weights"):
            build(pretrained="x", vocab_size=10)
        with pytest.raises(TargetError, match=r"cannot load pretrained=.*\n.*folder"):
            build(pretrained=str(tmp_path))
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(TargetError, match=r"pip install 'transformers"):
            build()
