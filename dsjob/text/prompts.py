"""Prompts as data, for models that continue them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset

from dsjob import storage
from dsjob.errors import DataError


class Prompts(Dataset[Any]):
    """Texts that a model continues, from a file: each sample has `prompt`, and its `number`.

    The section `generation` has the tokenizer.

    path: a path or URL. Each line is a text, or JSON: a string, or an object with `prompt`. Empty lines are left out.
    Raises DataError with file and line, StorageError.
    """

    def __init__(self, path: str) -> None:
        self._prompts = read_prompts(storage.read_text(path), path)

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": self._prompts[index], "number": index}  # a batch's samples are counted by its tensors


def read_prompts(text: str, name: str) -> list[str]:
    """The prompts in a file's text. name: of the file, for messages. Raises DataError."""
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        value: Any = line.rstrip("\r")
        if line.lstrip().startswith(("{", '"')):
            try:
                value = json.loads(line)
            except ValueError as error:
                raise DataError(f"{name}:{number}: not JSON: {error}", hint='write {"prompt": "a text"}') from error
            value = value.get("prompt") if isinstance(value, Mapping) else value
        if not isinstance(value, str) or not value:
            raise DataError(f"{name}:{number}: no prompt", hint='write a text, or {"prompt": "a text"}')
        prompts.append(value)
    if not prompts:
        raise DataError(f"{name} contains no prompts", hint="write one per line")
    return prompts
