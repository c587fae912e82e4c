"""`dsjob.convert` and `dsjob.load_model`: export a checkpoint for other programs, or load its model into this one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

from dsjob.checkpoint.format.zero_to_fp32 import Written
from dsjob.checkpoint.offline import convert as conversion
from dsjob.checkpoint.pretrained.folder import Pretrained
from dsjob.checkpoint.root.best import choose_tag, choose_weights
from dsjob.contract.models import list_models
from dsjob.document import Document
from dsjob.document.origins import Composed
from dsjob.errors import UsageError
from dsjob.front.checkpoint import choose_checkpoint
from dsjob.front.places import placing_errors
from dsjob.front.process import keeping_process
from dsjob.front.source import allowing, make_flags, require_path
from dsjob.trust.grant import Trust
from dsjob.trust.user import Flags

if TYPE_CHECKING:
    from torch import nn

_Url = str | os.PathLike[str]
_PLAIN = ("fp32", "bf16", "fp16")
_WEIGHTS = (*_PLAIN, "hf")
_FORMS = {  # the values of `to` that each argument of `convert` is for
    "dtype": ("hf", "deepspeed"),
    "model": _WEIGHTS,
    "ema": _WEIGHTS,
    "strip": _PLAIN,
    "prefix": _PLAIN,
    "exclude_frozen": _WEIGHTS,
    "form": _WEIGHTS,
    "tokenizer": ("hf",),
    "merge": ("hf",),
    "adapter": ("hf",),
    "adapter_config": ("hf",),
    "zero_stage": ("deepspeed",),
    "world_size": ("deepspeed",),
}


def convert(
    checkpoint: _Url,
    out: _Url | None = None,
    *,
    to: Literal["fp32", "bf16", "fp16", "hf", "deepspeed"] = "fp32",
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    tag: str | None = None,
    best: bool = False,
    model: str | None = None,
    ema: bool = False,
    strip: str = "",
    prefix: str = "",
    exclude_frozen: bool = False,
    form: Literal["safetensors", "torch", ""] = "",
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    tokenizer: _Url | None = None,
    merge: bool = False,
    adapter: str | None = None,
    adapter_config: _Url | None = None,
    zero_stage: Literal[1, 2, 3] | None = None,
    world_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Written]:
    """Converts a checkpoint to plain weights, to a folder for transformers (`to="hf"`), or to a checkpoint that
    DeepSpeed can resume (`to="deepspeed"`). Returns the files written.

    checkpoint: the path or URL of a run's folder, a checkpoint folder, or the folder of one step in it. out: a folder,
    or a file that ends in .safetensors, .bin, .pt, .pth or .ckpt; by default `weights-TAG-DTYPE` in that folder. to:
    the dtype of the weights, or "hf" or "deepspeed". dtype: with "hf", the dtype of the weights (default: fp32); with
    "deepspeed", that of the run that resumes (default: the job's). tag: the checkpoint to convert (default: the newest,
    or after `load_best_at_end`, the best). best: convert the best one by checkpoint.best of the job. model: one of the
    job's models (default: all). strip, prefix: texts to remove from the start of names and to add. exclude_frozen:
    leave out frozen parameters. form: the format of the files in a folder (default: safetensors). max_shard_size: of a
    file, in bytes or as "5GB". overwrite: replace earlier output of the same kind. ema: convert averages instead.
    tokenizer, merge, adapter, adapter_config: with "hf", a folder with a tokenizer's files (default: the job's),
    whether to merge a LoRA adapter, which adapter to write, and an adapter_config.json if none exists. zero_stage,
    world_size: with "deepspeed", the ZeRO stage and the number of ranks of the run that resumes; these files have no
    sha256. progress: called with the bytes written and in total, except with "deepspeed".
    Raises UsageError, NoCheckpointError, CorruptCheckpointError, StorageError.
    """
    _require_fitting(to, locals())
    target, source = _to_text(out), require_path(checkpoint, "a checkpoint")
    tag = (choose_tag if to == "deepspeed" else choose_weights)(source, tag, best=best)
    if to == "deepspeed":
        return _write_deepspeed(source, target, zero_stage, world_size, dtype=dtype, tag=tag, overwrite=overwrite)
    return conversion.convert(
        source,
        target,
        to=(dtype or "fp32") if to == "hf" else to,
        tag=tag,
        model=model,
        ema=ema,
        max_shard_size=conversion.parse_size(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size,
        overwrite=overwrite,
        form=form,
        names=conversion.Names(strip, prefix, exclude_frozen),
        pretrained=Pretrained(_to_text(tokenizer), merge, adapter, _to_text(adapter_config)) if to == "hf" else None,
        progress=progress,
    )


def _to_text(url: _Url | None) -> str | None:
    return None if url is None else os.fspath(url)


def _write_deepspeed(
    source: str,
    out: str | None,
    stage: int | None,
    world_size: int | None,
    *,
    dtype: Literal["fp32", "bf16", "fp16"] | None,
    tag: str | None,
    overwrite: bool,
) -> list[Written]:
    if out is None or stage not in (1, 2, 3) or world_size is None or world_size < 1:
        raise UsageError(
            'to="deepspeed" needs out, zero_stage (1, 2 or 3) and world_size (at least 1)',
            hint='convert(checkpoint, "out", to="deepspeed", zero_stage=3, world_size=8)',
        )
    paths = conversion.convert_to_deepspeed(
        source, out, stage=stage, world_size=world_size, to=dtype, tag=tag, overwrite=overwrite
    )
    return [Written(path, os.path.getsize(path), sha256="", tensors=0) for path in paths]


def _require_fitting(to: str, given: Mapping[str, Any]) -> None:
    """Raises UsageError for an unknown `to`, or for one of convert's arguments that has no effect with it."""
    if to not in (*_WEIGHTS, "deepspeed"):
        raise UsageError(f'to="{to}" is not supported', hint=f"use {', '.join(_WEIGHTS)} or deepspeed")
    if to == "hf" and given["out"] is None:
        raise UsageError('to="hf" needs an output folder', hint='convert(checkpoint, "model", to="hf")')
    for name, fitting in _FORMS.items():
        if given[name] and to not in fitting:
            forms = " or ".join(f'to="{form}"' for form in fitting)
            raise UsageError(f'{name} has no effect with to="{to}"', hint=f"leave it out; it is for {forms}")


def load_model(
    checkpoint: _Url,
    *,
    tag: str | None = None,
    best: bool = False,
    ema: bool = False,
    model: str | None = None,
    trust: Sequence[str] = (),
    trust_remote_code: bool = False,
    unpinned: bool = False,
) -> nn.Module:
    """Loads the model of a checkpoint with its weights: on the CPU, in fp32, in evaluation mode.

    checkpoint: the path or URL of a run's folder, a checkpoint folder, or the folder of one step in it, such as
    `Result.checkpoint`. tag: the checkpoint to load (default: the newest, or after `load_best_at_end`, the best). best:
    load the best one by checkpoint.best of the job. ema: load averages of weights (dsjob.callbacks.EMA) instead of the
    weights. model: one of the job's models, if it has several.

    The job in the checkpoint defines the model. It may name your own modules if the checkpoint is in a run's folder
    that belongs to you. For any other checkpoint, only names that `trust` allows are imported.
    """
    flags = make_flags(trust, trust_remote_code, unpinned)
    source = require_path(checkpoint, "a checkpoint")
    with allowing(flags), keeping_process(torch=True):
        tag = choose_weights(source, tag, best=best)
        document, granted, file = _read_document(source, tag, flags)
        name = _choose_model(document, model)
        with placing_errors(Composed(document, file)) if file is not None else nullcontext():
            weights = conversion.read_weights(source, tag=tag, model=model, ema=ema)
            return _build(document, name, granted, weights)


def _build(document: dict[str, Any], name: str, trust: Trust, weights: dict[str, Any]) -> nn.Module:
    from dsjob.document.resolve import view_model
    from dsjob.errors import ContractError
    from dsjob.launch.rank import add_import_folders
    from dsjob.training.build import build_model

    add_import_folders(trust.importable)
    target = view_model(document, name).model
    assert target is not None
    where = ("models", name, "model") if document.get("models") else ("model",)
    made = build_model(target, trust, where)
    try:
        made.load_state_dict(weights)
    except RuntimeError as error:
        what = str(error).split("\n\t")
        hint = "the code of the model has changed since the checkpoint was made"
        raise ContractError(f"the weights do not fit {target.path}: {what[-1]}", hint=hint) from error
    return made.eval()


def _read_document(source: str, tag: str | None, flags: Flags) -> tuple[dict[str, Any], Trust, Document | None]:
    """The resolved document of the run that wrote a checkpoint, what it may import, and its file.

    The file is None if the document is the copy in the checkpoint.
    """
    chosen = choose_checkpoint(source, tag)
    if chosen.file is None:
        raise UsageError(f"{source} does not contain its job", hint="dsjob.convert exports its weights")
    return chosen.file.value, chosen.grant(flags), chosen.file if chosen.run_dir is not None else None


def _choose_model(document: dict[str, Any], wanted: str | None) -> str:
    names = list_models(document)
    if not document.get("models"):
        if wanted is not None:
            raise UsageError("the checkpoint holds one model", hint="leave out model")
        return names[0]
    if wanted not in names:
        what = "holds several models" if wanted is None else f"holds no model {wanted!r}"
        raise UsageError(f"the checkpoint {what}", hint=f"model= one of {', '.join(names)}")
    return wanted
