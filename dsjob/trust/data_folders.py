"""Checks a local data folder before `datasets` loads it, with the same policy as for the arguments in a document.

The folder's card (README.md) may name files and URLs, and its symbolic links may lead anywhere. A link to a kernel
file, such as this process's environment, would make `datasets` copy that file into its cache.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dsjob import document as documents
from dsjob.contract.locations import check_texts
from dsjob.contract.paths import Path
from dsjob.contract.secrets import list_texts
from dsjob.errors import DocumentError, Problem
from dsjob.files import is_plain
from dsjob.terminal import quote_word
from dsjob.trust.literals import check_options

_CARDS = ("README.md", ".huggingface.yaml")
_BLOCK = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
_MAGIC = re.compile(r"[*?\[{]")
_MAX_CARD = 4 << 20  # bytes
_LOADERS = {"load_dataset": "path", "load_from_disk": "dataset_path"}


def check_data(value: Mapping[str, Any], protocols: frozenset[str]) -> list[Problem]:
    """Problems with the folders that a loader of `datasets` is about to read.

    `value`: the target with its final arguments. `protocols`: the URL protocols that the user has granted.
    """
    target = str(value["_target_"])
    listed = [*value.get("_args_", []), None]
    first = value.get(_LOADERS.get(target.rpartition(".")[2], ""), listed[0])
    inside = value.get("data_dir")
    both = os.path.join(first, inside) if isinstance(first, str) and isinstance(inside, str) else ""
    found: list[Problem] = []
    for folder in {os.path.expanduser(folder): None for folder in (first, inside, both) if isinstance(folder, str)}:
        if os.path.isdir(folder):
            found += [*_check_links(target, folder), *_check_cards(target, folder, protocols)]
    texts = (text for _, text in list_texts({**value, "_args_": listed}) if isinstance(text, str))
    for pattern in (text for text in texts if _MAGIC.search(text) and "://" not in text):
        above = _MAGIC.split(os.path.expanduser(pattern), maxsplit=1)[0].rpartition("/")[0]
        depth = None if "**" in pattern else pattern.count("/") - above.count("/") + 1
        found += _check_links(target, above or ("/" if pattern.startswith("/") else "."), depth)
    return found


def _check_links(target: str, folder: str, depth: int | None = None) -> Iterator[Problem]:
    """Problems with links to kernel files, and with pipes, in a folder and below it (at most `depth` levels)."""
    seen: set[str] = set()
    for above, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(above)
        for name in [*folders, *files]:
            path = os.path.join(above, name)
            problems = list(check_options({"_target_": target, "path": os.path.realpath(path)}, ()))
            for problem in problems if os.path.islink(path) else ():
                yield Problem(f"{path}: {problem.message}", (), problem.rule, problem.hint)
            if not is_plain(path) and not os.path.isdir(path):
                message = f"{path} is a pipe or a device, so reading it may never end"
                yield Problem(message, (), "kernel-file", "delete it")
            if problems and name in folders:
                folders.remove(name)
        if real in seen or (depth is not None and above[len(folder) :].count("/") + 1 >= depth):
            folders.clear()
        seen.add(real)


def _check_cards(target: str, folder: str, protocols: frozenset[str]) -> Iterator[Problem]:
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
        for problem in (*check_texts(values, root, protocols, listed=True), *check_options(named, root)):
            place = ".".join(map(str, problem.path))
            yield Problem(f"{card}: {place}: {problem.message}", (), problem.rule, problem.hint)
