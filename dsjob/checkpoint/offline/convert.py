"""`dsjob convert`: converts checkpoints from any place to plain weights in fp32, bf16 or fp16.

`zero_to_fp32.py` does the reading, streaming and writing. This module adds sources by URL, conversion to other dtypes
with numpy, and the project's errors. It imports torch only for checkpoints of other programs.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as plain
from dsjob.checkpoint.format.averages import take_averages
from dsjob.checkpoint.format.rounding import DTYPES, Rounded
from dsjob.checkpoint.format.zero_to_fp32 import TORCH, Written
from dsjob.checkpoint.pretrained.folder import Pretrained, plan_folder
from dsjob.checkpoint.pretrained.tokenizer import find_tokenizer, read_tokenizer
from dsjob.checkpoint.root.run_state import read_job, read_values, restoring
from dsjob.checkpoint.root.source import locate, renamed
from dsjob.errors import UsageError
from dsjob.files import temporary_folder

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Names:
    """Which tensors are written, and under which names: `strip` is removed from the start of names that have it, then
    `prefix` is added. `trained`: omit frozen parameters."""

    strip: str = ""
    prefix: str = ""
    trained: bool = False

    def apply(self, checkpoint: plain.Checkpoint) -> plain.Checkpoint:
        """The checkpoint with changed names. Raises UsageError if two names collide, or no name begins with `strip`."""
        if self.trained:
            checkpoint = plain.without_frozen(checkpoint)
        if not (self.strip or self.prefix):
            return checkpoint
        found = plain.weights(checkpoint)
        if self.strip and not any(name.startswith(self.strip) for name in found):
            raise UsageError(f"no name begins with {self.strip!r}", hint=f"names look like {next(iter(found))}")
        new = {name: f"{self.prefix}{name.removeprefix(self.strip)}" for name in found}
        twice = [name for name, count in Counter(new.values()).items() if count > 1]
        if twice:
            raise UsageError(f"without {self.strip!r}, two tensors would be named {twice[0]}", hint="strip less")
        return rename(checkpoint, new)


def rename(checkpoint: plain.Checkpoint, new: Mapping[str, str]) -> plain.Checkpoint:
    """The checkpoint with only the tensors in `new`, which maps the model's names to new ones."""
    # Of tied names, the first one gets the tensor and the others become aliases.
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
    ema: bool = False,
    max_shard_size: int = 5_000_000_000,
    overwrite: bool = False,
    form: Literal["safetensors", "torch", ""] = "",
    names: Names = Names(),
    pretrained: Pretrained | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Written]:
    """Writes a checkpoint's parameters and buffers to files that any tool loads. Returns the files.

    source: a path or URL: a run's folder (with `checkpoints/` in it), a checkpoint folder, the folder of one step, a
    DeepSpeed folder, or weights of other programs (see `elsewhere`).
    out: a local folder, or a local file: `.safetensors`, or `.bin`, `.pt`, `.pth` or `.ckpt` in torch's format. The
    default is the folder `weights-<tag>-<to>` in the checkpoint folder, if that is local; with `model`, its name
    precedes the dtype.
    to: the dtype that F64, F32, F16 and BF16 are converted to, rounded to nearest even. Other dtypes stay.
    tag: which checkpoint; by default the newest. max_shard_size: most bytes of tensors per file of a folder.
    model: one of several models; by default all, where each tensor's name begins with that of its model.
    ema: write the averages of `dsjob.callbacks.EMA` in place of the weights.
    form: the format of files in a folder; by default safetensors. names: which tensors to write, under which names.
    pretrained: write a folder that transformers' or peft's `from_pretrained` loads.
    progress: called with the bytes written, and the bytes to write in total.

    Tied weights are written under each of their names, so that a strict `load_state_dict` finds all: twice in
    safetensors, which cannot share data, and once in torch's format. Memory use is a few buffers. The output appears
    complete or not at all. Values beyond the range of `to` become infinite, and a warning counts them per tensor.
    Raises UsageError, NoCheckpointError, CorruptCheckpointError, StorageError.
    """
    with renamed(f"convert {source}"):
        place, checkpoint = _open(source, tag)
        if out is None and not storage.is_local(place.root):
            raise UsageError(f"{source} is not a local folder, so the output needs a name", hint="name a local folder")
        chosen = f"-{model}" if model is not None else ""
        target = os.path.join(place.root, f"weights-{checkpoint.tag}{chosen}-{to}") if out is None else out
        if not storage.is_local(target):
            raise UsageError(
                f"cannot write weights to {target}: not a local path",
                hint="name a local folder, then copy it there",
            )
        cast = Rounded(DTYPES[to])
        checkpoint = names.apply(_choose(checkpoint, model, ema=ema))
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
        logger.warning("%d values exceed the range of %s and became infinite, in %s", total, to, listed)
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
    """Writes one of dsjob's checkpoints as DeepSpeed would with ZeRO `stage` on `world_size` ranks. Returns the paths.

    out: a local folder. to: the model's dtype in the run that will continue; by default the job's. The files are
    pickles, because DeepSpeed loads nothing else. Raises the same errors as `convert`.
    """
    with renamed(f"convert {source}"):
        place, record = locate(source, tag)
        checkpoint = plain.read_checkpoint(place, record)
        if not storage.is_local(out):
            raise UsageError(f"cannot write to {out}: not a local path", hint="name a local folder, then copy it there")
        if checkpoint.manifest.get("models") or checkpoint.manifest.get("model_ranks", 1) > 1:
            raise UsageError(
                "the checkpoint has several models, but DeepSpeed's format has only one", hint="use --to fp32"
            )
        from dsjob.checkpoint.format.dtypes import DTYPES as TORCH_DTYPES
        from dsjob.checkpoint.other.deepspeed.writer import Target, write_deepspeed

        values, job = read_values(place, checkpoint), read_job(place, checkpoint) or {}
        with restoring(source):
            enabled = (name for name in ("bf16", "fp16") if (job.get(name) or {}).get("enabled"))
            chosen: str = to or next(enabled, "fp32")
            target = Target(stage, world_size, TORCH_DTYPES[DTYPES[chosen]])
            return write_deepspeed(place, checkpoint, values, storage.local_path(out), target, overwrite)


def _choose(checkpoint: plain.Checkpoint, model: str | None, *, ema: bool) -> plain.Checkpoint:
    averaged = take_averages(checkpoint) if ema else checkpoint
    return averaged if model is None else _take_model(averaged, model)


def _take_model(checkpoint: plain.Checkpoint, name: str) -> plain.Checkpoint:
    """The checkpoint with the tensors of only one of its models, under that model's own names."""
    start = f"model.{name}."

    def strip(full: str) -> str:
        return f"model.{full.removeprefix(start)}"

    names = checkpoint.manifest.get("models", [])
    if name not in names:
        there = f"its models are: {', '.join(names)}" if names else "it has a single model: omit --model"
        raise UsageError(f"the checkpoint has no model {name[:80]!r}", hint=there)
    tensors = {strip(full): tensor for full, tensor in checkpoint.tensors.items() if full.startswith(start)}
    aliases = {strip(a): strip(target) for a, target in checkpoint.aliases.items() if a.startswith(start)}
    kept = checkpoint.manifest.get("pretrained")
    manifest = {**checkpoint.manifest, "pretrained": kept.get(name) if isinstance(kept, dict) else None}
    return checkpoint._replace(tensors=tensors, aliases=aliases, manifest=manifest)


def _prepare(
    wanted: Pretrained, place: plain.Folder, checkpoint: plain.Checkpoint, out: str, to: str, form: str, overwrite: bool
) -> tuple[str, plain.Checkpoint, Rounded, dict[str, bytes]]:
    """Plans a folder for `from_pretrained`: the path of the weights, the renamed tensors, their rounding, and the
    other files of the folder."""
    if out.endswith((".safetensors", *TORCH)):
        raise UsageError(f"{out} is a file, but from_pretrained loads a folder", hint="name a folder")
    folder = plan_folder(wanted, place, checkpoint, to)
    for note in folder.notes:
        logger.warning(note)
    if folder.weights and form == "torch":
        raise UsageError("--format torch: adapters are always written as safetensors", hint="omit --format")
    if wanted.tokenizer:
        folder.beside.update(read_tokenizer(wanted.tokenizer))
    else:
        found, note = find_tokenizer(read_job(place, checkpoint), place.root)
        folder.beside.update(found)
        logger.info(note)
    there = [name for name in folder.beside if os.path.exists(os.path.join(out, name))]
    if there and not overwrite:
        raise UsageError(
            f"{out} already contains {', '.join(there)}",
            hint="choose another output, or set --overwrite (Python: overwrite=True)",
        )
    path = os.path.join(out, folder.weights) if folder.weights else out
    return path, rename(checkpoint, folder.names), folder.cast, folder.beside


def parse_size(text: str) -> int:
    """Bytes of "5GB" (10^9), "500MB", "2GiB" (2^30) or "1000". Raises UsageError for anything else."""
    with renamed(f"read {text!r}"):
        return plain.parse_size(text)


def _open(source: str, tag: str | None) -> tuple[plain.Folder, plain.Checkpoint]:
    """Opens the checkpoint at `source`, dsjob's own or another program's. Returns its root folder, and the manifest."""
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


def read_weights(
    source: str, *, tag: str | None = None, model: str | None = None, ema: bool = False
) -> dict[str, Tensor]:
    """A checkpoint's parameters and buffers as fp32 tensors, for `load_state_dict`. Arguments as for `convert`."""
    from safetensors.torch import load_file

    with temporary_folder() as folder:
        file = os.path.join(folder, "weights.safetensors")
        convert(source, file, to="fp32", tag=tag, model=model, ema=ema)
        return load_file(file)
