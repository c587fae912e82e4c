"""`dsjob convert`: checkpoints to plain weights, read from anywhere and written as fp32, bf16 or fp16.

Reading, streaming and writing are those of `zero_to_fp32.py`. This module adds sources by URL, the dtypes by numpy, and
the project's errors. torch is imported for checkpoints of other programs alone.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dsjob import storage
from dsjob.checkpoint import zero_to_fp32 as plain
from dsjob.checkpoint.pretrained import make_files
from dsjob.checkpoint.run_state import read_job, read_values, restoring
from dsjob.checkpoint.source import locate, renamed
from dsjob.checkpoint.tokenizer import find_tokenizer, read_tokenizer
from dsjob.checkpoint.zero_to_fp32 import TORCH, Written
from dsjob.errors import UsageError

logger = logging.getLogger(__name__)
Array = npt.NDArray[Any]

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_PART = 1 << 16  # elements: what stays in a core's cache from one step of the arithmetic to the next
LARGEST = {"F32": 3.4e38, "BF16": 3.38e38, "F16": 65504.0}  # below these nothing is rounded to infinity


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
        new = {name: f"model.{self.prefix}{name.removeprefix(self.strip)}" for name in found}
        twice = [name for name, count in Counter(new.values()).items() if count > 1]
        if twice:
            raise UsageError(f"without {self.strip!r}, two tensors would be called {twice[0][6:]}", hint="strip less")
        first = {place: new[name] for name, place in reversed(found.items())}
        tensors = {name: checkpoint.tensors[place] for place, name in first.items()}
        aliases = {new[name]: first[place] for name, place in found.items() if new[name] != first[place]}
        return checkpoint._replace(tensors=tensors, aliases=aliases)


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
    pretrained: bool = False,
    tokenizer: str | None = None,
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
    pretrained: a folder for transformers' `from_pretrained`, with the tokenizer's files out of the folder `tokenizer`;
    by default those of the tokenizer that the job names, where they are on this machine. Which is logged.
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
        beside = _make_beside(place, checkpoint, path, to, tokenizer, overwrite) if pretrained else {}
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
        from dsjob.checkpoint.deepspeed_writer import Target, write_deepspeed
        from dsjob.checkpoint.dtypes import DTYPES as TORCH_DTYPES
        from dsjob.checkpoint.values import decode

        values, job = read_values(place, checkpoint), read_job(place, checkpoint) or {}
        with restoring(source):
            enabled = (name for name in ("bf16", "fp16") if (job.get(name) or {}).get("enabled"))
            chosen: str = to or next(enabled, "fp32")
            target = Target(stage, world_size, TORCH_DTYPES[DTYPES[chosen]])
            return write_deepspeed(place, checkpoint, decode(values), storage.local_path(out), target, overwrite)


def _take_model(checkpoint: plain.Checkpoint, name: str) -> plain.Checkpoint:
    """The tensors of one of several models, under the names that the model itself has for them."""
    start = f"model.{name}."

    def strip(full: str) -> str:
        return f"model.{full.removeprefix(start)}"

    names = checkpoint.manifest.get("models", [])
    if name not in names:
        there = f"there are: {', '.join(names)}" if names else "it holds one model: leave out --model"
        raise UsageError(f"the checkpoint holds no model {name!r}", hint=there)
    tensors = {strip(full): tensor for full, tensor in checkpoint.tensors.items() if full.startswith(start)}
    aliases = {strip(a): strip(target) for a, target in checkpoint.aliases.items() if a.startswith(start)}
    kept = checkpoint.manifest.get("pretrained")
    manifest = {**checkpoint.manifest, "pretrained": kept.get(name) if isinstance(kept, dict) else None}
    return checkpoint._replace(tensors=tensors, aliases=aliases, manifest=manifest)


def _make_beside(
    place: plain.Folder, checkpoint: plain.Checkpoint, out: str, to: str, tokenizer: str | None, overwrite: bool
) -> dict[str, bytes]:
    if out.endswith((".safetensors", *TORCH)):
        raise UsageError(f"{out} is one file; from_pretrained loads a folder", hint="name a folder")
    files = make_files(checkpoint.manifest.get("pretrained"), to)
    if tokenizer:
        files.update(read_tokenizer(tokenizer))
    else:
        found, told = find_tokenizer(read_job(place, checkpoint))
        files.update(found)
        logger.info(told)
    there = [name for name in files if os.path.exists(os.path.join(out, name))]
    if there and not overwrite:
        raise UsageError(f"{out} holds {', '.join(there)} already", hint="choose another place, or add --overwrite")
    return files


def parse_size(text: str) -> int:
    """Bytes of "5GB" (10^9), "500MB", "2GiB" (2^30) or "1000"; UsageError where it is none of these."""
    with renamed(f"read {text!r}"):
        return plain.parse_size(text)


def _open(source: str, tag: str | None) -> tuple[plain.Folder, plain.Checkpoint]:
    """The checkpoint that `source` means, dsjob's own or another program's, and the root that its files lie in."""
    try:
        place, record = locate(source, tag)
    except plain.NothingThere:
        from dsjob.checkpoint.elsewhere import find_elsewhere

        found = find_elsewhere(source, tag)
        if found is None:
            raise
        for note in found.notes:
            logger.warning("%s: %s", found.place, note)
        return found.open(), found.checkpoint
    return place, plain.read_checkpoint(place, record)


class Rounded(plain.Fp32):
    """What is written: floating dtypes become `dtype` (F32, BF16 or F16) by way of F32, as torch's `to` does.

    `overflows` counts, by tensor, the finite values that became infinite.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.overflows: dict[str, int] = {}

    def target(self, dtype: str) -> str:
        """See Fp32."""
        return self.dtype if dtype in ("F64", "F32", "F16", "BF16") else dtype

    def __call__(self, name: str, dtype: str, block: memoryview) -> memoryview:
        """See Fp32."""
        if self.target(dtype) == dtype:
            return block
        width = plain.WIDTH[dtype]
        out = np.empty(len(block) // width, "<f4" if self.dtype == "F32" else "<u2")
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for start in range(0, len(out), _PART):
                self._round(name, dtype, block[start * width : (start + _PART) * width], out[start : start + _PART])
        return out.view(np.uint8).data

    def _round(self, name: str, dtype: str, block: memoryview, out: Array) -> None:
        before = np.frombuffer(block, "<f8") if dtype == "F64" else widen(dtype, block)
        wide = before.astype("<f4", copy=False)
        if self.dtype == "F32":
            out[:] = wide
        else:
            _ROUND[self.dtype](wide.view("<u4"), out)
        limit = LARGEST[self.dtype]
        if before.max() < limit and before.min() > -limit:  # nothing becomes infinite, and nothing is nan
            return
        if self.dtype == "F32":
            infinite = np.isinf(out)
        else:
            infinity, shift = (0x7F80, 16) if self.dtype == "BF16" else (0x7C00, 13)
            one = infinity & -infinity  # of the exponent; below it are the payload of a NaN and what makes it quiet
            nan = np.isnan(wide)
            bits = wide.view("<u4")[nan]
            out[nan] = (bits >> 16) & 0x8000 | infinity | one >> 1 | (bits >> shift) & (one - 1)
            infinite = (out & 0x7FFF) == infinity
        count = int(np.count_nonzero(infinite & np.isfinite(before)))
        if count:
            self.overflows[name] = self.overflows.get(name, 0) + count


def widen(dtype: str, block: memoryview) -> Array:
    """Elements of F32, BF16 or F16 as float32; bit for bit what the script makes of them."""
    if dtype == "F32":
        return np.frombuffer(block, "<f4")
    bits = np.frombuffer(block, "<u2")
    if dtype == "BF16":
        wide: Array = (bits.astype("<u4") << 16).view("<f4")
        return wide
    by_table: Array = _half_bits()[bits].view("<f4")  # the machine's own conversion makes signalling NaNs quiet
    return by_table


@functools.cache
def _half_bits() -> Array:
    table: Array = np.array(plain.half_bits(), "<u4")
    return table


def _round_to_bf16(bits: Array, out: Array) -> None:
    """The bits of float32, none of them NaN, to bfloat16's, to nearest even."""
    # Half of the last place that is kept, less one unless that place is odd: ties go to even.
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    out[:] = rounded.view("<u2")[1::2]


def _round_to_f16(bits: Array, out: Array) -> None:
    """The same to float16. numpy's own conversion takes 20 times as long where results are subnormal.

    To a magnitude is added 2^13 times its power of two, or that of the smallest normal number: what the processor keeps
    of the sum, to nearest even, ends where float16 ends. The difference of the bits is how many last places there are.
    """
    size = bits & 0x7FFFFFFF
    np.minimum(size, 0x47800000, out=size)  # 2^16, which is infinity
    power = np.maximum(size, 0x38800000)  # 2^-14
    power &= 0x7F800000
    added = power + (13 << 23)
    total = size.view("<f4")
    total += added.view("<f4")
    size -= added
    power >>= 13
    size += power
    size -= (127 - 15 + 1) << 10
    sign = bits >> 16
    sign &= 0x8000
    size |= sign
    out[:] = size.view("<u2")[0::2]


_ROUND = {"BF16": _round_to_bf16, "F16": _round_to_f16}
