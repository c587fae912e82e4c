"""Text that every machine has: the source code of Python's standard library, as bytes.

A byte dataset, which can also read a file or folder of your own, and a callback that samples from a trained byte model.
Nothing is downloaded. Another version of Python gives slightly different bytes.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from dsjob import Callback, RunView, storage
from dsjob.errors import DataError, StorageError

SPLITS = ("train", "validation", "all")
VALIDATION_SHARE = 10  # one in ten
# Folders to skip in the standard library: installed packages, compiled files, tests, and long tables.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "encodings", "pydoc_data"}
)


class ByteText(Dataset[dict[str, Tensor]]):
    """Windows of text, one byte a token: `inputs` and `targets`, int64 [context], the targets one byte ahead.

    Windows do not overlap. Files are read in the order of their relative paths. Each belongs to one split: a hash of
    its path puts about one in ten into validation. Of a single file, the last tenth is validation.

    Args:
        split: "train", "validation", or "all" (for text that has a split of its own).
        context: bytes in a window.
        max_bytes: at most this many bytes of the split.
        path: a text file or a folder, without its hidden files; None for Python's standard library.
        pattern: which files of a folder to read.

    Raises:
        DataError: unknown split, missing path, or less than one window of text.
    """

    def __init__(
        self,
        split: str = "train",
        context: int = 128,
        max_bytes: int | None = None,
        path: str | None = None,
        pattern: str = "*.py",
    ) -> None:
        check_split(split)
        if context < 1:
            raise DataError(f"context is {context}; a window needs at least 1 byte")
        root = Path(sysconfig.get_path("stdlib") if path is None else path)
        if root.is_file():
            data = _cut(_read_file(root), split)
        elif root.is_dir():
            skipped = SKIPPED_FOLDERS if path is None else frozenset()
            data = _read_files(root, list_files(root, pattern, split, skipped), max_bytes)
        else:
            raise DataError(f"there is no file or folder at {root}", hint="path is a text file or a folder of them")
        if max_bytes is not None:
            del data[max(max_bytes, 0) :]
        if len(data) <= context:
            raise DataError(
                f"split {split!r} of {root} has {len(data)} bytes; one window needs {context + 1}",
                hint=f"files of a folder are those named {pattern}; split='all' takes all of them",
            )
        self.context = context
        self.data = torch.frombuffer(data, dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.context

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.context
        window = self.data[start : start + self.context + 1].long()
        return {"inputs": window[:-1], "targets": window[1:]}


def check_split(split: str) -> None:
    """Raise DataError unless `split` is one of `SPLITS`."""
    if split not in SPLITS:
        raise DataError(f"unknown split {split!r}", hint=f"allowed: {', '.join(SPLITS)}")


def list_files(root: Path, pattern: str, split: str, skipped: frozenset[str]) -> list[str]:
    """The files of a split as sorted posix paths relative to `root`, so that the order is the same on every machine.
    Hidden files and folders are left out.

    skipped: names of folders to leave out.
    """
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        wanted = (name for name in names if fnmatch(name, pattern) and not name.startswith("."))
        found += [Path(folder, name).relative_to(root).as_posix() for name in wanted]
    return sorted(name for name in found if split in ("all", _split_of(name)))


def _split_of(name: str) -> str:
    return "train" if hashlib.sha256(name.encode()).digest()[0] % VALIDATION_SHARE else "validation"


def _cut(data: bytes, split: str) -> bytearray:
    border = len(data) - len(data) // VALIDATION_SHARE
    return bytearray(data[{"train": slice(border), "validation": slice(border, None), "all": slice(None)}[split]])


def _read_files(root: Path, names: list[str], enough: int | None) -> bytearray:
    data = bytearray()
    for name in names:
        if enough is not None and len(data) >= enough:
            break
        data += _read_file(root / name)
    return data


def _read_file(path: Path) -> bytes:
    try:
        return storage.read_bytes(str(path))
    except StorageError as error:
        raise DataError(error.message, hint=error.hint) from error


class SampleText(Callback):
    """At the end of a run, prints the trained model's continuation of `prompt`, sampled byte by byte.

    The model maps `inputs` (int64 [1, T]) to a dict with `logits` ([1, T, V], V at least 256) and has an attribute
    `context`, its largest T. All ranks call the model together, as sharded models require. The global random
    generators are not changed. Samples nothing in a pipeline.

    Args:
        prompt: at least one byte.
        length: bytes to sample.
        temperature: above 0; lower is more predictable.
        seed: of the sampling alone.

    Raises:
        ValueError: `prompt` is empty, or `length` or `temperature` is not positive.
    """

    def __init__(self, prompt: str = "def ", length: int = 240, temperature: float = 0.8, seed: int = 0) -> None:
        if not prompt:
            raise ValueError("prompt is empty; it needs at least one byte")
        if length < 1 or temperature <= 0.0:
            raise ValueError(f"length is {length} and temperature {temperature}; both must be above 0")
        self.prompt = prompt
        self.length = length
        self.temperature = temperature
        self.seed = seed

    def on_end(self, run: RunView) -> None:
        """Samples in evaluation mode, and shows the text."""
        if run.engine.world.pipe.size > 1:
            run.say("sampled text", "none: in a pipeline, each rank has only a part of the model")
            return
        module = run.engine.module
        was_training = module.training
        module.eval()
        try:
            text = self._sample(module, run.engine.device)
        finally:
            module.train(was_training)
        run.say("sampled text", text)

    @torch.no_grad()
    def _sample(self, module: Any, device: torch.device) -> str:
        generator = torch.Generator().manual_seed(self.seed)  # on the CPU: the same draws on every rank and device
        text = list(self.prompt.encode())
        for _ in range(self.length):
            inputs = torch.tensor([text[-module.context :]], device=device)
            logits = module(inputs=inputs)["logits"][0, -1, :256].float().cpu()
            chances = torch.softmax(logits / self.temperature, dim=-1)
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
        return _show(bytes(text))


def _show(data: bytes) -> str:
    """Text without control characters, which an untrained model may produce and a terminal would execute."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in data.decode(errors="replace"))
