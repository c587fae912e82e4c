"""Files that expand to far more than they are: reading ends with an error before memory or disk are full."""

from __future__ import annotations

import gzip
import json
import resource
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import dsjob

from dsjob import storage
from dsjob.errors import DataError
from dsjob.text import expansion, records

MIB = 1 << 20
REFUSED = "expands to more than 200 times its size, which no real texts do"


def compress(pieces: Iterator[bytes]) -> bytes:
    """What gzip makes of a content that is never in memory as a whole."""
    gzipped = zlib.compressobj(9, wbits=31)
    return b"".join([gzipped.compress(piece) for piece in pieces] + [gzipped.flush()])


def repeat(piece: bytes, times: int, first: bytes = b"", last: bytes = b"") -> bytes:
    return compress(each for each in (first, *[piece] * times, last))


def write_parquet(path: Path, *, compression: str, dictionary: bool) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    text = "word " * (MIB // 5)
    if dictionary:
        values = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 2000, "int32"), [text])
    else:
        values = pyarrow.array([text + str(number) for number in range(40)])
    parquet.write_table(pyarrow.table({"text": values}), path, compression=compression, use_dictionary=dictionary)


def write_saved(path: Path) -> None:
    """A dataset whose Arrow file is compressed, as `datasets` reads it but never writes it."""
    pyarrow, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(str(path))
    (file,) = path.glob("*.arrow")
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    rows = pyarrow.table({"text": ["word " * 200_000] * 100})
    schema = rows.schema.with_metadata(pyarrow.ipc.open_stream(file.read_bytes()).schema.metadata)
    with pyarrow.ipc.new_stream(file, schema, options=options) as writer:
        writer.write_table(rows.cast(schema))


WRITERS: dict[str, Callable[[Path], Any]] = {
    "bomb.txt.gz": lambda path: path.write_bytes(repeat(b"x" * (MIB - 1) + b"\n", 100)),
    "line.txt.gz": lambda path: path.write_bytes(repeat(b"x" * MIB, 100)),
    "bomb.jsonl.gz": lambda path: path.write_bytes(repeat(json.dumps({"text": "x" * MIB}).encode() + b"\n", 100)),
    "bomb.json.gz": lambda path: path.write_bytes(repeat(b" " * MIB, 100, b"[", b"]")),
    "bomb.csv.gz": lambda path: path.write_bytes(repeat(b"x" * MIB + b"\n", 100, b"text\n")),
    "bomb.parquet": lambda path: write_parquet(path, compression="zstd", dictionary=False),
    "dictionary.parquet": lambda path: write_parquet(path, compression="none", dictionary=True),
    "saved": write_saved,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_bomb_is_refused_early(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name
    WRITERS[name](path)
    if name != "bomb.txt.gz":
        monkeypatch.setattr(expansion, "ALWAYS", 4 * MIB)
    source = records.Source((str(path),), {"text": "text"}, lines="line" not in name)
    read = 0

    def read_all() -> None:
        nonlocal read
        for record in source.read():
            read += len(record.text)

    with pytest.raises(DataError, match=REFUSED) as caught:
        read_all()
    assert name in caught.value.message
    assert "gunzip" in caught.value.hint
    assert read <= expansion.ALWAYS + expansion.RATIO * sum(f.size for f in storage.find_files(str(tmp_path)).values())


def test_texts_that_repeat_much_are_read(tmp_path: Path) -> None:
    """A log compresses well, and a small file may expand as it likes."""
    log = tmp_path / "log.txt.gz"
    log.write_bytes(gzip.compress(b"".join(b"%09d 12:00:00 INFO the same message\n" % n for n in range(200_000))))
    small = tmp_path / "small.txt.gz"
    small.write_bytes(repeat(b"x" * (MIB - 1) + b"\n", 63))
    counted = [sum(1 for _ in records.Source((str(path),), {"text": "text"}).read()) for path in (log, small)]
    assert counted == [200_000, 63]


def test_a_file_whose_size_no_server_tells_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expansion, "ALWAYS", MIB)
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"".join(b"%d some line\n" % n for n in range(200_000))))
    monkeypatch.setattr(storage, "describe", lambda url: storage.Found(0, None))
    assert sum(1 for _ in records.Source((str(path),), {"text": "text"}).read()) == 200_000


@pytest.mark.slow
def test_a_job_with_a_bomb_ends_with_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "bomb.txt.gz").write_bytes(100 * repeat(b"x" * (MIB - 1) + b"\n", 40))
    document = {
        "model": {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1},
        "data": {"train": {"_target_": "dsjob.text.Text", "source": "bomb.txt.gz"}},
        "trainer": {"train_batch": 1, "max_steps": 1},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    (tmp_path / "cfg.json").write_text(json.dumps(document))
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    done = dsjob("cfg.json", cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 1
    assert f"bomb.txt.gz {REFUSED}" in done.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= max(before, 4 << 20)
    assert sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file()) < MIB
