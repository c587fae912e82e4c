"""Checkpoint folders made to do harm: each case changes a sound checkpoint, and commits it anew where digests are in
the way, as somebody would who can write all of it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

TAG = "step-00000003"
FOLDER = f"{TAG}-a0001"
SHARD = "r00000-of-00001.safetensors"
DEEP = '{"a":' * 50_000
Change = Callable[[Path], Any]
CASES: dict[str, Change] = {}
REFUSED: set[str] = set()  # those that nothing may make weights of
SOME: list[str] = []  # a part of them, with each place and each value


def _add(name: str, change: Change, refused: bool = True, some: bool = True) -> None:
    assert name not in CASES, name
    CASES[name] = change
    if refused:
        REFUSED.add(name)
    if some:
        SOME.append(name)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def recommit(root: Path, **changes: Any) -> None:
    """Makes the commit record say what the manifest is now."""
    path = root / "commits" / f"{TAG}.json"
    record = json.loads(path.read_text())
    record["manifest_sha256"] = _sha256(root / FOLDER / "manifest.json")
    path.write_text(json.dumps({**record, **changes}))


def _in_manifest(change: Callable[[dict[str, Any]], Any]) -> Change:
    def apply(root: Path) -> None:
        path = root / FOLDER / "manifest.json"
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))
        recommit(root)

    return apply


def _manifest_text(change: Callable[[str], str]) -> Change:
    def apply(root: Path) -> None:
        path = root / FOLDER / "manifest.json"
        path.write_text(change(path.read_text()), errors="surrogatepass")
        recommit(root)

    return apply


def _in_record(**changes: Any) -> Change:
    return lambda root: recommit(root, **changes)


def _in_state(change: Callable[[dict[str, Any]], Any], name: str = "state.json") -> Change:
    def apply(root: Path) -> None:
        state = json.loads((root / FOLDER / name).read_text())
        change(state)
        _rewrite(root, name, json.dumps(state))

    return apply


def _rewrite(root: Path, name: str, text: str) -> None:
    (root / FOLDER / name).write_text(text, errors="surrogatepass")
    path = root / FOLDER / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest[f"{name[:-5]}_sha256"] = _sha256(root / FOLDER / name)
    path.write_text(json.dumps(manifest))
    recommit(root)


def _text_of(name: str, text: str) -> Change:
    return lambda root: _rewrite(root, name, text)


def _put(place: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    def change(target: Any) -> None:
        *path, last = place.split("/")
        for part in path:
            target = target[int(part) if isinstance(target, list) else next(iter(target)) if part == "*" else part]
        key: Any = next(iter(target)) if last == "*" else int(last) if isinstance(target, list) else last
        target[key] = value

    return change


WRONG: tuple[Any, ...] = (None, True, -1, 1.5, 1 << 70, "x", "../../x", [], {}, [[]], {"a": 1}, "\ud800", 10**400)
PLACES = (
    "format", "version", "tag", "step", "files", "files/*", "files/*/size", "tensors", "tensors/model.w",
    "tensors/model.w/dtype", "tensors/model.w/shape", "tensors/model.w/shape/0",
    "tensors/model.w/chunks", "tensors/model.w/chunks/0", "tensors/model.w/chunks/0/file",
    "tensors/model.w/chunks/0/start", "tensors/model.w/chunks/0/length", "tensors/model.w/chunks/0/offsets",
    "tensors/model.w/chunks/0/sizes", "aliases",
)  # fmt: skip
LOOSE = ("tensors/model.w/role", "world_size", "zero_stage", "models", "pretrained", "state_sha256", "job_sha256")
MILD = {("aliases", "{}")}  # what is wrong nowhere


def _add_wrong_types() -> None:
    for row, place in enumerate(PLACES):
        for column, value in enumerate(WRONG):
            shown, change = ascii(value)[:20], _in_manifest(_put(place, value))
            _add(f"manifest {place} is {shown}", change, (place, shown) not in MILD, (row + column) % 10 == 0)
    for row, place in enumerate(LOOSE):
        for column, value in enumerate(WRONG):
            change = _in_manifest(_put(place, value))
            _add(f"manifest {place} is {ascii(value)[:20]}", change, refused=False, some=(row + column) % 10 == 0)
    for value in WRONG[:-3]:
        if value != "x":
            _add(f"sha256 is {ascii(value)[:20]}", _in_manifest(_put("tensors/model.w/chunks/0/sha256", value)), False)
    for row, key in enumerate(("format", "version", "tag", "step", "dir", "manifest_sha256")):
        for column, value in enumerate(WRONG):
            _add(f"record {key} is {ascii(value)[:20]}", _in_record(**{key: value}), some=(row + column) % 10 == 0)


NAMES = (
    "../x", "..", ".", "/etc/passwd", "a/b", "a\\b", "a\0b", "a\n", "", "x" * 300, "\u2025/x", "%2e%2e", "\uff0e\uff0e",
    "~", "$HOME", "con:", "\ud800", " ", "file:///etc/passwd", "C:\\x", ".hidden", "-", "\u202e",
)  # fmt: skip


def _add_names() -> None:
    def rename(name: str) -> Callable[[dict[str, Any]], None]:
        def change(manifest: dict[str, Any]) -> None:
            manifest["files"][name] = manifest["files"].pop(SHARD)
            for tensor in manifest["tensors"].values():
                for chunk in tensor["chunks"]:
                    chunk["file"] = name

        return change

    def tensor(name: str) -> Callable[[dict[str, Any]], None]:
        def change(manifest: dict[str, Any]) -> None:
            manifest["tensors"][f"model.{name}"] = manifest["tensors"].pop("model.w")

        return change

    for number, name in enumerate(NAMES):
        _add(f"file called {ascii(name)[:20]}", _in_manifest(rename(name)), some=number % 3 == 0)
        _add(f"folder called {ascii(name)[:20]}", _in_record(dir=name), some=number % 3 == 1)
        _add(f"tensor called {ascii(name)[:20]}", _in_manifest(tensor(name)), refused=False, some=number % 3 == 2)
    for name in ("..json", "%2e%2e.json", "\u2025.json", "a\n.json", "-.json", "x" * 240 + ".json"):
        _add(f"record called {ascii(name)[:20]}", _record_called(name), refused=False)


def _record_called(name: str) -> Change:
    def apply(root: Path) -> None:
        record = json.loads((root / "commits" / f"{TAG}.json").read_text())
        (root / "commits" / name).write_text(json.dumps({**record, "tag": name[:-5], "step": 10**9}))

    return apply


def _outside(root: Path) -> Path:
    path = root.parent / f"outside-{root.name}"
    path.mkdir(exist_ok=True)
    return path


def _link(name: str, target: str | None = None) -> Change:
    """Replaces a file by a link to a copy outside, or to `target`."""

    def apply(root: Path) -> None:
        path = root / name
        copy = _outside(root) / path.name
        os.replace(path, copy)
        path.symlink_to(target or copy)

    return apply


def _link_folder(root: Path) -> None:
    os.replace(root / FOLDER, _outside(root) / FOLDER)
    (root / FOLDER).symlink_to(_outside(root) / FOLDER)


def _claim(start: int, length: int) -> Callable[[dict[str, Any]], None]:
    """A tensor as large as `length`, in a file that is said to be long enough."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][SHARD]["size"] = 1 << 62
        entry = manifest["tensors"]["model.w"]
        entry["shape"] = entry["chunks"][0]["sizes"] = [length // 4]
        entry["chunks"][0].update(start=start, length=length, offsets=[0])

    return change


def _sparse(root: Path, size: int, kind: str) -> None:
    """The file is as long as it is said to be, and takes no room: a bomb for whoever reads it into memory."""
    path = root / FOLDER / SHARD
    before = path.stat().st_size
    os.truncate(path, before + size)
    manifest = json.loads((root / FOLDER / "manifest.json").read_text())
    manifest["files"][SHARD]["size"] = before + size
    chunk = {"file": SHARD, "start": before, "length": size, "offsets": [0], "sizes": [size]}
    role = "optimizer" if kind == "optimizer" else "parameter"
    manifest["tensors"][f"{kind}.w.bomb"] = {"role": role, "dtype": "U8", "shape": [size], "chunks": [chunk]}
    (root / FOLDER / "manifest.json").write_text(json.dumps(manifest))
    recommit(root)


def _add_bombs() -> None:
    for length in (1 << 40, 1 << 61, 4):
        _add(f"chunk of {length} bytes", _in_manifest(_claim(100, length)))
    _add("tensor of 10^18 elements", _in_manifest(_put("tensors/model.w/shape", [10**9, 10**9])))
    _add("tensor of 64 dims", _in_manifest(_put("tensors/model.w/shape", [2] * 64)))
    _add("tensor of 10^5 dims", _in_manifest(_put("tensors/model.w/shape", [1] * 100_000)))
    for kind in ("optimizer", "model"):
        _add(f"320 MB for the {kind}", lambda root, kind=kind: _sparse(root, 320 << 20, kind), False, kind == "model")  # type: ignore[misc]
    _add("manifest of 300 MB", _fill("manifest.json", 300 << 20))
    _add("record of 2 MB", _fill("record", 2 << 20))
    _add("state of 300 MB", _fill("state.json", 300 << 20), refused=False)
    _add("10^4 overlapping chunks", _in_manifest(_overlap))
    for name in ("manifest.json", "state.json", "job.json"):
        _add(f"{name} of depth 50000", _text_of_any(name, DEEP), name == "manifest.json")
        _add(f"{name} of depth 50000 in lists", _text_of_any(name, "[" * 50_000), name == "manifest.json")
        _add(f"{name} with a depth of 900", _nest(name, 900), refused=False)
        _add(f"{name} with a key twice", _twice(name), name == "manifest.json")
        for number, text in enumerate(("", "null", "[]", "{", "\ud800", "NaN", "\0", "1" * 5000, '{"a": Infinity}')):
            _add(f"{name} is text {number}", _text_of_any(name, text), name == "manifest.json")
    for number, text in enumerate(("", "null", "[]", "{", DEEP, "[" * 50_000, "\0", "1" * 5000)):
        _add(f"record is text {number}", _record_text(text))


def _record_text(text: str) -> Change:
    return lambda root: (root / "commits" / f"{TAG}.json").write_text(text)


def _text_of_any(name: str, text: str) -> Change:
    return _manifest_text(lambda _: text) if name == "manifest.json" else _text_of(name, text)


def _nest(name: str, depth: int) -> Change:
    value = "[" * depth + "]" * depth

    def apply(root: Path) -> None:
        text = (root / FOLDER / name).read_text()
        new = f'{{"nested":{value},{text[1:]}'
        if name == "state.json":
            new = text.replace('"client_state":{', f'"client_state":{{"nested":{value},').replace(",}", "}")
        if name == "manifest.json":
            (root / FOLDER / name).write_text(new)
            recommit(root)
        else:
            _rewrite(root, name, new)

    return apply


def _twice(name: str) -> Change:
    def apply(root: Path) -> None:
        text = '{"step":3,"step":4,' + (root / FOLDER / name).read_text()[1:]
        _text_of_any(name, text)(root)

    return apply


def _fill(name: str, size: int) -> Change:
    def apply(root: Path) -> None:
        path = root / "commits" / f"{TAG}.json" if name == "record" else root / FOLDER / name
        with open(path, "r+b") as file:
            file.truncate(size)
        if name == "state.json":
            _rewrite_digest(root)
        if name == "manifest.json":
            recommit(root)

    return apply


def _rewrite_digest(root: Path) -> None:
    path = root / FOLDER / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["state_sha256"] = _sha256(root / FOLDER / "state.json")
    path.write_text(json.dumps(manifest))
    recommit(root)


def _overlap(manifest: dict[str, Any]) -> None:
    chunk = manifest["tensors"]["model.w"]["chunks"][0]
    manifest["tensors"]["model.w"]["chunks"] = [chunk] * 10_000


def _add_files() -> None:
    for name in (f"{FOLDER}/{SHARD}", f"{FOLDER}/manifest.json", f"commits/{TAG}.json", f"{FOLDER}/state.json"):
        _add(f"{name} is a link outside", _link(name), not name.endswith("state.json"))
        _add(f"{name} is a link to /dev/zero", _link(name, "/dev/zero"), not name.endswith("state.json"))
        _add(f"{name} is a link to itself", _link(name, name.rpartition("/")[2]), not name.endswith("state.json"))
        _add(f"{name} is a link to nothing", _link(name, "nothing"), not name.endswith("state.json"))
        _add(f"{name} is a folder", _make_folder(name), not name.endswith("state.json"))
        _add(f"{name} is a pipe", _make_pipe(name), not name.endswith("state.json"))
        _add(f"{name} is missing", lambda root, name=name: (root / name).unlink(), not name.endswith("state.json"))  # type: ignore[misc]
    _add("folder is a link outside", _link_folder)
    for offset in (0, 8, None):
        _add(f"shard with a byte changed at {offset}", _flip(offset), offset is None)
    _add("shard cut short", lambda root: os.truncate(root / FOLDER / SHARD, 50))
    for length in (0, 1 << 31, 1 << 62, (1 << 64) - 1):
        _add(f"shard with a header of {length} bytes", _header(length), refused=False)
    pickled = b"cposix\nsystem\n(S'touch pwned'\ntR."
    for name in (SHARD, "manifest.json", "state.json", "job.json"):
        _add(f"{name} is a pickle", _bytes(name, pickled), name in (SHARD, "manifest.json"))
    _add("files beside that are pickles", _strew(pickled), refused=False)


def _bytes(name: str, data: bytes) -> Change:
    return lambda root: (root / FOLDER / name).write_bytes(data)


def _strew(data: bytes) -> Change:
    def apply(root: Path) -> None:
        for name in (".metadata", "__0_0.distcp", "pytorch_model.bin", "optimizer.pt", "mp_rank_00_model_states.pt"):
            (root / FOLDER / name).write_bytes(data)
            (root / name).write_bytes(data)

    return apply


def _make_folder(name: str) -> Change:
    def apply(root: Path) -> None:
        (root / name).unlink()
        (root / name).mkdir()

    return apply


def _make_pipe(name: str) -> Change:
    def apply(root: Path) -> None:
        (root / name).unlink()
        os.mkfifo(root / name)

    return apply


def _flip(offset: int | None) -> Change:
    """Changes a bit of the shard: by default one of the weights."""

    def apply(root: Path) -> None:
        path = root / FOLDER / SHARD
        data = bytearray(path.read_bytes())
        chunk = json.loads((root / FOLDER / "manifest.json").read_text())["tensors"]["model.w"]["chunks"][0]
        data[chunk["start"] if offset is None else offset] ^= 1
        path.write_bytes(data)

    return apply


def _header(length: int) -> Change:
    def apply(root: Path) -> None:
        path = root / FOLDER / SHARD
        data = path.read_bytes()
        path.write_bytes(length.to_bytes(8, "little") + data[8:])

    return apply


STATE_PLACES = (
    "counters", "counters/global_steps", "counters/global_samples", "optimizer", "optimizer/groups",
    "optimizer/groups/0", "optimizer/groups/0/names", "optimizer/groups/0/lr", "optimizer/values", "optimizer/class",
    "scheduler", "rng", "rng/0", "rng/0/python", "rng/0/numpy", "rng/0/torch", "client_state", "loss_scaler",
)  # fmt: skip


def _add_state() -> None:
    tagged = ({"$tuple": 1}, {"$float": "x"}, {"$tensor": 1}, {"$items": [1]})
    for row, place in enumerate(STATE_PLACES):
        for column, value in enumerate((None, True, -1, "x", [], {}, [[]], {"a": 1}, *tagged)):
            change = _in_state(_put(place, value))
            _add(f"state {place} is {value!a}", change, refused=False, some=(row + column) % 10 == 0)


_add_wrong_types()
_add_names()
_add_bombs()
_add_files()
_add_state()
