"""Lists the checkpoints of a root, and describes the contents of one, without reading tensors. Imports no torch.

Listing costs one directory listing, and the manifest and state.json of each tag.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.root.attempts import FOLDER
from dsjob.checkpoint.root.best import find_best
from dsjob.checkpoint.root.source import find_root, locate, renamed
from dsjob.errors import DsjobError, NoCheckpointError

# For fullmatch: the files of a save, relative to its folder. A folder with any other file does not belong to dsjob.
SAVED = re.compile(
    r"((manifest|state|job)\.json|done/r\d{5,}\.json)(\.[0-9a-f]{32}\.tmp)?|r\d{5,}-of-\d{5,}\.safetensors"
)
_LATEST = 1e12  # seconds since 1970; anything beyond is not a plausible time
State = Literal["committed", "damaged", "partial", "superseded"]


@dataclass(frozen=True)
class Listed:
    """A checkpoint, or the folder of a save that is not one.

    `state`: `committed`; `damaged`: it has a commit record, but also a `problem`; `partial`: a folder without a commit
    record; `superseded`: a folder whose record was set aside when a run was rewound. `best`: see `find_best`. `size`:
    bytes of all files in the folder. `saved`, in seconds since 1970: the time in the record (copies have one),
    otherwise when the record was written, or the last file of a folder without a record; None if the file system does
    not say.
    """

    state: State
    tag: str
    folder: str
    step: int | None
    size: int
    saved: float | None
    world_size: int | None = None
    zero_stage: int | None = None
    newest: bool = False
    best: bool = False
    problem: str = ""


@dataclass(frozen=True)
class Inventory:
    """Everything in the root at `url`: checkpoints in the order of their steps, then other folders of saves."""

    url: str
    checkpoints: tuple[Listed, ...]

    def as_json(self) -> dict[str, Any]:
        """The inventory as JSON values."""
        return asdict(self)


def take_inventory(url: str) -> Inventory:
    """Lists the root that `url` refers to (see source.find_root). Raises NoCheckpointError if it is empty.

    Verifies manifests against commit records, and state.json and the sizes of files against manifests, but not the
    bytes of shards.
    """
    with renamed(f"list {url}"):
        root, _ = find_root(url)
        files = storage.find_files(root.root)
        names = root.names("")
        folders = _group(names, files)
        tags = sorted(name[8:-5] for name in files if re.fullmatch(r"commits/[^/]+\.json", name))
        listed = [_look(root, tag, folders, files) for tag in tags if layout.NAME.fullmatch(tag)]
        listed += list_unfinished(names, files, {entry.folder for entry in listed})
        if not listed:
            raise NoCheckpointError(f"no checkpoint in {root.root}", hint="name a run's folder or a checkpoint folder")
        best = _find_best_tag(root)
    last = max((e for e in listed if e.state == "committed"), key=lambda e: (e.step or 0, e.tag), default=None)
    marked = [
        Listed(**{**asdict(entry), "newest": entry is last, "best": entry.tag == best and entry.state == "committed"})
        for entry in listed
    ]
    return Inventory(root.root, tuple(sorted(marked, key=lambda e: (e.step is None, e.step or 0, e.tag, e.folder))))


def _find_best_tag(root: layout.Folder) -> str:
    """The tag of the best checkpoint; empty if there is none, or if the newest one, whose job decides, is damaged."""
    try:
        record = find_best(root)
    except (layout.Problem, DsjobError):
        return ""
    return str(record["tag"]) if record is not None else ""


def list_unfinished(names: Iterable[str], files: Mapping[str, storage.Found], taken: Collection[str]) -> list[Listed]:
    """The folders of saves that are not checkpoints: `partial` or `superseded`.

    names: the names in the root. files: all files below it. taken: the folders that commit records name.
    """
    found = []
    for name, contents in _group(names, files).items():
        # A folder with any other file may be someone else's, so it is not listed, and never deleted.
        if FOLDER.fullmatch(name) and name not in taken and all(map(SAVED.fullmatch, contents.sizes)):
            state: State = "superseded" if f"superseded/{name}.json" in files else "partial"
            found.append(Listed(state, name.rpartition("-a")[0], name, None, contents.size, contents.written))
    return found


def _group(names: Iterable[str], files: Mapping[str, storage.Found]) -> dict[str, _Contents]:
    folders = {name: _Contents() for name in names if layout.NAME.fullmatch(name)}
    for path, found in files.items():
        folder, _, name = path.partition("/")
        if folder in folders and name:
            folders[folder].add(name, found)
    return folders


class _Contents:
    """The files of one folder."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.written: float | None = None

    @property
    def size(self) -> int:
        return sum(self.sizes.values())

    def add(self, name: str, found: storage.Found) -> None:
        self.sizes[name] = found.size
        self.written = max((t for t in (self.written, found.written) if t is not None), default=None)


def _look(root: layout.Folder, tag: str, folders: dict[str, _Contents], files: dict[str, storage.Found]) -> Listed:
    saved = files[f"commits/{tag}.json"].written
    folder, step, size = "", None, 0
    try:
        record = layout.read_commit(root, tag)
        folder, step, saved = record["dir"], record["step"], read_saved(record, saved)
        contents = folders.get(folder, _Contents())
        size = contents.size
        checkpoint = layout.read_checkpoint(root, record)
        # The size of state.json is not in the manifest; its digest is compared below.
        expected: dict[str, int | None] = {**checkpoint.files, "state.json": None}
        for name, length in expected.items():
            found = contents.sizes.get(name)
            if found is None:
                raise layout.Damaged(f"{root.root}/{folder}/{name} is missing")
            if length is not None and found != length:
                raise layout.Damaged(f"{root.root}/{folder}/{name} has {found} bytes; the manifest says {length}")
        digest = str(checkpoint.manifest.get("state_sha256") or "")
        layout.read_object(root, f"{folder}/state.json", layout.MAX_MANIFEST, digest)  # no manifest has its size
    except layout.Damaged as error:
        return Listed("damaged", tag, folder, step, size, saved, problem=error.message)
    world_size, stage = (_count(checkpoint.manifest.get(key)) for key in ("world_size", "zero_stage"))
    return Listed("committed", tag, folder, step, size, saved, world_size, stage)


def read_saved(record: Mapping[str, Any], written: float | None) -> float | None:
    """When a checkpoint was saved: the time in its commit record, else when the record was `written`."""
    saved: Any = record.get("saved")
    return float(saved) if type(saved) in (int, float) and 0 <= saved < _LATEST else written


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def describe(url: str, tag: str | None = None) -> dict[str, Any]:
    """The contents of one checkpoint as JSON values: `tensors` by name, sums by role and dtype, the run's plain state.

    Raises NoCheckpointError, CorruptCheckpointError, StorageError, UsageError.
    """
    with renamed(f"read {url}"):
        root, record = locate(url, tag)
        checkpoint = layout.read_checkpoint(root, record)
        manifest, folder = checkpoint.manifest, checkpoint.folder
        state = layout.read_object(
            root, f"{folder}/state.json", layout.MAX_MANIFEST, str(manifest.get("state_sha256") or "")
        )
        names = root.names(folder)
        job = layout.read_object(root, f"{folder}/job.json", layout.MAX_MANIFEST) if "job.json" in names else {}
    tensors = {
        name: {"role": t.role, "dtype": t.dtype, "shape": list(t.shape), "bytes": _size(t)}
        for name, t in checkpoint.tensors.items()
    }
    return {
        "url": storage.join(root.root, folder),
        "tag": checkpoint.tag,
        "step": checkpoint.step,
        "world_size": manifest.get("world_size"),
        "zero_stage": manifest.get("zero_stage"),
        "models": manifest.get("models", []),
        "job": job.get("name"),
        "precision": _find_precision(job) if job else None,
        "optimizer": _find_optimizers(state.get("optimizer")),
        "counters": state.get("counters"),
        "bytes": sum(checkpoint.files.values()),
        "files": checkpoint.files,
        "parameters": sum(math.prod(t.shape) for t in checkpoint.tensors.values() if t.role in layout.ROLES[:2]),
        "roles": _sum_up(tensors, "role"),
        "dtypes": _sum_up(tensors, "dtype"),
        "aliases": checkpoint.aliases,
        "tensors": tensors,
    }


def _size(tensor: layout.Tensor) -> int:
    return math.prod(tensor.shape) * layout.WIDTH[tensor.dtype]


def _sum_up(tensors: dict[str, dict[str, Any]], key: str) -> dict[str, dict[str, int]]:
    counts, sizes = Counter[str](), Counter[str]()
    for entry in tensors.values():
        counts[entry[key]] += 1
        sizes[entry[key]] += entry["bytes"]
    return {name: {"tensors": counts[name], "bytes": sizes[name]} for name in sorted(counts)}


def _find_precision(job: dict[str, Any]) -> str:
    """The precision that the job's sections select."""
    for section in ("bf16", "fp16", "torch_autocast"):
        given = job.get(section)
        if isinstance(given, dict) and given.get("enabled") is True:
            return section
    return "fp32"


def _find_optimizers(state: object) -> str | dict[str, str] | None:
    """The class of the optimizer; with several models, that of each model's optimizer."""
    if not isinstance(state, dict):
        return None
    if isinstance(state.get("class"), str):
        return str(state["class"])
    found = {name: entry["class"] for name, entry in state.items() if isinstance(entry, dict) and "class" in entry}
    return {name: str(kind) for name, kind in found.items()} or None
