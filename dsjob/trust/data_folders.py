"""Checks a local folder before a library loads data or a model from it, with the same policy as for the arguments in a
document.

The folder's card (README.md) may name files and URLs, and its symbolic links may lead anywhere. A link to a kernel
file, such as this process's environment, would make `datasets` copy that file into its cache.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from dsjob import document as documents
from dsjob.contract.access import ALLOWED, Access, is_hidden, is_key_file
from dsjob.contract.locations import check_texts
from dsjob.contract.paths import Path
from dsjob.contract.secrets import list_texts
from dsjob.errors import DocumentError, Problem
from dsjob.files import is_plain
from dsjob.terminal import quote_word
from dsjob.trust.literals import check_options
from dsjob.trust.places import MAGIC, check_places, split_pattern, strip

_CARDS = ("README.md", ".huggingface.yaml")
_BLOCK = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
_MAX_CARD = 4 << 20  # bytes
_QUICK = 1_000  # entries of folders that the check of a document looks at
_ALL = re.compile(r".*", re.DOTALL)
_TEXTS = r"(?i).*\.(jsonl|ndjson|json|csv|tsv|parquet|pq|txt|text|md)(\.gz)?"
_PATTERN = "*.py"  # the default of ByteText


class _Reader(NamedTuple):
    """A reader of folders that is dsjob's own: its positional arguments, and which of them is the folder; how many
    levels it reads (None: all), and which names (none: those of its `pattern`); whether it reads what `datasets` has
    saved."""

    positional: tuple[str, ...]
    at: int
    depth: int | None
    names: str
    saved: bool


_READERS = {
    "dsjob.text.Text": _Reader(("source",), 0, 1, _TEXTS, True),
    "dsjob.recipes.text.ByteText": _Reader(("split", "context", "max_bytes", "path", "pattern"), 3, None, "", False),
}
_LOADERS = {"load_dataset": "path", "load_from_disk": "dataset_path"}


def check_contents(value: Mapping[str, Any], path: Path, access: Access) -> Iterator[Problem]:
    """Problems with the contents of the folders of data that a target names, as far as a quick look shows them: a
    folder may be large. Readers look at each file that they open. `path`: the target's place."""
    target = str(value["_target_"])
    if not isinstance(value.get("_args_", []), list):
        return  # reported already
    if reader := _READERS.get(target):
        arguments = {**dict(zip(reader.positional, value.get("_args_", []), strict=False)), **value}
        names = re.compile(reader.names or fnmatch.translate(str(arguments.get("pattern", _PATTERN))))
        named = arguments.get(key := reader.positional[reader.at])
        for folder in named if isinstance(named, list) else [named]:
            if isinstance(folder, str) and os.path.isdir(local := strip(folder)):
                # A folder that `datasets` has saved is read as a whole.
                saved = reader.saved and os.path.isfile(os.path.join(local, "state.json"))
                looked = (None, _ALL) if saved else (reader.depth, names)
                for problem in check_links(local, access, *looked, follow=bool(saved), most=_QUICK):
                    yield replace(problem, path=(*path, key if key in value else "_args_"))
    if target.startswith("datasets."):
        for problem in check_data(value, access, most=_QUICK):
            yield replace(problem, path=(*path, "_target_"))


def check_data(value: Mapping[str, Any], access: Access, *, most: int | None = None) -> list[Problem]:
    """Problems with the folders that a loader of `datasets` is about to read.

    `value`: the target with its final arguments. `access`: of the document that names it. `most`: see `check_links`.
    """
    target = str(value["_target_"])
    listed = [*value.get("_args_", []), None]
    first = value.get(_LOADERS.get(target.rpartition(".")[2], ""), listed[0])
    inside = value.get("data_dir")
    both = os.path.join(first, inside) if isinstance(first, str) and isinstance(inside, str) else ""
    found: list[Problem] = []
    for folder in {os.path.expanduser(folder): None for folder in (first, inside, both) if isinstance(folder, str)}:
        if os.path.isdir(folder):
            found += [*check_links(folder, access, most=most), *_check_cards(target, folder, access)]
    texts = (text for _, text in list_texts({**value, "_args_": listed}) if isinstance(text, str))
    for pattern in (text for text in texts if MAGIC.search(text) and "://" not in text):
        above, parts = split_pattern(os.path.expanduser(pattern))
        names = "*" if "{" in parts[-1] else parts[-1]  # fnmatch has no braces
        depth = None if "**" in pattern else len(parts)
        found += check_links(above, access, depth, re.compile(fnmatch.translate(names)), most=most)
    return found


def check_links(
    folder: str,
    access: Access,
    depth: int | None = None,
    names: re.Pattern[str] = _ALL,
    *,
    follow: bool = True,
    most: int | None = None,
) -> Iterator[Problem]:
    """Problems with links to places that the document may not read, with files of keys, and with pipes, in a folder
    and below it: at most `depth` levels, and `most` entries. Leaves out hidden files, as loaders do, files whose names
    do not match, and unless `follow`, folders that are links."""
    waiting, seen, count = [(folder, 1)], set[str](), 0
    while waiting:
        above, level = waiting.pop()
        real = os.path.realpath(above)
        if real in seen or not os.path.isdir(real):
            continue
        seen.add(real)
        entries = _list_entries(above, None if most is None else most - count)
        count += len(entries)
        for entry in entries:
            enters = entry.is_dir() and (depth is None or level < depth) and (follow or not entry.is_symlink())
            if is_hidden(entry.name) or not (enters if entry.is_dir() else names.fullmatch(entry.name)):
                continue  # nobody reads it
            rule, message, hint = ALLOWED
            if entry.is_symlink() or is_key_file(entry.name):
                rule, message, hint = access.explain(entry.path)
            if rule:
                yield Problem(f"{entry.path}: {message}", (), rule, hint)
            elif enters:
                waiting.append((entry.path, level + 1))
            elif not entry.is_file() and not is_plain(entry.path):
                message = f"{entry.path} is a pipe or a device, so reading it may never end"
                yield Problem(message, (), "kernel-file", "delete it")


def _list_entries(folder: str, most: int | None) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(islice(entries, most), key=lambda entry: entry.name)
    except OSError:  # another user's folder: who reads it will fail
        return []


def _check_cards(target: str, folder: str, access: Access) -> Iterator[Problem]:
    for name in _CARDS:
        card = os.path.join(folder, name)
        if not (os.path.isfile(card) and is_plain(card)):
            continue
        with open(card, "rb") as file:
            text = file.read(_MAX_CARD + 1).decode(errors="replace")
        if name.endswith(".md"):
            block = _BLOCK.match(text)
            text = block[1] if block else ""
        try:
            if len(text) > _MAX_CARD:
                raise DocumentError([Problem("it is too large", (), "too-large")])
            values = documents.parse(text, card, format="yaml").value if text.strip() else {}
        except DocumentError as error:
            message = f"cannot check {card}: {error.problems[0].message}"
            yield Problem(message, (), "data-card", f"correct it, or run with --trust {quote_word(target)}")
            continue
        root: Path = ()
        named = {"_target_": target, "path": folder, "card": values}
        urls = check_texts(values, root, access.protocols, listed=True)
        for problem in (*urls, *check_options(named, root), *check_places(named, root, access)):
            place = ".".join(map(str, problem.path))
            yield Problem(f"{card}: {place}: {problem.message}", (), problem.rule, problem.hint)
