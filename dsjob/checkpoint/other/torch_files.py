"""Reads untrusted files of `torch.save`: their content, and where in the file the bytes of each tensor lie.

Such a file is a zip with one pickle and one member per storage. This module reads only the pickle. It first checks that
every name in the pickle is harmless, then uses torch's unpickler for weights, with tensors on the meta device, so no
tensor data is in memory. The data are read later through `CheckedFolder`, which first verifies the zip's checksums.

`torch.load` is called with `weights_only=True` and `map_location="meta"` rather than with mmap: then storages know
where their bytes begin, which is checked against the zip's directory, and URLs work like files.
"""

from __future__ import annotations

import bisect
import io
import os
import pickle
import pickletools
import re
import struct
import threading
import warnings
import zipfile
import zlib
from collections.abc import Iterable
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor, nn

from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.format.dtypes import NAMES
from dsjob.errors import CheckpointError
from dsjob.torch_private import position_in_file

MAX_VALUES, MAX_NESTED = 50_000_000, 100  # per pickle; a shared object counts each time it is referred to
MAX_PICKLE, MAX_DIRECTORY, MAX_MEMBERS = 256 << 20, 256 << 20, 1 << 20
# The only names that a pickle may refer to, apart from those in STANDS_FOR.
HARMLESS = re.compile(
    r"collections\.OrderedDict|builtins\.(set|complex)|_codecs\.encode|torch\.(Size|device|serialization\._get_layout)"
    r"|torch\._utils\._rebuild_(tensor_v2|parameter)|torch\._tensor\._rebuild_from_type_v2|torch\.Tensor|torch\.([A-Z][A-Za-z0-9]*Storage|storage\.UntypedStorage)"
    r"|torch\.(float|bfloat|half|double|int|uint|long|short|bool|complex)[a-z0-9_]*"
)


class Inert:
    """Replaces one of DeepSpeed's classes. Has the object's arguments and attributes, but no behaviour."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


class LossScaler(Inert): ...


class DynamicLossScaler(Inert): ...


class FragmentAddress(Inert): ...


class ZeroStage(Inert): ...


STANDS_FOR: dict[str, type[Inert]] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": LossScaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": DynamicLossScaler,
    "deepspeed.utils.tensor_fragment.fragment_address": FragmentAddress,
    "deepspeed.runtime.zero.config.ZeroStageEnum": ZeroStage,
}


class Member(NamedTuple):
    """The data of a member of a zip: start and size in bytes, and CRC-32."""

    start: int
    size: int
    crc: int


class Stored(NamedTuple):
    """Where a tensor's data lie in a file, in row-major order. `start`: in bytes. `dtype`: its name in safetensors."""

    file: str
    start: int
    dtype: str
    shape: tuple[int, ...]


class TorchFile:
    """One file of torch.save. `content`: what was saved, with tensors on the meta device. `members`: by their first
    byte. `size`: in bytes.

    Raises CheckpointError for unsupported or unsafe content, Damaged (see `zero_to_fp32`) if torch.save cannot have
    written the file.
    """

    def __init__(self, folder: layout.Folder, name: str) -> None:
        self.name, self.place = name, f"{folder.root}/{name}"
        try:
            raw = folder.open_file(name)
        except FileNotFoundError:
            raise layout.Damaged(f"{self.place} is missing") from None
        with cast(BinaryIO, io.BufferedReader(raw)) as file:
            text, self.members = self._check_zip(file)
            self._refuse_names(text)
            file.seek(0)
            self.content = self._unpickle(file)

    def place_of(self, tensor: Any) -> Stored:
        """Where the data of a tensor in `content` lie in the file."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            raise CheckpointError(f"{self.place} contains a {type(tensor).__name__} where a plain tensor is expected")
        if tensor.dtype not in NAMES:
            raise CheckpointError(f"{self.place} contains a tensor of {tensor.dtype}, which is not supported")
        shape = tuple(tensor.shape)
        if not tensor.numel():
            return Stored(self.name, 0, NAMES[tensor.dtype], shape)
        if not tensor.is_contiguous():
            raise CheckpointError(
                f"{self.place}: a tensor of shape {list(shape)} is not contiguous (strides {list(tensor.stride())})",
                hint="call .contiguous() on the weights before saving them",
            )
        storage = tensor.untyped_storage()
        position = position_in_file(tensor)
        member = self.members.get(position) if position is not None else None
        start, end = (n * tensor.itemsize for n in (tensor.storage_offset(), tensor.storage_offset() + tensor.numel()))
        if member is None or storage.nbytes() != member.size or end > member.size:
            raise layout.Damaged(f"{self.place}: a tensor of shape {list(shape)} is not inside its storage")
        return Stored(self.name, member.start + start, NAMES[tensor.dtype], shape)

    def _check_zip(self, file: BinaryIO) -> tuple[bytes, dict[int, Member]]:
        """The pickle, and the members of the zip. Members must be uncompressed, and must not overlap."""
        self.size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if file.read(4) != b"PK\x03\x04":
            raise CheckpointError(
                f"{self.place} is not a zip file, the format of torch.save since torch 1.6",
                hint="load it with the program that wrote it, and save it again with a current torch",
            )
        try:
            self._check_directory(file, self.size)
            with zipfile.ZipFile(file) as archive:
                infos = archive.infolist()
                members = {m.start: m for m in self._find_members(file, infos, archive.start_dir)}
                pickles = [
                    info for info in infos if info.filename.count("/") == 1 and info.filename[-9:] == "/data.pkl"
                ]
                orders = [info for info in infos if info.filename.endswith("/byteorder")]
                if len(pickles) != 1 or len(orders) > 1 or pickles[0].file_size > MAX_PICKLE:
                    raise layout.Damaged(f"{self.place} must contain one pickle of at most {MAX_PICKLE} bytes")
                if orders and archive.read(orders[0]) != b"little":
                    raise CheckpointError(f"{self.place} was written on a big-endian machine")
                return archive.read(pickles[0]), members
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, struct.error, ValueError) as error:
            raise layout.Damaged(f"{self.place} is not a complete file of torch.save: {error}") from None

    def _check_directory(self, file: BinaryIO, size: int) -> None:
        """Raises Damaged if the zip claims a directory beyond the limit. zipfile would read all of it into memory."""
        # A zip ends in its end record (22 bytes). In zip64, a locator (20 bytes) precedes it.
        file.seek(max(size - 42, 0))
        tail = file.read(42)
        end = tail[-22:]
        if end[:4] != b"PK\x05\x06":
            raise layout.Damaged(f"{self.place} is truncated, or has extra bytes at its end")
        (length,) = struct.unpack("<L", end[12:16])
        if tail[:4] == b"PK\x06\x07":
            (position,) = struct.unpack("<Q", tail[8:16])
            file.seek(min(position, size))
            record = file.read(56)
            length = struct.unpack("<Q", record[40:48])[0] if record[:4] == b"PK\x06\x06" else MAX_DIRECTORY + 1
        if length > min(size, MAX_DIRECTORY):
            raise layout.Damaged(f"{self.place} claims a directory of {length} bytes")

    def _find_members(self, file: BinaryIO, infos: list[zipfile.ZipInfo], end: int) -> list[Member]:
        if len(infos) > MAX_MEMBERS or len({info.filename for info in infos}) != len(infos):
            raise layout.Damaged(f"{self.place} has duplicate members, or more than {MAX_MEMBERS}")
        found, previous = [], 0
        for info in sorted(infos, key=lambda info: info.header_offset):
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
                raise layout.Damaged(f"{self.place}: {info.filename[:80]!r} is compressed; torch.save never compresses")
            file.seek(info.header_offset)
            header = file.read(30)
            if len(header) < 30 or header[:4] != b"PK\x03\x04" or info.header_offset < previous:
                raise layout.Damaged(f"{self.place}: {info.filename[:80]!r} is not where the directory says")
            start = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
            previous = start + info.file_size
            if previous > end:
                raise layout.Damaged(f"{self.place}: {info.filename[:80]!r} extends beyond the end of the file")
            found.append(Member(start, info.file_size, info.CRC))
        return found

    def _refuse_names(self, text: bytes) -> None:
        """Raises CheckpointError if the pickle names anything that tensors and DeepSpeed's state do not need."""
        try:
            named = {arg for op, arg, _ in pickletools.genops(text) if op.name in ("GLOBAL", "INST")}
        except Exception as error:  # pickletools raises many types for malformed input
            raise layout.Damaged(f"{self.place} does not contain a complete pickle: {error}") from None
        names = {".".join(name.split(" ", 1)).replace("__builtin__.", "builtins.") for name in map(str, named)}
        unknown = sorted(name for name in names if name not in STANDS_FOR and not HARMLESS.fullmatch(name))
        if "argparse.Namespace" in unknown:
            raise CheckpointError(
                f"{self.place} contains argparse.Namespace: the arguments of a Megatron program, in its client state",
                hint="checkpoints of Megatron-DeepSpeed are not supported",
            )
        if unknown:
            listed = ", ".join(name[:80] for name in unknown[:5]) + (", ..." if unknown[5:] else "")
            raise CheckpointError(
                f"{self.place} would execute code: {listed}",
                hint="save it without these objects (in client_state, say); dsjob did not execute anything",
            )

    def _unpickle(self, file: BinaryIO) -> Any:
        stubs: list[Any] = [(stub, name) for name, stub in STANDS_FOR.items()]
        try:
            with torch.serialization.safe_globals(stubs), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # deprecation warnings about storages
                content = torch.load(file, weights_only=True, map_location="meta")
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"torch refuses to load {self.place}: {str(error).splitlines()[0]}") from None
        except (Exception, RecursionError) as error:  # a hostile pickle can raise anything
            raise layout.Damaged(f"{self.place} cannot be read: {type(error).__name__}: {str(error)[:200]}") from None
        if not is_bounded(content):
            raise layout.Damaged(f"{self.place} has more than {MAX_VALUES:,} values, or is nested too deeply")
        return content


def is_bounded(content: Any) -> bool:
    """Whether walking through a value, visiting shared parts each time, takes a bounded number of steps.

    A pickle of a few kilobytes can refer to one list twice in the next list, and so on, a billion times in total.
    """
    sizes: dict[int, int] = {}  # by id: the number of values inside, 0 while it is being counted
    places: list[tuple[Any, bool]] = [(content, False)]
    depth = 0
    while places:
        value, closed = places.pop()
        parts = list(_list_parts(value))
        if closed:
            depth -= 1
            sizes[id(value)] = 1 + sum(sizes.get(id(part)) or _weigh_leaf(part) for part in parts)
            if sizes[id(value)] > MAX_VALUES:
                return False
        elif id(value) in sizes:
            if not sizes[id(value)]:
                return False  # it contains itself
        elif parts:
            depth += 1
            if depth > MAX_NESTED:
                return False
            sizes[id(value)] = 0
            places.append((value, True))
            places += [(part, False) for part in parts if isinstance(part, _HOLDING)]
    return True


_HOLDING = (dict, list, tuple, set, LossScaler, DynamicLossScaler, FragmentAddress)


def _weigh_leaf(value: Any) -> int:
    return 1 + len(value) if isinstance(value, (str, bytes)) else 1


def _list_parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set)):
        return value
    return vars(value).values() if isinstance(value, _HOLDING) else ()


class CheckedFolder(layout.Folder):
    """A folder that verifies zip members against their checksums: each as a whole, before any of its bytes is read."""

    def __init__(self, inner: layout.Folder, members: dict[str, list[Member]]) -> None:
        self.root, self._inner = inner.root, inner
        self._members = {name: sorted(listed) for name, listed in members.items()}
        self._sound: set[tuple[str, int]] = set()
        self._checking = threading.Lock()  # several threads read; a second one waits until the member is verified

    def names(self, folder: str) -> list[str]:
        """See Folder."""
        return self._inner.names(folder)

    def open_file(self, name: str) -> io.RawIOBase:
        """See Folder."""
        name = name.removeprefix("./")
        file = self._inner.open_file(name)
        return _CheckedFile(self, name, file) if name in self._members else file

    def check(self, name: str, file: io.RawIOBase, start: int, end: int) -> None:
        """Verifies all members with bytes between two positions. Raises Damaged."""
        members = self._members[name]
        for member in members[max(bisect.bisect(members, (start + 1,)) - 1, 0) :]:
            if member.start >= end:
                break
            if member.start + member.size <= start:
                continue
            with self._checking:
                self._check_member(name, file, member)

    def _check_member(self, name: str, file: io.RawIOBase, member: Member) -> None:
        if (name, member.start) in self._sound:
            return
        file.seek(member.start)
        if _compute_crc(file, member.size) != member.crc:
            raise layout.Damaged(
                f"{self.root}/{name}: the {member.size} bytes at {member.start} do not match the file's own checksum"
            )
        self._sound.add((name, member.start))


class _CheckedFile(io.RawIOBase):
    """A file of a CheckedFolder, verified on reading."""

    def __init__(self, folder: CheckedFolder, name: str, file: io.RawIOBase) -> None:
        self._folder, self._name, self._file = folder, name, file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int | None:
        start = self._file.tell()
        self._folder.check(self._name, self._file, start, start + len(buffer))
        self._file.seek(start)
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


def _compute_crc(file: io.RawIOBase, size: int) -> int:
    block, crc = memoryview(bytearray(min(size, 1 << 20))), 0
    while size:
        view = block[:size]
        if not layout.read_exactly(file, view):
            return -1
        crc, size = zlib.crc32(view, crc), size - len(view)
    return crc
