"""Finds the tokenizer of a checkpoint, and reads its files from this machine.

A document from a checkpoint is not trusted. The tokenizer it names is looked up in a folder, or in the cache of the
hub's client; nothing is imported, called or downloaded. Since the document decides which folder is read, only files
with the fixed names of tokenizer files are copied: regular files, and no links that point outside the folder.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator
from typing import Any

from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.contract.access import Access
from dsjob.errors import UsageError

FILES = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "preprocessor_config.json", "processor_config.json",
}  # fmt: skip
MOST_BYTES = 64 << 20  # of all files together, which are held in memory; a vocabulary of 262,144 has about 40 MB
COPIES = "add --tokenizer FOLDER to copy one from FOLDER"
LOADER = re.compile(r".*(Tokenizer(Fast)?|Processor|FeatureExtractor)\.from_pretrained")
_HUB_NAME = re.compile(rf"{layout.NAME.pattern}(/{layout.NAME.pattern})?")


def read_tokenizer(folder: str) -> dict[str, bytes]:
    """A tokenizer's files, by name, from a folder that the user named. Links may point anywhere. Raises UsageError."""
    files = _read(folder, "/", None) if os.path.isdir(folder) else {}
    if not files:
        raise UsageError(
            f"{folder} contains no tokenizer files", hint="name a folder written by the tokenizer's save_pretrained"
        )
    return files


def find_tokenizer(job: Any, root: str) -> tuple[dict[str, bytes], str]:
    """The files of a checkpoint's tokenizer, and a message: those beside the checkpoint, where HF's Trainer saves them,
    or else those of the tokenizer that the job's document names. No files if they are not on this machine.

    job: the values of job.json, or None. A relative folder is relative to the current folder, as in the run. root: the
    folder that contains the checkpoint.
    """
    if os.path.isdir(root) and not FILES.isdisjoint(os.listdir(root)):
        try:
            return _read(root, root), f"copied the tokenizer beside the checkpoint, from {root!r}"
        except (OSError, UsageError) as error:
            return {}, f"no tokenizer was copied: cannot read the one beside the checkpoint: {error}; {COPIES}"
    named = dict(sorted(_find_names(job), key=lambda found: found[1] or ""))  # the same name with a revision wins
    if len(named) != 1:
        several = f"the job names several ({', '.join(map(_show, list(named)[:5]))}); " if named else ""
        return {}, f"no tokenizer was copied: {several}{COPIES}"
    ((name, revision),) = named.items()
    try:
        if os.path.isdir(name):
            if private := Access().explain(name)[1]:
                raise UsageError(private)
            files, place = _read(name, name), repr(os.path.abspath(name))
        else:
            files, place = _read_cached(name, revision), "the cache of the hub's client"
    except (OSError, UsageError, ValueError) as error:
        why = error.message if isinstance(error, UsageError) else error
        return {}, f"no tokenizer was copied: cannot read the job's tokenizer {_show(name)}: {why}; {COPIES}"
    if not files:
        where = "is not on this machine, and dsjob downloads nothing"
        return {}, f"no tokenizer was copied: the job's tokenizer {_show(name)} {where}; {COPIES}"
    return files, f"copied the job's tokenizer {_show(name)} from {place}"


def find_files(name: str, revision: str | None = None, wanted: Collection[str] = FILES) -> dict[str, bytes]:
    """The tokenizer's files, or other `wanted` ones, in a folder, or of a name on the hub from the cache of its client.
    Empty if they are not on this machine, or cannot be read."""
    try:
        return _read(name, name, wanted=wanted) if os.path.isdir(name) else _read_cached(name, revision, wanted)
    except (OSError, UsageError, ValueError):
        return {}


def _find_names(value: Any) -> Iterator[tuple[str, str | None]]:
    """The tokenizers that a document names, and their revisions: arguments `tokenizer`, and the first argument of
    calls to `from_pretrained`."""
    if isinstance(value, dict):
        name, revision = value.get("tokenizer"), None  # a `revision` beside it may belong to a model or dataset
        if LOADER.fullmatch(str(value.get("_target_"))):
            listed, revision = value.get("_args_"), value.get("revision")
            name = listed[0] if isinstance(listed, list) and listed else value.get("pretrained_model_name_or_path")
        if isinstance(name, str) and name:
            yield name, revision if isinstance(revision, str) else None
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _find_names(item)


def _read(folder: str, inside: str, most: int | None = MOST_BYTES, wanted: Collection[str] = FILES) -> dict[str, bytes]:
    """Reads those of the `wanted` files that are in a folder. Raises UsageError if a link points outside `inside`, or
    if they have more than `most` bytes together."""
    root, files, room = layout.Folder(inside), dict[str, bytes](), math.inf if most is None else most
    for name in sorted(set(wanted).intersection(os.listdir(folder))):
        place = os.path.join(folder, name)
        try:
            with root.open_file(os.path.abspath(place)) as file:
                size = file.seek(0, os.SEEK_END)
                if size > room:
                    raise UsageError(f"the tokenizer files in {folder!r} have more than {most:,} bytes")
                room -= size
                file.seek(0)
                data = bytearray(size)
                complete = layout.read_exactly(file, memoryview(data))
        except (layout.Problem, IsADirectoryError) as error:
            raise UsageError(f"{place!r} is not a regular file, or is a link to outside its folder") from error
        if not complete:
            raise UsageError(f"{place!r} was truncated while it was read")
        files[name] = bytes(data)
    return files


def _read_cached(name: str, revision: str | None, wanted: Collection[str] = FILES) -> dict[str, bytes]:
    """The `wanted` files of a name on the hub, from the cache of the hub's client. Empty if they are not cached."""
    if not _HUB_NAME.fullmatch(name) or not layout.NAME.fullmatch(revision or "main"):
        return {}
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return {}
    found = (try_to_load_from_cache(name, file, revision=revision) for file in sorted(wanted))
    folder = next((os.path.dirname(path) for path in found if isinstance(path, str)), None)
    return _read(folder, "/", wanted=wanted) if folder else {}


def _show(name: str) -> str:
    return repr(name[:200])
