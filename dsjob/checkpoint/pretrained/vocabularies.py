"""Finds tokenizers in a document that give other ids than its pretrained model was trained with.

Such a job trains without an error, and forgets what the model knew. Only files on this machine are compared; nothing is
imported, called or downloaded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from dsjob.checkpoint.pretrained.tokenizer import LOADER, find_files
from dsjob.contract.models import list_models, take_model
from dsjob.contract.paths import Path
from dsjob.errors import Problem

BYTES = "bytes"  # the tokenizer of dsjob.text.Text that is not one of transformers
_TEXT = "dsjob.text.Text"
_MODEL = re.compile(r".*\.(?!\w*(Config|Tokenizer|Processor|Extractor))\w+\.from_pretrained")
_LEAST = 0.5  # of the tokens, that have the same ids: a tokenizer may add some to the model's, or drop some
_MOST_SPARE = 2  # rows of an embedding for each id: models round their vocabularies up
_Name = tuple[str, str | None]  # a folder or a name on the hub, and the revision


def check_tokenizers(document: Mapping[str, Any]) -> Iterator[Problem]:
    """The problems of a document's tokenizers: one that does not fit the pretrained model, and sets of data with
    different ones."""
    used = [each for key in ("data", "generation") for each in _list_used(document.get(key), (key,))]
    names = [own for name in list_models(document) for own in _list_models(take_model(document, name).get("model"))]
    model, *more = [*dict.fromkeys(names), None]
    for place, name in used if model is not None and more == [None] else ():
        if name != model and (problem := _compare(name, model, place)):
            yield problem
            return
    first, *others = used or [((), ("", None))]
    for place, name in others:
        if name != first[1] and _differ(name, first[1]):
            data = ".".join(map(str, first[0][:-1]))
            message = f"{name[0]} gives other ids than {first[1][0]}, the tokenizer of {data}"
            yield Problem(message, place, "two-tokenizers", "use one tokenizer for all data", severity="warning")


def _compare(name: _Name, model: _Name, place: Path) -> Problem | None:
    if _differ(name, model):
        message = f"{name[0]} gives other ids than the tokenizer of the model {model[0]}"
        own = "to train it with another vocabulary on purpose, load it in a function of your own"
        return Problem(message, place, "foreign-tokenizer", f"set tokenizer: {model[0]}; {own}")
    if find_files(*model):  # then it is known to fit, or cannot be compared
        return None
    size, rows = _count_ids(name), _read_vocabulary_size(model)
    if not size or not rows or size <= rows <= _MOST_SPARE * size:
        return None
    severity = "error" if size > rows and name[0] == BYTES else "warning"  # others have ids that texts seldom contain
    message = f"{name[0]} has {size:,} ids, but the vocabulary of the model {model[0]} has {rows:,}"
    return Problem(message, place, "foreign-tokenizer", "set the model's own tokenizer", severity=severity)


def _list_models(value: Any) -> Iterator[_Name]:
    """The pretrained models that a section names, with all that is below it."""
    if isinstance(value, Mapping):
        if _MODEL.fullmatch(str(value.get("_target_"))) and (name := _read_name(value)) is not None:
            yield name
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from _list_models(item)


def _list_used(value: Any, path: Path) -> Iterator[tuple[Path, _Name]]:
    """The tokenizers that the data uses, each with its place."""
    if isinstance(value, Mapping):
        revision = value.get("revision")
        if LOADER.fullmatch(str(value.get("_target_"))):
            if (name := _read_name(value)) is not None:
                yield (*path, "_target_"), name
        elif value.get("_target_") == _TEXT:
            place = "tokenizer" if "tokenizer" in value else "_target_"
            yield (*path, place), (str(value.get("tokenizer", BYTES)), revision if isinstance(revision, str) else None)
        elif isinstance(value.get("tokenizer"), str):  # a revision beside it may be that of the data
            yield (*path, "tokenizer"), (value["tokenizer"], None)
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _list_used(item, (*path, key))


def _read_name(call: Mapping[str, Any]) -> _Name | None:
    listed, revision = call.get("_args_"), call.get("revision")
    name = listed[0] if isinstance(listed, list) and listed else call.get("pretrained_model_name_or_path")
    return (name, revision if isinstance(revision, str) else None) if isinstance(name, str) and name else None


def _differ(first: _Name, second: _Name) -> bool:
    """Whether two tokenizers give most tokens different ids. False if one of them is unknown."""
    if first[0] == second[0]:  # perhaps at another revision
        return False
    if BYTES in (first[0], second[0]):
        (other,) = (name for name in (first, second) if name[0] != BYTES)
        return bool(find_files(*other))
    if os.path.isdir(first[0]) and os.path.isdir(second[0]) and os.path.samefile(first[0], second[0]):
        return False
    files = [find_files(*name) for name in (first, second)]
    if files[0] == files[1]:
        return False
    fewer, more = sorted(map(_read_ids, files), key=len)
    return sum(more.get(token) == number for token, number in fewer.items()) < _LEAST * len(fewer)


def _count_ids(name: _Name) -> int:
    """How many ids a tokenizer has, those of added tokens not counted; 0 if unknown."""
    return 257 if name[0] == BYTES else len(_read_ids(find_files(*name)))


def _read_vocabulary_size(model: _Name) -> int:
    """The size of a model's vocabulary, as its configuration says; 0 if unknown."""
    with suppress(ValueError, RecursionError, KeyError):
        config = json.loads(find_files(*model, wanted=("config.json",))["config.json"])
        parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
        return next((part["vocab_size"] for part in parts if isinstance(part.get("vocab_size"), int)), 0)
    return 0


def _read_ids(files: Mapping[str, bytes]) -> dict[str, int]:
    """The ids of a tokenizer's tokens, from its files. Empty if they are in another format."""
    found: Any = {}
    with suppress(ValueError, RecursionError, KeyError, TypeError):
        if "tokenizer.json" in files:
            found = json.loads(files["tokenizer.json"])["model"]["vocab"]
        elif "vocab.json" in files:
            found = json.loads(files["vocab.json"])
        elif "vocab.txt" in files:
            found = files["vocab.txt"].decode().splitlines()
        if isinstance(found, list):  # of tokens, or of pairs of a token and its score
            tokens = [each[0] if isinstance(each, list) else each for each in found]
            found = {str(token): number for number, token in enumerate(tokens)}
    return found if isinstance(found, dict) else {}
