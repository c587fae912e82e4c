"""The token cache: the ids of all texts in one file, which every process maps into its memory.

One process of a machine builds it, under a lock (`dsjob.text.building`). The others wait at the lock and not in a
collective, so their waiting has no time limit. Neither has that of ranks on a machine that already has the cache
(`dsjob.ranks.waiting`). Files:

    tokens       the ids of all texts, one after the other: uint16 or uint32
    ends         int64 [texts]: where each text ends in `tokens`
    prompts      int64 [texts]: how many ids at the start of each text are its prompt
    about.json   the number type of `tokens`, and what they were made of
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dsjob.errors import DataError, StorageError
from dsjob.files import sync_names
from dsjob.text.building import Tell, building
from dsjob.text.records import Record, Source
from dsjob.text.tokenizers import Tokenizer

_TOGETHER, _CHARACTERS = 1000, 4 << 20  # the most texts that are tokenised in one call, and when they are enough


@dataclass(frozen=True)
class TokenCache:
    """The tokens of texts. tokens: [total]; ends, prompts: int64 [texts]. All are mapped, not loaded."""

    tokens: npt.NDArray[Any]
    ends: npt.NDArray[np.int64]
    prompts: npt.NDArray[np.int64]

    def find(self, index: int) -> tuple[int, int]:
        """Where text `index` begins and ends in `tokens`."""
        return int(self.ends[index - 1]) if index else 0, int(self.ends[index])


def open_cache(folder: Path, build: Callable[[Path, Tell], None], source: str) -> TokenCache:
    """Opens the cache in `folder`, after one process has called `build` with the folder to write, and with a function
    for how far it is. source: the texts, for messages. Raises StorageError."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not folder.is_dir():
            with building(folder.with_suffix(".lock"), f"tokenising {source}") as tell:
                if not folder.is_dir():
                    unfinished = folder.with_suffix(".unfinished")
                    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
                    unfinished.mkdir(mode=0o700)
                    try:
                        build(unfinished, tell)
                    except BaseException:  # what is on a full disk would keep it full
                        shutil.rmtree(unfinished, ignore_errors=True)
                        raise
                    for path in unfinished.iterdir():  # durable before its name is
                        with path.open("rb") as file:
                            os.fsync(file.fileno())
                    unfinished.rename(folder)
                    sync_names(str(folder.parent))
        return _read_cache(folder)
    except OSError as error:
        hint = "name another folder with cache_dir"
        raise StorageError(f"cannot use the token cache {folder}: {error.strerror or error}", hint=hint) from error


def _read_cache(folder: Path) -> TokenCache:
    try:
        found = json.loads((folder / "about.json").read_text())
        tokens = _map(folder / "tokens", np.dtype(found["dtype"]))
        cache = TokenCache(tokens, *(_map(folder / name, np.dtype(np.int64)) for name in ("ends", "prompts")))
        lengths = {"tokens": len(tokens), "texts": len(cache.ends)}
        if any(found[name] != length for name, length in lengths.items()) or len(cache.ends) != len(cache.prompts):
            raise ValueError("a file is shorter or longer than about.json says")
        return cache
    except (ValueError, KeyError, TypeError) as error:  # of a machine that lost power, or of another program
        raise StorageError(f"the token cache {folder} is damaged: {error}", hint="delete this folder") from error


def _map(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.memmap(path, dtype=dtype, mode="r")


def write_cache(folder: Path, source: Source, tokenizer: Tokenizer, *, end: bool, most: int | None, tell: Tell) -> None:
    """Tokenises texts into the files of a cache, in bounded memory.

    A text without any ids is left out: a model cannot take a sample without tokens. end: whether the end marker follows
    each text. most: at most so many texts. tell: is called with how far it is. Raises DataError if there are none.
    """
    dtype = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
    total = count = prompt = first = 0
    with (
        open(folder / "tokens", "wb") as tokens,
        open(folder / "ends", "wb") as ends,
        open(folder / "prompts", "wb") as prompts,
    ):
        begins = True  # whether the next record begins a text
        for record, ids in _tokenise(source.read(), tokenizer):
            if begins and count == most:
                break
            if begins:
                prompt, first = len(ids[0]), total
            marker = [tokenizer.eos] if end and record.ends and tokenizer.eos is not None else []
            written = np.array([*ids[0], *ids[1], *marker], dtype)
            tokens.write(written.tobytes())
            total, begins = total + len(written), record.ends
            if record.ends and total > first:
                count += 1
                ends.write(np.int64(total).tobytes())
                prompts.write(np.int64(prompt).tobytes())
            if count % 100 == 0 or not record.ends:
                part = max(source.part, count / most if most else 0)
                tell(f"{count:,} texts, {100 * part:.0f}%")
    if not total:
        raise DataError(f"{source.label} has no text")
    about = {"dtype": dtype.name, "texts": count, "tokens": total, "source": source.label}
    (folder / "about.json").write_text(json.dumps(about, indent=2))


def _take(records: Iterator[Record]) -> list[Record]:
    """The next records, as many as are tokenised in one call."""
    taken, size = list[Record](), 0
    for record in records:
        taken.append(record)
        size += len(record.text) + len(record.prompt or "")
        if len(taken) == _TOGETHER or size >= _CHARACTERS:
            break
    return taken


def _tokenise(records: Iterable[Record], tokenizer: Tokenizer) -> Iterator[tuple[Record, tuple[list[int], list[int]]]]:
    """Each record with the ids of its prompt and of its text."""
    iterator, begins = iter(records), True
    while together := _take(iterator):
        # Special tokens come before the prompt if there is one, and only where a text begins.
        firsts = [begins, *(record.ends for record in together[:-1])]
        begins = together[-1].ends
        prompts = iter(tokenizer.encode([r.prompt for r in together if r.prompt is not None], begins=True))
        opened = [record.prompt is None and first for record, first in zip(together, firsts, strict=True)]
        texts = {
            flag: iter(
                tokenizer.encode([r.text for r, o in zip(together, opened, strict=True) if o is flag], begins=flag)
            )
            for flag in (True, False)
        }
        for record, flag in zip(together, opened, strict=True):
            yield record, (next(prompts) if record.prompt is not None else [], next(texts[flag]))
