"""Reads texts from JSONL, JSON, CSV, TSV, Parquet and text files, and from folders that `datasets` has saved."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from dsjob import storage
from dsjob.errors import DataError, how_to_install

FORMATS = ("jsonl", "json", "csv", "tsv", "parquet", "txt")
_LONGEST = 256 << 20  # bytes, or characters of a CSV file, in a line: what is longer is no text file
_PIECE = 1 << 20  # characters that are tokenised at once of a file that is one text


@dataclass(frozen=True)
class Record:
    """A text, and the prompt before it. ends: false if the next record continues this text."""

    text: str
    prompt: str | None = None
    ends: bool = True


@dataclass(frozen=True)
class Source:
    """Where texts are, and what they are called there.

    columns: the names of the columns `text` and, if there are prompts, `prompt`. lines: whether each line of a text
    file is a text of its own; otherwise the file is one.
    """

    files: tuple[str, ...]
    columns: Mapping[str, str]
    lines: bool = True

    def read(self) -> Iterator[Record]:
        """All texts in the order of the files. Raises DataError and StorageError."""
        for file in self.files:
            yield from self._read_file(file)

    def _read_file(self, url: str) -> Iterator[Record]:
        if _is_saved(url):
            yield from self._take_columns(_read_saved(url), url)
            return
        kind = find_format(url)
        with storage.open_read(url) as raw, gzip.open(raw) if url.endswith(".gz") else nullcontext(raw) as opened:
            file = cast("BinaryIO", opened)
            if kind == "parquet":
                yield from self._take_columns(_read_parquet(file, list(self.columns.values()), url), url)
            elif kind == "txt":
                yield from _read_lines(file, url) if self.lines else _read_whole(file, url)
            else:
                yield from self._take_columns(_READERS[kind](file, url), url)

    def _take_columns(self, rows: Iterator[tuple[str, Mapping[str, Any]]], url: str) -> Iterator[Record]:
        for place, row in rows:
            found = {}
            for name, column in self.columns.items():
                if column not in row:
                    has = ", ".join(sorted(str(key) for key in row)[:20])
                    hint = f"name the column in columns, for example columns: {{{name}: ...}}"
                    raise DataError(f"{place} has no column {column!r}; it has: {has}", hint=hint)
                if not isinstance(row[column], str):
                    raise DataError(f"{place}: {column} is not text, but {type(row[column]).__name__}")
                found[name] = row[column]
            yield Record(found["text"], found.get("prompt"))


def find_format(url: str) -> str:
    """The format of a file by its name. Raises DataError for an unknown one."""
    name = url.rstrip("/").rpartition("/")[2].removesuffix(".gz")
    kind = {"ndjson": "jsonl", "text": "txt", "md": "txt", "pq": "parquet"}.get(
        ending := name.rpartition(".")[2], ending
    )
    if kind not in FORMATS:
        hint = f"its name has to end with one of: {', '.join('.' + known for known in FORMATS)} (also with .gz)"
        raise DataError(f"cannot tell the format of {url} from its name", hint=hint)
    return kind


def list_files(source: str | Sequence[str]) -> tuple[str, ...]:
    """The files of a source: a file, a folder of files, a folder that `datasets` has saved, or a list of these."""
    found: list[str] = []
    for url in [source] if isinstance(source, str) else source:
        if not storage.exists(url):
            raise DataError(f"there is no file or folder at {url}", hint="correct the path in source")
        names = storage.find_files(url, deep=False) if storage.is_folder(url) and not _is_saved(url) else {}
        below = sorted(name for name in names if name.removesuffix(".gz").rpartition(".")[2] in FORMATS)
        found += [storage.join(url, name) for name in below] or [url]
    return tuple(found)


def _is_saved(url: str) -> bool:
    """Whether `datasets` has saved a dataset there."""
    return storage.is_local(url) and os.path.isfile(os.path.join(storage.local_path(url), "state.json"))


def _read_saved(url: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{url} needs the package datasets", hint=how_to_install("datasets")) from error
    for number, row in enumerate(datasets.load_from_disk(storage.local_path(url))):
        yield f"{url}: row {number}", row


def _read_parquet(file: BinaryIO, columns: list[str], url: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        from pyarrow import lib, parquet
    except ImportError as error:
        raise DataError(f"{url} needs the package pyarrow", hint=how_to_install("pyarrow")) from error
    number = 0
    try:
        opened = parquet.ParquetFile(file)
        names = set(opened.schema_arrow.names)
        for batch in opened.iter_batches(1024, columns=[name for name in columns if name in names] or None):
            for row in batch.to_pylist():
                yield f"{url}: row {number}", row
                number += 1
    except lib.ArrowException as error:
        raise DataError(f"{url} cannot be read after row {number}: {error}") from error


def _read_jsonl(file: BinaryIO, url: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(_split_lines(file, url), start=1):
        if line.strip():
            yield f"{url}:{number}", _require_object(_parse(line, f"{url}:{number}"), f"{url}:{number}")


def _read_json(file: BinaryIO, url: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    rows = _parse(file.read(), url)
    if not isinstance(rows, list):
        raise DataError(f"{url} is not a list of objects", hint="a file with one object per line is named *.jsonl")
    for number, row in enumerate(rows):
        yield f"{url}: row {number}", _require_object(row, f"{url}: row {number}")


def _parse(data: bytes, place: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON: {error}") from error


def _require_object(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{place} is not an object, but {type(value).__name__}")
    return value


def _read_csv(file: BinaryIO, url: str, delimiter: str = ",") -> Iterator[tuple[str, Mapping[str, Any]]]:
    csv.field_size_limit(_LONGEST)  # a text may be longer than the default of 131,072 characters
    lines = _split_lines(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), url)
    rows = csv.DictReader(lines, delimiter=delimiter)
    try:
        for row in rows:
            yield f"{url}:{rows.line_num}", row
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{url}:{rows.line_num} cannot be read: {error}") from error


def _read_tsv(file: BinaryIO, url: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return _read_csv(file, url, "\t")


def _read_lines(file: BinaryIO, url: str) -> Iterator[Record]:
    for number, line in enumerate(_split_lines(file, url), start=1):
        if line.strip():
            yield Record(_decode(line, f"{url}:{number}").rstrip("\r\n"))


def _read_whole(file: BinaryIO, url: str) -> Iterator[Record]:
    """One text in pieces that end with a line, so that a file of any size fits in memory."""
    number, all_lines = 1, _split_lines(file, url)
    lines = _take_piece(all_lines)
    while lines:
        piece = _decode(b"".join(lines), f"{url}: after line {number}")
        number += len(lines)
        lines = _take_piece(all_lines)
        yield Record(piece, ends=not lines)


def _take_piece(lines: Iterator[bytes]) -> list[bytes]:
    taken, size = list[bytes](), 0
    for line in lines:
        taken.append(line)
        size += len(line)
        if size >= _PIECE:
            break
    return taken


def _split_lines(file: Any, url: str) -> Iterator[Any]:
    """The lines of a binary or text file, of bounded length: an endless one must not take all memory. Raises
    DataError."""
    number = 1
    while line := file.readline(_LONGEST + 1):
        if len(line) > _LONGEST:
            raise DataError(
                f"{url}:{number} is longer than {_LONGEST:,} bytes", hint="break it into lines, or check it"
            )
        yield line
        number += 1


def _decode(data: bytes, place: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not UTF-8 text") from error


_READERS = {"jsonl": _read_jsonl, "json": _read_json, "csv": _read_csv, "tsv": _read_tsv}
