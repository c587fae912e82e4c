"""The tokenizer beside converted weights: which one a job's document names, and the files of one on this machine.

A document out of a checkpoint is somebody else's text. What it names is looked for in a folder, or in what the hub's
client has kept; nothing is imported, called or downloaded. It decides which folder is read, so that no more than the
fixed names of tokenizers' files are taken from there, plain files without links that lead out of the folder.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from typing import Any

from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.errors import UsageError

FILES = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "preprocessor_config.json", "processor_config.json",
}  # fmt: skip
MOST_BYTES = 64 << 20  # of all files together, which are held in memory; those of 262,144 tokens have about 40 MB
COPIES = "--tokenizer FOLDER copies one from FOLDER"
_LOADER = re.compile(r".*(Tokenizer(Fast)?|Processor|FeatureExtractor)\.from_pretrained")
_HUB_NAME = re.compile(rf"{layout.NAME.pattern}(/{layout.NAME.pattern})?")


def read_tokenizer(folder: str) -> dict[str, bytes]:
    """A tokenizer's files in a folder that the user names, by name; links may lead anywhere. Raises UsageError."""
    files = _read(folder, "/", None) if os.path.isdir(folder) else {}
    if not files:
        raise UsageError(f"{folder} is no folder with a tokenizer's files", hint="a folder of save_pretrained")
    return files


def find_tokenizer(job: Any) -> tuple[dict[str, bytes], str]:
    """The files of the tokenizer that a job's document names, none where it has none here; and what is to be told.

    `job`: the values of job.json, or None. A relative folder is one below the current folder, as in the run.
    """
    named = dict(sorted(_find_names(job), key=lambda found: found[1] or ""))  # of one name, a revision counts
    if len(named) != 1:
        several = f"the job names several ({', '.join(map(_show, list(named)[:5]))}); " if named else ""
        return {}, f"the folder has no tokenizer: {several}{COPIES}"
    ((name, revision),) = named.items()
    try:
        if os.path.isdir(name):
            files, place = _read(name, name), repr(os.path.abspath(name))
        else:
            files, place = _read_cached(name, revision), "what the hub's client has kept"
    except (OSError, UsageError, ValueError) as error:
        why = error.message if isinstance(error, UsageError) else error
        return {}, f"the folder has no tokenizer: that of the job, {_show(name)}, cannot be taken: {why}; {COPIES}"
    if not files:
        where = "no files of it are here, and nothing is downloaded"
        return {}, f"the folder has no tokenizer: the job names {_show(name)}; {where}; {COPIES}"
    return files, f"the tokenizer's files are those of {_show(name)}, which the job names, from {place}"


def _find_names(value: Any) -> Iterator[tuple[str, str | None]]:
    """What a document names as tokenizers, and their revisions: arguments `tokenizer`, and first ones of loaders."""
    if isinstance(value, dict):
        name, revision = value.get("tokenizer"), None  # a revision beside it may be that of a model or a dataset
        if _LOADER.fullmatch(str(value.get("_target_"))):
            listed, revision = value.get("_args_"), value.get("revision")
            name = listed[0] if isinstance(listed, list) and listed else value.get("pretrained_model_name_or_path")
        if isinstance(name, str) and name:
            yield name, revision if isinstance(revision, str) else None
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _find_names(item)


def _read(folder: str, inside: str, most: int | None = MOST_BYTES) -> dict[str, bytes]:
    """The files of FILES in a folder, which must not be links that lead out of `inside`, nor have more than `most`
    bytes together. Raises UsageError."""
    root, files, room = layout.Folder(inside), dict[str, bytes](), math.inf if most is None else most
    for name in sorted(FILES.intersection(os.listdir(folder))):
        place = os.path.join(folder, name)
        try:
            with root.open_file(os.path.abspath(place)) as file:
                size = file.seek(0, os.SEEK_END)
                if size > room:
                    raise UsageError(f"{folder!r} has more than {most:,} bytes of a tokenizer's files")
                room -= size
                file.seek(0)
                data = bytearray(size)
                complete = layout.read_exactly(file, memoryview(data))
        except (layout.Problem, IsADirectoryError) as error:
            raise UsageError(f"{place!r} is no plain file, or a link that leads out of its folder") from error
        if not complete:
            raise UsageError(f"{place!r} became shorter while it was read")
        files[name] = bytes(data)
    return files


def _read_cached(name: str, revision: str | None) -> dict[str, bytes]:
    """The files of a name on the hub at a revision, out of the cache of the hub's client; none where they are not."""
    if not _HUB_NAME.fullmatch(name) or not layout.NAME.fullmatch(revision or "main"):
        return {}
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return {}
    found = (try_to_load_from_cache(name, file, revision=revision) for file in sorted(FILES))
    folder = next((os.path.dirname(path) for path in found if isinstance(path, str)), None)
    return _read(folder, "/") if folder else {}


def _show(name: str) -> str:
    return repr(name[:200])
