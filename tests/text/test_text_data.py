"""Texts become samples: formats, columns, tokenizers, packing, and one cache for all processes."""

from __future__ import annotations

import csv
import gzip
import inspect
import json
import os
import re
import signal
import socket
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from killed import wait_until
from programs import Program, run_program
from torch import Tensor

from dsjob import storage
from dsjob.data.loader import TrainingLoader
from dsjob.errors import DataError, StorageError
from dsjob.ranks.mesh import World
from dsjob.text import Mixture, Pad, Text, records
from dsjob.text.building import _read_sign, building
from dsjob.text.tokenizers import ByteTokenizer

TEXTS = ["one", "two is\nlonger, with “quotes”", "drei", ""]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dsjob" / "text"


def write_texts(folder: Path, kind: str, texts: list[str] = TEXTS, column: str = "text") -> str:
    path = folder / f"texts.{kind}"
    rows = [{"id": number, column: text} for number, text in enumerate(texts)]
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind in ("csv", "tsv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["id", column], delimiter="\t" if kind == "tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif kind == "saved":
        pytest.importorskip("datasets").Dataset.from_list(rows).save_to_disk(str(path))
    return str(path)


def decode(ids: Tensor) -> str:
    return bytes(number for number in ids.tolist() if number < 256).decode()


def list_texts(dataset: Text) -> list[str]:
    return [decode(dataset[index]["input_ids"]) for index in range(len(dataset))]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "csv", "tsv", "parquet", "saved"])
def test_every_format_gives_the_texts_in_order(tmp_path: Path, kind: str) -> None:
    dataset = Text(write_texts(tmp_path, kind, column="body"), columns={"text": "body"})
    assert list_texts(dataset) == TEXTS
    assert dataset[0]["input_ids"].tolist() == [*b"one", 256] == dataset[0]["labels"].tolist()
    assert dataset.lengths.tolist() == [len(text.encode()) + 1 for text in TEXTS]


def test_lines_of_text_files_are_texts_or_a_file_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.txt").write_text("three")
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    assert list_texts(Text(str(tmp_path))) == ["one", "two", "three"]
    monkeypatch.setattr("dsjob.text.records._PIECE", 2)  # read in pieces
    assert list_texts(Text(str(tmp_path), lines=False)) == ["one\n\ntwo\n", "three"]
    listed = [str(tmp_path / "b.txt"), str(tmp_path / "a.txt")]
    assert list_texts(Text(listed, max_samples=2)) == ["three", "one"]
    with pytest.raises(DataError, match=r"a\.txt is a text file, which has no columns"):
        Text(str(tmp_path / "a.txt"), columns={"prompt": "q"})


def test_texts_come_from_urls() -> None:
    storage.write_bytes("memory://texts/a.jsonl", b'{"text": "far"}\n')
    assert list_texts(Text("memory://texts/a.jsonl")) == ["far"] == list_texts(Text("memory://texts"))


def test_prompts_are_not_learnt(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"q": "1+1=", "a": "2"}\n{"q": "", "a": "so"}\n')
    columns = {"prompt": "q", "text": "a"}
    first, second = Text(str(path), columns=columns)
    assert first["input_ids"].tolist() == [*b"1+1=2", 256]
    assert first["labels"].tolist() == [-100] * 4 + [*b"2", 256]
    assert second["labels"].tolist() == [*b"so", 256]
    cut = Text(str(path), columns=columns, max_length=3)[0]
    assert cut["labels"].tolist() == [-100] * 3
    (window,) = Text(str(path), columns=columns, max_length=9, pack=True)
    assert window["labels"].tolist() == [-100] * 4 + [*b"2", 256] + [-100, *b"o", 256]


def test_windows_know_the_texts_in_them(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abc\nde\nfghijkl\n")
    windows = Text(str(path), max_length=5, pack=True)
    assert len(windows) == 3  # 15 ids with the end markers
    joined = torch.cat([window["input_ids"] for window in windows]).tolist()
    assert joined == [*b"abc", 256, *b"de", 256, *b"fghijkl", 256]
    assert [window["position_ids"].tolist() for window in windows] == [
        [0, 1, 2, 3, 0],
        [0, 1, 0, 1, 2],
        [0, 1, 2, 3, 4],
    ]
    hidden = [[label == -100 for label in window["labels"].tolist()] for window in windows]
    assert hidden == [[True, False, False, False, True], [True, False, True, False, False], [True] + [False] * 4]
    for window in windows:
        learnt = window["labels"] != -100
        assert torch.equal(window["labels"][learnt], window["input_ids"][learnt])


def make_llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=257, **sizes)).eval()


def test_a_model_of_transformers_sees_nothing_outside_of_a_text(tmp_path: Path) -> None:
    """The loss of packed texts is that of the texts alone, of one window at a time and of a batch."""
    path, model = tmp_path / "a.txt", make_llama()
    path.write_text("abc\nde\nfghi\nabc\nde\nfghi\n")
    windows = [*Text(str(path), max_length=12, pack=True)]
    assert len(windows) == 2
    alone = Pad()([Text(str(path))[index] for index in range(3)])
    with torch.no_grad():
        expected = model(**alone).loss.item()
        for window in windows:
            assert model(**Pad()([window])).loss.item() == pytest.approx(expected, abs=1e-6)
        assert model(**Pad()(windows)).loss.item() == pytest.approx(expected, abs=1e-6)
        unaware = {"input_ids": windows[0]["input_ids"][None], "labels": windows[0]["labels"][None]}
        assert abs(model(**unaware).loss.item() - expected) > 1e-5  # the test can tell


def test_samples_are_padded_to_the_longest(tmp_path: Path) -> None:
    dataset = Text(write_texts(tmp_path, "jsonl", ["a", "bcd"]))
    batch = Pad(pad_id=9, multiple_of=4)([dataset[0], dataset[1]])
    assert batch["input_ids"].tolist() == [[97, 256, 9, 9], [98, 99, 100, 256]]
    assert batch["labels"].tolist() == [[97, 256, -100, -100], [98, 99, 100, 256]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert Pad(multiple_of=8)([dataset[0]])["input_ids"].shape == (1, 8)


def test_samples_of_other_datasets_are_padded(tmp_path: Path) -> None:
    """Lists, as tokenizers return them; labels of their own length, as encoder-decoder models have; a class."""
    pairs = [{"input_ids": [5, 6, 7], "labels": [8]}, {"input_ids": [5], "labels": [8, 9]}]
    batch = Pad(pad_id=1)(pairs)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [5, 1, 1]]
    assert batch["labels"].tolist() == [[8, -100], [8, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    classes = [{"input_ids": [5, 6], "attention_mask": [0, 1], "labels": 2}, {**pairs[1], "attention_mask": [1]}]
    batch = Pad(pad_id=1)([{**each, "labels": number} for number, each in enumerate(classes)])
    assert batch["labels"].tolist() == [0, 1]
    assert batch["attention_mask"].tolist() == [[0, 1], [1, 0]]


def make_tokenizer(folder: Path, words: list[str]) -> str:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *words])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(str(folder))
    return str(folder)


def test_tokenizers_of_transformers_put_their_markers_where_a_text_begins_and_ends(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "words", ["one", "two"])
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"text": "one two three", "prompt": "two"}\n')
    assert Text(str(path), tokenizer=tokenizer)[0]["input_ids"].tolist() == [1, 3, 4, 0, 2]
    assert Text(str(path), tokenizer=tokenizer, end=False)[0]["input_ids"].tolist() == [1, 3, 4, 0]
    both = Text(str(path), tokenizer=tokenizer, columns={"prompt": "prompt"})[0]
    assert both["input_ids"].tolist() == [1, 4, 3, 4, 0, 2]
    assert both["labels"].tolist() == [-100, -100, 3, 4, 0, 2]


def test_the_cache_is_used_until_something_changes(tmp_path: Path, cache: Path) -> None:
    path = write_texts(tmp_path, "jsonl")
    tokenizer = make_tokenizer(tmp_path / "words", ["one"])

    def count() -> int:
        return len([entry for entry in cache.iterdir() if entry.is_dir()])

    Text(path), Text(path, max_length=3), Text(path, max_length=4, pack=True)
    assert count() == 1
    Text(path, max_samples=1), Text(path, end=False), Text(path, tokenizer=tokenizer)
    assert count() == 4
    make_tokenizer(tmp_path / "words", ["one", "two"])
    Text(path, tokenizer=tokenizer)
    assert count() == 5
    write_texts(tmp_path, "jsonl", [*TEXTS, "more"])
    assert list_texts(Text(path))[-1] == "more"
    assert count() == 6
    assert cache.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("name", "kept"), [("ends", 0), ("ends", 8), ("prompts", 8), ("tokens", 2)])
def test_a_damaged_cache_is_named(tmp_path: Path, cache: Path, name: str, kept: int) -> None:
    path = write_texts(tmp_path, "jsonl")
    Text(path)
    (folder,) = (entry for entry in cache.iterdir() if entry.is_dir())
    os.truncate(folder / name, kept)
    with pytest.raises(StorageError, match=f"the token cache {folder} is damaged"):
        Text(path)


def test_a_build_that_fails_leaves_no_files(tmp_path: Path, cache: Path) -> None:
    path = write_texts(tmp_path, "jsonl", ["good"] * 9)
    with open(path, "a", encoding="utf-8") as file:
        file.write("[]\n")
    with pytest.raises(DataError, match=r":\d+ is not an object"):
        Text(path)
    assert not [entry for entry in cache.iterdir() if entry.is_dir()]


BUILD = """
import sys, time
from dsjob.text import Text
import dsjob.text.tokenizers as tokenizers
encode = tokenizers.ByteTokenizer.encode
def slow(self, texts, *, begins):
    if texts: print("building", flush=True); time.sleep(float(sys.argv[2]))
    return encode(self, texts, begins=begins)
tokenizers.ByteTokenizer.encode = slow
print(len(Text(sys.argv[1])), flush=True)
"""


def start(path: str, seconds: float) -> Program:
    return Program([sys.executable, "-c", BUILD, path, str(seconds)], cwd=Path(path).parent)


def test_one_process_builds_while_the_others_wait_and_a_killed_one_is_replaced(tmp_path: Path) -> None:
    path = write_texts(tmp_path, "jsonl")
    first = start(path, 600)
    wait_until(lambda: first.stdout == "building\n", 60, "nothing is built")
    others = [start(path, 0.5) for _ in range(2)]
    time.sleep(0.3)
    os.kill(first.pid, signal.SIGKILL)
    first.wait(60)
    said = sorted(other.communicate(timeout=60)[0] for other in others)
    assert said == [f"{len(TEXTS)}\n", f"building\n{len(TEXTS)}\n"]


WAIT = """
import os, sys
# With another parent: of two ranks of a launcher, only the one that builds says so.
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
from dsjob.ranks import patience
patience.TO_SAY, patience.TO_SAY_AGAIN, patience.TO_MISS = 0.2, 0.5, 2.0
from dsjob.text import Text
print(len(Text(sys.argv[1])))
"""


@pytest.mark.full
def test_a_process_says_for_whom_it_waits_and_does_not_wait_for_a_silent_one(tmp_path: Path) -> None:
    """A stopped process stands for one on a machine that is gone: its lock is held, but it gives no signs of life."""
    path = write_texts(tmp_path, "jsonl")
    builder = start(path, 600)
    wait_until(lambda: builder.stdout == "building\n", 60, "nothing is built")
    waiting = Program([sys.executable, "-c", WAIT, path], cwd=tmp_path)
    try:
        wait_until(lambda: "\n" in waiting.stderr, 60, "it says nothing")
        line = waiting.stderr.splitlines(keepends=True)[0]
        who = f"process {builder.pid} on {socket.gethostname()}"
        assert re.fullmatch(rf"dsjob: process \d+ has waited \d s for {who}, which is tokenising {path}\n", line)
        assert waiting.poll() is None
        os.kill(builder.pid, signal.SIGSTOP)
        _, told = waiting.communicate(timeout=60)
    finally:
        builder.kill()
        builder.wait(60)
    assert waiting.returncode
    assert f"{who} holds the lock" in told
    assert "has shown no sign of life for 2 s" in told


def test_signs_of_life_may_contain_any_characters(tmp_path: Path) -> None:
    with building(tmp_path / "lock", "tokenising " + "\N{SNAKE}" * 1000), (tmp_path / "lock").open("rb") as file:
        deadline = time.monotonic() + 10
        while not (sign := _read_sign(file.fileno())) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert sign["process"] == os.getpid()
    assert sign["doing"].startswith("tokenising \N{SNAKE}")


def test_a_long_build_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dsjob.ranks.patience.TO_SAY", 0.5)
    monkeypatch.setattr("dsjob.text.cache._TOGETHER", 100)
    encode = ByteTokenizer.encode

    def slow(self: Any, texts: Any, *, begins: bool) -> list[list[int]]:
        time.sleep(1.5 if "last" in texts else 0)
        return encode(self, texts, begins=begins)

    monkeypatch.setattr(ByteTokenizer, "encode", slow)
    path = write_texts(tmp_path, "jsonl", ["text"] * 300 + ["last"] * 100)
    Text(path, max_samples=400)
    expected = rf"dsjob: process {os.getpid()} has been tokenising {path}: 300 texts, \d+% for 1 s\n"
    assert re.fullmatch(expected, capfd.readouterr().err)
    Text(path, max_samples=400)
    assert capfd.readouterr().err == ""


def test_a_huge_dataset_starts_at_once_and_is_never_loaded(tmp_path: Path, cache: Path) -> None:
    """100 GB of tokens in a sparse file: a stand-in with which a real cache is replaced."""
    dataset = Text(write_texts(tmp_path, "jsonl"), max_length=1000, pack=False)
    (folder,) = (entry for entry in cache.iterdir() if entry.is_dir())
    samples, tokens = 10_000_000, 50_000_000_000
    with open(folder / "tokens", "r+b") as file:
        file.truncate(2 * tokens)
    for name in ("ends", "prompts"):
        np.memmap(folder / name, np.int64, "w+", shape=(samples,))[-1] = tokens if name == "ends" else 0
    about = json.loads((folder / "about.json").read_text())
    (folder / "about.json").write_text(json.dumps({**about, "texts": samples, "tokens": tokens}))
    script = (
        "import resource, sys; import torch; from dsjob.text import Text\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "dataset = Text(sys.argv[1], max_length=2048, pack=True)\n"
        "found = dataset[len(dataset) - 1]['input_ids'].shape, len(dataset)\n"
        "print(found, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)\n"
    )
    del dataset
    done = run_program([sys.executable, "-c", script, tmp_path / "texts.jsonl"], cwd=tmp_path)
    assert done.stdout.startswith(f"(torch.Size([2048]), {tokens // 2048}) "), done.stderr
    assert int(done.stdout.split()[-1]) < 100  # MB


COMMIT = 40 * "a"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in for the hub: the arguments of each load."""
    datasets, loads = pytest.importorskip("datasets"), list[dict[str, Any]]()
    signature = inspect.signature(datasets.load_dataset)

    def load_dataset(*given: Any, **named: Any) -> Any:
        arguments = signature.bind(*given, **named).arguments
        if arguments["path"] != "someone/texts":
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{arguments['path']}' doesn't exist on the Hub")
        loads.append(arguments)
        return datasets.Dataset.from_list([{"body": f"{text} of {arguments['split']}"} for text in ("one", "two")])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return loads


def test_a_dataset_of_the_hub_is_loaded_once_at_its_commit(hub: list[dict[str, Any]]) -> None:
    named: dict[str, Any] = {"dataset": "someone/texts", "columns": {"text": "body"}, "dataset_config": "small"}
    for _ in range(2):
        assert list_texts(Text(**named, dataset_revision=COMMIT)) == ["one of train", "two of train"]
    expected = {"path": "someone/texts", "name": "small", "revision": COMMIT, "split": "train"}
    assert hub == [expected]
    assert list_texts(Text(**named, dataset_revision=40 * "b", split="test")) == ["one of test", "two of test"]
    assert hub[1:] == [{**expected, "revision": 40 * "b", "split": "test"}]
    # A branch may change: what was loaded decides.
    for _ in range(2):
        Text(**named, dataset_revision="main")
    assert len(hub) == 5


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"dataset": "someone/else"}, "cannot load dataset='someone/else': Dataset 'someone/else' doesn't exist"),
        ({"dataset": "."}, "dataset='.' is not the name of a dataset on the hub"),
        ({"dataset": "dsjob/text"}, "dataset='dsjob/text' is not the name of a dataset on the hub"),
        ({"dataset": "pandas"}, "dataset='pandas' is not the name of a dataset on the hub"),
        ({"dataset": "someone/texts", "source": "a.txt"}, "both source and dataset are given"),
        ({}, "neither source nor dataset is given"),
        ({"dataset": "someone/texts"}, "someone/texts: row 0 has no column 'text'; it has: body"),
    ],
)
def test_a_dataset_that_cannot_be_loaded_is_an_error(
    hub: list[dict[str, Any]], arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(DataError, match=re.escape(told)):
        Text(**arguments, dataset_revision=COMMIT)


def test_a_mixture_needs_a_list_of_datasets_with_a_length(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="datasets is one Text, not a list"):
        Mixture(Text(write_texts(tmp_path, "jsonl")))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"datasets\[0\] \(list_iterator\) has no length"):
        Mixture([iter([1])])


def test_a_mixture_keeps_its_proportions(tmp_path: Path) -> None:
    parts = []
    for name, length in (("a", 30), ("b", 10)):
        (tmp_path / name).mkdir()
        parts.append(Text(write_texts(tmp_path / name, "jsonl", [f"{name}{number}" for number in range(length)])))
    whole = Mixture(parts)
    assert sorted(decode(whole[index]["input_ids"]) for index in range(40)) == sorted(
        [f"a{number}" for number in range(30)] + [f"b{number}" for number in range(10)]
    )
    even = Mixture(parts, weights=[1, 1])
    found = [decode(even[index]["input_ids"]) for index in range(len(even))]
    assert len(found) == 40
    assert len({text for text in found if text.startswith("a")}) == 20  # some of its 30
    assert sorted(text for text in found if text.startswith("b")) == sorted(2 * [f"b{number}" for number in range(10)])
    assert even.lengths.tolist() == [len(text) + 1 for text in found]
    with pytest.raises(IndexError):
        even[40]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mixture_goes_on_with_the_other_samples_in_the_next_epoch(workers: int) -> None:
    """Data set 0 has 30 samples and a share of 10: three epochs read each of them once."""
    mixture = Mixture([[*range(30)], [*range(100, 110)]], weights=[1, 3])
    world = World(data_rank=0, local_rank=0, data_size=1, device=torch.device("cpu"))

    def read(seek: int, batches: int) -> list[int]:
        loader = TrainingLoader(mixture, 40, micro_batch=8, world=world, seed=1, num_workers=workers)
        loader.seek(seek)
        return [number for batch in islice(loader, batches) for number in batch.tolist()]

    seen = read(0, 15)
    epochs = [seen[start : start + 40] for start in (0, 40, 80)]
    assert sorted(number for number in seen if number < 100) == list(range(30))
    assert all(sorted(n for n in each if n >= 100) == sorted(3 * [*range(100, 110)]) for each in epochs)
    assert read(48, 9) == seen[48:]  # resumed in the middle of an epoch


@pytest.mark.parametrize("weights", [[1], [1, 0], [1, -1], [1, float("inf")], [1, "a"], 0.5])
def test_weights_of_a_mixture_are_checked(weights: Any) -> None:
    with pytest.raises(DataError, match=r"weights is .*, but there are 2 datasets"):
        Mixture([[1], [2]], weights)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": 1}', r"a.jsonl:1: text is not text, but int"),
        ("a.jsonl", '{"text": "a"}\n{"body": "b"}', r"a.jsonl:2 has no column 'text'; it has: body"),
        ("a.jsonl", '{"text": "a"}\n{oops', r"a.jsonl:2 is not JSON: "),
        ("a.jsonl", "[1]", r"a.jsonl:1 is not an object, but list"),
        ("a.json", '{"text": "a"}', r"a.json is not a list of objects"),
        ("a.csv", "id,body\n1,x\n", r"a.csv:2 has no column 'text'; it has: body, id"),
        ("a.csv", "text\na\n\xff\n", r"a.csv:3 is not UTF-8 text"),
        ("a.parquet", "not parquet", r"a.parquet cannot be read after row 0: "),
        ("a.txt", "a\n\xff", r"a.txt:2 is not UTF-8 text"),
        ("a.txt", "\n\n", r"a.txt has no text"),
        ("a.docx", "a", r"cannot tell the format of .*a.docx from its name"),
        ("a.jsonl.gz", "not gzip", r"cannot (read|use).*gz"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:40].decode("latin-1"), r"damaged: Compr"),
        ("a.jsonl.gz", "\x1f\x8b\x08\0\0\0\0\0\0\xff" + 99 * "x", r"a.jsonl.gz is damaged: Error -3"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises((DataError, StorageError), match=message):
        Text(str(tmp_path / name))


def test_csv_files_of_other_systems_are_read(tmp_path: Path) -> None:
    for number, content in enumerate(("\ufefftext\r\none\r\ntwo\r\n", "text\rone\rtwo\r", '"text"\n"one"\ntwo')):
        (path := tmp_path / f"{number}.csv").write_bytes(content.encode())
        assert list_texts(Text(str(path))) == ["one", "two"]


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    path = write_texts(tmp_path, "jsonl")
    for options, message in (
        ({"pack": True}, "pack needs max_length"),
        ({"max_length": 0}, "max_length is 0"),
        ({"max_length": "12"}, "max_length is '12'"),
        ({"columns": "text"}, "columns is 'text'"),
        ({"columns": {"txt": "a"}}, "columns has no key 'txt'"),
        ({"pack": True, "max_length": 1000}, "tokens; a window needs 1,000"),
        ({"tokenizer": str(tmp_path)}, "cannot load tokenizer="),
    ):
        with pytest.raises(DataError, match=message):
            Text(path, **options)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="there is no file or folder at /nowhere"):
        Text("/nowhere/a.txt")
    for source in ([], [None], ""):
        with pytest.raises(DataError, match="source is "):
            Text(source)  # type: ignore[arg-type]


def test_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "notes.docx").write_text("")
    with pytest.raises(DataError, match=f"the folder {tmp_path} contains no file with texts"):
        Text(str(tmp_path))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(DataError, match=f"{tmp_path} contains several datasets\n.*{tmp_path}/train"):
        Text(str(tmp_path))
    saved = Path(write_texts(tmp_path, "saved"))
    next(saved.glob("*.arrow")).write_bytes(b"damaged")
    with pytest.raises(DataError, match=f"{saved} cannot be loaded: "):
        Text(str(saved))


def test_texts_without_tokens_are_left_out(tmp_path: Path) -> None:
    path = write_texts(tmp_path, "jsonl", ["", "one", "", "two", ""])
    assert list_texts(Text(path, end=False, max_samples=2)) == ["one", "two"]
    assert list_texts(Text(path)) == ["", "one", "", "two", ""]  # each has its end marker


@pytest.mark.parametrize(("name", "lines"), [("a.txt", True), ("a.txt", False), ("a.jsonl", True), ("a.csv", True)])
def test_an_endless_line_is_an_error_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, lines: bool
) -> None:
    monkeypatch.setattr(records, "_LONGEST", 1000)
    first = {"a.txt": "one", "a.jsonl": '{"text": "one"}', "a.csv": "text"}[name]
    (tmp_path / name).write_text(first + "\n" + "x" * 5000)
    source = records.Source((str(tmp_path / name),), {"text": "text"}, lines)
    with pytest.raises(DataError, match=rf"{name}:2 is longer than 1,000 bytes"):
        list(source.read())
