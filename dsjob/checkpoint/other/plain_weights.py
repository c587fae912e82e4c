"""Reads weights that other programs wrote: a file of torch.save or safetensors, or a folder of such files.

A folder has the names that transformers uses: `model.safetensors` or `pytorch_model.bin`, or several with an index.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.format.headers import read_header
from dsjob.checkpoint.other.foreign import Boxes, Foreign
from dsjob.checkpoint.other.torch_files import TorchFile
from dsjob.checkpoint.root.source import open_root
from dsjob.contract.shown import cut
from dsjob.errors import CheckpointError

FILE = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,250}\.(safetensors|bin|pt|pth|ckpt)")
WHOLE = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
BELOW = ("module", "model", "state_dict", "model_state_dict")
MAX_INDEX = 64 << 20


def find_weights(url: str) -> Foreign | None:
    """The weights in a file or folder, at a path or URL. None if there are no files with known names."""
    head, _, last = url.rstrip("/").rpartition("/")
    if FILE.fullmatch(last):
        root, names = open_root(head or "."), [last]
        if last not in root.names(""):
            return None
    else:
        root = open_root(url)
        there = root.names("")
        index = next((name for name in INDEX if name in there), None)
        names = _read_index(root, index) if index else [name for name in WHOLE if name in there][:1]
    if not names:
        return None
    boxes = Boxes(".")
    try:
        for name in names:
            _read_safetensors(root, name, boxes) if name.endswith(".safetensors") else _read_torch(root, name, boxes)
        checkpoint = boxes.finish(last or root.root, 0)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise layout.Damaged(
            f"{root.root}: cannot read weights from {', '.join(names[:3])}: {cut(what, 300)}"
        ) from None
    if not checkpoint.tensors:
        raise CheckpointError(f"{url} contains no weights")
    return Foreign(root.root, "weights", checkpoint, boxes.members, None)


def _read_index(root: layout.Folder, name: str) -> list[str]:
    try:
        names = sorted(set(layout.read_object(root, name, MAX_INDEX)["weight_map"].values()))
    except (AttributeError, KeyError, TypeError) as error:
        raise layout.Damaged(f"{root.root}/{name} is not an index of weights: {cut(repr(error), 300)}") from None
    wrong = next((n for n in names if not isinstance(n, str) or not FILE.fullmatch(n)), None)
    if wrong is not None:
        raise layout.Damaged(f"{root.root}/{name} names an invalid file: {str(wrong)[:80]!r}")
    return names


def _read_torch(root: layout.Folder, name: str, boxes: Boxes) -> None:
    file = boxes.know(TorchFile(root, name))
    content: Any = file.content
    # Training scripts often save the weights below a key, beside other state.
    below = next((key for key in BELOW if isinstance(content, dict) and isinstance(content.get(key), dict)), None)
    tensors = content if below is None else content[below]
    for key, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            boxes.add(f"model.{key}", "parameter", file.place_of(tensor))


def _read_safetensors(root: layout.Folder, name: str, boxes: Boxes) -> None:
    boxes.sizes[name], places = read_header(root, name)
    for key, (dtype, shape, start, length) in places.items():
        chunk = {"file": name, "start": start, "length": length, "offsets": [0] * len(shape), "sizes": shape}
        chunks = [chunk] if length else []
        boxes.entries[f"model.{key}"] = {"role": "parameter", "dtype": dtype, "shape": shape, "chunks": chunks}
