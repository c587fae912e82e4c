"""Reads texts from JSONL, JSON, CSV, TSV, Parquet and text files, from folders that `datasets` has saved, and from
datasets on the hub."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

from dsjob import storage
from dsjob.contract.access import find_access
from dsjob.errors import DataError, DsjobError, how_to_install
from dsjob.text.expansion import Expanded, Expansion
from dsjob.trust.data_folders import check_links

FORMATS = ("jsonl", "json", "csv", "tsv", "parquet", "txt")
_ENDINGS = f"one of: {', '.join('.' + known for known in FORMATS)} (also with .gz)"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LONGEST = 256 << 20  # bytes, or characters of a CSV file, in a line: what is longer is no text file
_ROWS = 64  # of Parquet that are in memory at once: each may be one long value that the file stores once
_PIECE = 1 << 20  # characters that are tokenised at once of a file that is one text


@dataclass(frozen=True)
class Record:
    """A text, and the prompt before it. ends: false if the next record continues this text."""

    text: str
    prompt: str | None = None
    ends: bool = True


@dataclass
class Progress:
    """How far a source is read. files: those that are done. measure: the part of the current one, from 0 to 1."""

    files: int = 0
    measure: Callable[[], float] = lambda: 0.0


@dataclass(frozen=True)
class Source:
    """Where texts are, and what they are called there.

    columns: the names of the columns `text` and, if there are prompts, `prompt`. lines: whether each line of a text
    file is a text of its own; otherwise the file is one. progress: how far `read` is.
    """

    files: tuple[str, ...]
    columns: Mapping[str, str]
    lines: bool = True
    progress: Progress = field(default_factory=Progress, compare=False)

    def describe(self) -> list[Any]:
        """What changes with the content of the files: their names, sizes and times of change."""
        found = []
        for url in self.files:
            entries = storage.find_files(url) if storage.is_folder(url) else {"": storage.describe(url)}
            found.append([url, [[name, each.size, each.written] for name, each in sorted(entries.items())]])
        return found

    @property
    def label(self) -> str:
        """Its name in messages."""
        return ", ".join(self.files[:3]) + (", ..." if self.files[3:] else "")

    @property
    def part(self) -> float:
        """The part that `read` has read, from 0 to 1, as if all files were equally large."""
        return (self.progress.files + self.progress.measure()) / len(self.files)

    def read(self) -> Iterator[Record]:
        """All texts in the order of the files. Raises DataError and StorageError."""
        progress = self.progress
        for progress.files, file in enumerate(self.files):
            try:
                yield from self._read_file(file)
            finally:
                progress.measure = lambda: 1.0

    def _read_file(self, url: str) -> Iterator[Record]:
        if _is_saved(url):
            size = sum(found.size for found in storage.find_files(url).values())
            rows = self._count_rows(_load_saved(url), url)
            yield from self._limit(self._take_columns(rows, url), Expansion(url, lambda: size))
            return
        try:
            yield from self._read_rows(url, find_format(url))
        except (EOFError, zlib.error) as error:
            raise DataError(f"{url} is damaged: {error}", hint="copy or compress it again") from error

    def _read_rows(self, url: str, kind: str) -> Iterator[Record]:
        with storage.open_read(url) as raw:
            size = storage.describe(url).size
            self.progress.measure = lambda: min(1.0, raw.tell() / max(1, size))
            file = _expand(raw, Expansion(url, raw.tell)) if _is_gzip(url) else raw
            if kind == "parquet":
                rows = _read_parquet(file, list(self.columns.values()), url)
                yield from self._limit(self._take_columns(rows, url), Expansion(url, lambda: size))
            elif kind == "txt":
                if self.columns != {"text": "text"}:
                    raise DataError(f"{url} is a text file, which has no columns", hint="leave out columns")
                yield from _read_lines(file, url) if self.lines else _read_whole(file, url)
            else:
                yield from self._take_columns(_READERS[kind](file, url), url)

    def _count_rows(self, rows: Any, url: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The rows of a dataset of Hugging Face, each with its place."""
        number = 0
        self.progress.measure = lambda: number / len(rows)
        for number, row in enumerate(rows):
            yield f"{url}: row {number}", row

    def _limit(self, records: Iterator[Record], expansion: Expansion) -> Iterator[Record]:
        for record in records:
            expansion.add(len(record.text) + len(record.prompt or ""))
            yield record

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


@dataclass(frozen=True, kw_only=True)
class HubSource(Source):
    """A dataset on the hub of Hugging Face: `files` is its name alone. revision: its commit. config: one of its
    configurations. split: the part that is read."""

    revision: str | None
    config: str | None
    split: str

    def load(self) -> Any:
        """Its rows. Downloads what is not in the cache of `datasets`. Raises DataError."""
        (name,) = self.files
        # `datasets` would read a local folder, or for the name of a format (`pandas`) files of the current one, without
        # the checks of `dsjob.trust.data_folders`.
        if os.path.exists(name) or not _HUB_NAME.fullmatch(name):
            hint = "write OWNER/NAME; source names local files"
            raise DataError(f"dataset={name!r} is not the name of a dataset on the hub", hint=hint)
        datasets = _import_datasets(f"dataset={name!r}")
        try:
            return datasets.load_dataset(name, self.config, revision=self.revision, split=self.split)
        except DsjobError:  # a signal that arrived in the meantime
            raise
        except Exception as error:  # datasets and its readers raise all kinds
            text = " ".join(str(error).split()) or type(error).__name__
            hint = "check dataset, dataset_config, dataset_revision and split, and the connection"
            raise DataError(f"cannot load dataset={name!r}: {text}", hint=hint) from error

    def describe(self) -> list[Any]:
        """What changes with its content."""
        named = [*self.files, self.revision, self.config, self.split]
        if self.revision and _COMMIT.fullmatch(self.revision):
            return named
        # A branch moves. `datasets` keeps each commit in a folder of its own, whose name contains its hash.
        rows = self.load()
        return [*named, len(rows), [file["filename"] for file in rows.cache_files]]

    def _read_file(self, url: str) -> Iterator[Record]:
        yield from self._take_columns(self._count_rows(self.load(), url), url)


def find_format(url: str) -> str:
    """The format of a file by its name. Raises DataError for an unknown one."""
    name = url.rstrip("/").rpartition("/")[2].lower().removesuffix(".gz")
    kind = {"ndjson": "jsonl", "text": "txt", "md": "txt", "pq": "parquet"}.get(
        ending := name.rpartition(".")[2], ending
    )
    if kind not in FORMATS:
        raise DataError(f"cannot tell the format of {url} from its name", hint=f"its name has to end with {_ENDINGS}")
    return kind


def _expand(raw: BinaryIO, expansion: Expansion) -> BinaryIO:
    return cast("BinaryIO", io.BufferedReader(Expanded(gzip.GzipFile(fileobj=raw), expansion)))


def _is_gzip(url: str) -> bool:
    return url.lower().endswith(".gz")


def list_files(source: str | Sequence[str]) -> tuple[str, ...]:
    """The files of a source: a file, a folder of files, a folder that `datasets` has saved, or a list of these."""
    urls = [source] if isinstance(source, str) else source
    if not isinstance(urls, Sequence) or not urls or not all(isinstance(url, str) and url for url in urls):
        raise DataError(f"source is {source!r}", hint="name a file or a folder, or a list of these")
    return tuple(file for url in urls for file in _list_below(url))


def _list_below(url: str) -> list[str]:
    if not storage.exists(url):
        raise DataError(f"there is no file or folder at {url}", hint="correct the path in source")
    if _is_saved(url) or not storage.is_folder(url):
        return [url]
    names = storage.find_files(url, deep=False)
    if "dataset_dict.json" in names:
        hint = f"name one of its folders, such as {storage.join(url, 'train')}"
        raise DataError(f"{url} contains several datasets", hint=hint)
    shown = (name for name in names if not name.startswith("."))
    below = sorted(name for name in shown if name.lower().removesuffix(".gz").rpartition(".")[2] in FORMATS)
    if not below:
        raise DataError(
            f"the folder {url} contains no file with texts", hint=f"their names have to end with {_ENDINGS}"
        )
    return [storage.join(url, name) for name in below]


def _is_saved(url: str) -> bool:
    """Whether `datasets` has saved a dataset there."""
    return storage.is_local(url) and os.path.isfile(os.path.join(storage.local_path(url), "state.json"))


def _load_saved(url: str) -> Any:
    datasets = _import_datasets(url)
    if (access := find_access()) is not None:
        for problem in check_links(storage.local_path(url), access):
            raise DataError(problem.message, hint=problem.hint)
    try:
        return datasets.load_from_disk(storage.local_path(url))
    except (OSError, ValueError, KeyError) as error:  # Arrow's errors are kinds of OSError and ValueError
        raise DataError(f"{url} cannot be loaded: {error}", hint="save the dataset again") from error


def _import_datasets(what: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{what} needs the package datasets", hint=how_to_install("datasets")) from error
    return datasets


def _read_parquet(file: BinaryIO, columns: list[str], url: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        from pyarrow import lib, parquet
    except ImportError as error:
        raise DataError(f"{url} needs the package pyarrow", hint=how_to_install("pyarrow")) from error
    number = 0
    try:
        opened = parquet.ParquetFile(file)
        names = set(opened.schema_arrow.names)
        for batch in opened.iter_batches(_ROWS, columns=[name for name in columns if name in names] or None):
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
    rows = csv.DictReader(_decode_lines(file, url), delimiter=delimiter)
    try:
        for row in rows:
            yield f"{url}:{rows.line_num}", row
    except csv.Error as error:
        raise DataError(f"{url}:{max(rows.line_num, 1)} cannot be read: {error}") from error


def _decode_lines(file: BinaryIO, url: str) -> Iterator[str]:
    """The lines of a CSV file. Each is decoded by itself, so that an error knows its line."""
    for number, line in enumerate(_split_lines(file, url), start=1):
        text = _decode(line, f"{url}:{number}")
        yield from io.StringIO(text.removeprefix("\ufeff") if number == 1 else text, newline="")  # also splits at \r


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
