"""DeepSpeed folders that try to run code, write files, take memory or lead elsewhere; a child reads them, watched.

hostile_deepspeed.py FOLDER...     prints, as JSON, what each reading raised and what the process tried
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WATCHED = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "socket.connect",
    "shutil.rmtree", "socket.bind", "pickle.find_class", "os.mkdir", "os.remove", "os.rename", "shutil.copyfile",
    "urllib.Request",
)  # fmt: skip
MARKER = "pwned"


class Evil:
    """What a pickle of it calls when it is read."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def list_evils() -> dict[str, Evil]:
    import builtins
    import subprocess

    import torch

    return {
        "system": Evil(os.system, f"touch {MARKER}"),
        "popen": Evil(subprocess.Popen, ["touch", MARKER]),
        "eval": Evil(builtins.eval, f"open({MARKER!r}, 'w')"),
        "getattr": Evil(builtins.getattr, os, "getcwd"),
        "bytes": Evil(bytearray, 1 << 33),
        "load": Evil(torch.load, f"{MARKER}.pt", None, None),
        "hub": Evil(torch.hub.load, "a/b", "c"),
        "rmtree": Evil(shutil.rmtree, MARKER),
    }


def edit_pickle(path: Path, change: Callable[[Any], None]) -> None:
    """Reads one of our own files (they are trusted here), changes the tree, writes it back with what is evil in it."""
    import torch
    from torch.serialization import safe_globals

    sys.path.insert(0, str(Path(__file__).parent))
    from dsjob.checkpoint.other.torch_files import STANDS_FOR

    with safe_globals([(stub, name) for name, stub in STANDS_FOR.items()]):
        tree = torch.load(path, weights_only=True)
    change(tree)
    for stub in STANDS_FOR.values():  # they have to be found again under their own names: leave such objects out
        drop(tree, stub)
    torch.save(tree, path)


def drop(tree: Any, kind: type) -> None:
    for key, value in list(tree.items()) if isinstance(tree, dict) else []:
        if isinstance(value, kind):
            tree[key] = None
        else:
            drop(value, kind)


def make_pickles(source: Path, target: Path) -> Iterator[Path]:
    """Each evil thing at one place, and one evil thing at each place of each file."""
    inner, base = "optimizer_state_dict", "base_optimizer_state"
    places: dict[str, list[tuple[Any, ...]]] = {
        "model_states": [(), ("module",), ("lr_scheduler",), ("param_shapes", 0), ("shared_params",), ("ds_config",)],
        "optim_states": [(), (inner,), ("ds_config",), (inner, inner), (inner, base), (inner, base, "state", 0)],
    }
    evils = list_evils()
    for file in sorted((source / "global_step3").glob("*.pt")):
        kind = "optim_states" if "optim" in file.name else "model_states"
        tries = [(way, "system") for way in places[kind]] + [((), name) for name in evils if name != "system"]
        for way, name in tries:
            folder = target / f"{source.name}-{file.name}-{'.'.join(map(str, way))}-{name}"
            shutil.copytree(source, folder)

            def change(tree: Any, way: tuple[Any, ...] = way, evil: Evil = evils[name]) -> None:
                for key in way:
                    tree = tree[key]
                tree["evil"] = evil

            try:
                edit_pickle(folder / "global_step3" / file.name, change)
            except (KeyError, TypeError):  # this stage has no such place
                shutil.rmtree(folder)
                continue
            yield folder


def make_zips(source: Path, target: Path) -> Iterator[Path]:
    """Zips that lie, and pickles that no torch.save writes."""
    name = sorted(path.name for path in (source / "global_step3").glob("*.pt"))[-1]
    data = (source / "global_step3" / name).read_bytes()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    top = next(iter(members)).partition("/")[0]
    pickle_name, storage = f"{top}/data.pkl", f"{top}/data/0"

    def pack(compression: int = zipfile.ZIP_STORED, **other: bytes) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", compression) as archive:
            for member, content in {**members, **{key.replace("__", "/"): v for key, v in other.items()}}.items():
                archive.writestr(member, content)
        return out.getvalue()

    def with_pickle(text: bytes) -> bytes:
        return pack(**{pickle_name: text})

    layers = b"".join(b"q%c](" % i + b"h%c" % i * 10 + b"e" for i in range(30))
    bombs = b"\x80\x02}X\x04\x00\x00\x00note](NNNNNNNNNNe" + layers + b"s."
    end = data.rindex(b"PK\x05\x06")
    central = data.index(b"PK\x01\x02")
    size_at = central + 20
    tries = {
        "compressed": pack(zipfile.ZIP_DEFLATED),
        "bomb": pack(zipfile.ZIP_DEFLATED, **{storage: bytes(50_000_000)}),
        "nested": pack(**{storage: pack(zipfile.ZIP_DEFLATED, bomb=bytes(10_000_000))}),
        "cut": data[: len(data) // 2],
        "tail": data + b"something more",
        "longer": data[:size_at] + struct.pack("<LL", 1 << 30, 1 << 30) + data[size_at + 8 :],
        "directory": data[: end - 36] + struct.pack("<Q", 1 << 40) + data[end - 28 :],
        "elsewhere": data[:central] + data[central : central + 42] + struct.pack("<L", 7) + data[central + 46 :],
        "empty": b"",
        "legacy": b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",
        "text": b"nothing of the kind",
        "no-pickle": pack(**{pickle_name: b""}),
        "stop": with_pickle(b"\x80\x02."),
        "stack-global": with_pickle(b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0ctouch pwned\x85R."),
        "inst": with_pickle(b"(S'touch pwned'\nios\nsystem\n."),
        "extension": with_pickle(b"\x80\x02\x82\x01)R."),
        "persistent": with_pickle(b"\x80\x02X\x04\x00\x00\x00evilQ."),
        "memo": with_pickle(b"\x80\x02Nr\xff\xff\xff\x7f."),
        "deep": with_pickle(b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b"."),
        "long-text": with_pickle(b"\x80\x02X\xff\xff\xff\x7fabc."),
        "big-endian": pack(**{f"{top}/byteorder": b"big"}),
        "billion": with_pickle(bombs),
    }
    for kind, content in tries.items():
        folder = target / f"{source.name}-zip-{kind}"
        shutil.copytree(source, folder)
        (folder / "global_step3" / name).write_bytes(content)
        yield folder


def make_names(source: Path, target: Path) -> Iterator[Path]:
    """What `latest` may not say, and links to other places."""
    # fmt: off
    tries = ["../other", "/etc", "global_step3/../../x", "..", ".", "", "global_step3\x00", "global_step3\n../x",
             "%2e%2e", "\\..\\x", "global_step3/", "a" * 5000, "\u2024\u2024/x", "~root", "global_step3 ; touch pwned"]
    # fmt: on
    for number, text in enumerate(tries):
        folder = target / f"{source.name}-latest-{number}"
        shutil.copytree(source, folder)
        (folder / "latest").write_text(text)
        yield folder
    outside = target.parent / "outside.pt"
    file = sorted((source / "global_step3").glob("*.pt"))[0]
    shutil.copy(file, outside)
    folder = target / f"{source.name}-link"
    shutil.copytree(source, folder)
    (folder / "global_step3" / file.name).unlink()
    (folder / "global_step3" / file.name).symlink_to(outside)
    yield folder


def make_lies(source: Path, target: Path) -> Iterator[Path]:
    """Trees of plain values that are not as DeepSpeed writes them."""
    import torch

    lies: dict[str, Any] = {
        "dp_world_size": [0, -1, 10**18, "2", None, 1.5],
        "global_steps": [-1, "3", None, float("nan")],
        "mp_world_size": [2, "x"],
        "param_shapes": [[], [{}], [{"emb.weight": torch.Size((10**9, 10**9))}], [{"a": (-5,)}], 7, [["a"]]],
        "module": [None, [], {"a": torch.zeros(3, 3).t()[::2]}],
        "buffer_names": [None, 5],
        "shared_params": [{"a": "a"}, {"a": 5}, [1]],
    }
    for key, values in lies.items():
        for number, value in enumerate(values):
            folder = target / f"{source.name}-lie-{key}-{number}"
            shutil.copytree(source, folder)
            for file in (folder / "global_step3").glob("*model_states.pt"):
                edit_pickle(file, lambda tree, key=key, value=value: tree.update({key: value}))  # type: ignore[misc]
            yield folder


def nest(levels: int, width: int = 11) -> Any:
    """A list that is in a list `width` times, and that again: a few bytes a level, whatever they stand for."""
    value: Any = [0]
    for _ in range(levels):
        value = [value] * width
    return value


def make_bombs(source: Path, target: Path, keys: tuple[str, ...]) -> Iterator[Path]:
    """Values that no message may repeat, and tensors, where DeepSpeed has numbers, names and shapes."""
    import torch

    values = {
        "bomb": nest(30),
        "long": nest(6),
        "shapes": {"emb.weight": nest(30)},
        "name": {"a" * 1_000_000: nest(6)},
        "tensor": torch.zeros(2, 2),
        "scalar": torch.tensor(3),
        "number": 10**5000,
        "text": "a" * 1_000_000,
    }
    for key in keys:
        folder = target / f"{source.name}-{key}"
        for kind, value in values.items():
            shutil.copytree(source, folder.with_name(f"{folder.name}-{kind}"))
            for file in (folder.with_name(f"{folder.name}-{kind}") / "global_step3").glob("*model_states.pt"):
                edit_pickle(file, lambda tree, key=key, value=value: tree.update({key: value}))  # type: ignore[misc]
            yield folder.with_name(f"{folder.name}-{kind}")


def make_flips(source: Path, target: Path, count: int) -> Iterator[Path]:
    """One bit of one file is another."""
    random.seed(7)
    files = sorted((source / "global_step3").glob("*.pt"))
    for number in range(count):
        folder = target / f"{source.name}-flip-{number}"
        shutil.copytree(source, folder)
        file = folder / "global_step3" / random.choice(files).name
        data = bytearray(file.read_bytes())
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        file.write_bytes(data)
        yield folder


def read_peak() -> int:
    """The most memory that this process has had, in KiB."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def main(folders: list[str]) -> None:
    import tempfile

    import torch  # noqa: F401 (what it does at its own import is nobody's try)

    import dsjob.checkpoint.other.elsewhere  # noqa: F401
    from dsjob.checkpoint.offline.convert import convert

    events: list[str] = []
    out = tempfile.mkdtemp()
    watching = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not watching:
            return
        if event == "open":
            path, mode, flags = arguments
            writes = (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) if mode is None else set(mode) & set("wax+")
            if writes and not str(path).startswith(out):
                events.append(f"open {path!r} {mode!r}")
        elif event in WATCHED and not str(arguments[0]).startswith(out):
            events.append(f"{event} {arguments!r}")

    sys.addaudithook(hook)
    before = read_peak()
    found = {}
    for folder in folders:
        watching = True
        try:
            convert(folder, f"{out}/model.safetensors", to="fp32", overwrite=True)
            raised = ""
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        watching = False
        digest = ""
        if not raised:
            import hashlib

            digest = hashlib.sha256(Path(out, "model.safetensors").read_bytes()).hexdigest()
        found[folder] = [raised, digest]
    print(json.dumps({"found": found, "events": events, "grown": read_peak() - before}))  # noqa: T201
    shutil.rmtree(out)


if __name__ == "__main__":
    main(sys.argv[1:])
