"""Finds DeepSpeed's checkpoints: the folder, the tag, the files, and whether their layout is supported.

Looks only at names, and at the one line of `latest`. Checkpoints of pipeline-, tensor- or expert-parallel models are
recognised by their file names, and refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.root.source import open_root
from dsjob.errors import CheckpointError, NoCheckpointError

MODEL = re.compile(r"(zero_pp_rank_(?P<rank>\d{1,7})_)?mp_rank_(?P<mp>\d{2,5})_model_states\.pt")
OPTIM = re.compile(
    r"(?P<prefix>(bf16_|fp16_)?)zero_pp_rank_(?P<rank>\d{1,7})_mp_rank_(?P<mp>\d{2,5})_?optim_states\.pt"
)
UNSUPPORTED = {
    re.compile(r"(layer_-?\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt"): (
        "a mixture of experts (DeepSpeed-MoE)"
    ),
    re.compile(r"layer_\d+-model_\d+-model_states\.pt|layer_\d+-model_states\.pt"): "a pipeline-parallel model",
    re.compile(r"offloaded_tensors"): "optimizer state offloaded to NVMe",
}
LATEST = ("latest", "latest_universal")


@dataclass(frozen=True)
class DeepSpeedFolder:
    """One checkpoint. `tag`: its folder in `root`. File names are relative to that folder, in rank order."""

    root: layout.Folder
    tag: str
    models: tuple[str, ...]
    optims: tuple[str, ...]
    sharded: bool  # stage 3: one file of model states per rank
    universal: tuple[str, ...]  # of a universal checkpoint: parameters with a folder in `zero`

    @property
    def place(self) -> str:
        """The folder, for messages."""
        return f"{self.root.root}/{self.tag}"


def find_folder(url: str, tag: str | None = None) -> DeepSpeedFolder | None:
    """The DeepSpeed checkpoint at a path or URL: the folder that contains `latest`, or that of one tag. None for
    anything else.

    Raises NoCheckpointError if the tag does not exist, CheckpointError for an unsupported layout.
    """
    root = open_root(url)
    names = root.names("")
    if "commits" in names:
        return None
    if _is_checkpoint(names):
        head, _, name = root.root.rstrip("/").rpartition("/")
        if tag is not None and tag != name:
            raise NoCheckpointError(f"{url} is already the folder of one checkpoint", hint=f"omit the tag {tag}")
        if not layout.NAME.fullmatch(name):
            raise CheckpointError(f"invalid name of a checkpoint: {name[:80]!r}", hint="rename the folder")
        return _list_files(open_root(head or "/"), name, names)
    hints = [name for name in LATEST if name in names]
    tags = [name for name in names if layout.NAME.fullmatch(name) and re.fullmatch(r"global_step\d+(_uc)?", name)]
    if not hints and not tags and tag is None:
        return None
    wanted = tag or (_read_latest(root, hints[0]) if hints else None)
    if wanted is None:
        listed = ", ".join(sorted(tags)[-5:])
        raise NoCheckpointError(f"{url} has no file `latest`", hint=f"name one of its checkpoints: {listed}")
    if not layout.NAME.fullmatch(wanted):
        raise CheckpointError(f"invalid checkpoint tag {wanted[:80]!r}", hint="use letters, digits, '.', '_' and '-'")
    below = root.names(wanted) if wanted in names else []
    if not _is_checkpoint(below):
        if not tags and not hints:
            return None
        listed = ", ".join(sorted(tags)[-5:]) or "nothing else"
        raise NoCheckpointError(f"{url} has no checkpoint {wanted}", hint=f"available: {listed}")
    return _list_files(root, wanted, below)


def _is_checkpoint(names: list[str]) -> bool:
    patterns = (MODEL, OPTIM, *UNSUPPORTED)
    return any(pattern.fullmatch(name) for name in names for pattern in patterns)


def _read_latest(root: layout.Folder, name: str) -> str:
    try:
        with root.open_file(name) as file:
            text = (file.read(4096) or b"").decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {root.root}/{name}: {error}") from None
    if not layout.NAME.fullmatch(text):
        raise CheckpointError(
            f"{root.root}/{name} contains an invalid checkpoint tag: {text[:80]!r}",
            hint="name the checkpoint by its tag",
        )
    return text


def _list_files(root: layout.Folder, tag: str, names: list[str]) -> DeepSpeedFolder:
    place = f"{root.root}/{tag}"
    for pattern, what in UNSUPPORTED.items():
        found = next((name for name in names if pattern.fullmatch(name)), None)
        if found is not None:
            raise CheckpointError(
                f"{place} contains {what} ({found}), which is not supported",
                hint="dsjob reads checkpoints of data-parallel training, ZeRO 0 to 3",
            )
    models = {name: match for name in names if (match := MODEL.fullmatch(name))}
    optims = {name: match for name in names if (match := OPTIM.fullmatch(name))}
    parallel = [name for name, match in {**models, **optims}.items() if int(match["mp"])]
    if parallel:
        raise CheckpointError(
            f"{place} contains a tensor- or pipeline-parallel model ({min(parallel)}), which is not supported",
            hint="merge its parts with the program that saved them (Megatron's, say)",
        )
    if not models:
        raise layout.Damaged(f"{place} has no *_model_states.pt: the save did not complete, or files are missing")
    sharded = {name: int(match["rank"]) for name, match in models.items() if match["rank"] is not None}
    if len({match["prefix"] for match in optims.values()}) > 1:
        raise CheckpointError(
            f"{place} contains optimizer files of two runs: some names begin with bf16_, others do not",
            hint="move the files of the older run elsewhere",
        )
    by_rank = sorted(optims, key=lambda name: int(optims[name]["rank"]))
    ranks = [int(optims[name]["rank"]) for name in by_rank]
    for kind, numbers in (("optimizer", ranks), ("model", sorted(sharded.values()))):
        if numbers != list(range(len(numbers))):
            lacking = next(rank for rank, number in enumerate(numbers) if rank != number)
            raise layout.Damaged(f"{place}: the {kind} states of rank {lacking} are missing or duplicated")
    universal = [n for n in root.names(f"{tag}/zero") if layout.NAME.fullmatch(n) and not n.endswith(".pt")]
    chosen = sorted(sharded, key=lambda name: sharded[name]) if sharded else list(models)[:1]
    return DeepSpeedFolder(root, tag, tuple(chosen), tuple(by_rank), bool(sharded), tuple(sorted(universal)))
