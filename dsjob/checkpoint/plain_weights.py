"""Weights that other programs wrote, to begin from: a file of torch.save or safetensors, or a folder of them.

A folder is as transformers writes it: `model.safetensors` or `pytorch_model.bin`, or several of them with an index.
"""

from __future__ import annotations

import json
import re
from typing import Any

from torch import Tensor

from dsjob.checkpoint import zero_to_fp32 as layout
from dsjob.checkpoint.foreign import Boxes, Foreign
from dsjob.checkpoint.source import open_root
from dsjob.checkpoint.torch_files import TorchFile
from dsjob.errors import CheckpointError

FILE = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,250}\.(safetensors|bin|pt|pth|ckpt)")
WHOLE = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
BELOW = ("module", "model", "state_dict", "model_state_dict")
MAX_HEADER, MAX_INDEX = 100 << 20, 64 << 20


def find_weights(url: str) -> Foreign | None:
    """The weights in a file or folder, at a path or URL; None where none are recognised."""
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
        what = str(error) if isinstance(error, ValueError) else repr(error)
        raise layout.Damaged(f"{root.root}: {', '.join(names[:3])} hold no weights: {what[:300]}") from None
    if not checkpoint.tensors:
        raise CheckpointError(f"{url} holds no weights")
    return Foreign(root.root, "weights", checkpoint, boxes.members, None)


def _read_index(root: layout.Folder, name: str) -> list[str]:
    with root.open_file(name) as file:
        text = file.read(MAX_INDEX + 1) or b""
    try:
        if len(text) > MAX_INDEX:
            raise ValueError(f"it has more than {MAX_INDEX} bytes")
        names = sorted(set(json.loads(text)["weight_map"].values()))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise layout.Damaged(f"{root.root}/{name} is no index of weights: {error!r}") from None
    wrong = next((n for n in names if not isinstance(n, str) or not FILE.fullmatch(n)), None)
    if wrong is not None:
        raise layout.Damaged(f"{root.root}/{name} names {str(wrong)[:80]!r}, which is no file of the folder")
    return names


def _read_torch(root: layout.Folder, name: str, boxes: Boxes) -> None:
    file = boxes.know(TorchFile(root, name))
    content: Any = file.content
    below = next((key for key in BELOW if isinstance(content, dict) and isinstance(content.get(key), dict)), None)
    tensors = content if below is None else content[below]
    for key, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            boxes.add(f"model.{key}", "parameter", file.place_of(tensor))


def _read_safetensors(root: layout.Folder, name: str, boxes: Boxes) -> None:
    try:
        raw = root.open_file(name)
    except FileNotFoundError:
        raise layout.Damaged(f"{root.root}/{name} is missing") from None
    with raw as file:
        size = file.seek(0, 2)
        file.seek(0)
        start = bytearray(8)
        length = int.from_bytes(start, "little") if layout.read_exactly(file, memoryview(start)) else -1
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise ValueError(f"{name} has a header of {length} bytes")
        text = bytearray(length)
        layout.read_exactly(file, memoryview(text))
    header = json.loads(text)
    boxes.sizes[name] = size
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        first, end = entry["data_offsets"]
        place = {"file": name, "start": 8 + length + first, "length": end - first}
        chunk = {**place, "offsets": [0] * len(entry["shape"]), "sizes": entry["shape"]}
        chunks = [chunk] if end > first else []
        boxes.entries[f"model.{key}"] = {
            "role": "parameter",
            "dtype": entry["dtype"],
            "shape": entry["shape"],
            "chunks": chunks,
        }
