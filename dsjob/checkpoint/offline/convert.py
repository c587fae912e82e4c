"""`dsjob convert`: checkpoints to plain weights, read from anywhere and written as fp32, bf16 or fp16.

Reading, streaming and writing are those of `zero_to_fp32.py`. This module adds sources by URL, the dtypes by numpy, and
the project's errors. torch is imported for checkpoints of other programs alone.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as plain
from dsjob.checkpoint.format.rounding import DTYPES, Rounded
from dsjob.checkpoint.format.zero_to_fp32 import TORCH, Written
from dsjob.checkpoint.pretrained.folder import Pretrained, plan_folder
from dsjob.checkpoint.pretrained.tokenizer import find_tokenizer, read_tokenizer
from dsjob.checkpoint.root.run_state import read_job, read_values, restoring
from dsjob.checkpoint.root.source import locate, renamed
from dsjob.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Names:
    """Which tensors are written, and under which names: without the beginning `strip`, where a name has it, and with
    `prefix` before. `trained`: without parameters that were not trained."""

    strip: str = ""
    prefix: str = ""
    trained: bool = False

    def apply(self, checkpoint: plain.Checkpoint) -> plain.Checkpoint:
        """The checkpoint with other names. Raises UsageError where two tensors would have one, or `strip` fits none."""
        if self.trained:
            checkpoint = plain.without_frozen(checkpoint)
        if not (self.strip or self.prefix):
            return checkpoint
        found = plain.weights(checkpoint)
        if self.strip and not any(name.startswith(self.strip) for name in found):
            raise UsageError(f"no name begins with {self.strip!r}", hint=f"names are such as {next(iter(found))}")
        new = {name: f"{self.prefix}{name.removeprefix(self.strip)}" for name in found}
        twice = [name for name, count in Counter(new.values()).items() if count > 1]
        if twice:
            raise UsageError(f"without {self.strip!r}, two tensors would be called {twice[0]}", hint="strip less")
        return rename(checkpoint, new)


def rename(checkpoint: plain.Checkpoint, new: Mapping[str, str]) -> plain.Checkpoint:
    """The checkpoint with the tensors that `new` names, under the names that it gives them."""
    found = {name: place for name, place in plain.weights(checkpoint).items() if name in new}
    first = {place: f"model.{new[name]}" for name, place in reversed(found.items())}
    tensors = {name: checkpoint.tensors[place] for place, name in first.items()}
    aliases = {f"model.{new[name]}": first[place] for name, place in found.items()}
    return checkpoint._replace(
        tensors=tensors, aliases={alias: name for alias, name in aliases.items() if alias != name}
    )


def convert(
    source: str,
    out: str | None,
    *,
    to: Literal["fp32", "bf16", "fp16"],
    tag: str | None = None,
    model: str | None = None,
    max_shard_size: int = 5_000_000_000,
    overwrite: bool = False,
    form: Literal["safetensors", "torch", ""] = "",
    names: Names = Names(),
    pretrained: Pretrained | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Written]:
    """Writes a checkpoint's parameters and buffers as files that any tool loads; returns what was written.

    source: a run's folder (with `checkpoints/` in it), a checkpoint folder or one step's folder; a path or a URL; or
    a DeepSpeed folder, or weights of other programs (see `elsewhere`).
    out: a local folder, or a local path that ends in `.safetensors`, or in `.bin`, `.pt`, `.pth` or `.ckpt` for a file
    that `torch.load` reads; by default a folder in the checkpoint folder, if that is local: `weights-<tag>-<to>`,
    with the model's name before the dtype where one was chosen.
    to: what F64, F32, F16 and BF16 become, rounded to nearest even; other dtypes stay as they are.
    tag: which checkpoint; by default the newest. max_shard_size: bytes of tensors in one file of a folder.
    model: which one of a job's several; by default all, each tensor's name beginning with its model's.
    form: of the files in a folder; by default safetensors. names: which tensors, and what they are called.
    pretrained: a folder for transformers' `from_pretrained`, or peft's.
    progress: told the bytes written and those to write in all.

    Tied weights are under each of their names, so that a strict `load_state_dict` finds all: twice in safetensors,
    which cannot share, once in torch's files. Memory is bounded by a few buffers. The output appears complete or not at
    all. Values beyond the range of `to` become infinite, which a warning counts by tensor. Raises UsageError,
    NoCheckpointError, CorruptCheckpointError, StorageError.
    """
    with renamed(f"convert {source}"):
        place, checkpoint = _open(source, tag)
        if out is None and not storage.is_local(place.root):
            raise UsageError(f"{source} is not a local folder, and no output was named", hint="name a local folder")
        chosen = f"-{model}" if model is not None else ""
        target = os.path.join(place.root, f"weights-{checkpoint.tag}{chosen}-{to}") if out is None else out
        if not storage.is_local(target):
            raise UsageError(
                f"cannot write weights to {target}", hint="name a local folder, and copy it there afterwards"
            )
        cast = Rounded(DTYPES[to])
        if model is not None:
            checkpoint = _take_model(checkpoint, model)
        checkpoint = names.apply(checkpoint)
        path = storage.local_path(target)
        beside: dict[str, bytes] = {}
        if pretrained is not None:
            path, checkpoint, cast, beside = _prepare(pretrained, place, checkpoint, path, to, form, overwrite)
        report = progress or (lambda done, total: None)
        written = plain.export(place, checkpoint, path, cast, max_shard_size, overwrite, report, form, beside)
    if cast.overflows:
        worst = sorted(cast.overflows.items(), key=lambda item: -item[1])
        listed = ", ".join(f"{name} ({count})" for name, count in worst[:5]) + (", ..." if worst[5:] else "")
        total = sum(cast.overflows.values())
        logger.warning("%d values are beyond the range of %s and became infinite, in %s", total, to, listed)
    return written


def convert_to_deepspeed(
    source: str,
    out: str,
    *,
    stage: int,
    world_size: int,
    to: Literal["fp32", "bf16", "fp16"] | None = None,
    tag: str | None = None,
    overwrite: bool = False,
) -> list[str]:
    """Writes a checkpoint of dsjob's as DeepSpeed saves it with ZeRO `stage` on `world_size` ranks; the files' paths.

    out: a local folder. to: the dtype that the model has in the run that goes on; by default the job's. The files are
    pickles, which is what DeepSpeed loads. Raises as `convert` does.
    """
    with renamed(f"convert {source}"):
        place, record = locate(source, tag)
        checkpoint = plain.read_checkpoint(place, record)
        if not storage.is_local(out):
            raise UsageError(f"cannot write to {out}", hint="name a local folder, and copy it there afterwards")
        if checkpoint.manifest.get("models") or checkpoint.manifest.get("model_ranks", 1) > 1:
            raise UsageError("the checkpoint holds several models, and a DeepSpeed checkpoint one", hint="--to fp32")
        from dsjob.checkpoint.format.dtypes import DTYPES as TORCH_DTYPES
        from dsjob.checkpoint.other.deepspeed.writer import Target, write_deepspeed

        values, job = read_values(place, checkpoint), read_job(place, checkpoint) or {}
        with restoring(source):
            enabled = (name for name in ("bf16", "fp16") if (job.get(name) or {}).get("enabled"))
            chosen: str = to or next(enabled, "fp32")
            target = Target(stage, world_size, TORCH_DTYPES[DTYPES[chosen]])
            return write_deepspeed(place, checkpoint, values, storage.local_path(out), target, overwrite)


def _take_model(checkpoint: plain.Checkpoint, name: str) -> plain.Checkpoint:
    """The tensors of one of several models, under the names that the model itself has for them."""
    start = f"model.{name}."

    def strip(full: str) -> str:
        return f"model.{full.removeprefix(start)}"

    names = checkpoint.manifest.get("models", [])
    if name not in names:
        there = f"there are: {', '.join(names)}" if names else "it holds one model: leave out --model"
        raise UsageError(f"the checkpoint holds no model {name[:80]!r}", hint=there)
    tensors = {strip(full): tensor for full, tensor in checkpoint.tensors.items() if full.startswith(start)}
    aliases = {strip(a): strip(target) for a, target in checkpoint.aliases.items() if a.startswith(start)}
    kept = checkpoint.manifest.get("pretrained")
    manifest = {**checkpoint.manifest, "pretrained": kept.get(name) if isinstance(kept, dict) else None}
    return checkpoint._replace(tensors=tensors, aliases=aliases, manifest=manifest)


def _prepare(
    wanted: Pretrained, place: plain.Folder, checkpoint: plain.Checkpoint, out: str, to: str, form: str, overwrite: bool
) -> tuple[str, plain.Checkpoint, Rounded, dict[str, bytes]]:
    """Where the weights of a folder go, the tensors under their names there, their rounding, and what lies beside."""
    if out.endswith((".safetensors", *TORCH)):
        raise UsageError(f"{out} is one file; from_pretrained loads a folder", hint="name a folder")
    folder = plan_folder(wanted, place, checkpoint, to)
    for note in folder.notes:
        logger.warning(note)
    if folder.weights and form == "torch":
        raise UsageError("--format torch: an adapter's weights are safetensors", hint="leave --format out")
    if wanted.tokenizer:
        folder.beside.update(read_tokenizer(wanted.tokenizer))
    else:
        found, told = find_tokenizer(read_job(place, checkpoint))
        folder.beside.update(found)
        logger.info(told)
    there = [name for name in folder.beside if os.path.exists(os.path.join(out, name))]
    if there and not overwrite:
        raise UsageError(f"{out} holds {', '.join(there)} already", hint="choose another place, or add --overwrite")
    path = os.path.join(out, folder.weights) if folder.weights else out
    return path, rename(checkpoint, folder.names), folder.cast, folder.beside


def parse_size(text: str) -> int:
    """Bytes of "5GB" (10^9), "500MB", "2GiB" (2^30) or "1000"; UsageError where it is none of these."""
    with renamed(f"read {text!r}"):
        return plain.parse_size(text)


def _open(source: str, tag: str | None) -> tuple[plain.Folder, plain.Checkpoint]:
    """The checkpoint that `source` means, dsjob's own or another program's, and the root that its files lie in."""
    try:
        place, record = locate(source, tag)
    except plain.NothingThere:
        from dsjob.checkpoint.other.elsewhere import find_elsewhere

        found = find_elsewhere(source, tag)
        if found is None:
            raise
        for note in found.notes:
            logger.warning("%s: %s", found.place, note)
        return found.open(), found.checkpoint
    return place, plain.read_checkpoint(place, record)


def read_weights(source: str, *, tag: str | None = None, model: str | None = None) -> dict[str, Tensor]:
    """A checkpoint's parameters and buffers as fp32 tensors by name, for `load_state_dict`; arguments as `convert`."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory(prefix="dsjob-") as folder:
        file = os.path.join(folder, "weights.safetensors")
        convert(source, file, to="fp32", tag=tag, model=model)
        return load_file(file)
