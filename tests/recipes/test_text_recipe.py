"""The byte text and its splits, and the callback that samples."""

from __future__ import annotations

import pickle
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dsjob.errors import DataError
from dsjob.ranks.mesh import World
from dsjob.recipes.gpt import GPT, build
from dsjob.recipes.text import SKIPPED_FOLDERS, ByteText, SampleText, list_files

STDLIB = Path(sysconfig.get_path("stdlib"))


class TestByteText:
    def test_splits_share_no_file_and_cover_all(self) -> None:
        train, validation, all_files = (
            set(list_files(STDLIB, "*.py", s, SKIPPED_FOLDERS)) for s in ("train", "validation", "all")
        )
        assert not train & validation
        assert train | validation == all_files
        assert 0.05 < len(validation) / len(all_files) < 0.15
        assert "argparse.py" in all_files
        assert not any("site-packages" in name or name.startswith("test/") for name in all_files)

    def test_split_depends_on_names_alone(self, tmp_path: Path) -> None:
        names = [f"{folder}/m{i}.txt" for folder in ("a", "b") for i in range(20)]
        for root, order in ((tmp_path / "one", names), (tmp_path / "two", names[::-1])):
            for name in order:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(name)
        for split in ("train", "validation"):
            assert list_files(tmp_path / "one", "*.txt", split, frozenset()) == list_files(
                tmp_path / "two", "*.txt", split, frozenset()
            )
        assert list_files(tmp_path / "one", "*.txt", "validation", frozenset()) == [
            "a/m11.txt",
            "a/m12.txt",
            "a/m14.txt",
            "a/m17.txt",
            "a/m19.txt",
            "a/m3.txt",
            "a/m6.txt",
            "b/m6.txt",
            "b/m7.txt",
        ]  # for good

    def test_is_deterministic_quick_and_large_enough(self) -> None:
        start = time.perf_counter()
        first = ByteText("train")
        assert time.perf_counter() - start < 5.0  # about 0.05 s on a quiet machine
        assert torch.equal(first.data, ByteText("train").data)
        assert len(first) * 128 > 5_000_000
        assert len(ByteText("validation")) * 128 > 300_000

    def test_windows(self, tmp_path: Path) -> None:
        (tmp_path / "text.txt").write_bytes(bytes(range(100)))
        text = ByteText("all", context=9, path=str(tmp_path / "text.txt"))
        assert len(text) == 11  # 99 targets
        assert text[0]["inputs"].dtype == torch.int64
        assert text[0]["inputs"].tolist() == list(range(9))
        assert text[0]["targets"].tolist() == list(range(1, 10))
        assert text[10]["targets"].tolist() == list(range(91, 100))
        assert torch.cat([item["inputs"] for item in text]).tolist() == list(range(99))  # stops by itself, no overlap

    def test_single_file_is_cut(self, tmp_path: Path) -> None:
        path = tmp_path / "text.txt"
        path.write_bytes(bytes(range(100)))
        train, validation = (ByteText(s, context=3, path=str(path)).data.tolist() for s in ("train", "validation"))
        assert train == list(range(90))
        assert validation == list(range(90, 100))

    def test_folder_is_joined_in_order_of_names(self, tmp_path: Path) -> None:
        for name in ("b.md", "a.md", "tests/a.md", "ignored.txt"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(name)
        text = ByteText("all", context=2, path=str(tmp_path), pattern="*.md")
        assert bytes(text.data.tolist()) == b"a.mdb.mdtests/a.md"

    def test_max_bytes(self) -> None:
        assert bytes(ByteText(max_bytes=1000).data.tolist()) == bytes(ByteText().data[:1000].tolist())
        assert len(ByteText(max_bytes=1000)) == 7
        assert len(ByteText(max_bytes=1000, path=str(STDLIB / "argparse.py")).data) == 1000

    def test_can_go_to_worker_processes(self) -> None:
        text = ByteText(max_bytes=1000)
        assert torch.equal(pickle.loads(pickle.dumps(text)).data, text.data)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"split": "test"}, "unknown split 'test'\n.*train, validation, all"),
            ({"path": "/no/such/text"}, "no file or folder at /no/such/text"),
            ({"pattern": "*.nothing"}, r"has 0 bytes.*\n.*\*\.nothing"),
            ({"max_bytes": 128}, "has 128 bytes; one window needs 129"),
            ({"max_bytes": -1}, "has 0 bytes"),
            ({"context": 0}, "context is 0"),
        ],
    )
    def test_refuses(self, arguments: dict[str, Any], words: str) -> None:
        with pytest.raises(DataError, match=words):
            ByteText(**arguments)


class Recorder:
    """The parts of a run that the callback uses."""

    def __init__(self, module: nn.Module) -> None:
        self.engine = SimpleNamespace(
            module=module, device=torch.device("cpu"), world=World(0, 0, 1, torch.device("cpu"))
        )
        self.said: list[tuple[str, str]] = []

    def say(self, title: str, text: str) -> None:
        self.said.append((title, text))


def sample(module: nn.Module, **arguments: Any) -> str:
    run: Any = Recorder(module)
    SampleText(**arguments).on_end(run)
    ((_, text),) = run.said
    return str(text)


class TestSampleText:
    @pytest.fixture
    def model(self) -> GPT:
        torch.manual_seed(0)
        return build(context=16, layers=1, width=16, heads=2, dropout=0.3)

    def test_is_deterministic_and_leaves_the_run_as_it_was(self, model: GPT) -> None:
        state = torch.get_rng_state()
        first = sample(model, length=30)
        assert torch.equal(torch.get_rng_state(), state)
        assert first.startswith("def ")
        assert model.training
        torch.rand(5)
        assert sample(model.eval(), length=30) == first
        assert not model.training
        assert sample(model, length=30, seed=1) != first
        assert all(p.grad is None for p in model.parameters())

    def test_calls_the_model_once_a_byte(self, model: GPT) -> None:
        calls: list[torch.Size] = []
        model.register_forward_pre_hook(
            lambda _, __, keywords: calls.append(keywords["inputs"].shape), with_kwargs=True
        )
        sample(model, prompt="é", length=20)  # two bytes, and then past the context of 16
        assert len(calls) == 20
        assert calls[0] == (1, 2)
        assert calls[-1] == (1, 16)

    def test_follows_the_model(self) -> None:
        class Next(nn.Module):
            """Sure that after each byte comes the next one; ids above 255 are no bytes."""

            context = 4

            def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
                sure = nn.functional.one_hot(inputs + 1, 300) * 100.0
                sure[..., 256:] = 1000.0
                return {"logits": sure}

        assert sample(Next(), prompt="a", length=5) == "abcdef"
        assert sample(Next(), prompt="\x08", length=4) == "�\t\n��"  # a terminal would obey control characters

    @pytest.mark.parametrize("arguments", [{"prompt": ""}, {"length": 0}, {"temperature": 0.0}])
    def test_refuses(self, arguments: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"prompt|length|temperature"):
            SampleText(**arguments)
