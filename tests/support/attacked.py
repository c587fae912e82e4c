"""Every reader of checkpoints on every malicious folder, in one process with little memory and an audit hook.

attacked.py FOLDER some|all: works below FOLDER and prints JSON: what each reader did with each of these cases, and what
was attempted
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from malicious import CASES, SOME, TAG
from torch import nn

import dsjob
from dsjob.checkpoint.format import zero_to_fp32 as plain
from dsjob.checkpoint.live import weights
from dsjob.checkpoint.offline import compare, convert, transfer, verify
from dsjob.checkpoint.root import garbage, inventory
from dsjob.errors import DsjobError, NoCheckpointError

MEMORY = 256 << 20  # bytes that all readers together may take on top of what is there before the first case
WATCHED = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "socket.connect",
    "socket.bind", "socket.getaddrinfo", "ctypes.dlopen", "pickle.find_class", "shutil.rmtree", "marshal.loads",
)  # fmt: skip
REMOVING = ("os.remove", "os.rmdir")  # (path, folder's number)
CHANGING = (*REMOVING, "os.mkdir", "os.rename", "os.link", "os.symlink", "os.truncate")
events: list[str] = []
watching = ""


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not watching:
        return
    if event in ("import", "compile"):
        if "pwned" in repr(arguments):
            events.append(f"{event} {arguments!r}"[:300])
    elif event in WATCHED and not (event == "shutil.rmtree" and _is_inside(arguments[0])):
        events.append(f"{event} {arguments!r}"[:300])
    elif event == "open":
        path, mode, flags = arguments
        writes = set(mode or "") & set("wax+") or (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes and not _is_inside(path):
            events.append(f"open {path!r} {mode!r}")
    elif event in CHANGING:
        folders = [f"/proc/self/fd/{n}" for n in arguments[1:] if event in REMOVING and isinstance(n, int) and n >= 0]
        paths = [os.path.join(*folders, path) for path in arguments if isinstance(path, (str, bytes, os.PathLike))]
        if not all(map(_is_inside, paths)):
            events.append(f"{event} {arguments!r}")


def _is_inside(path: Any) -> bool:
    return isinstance(path, int) or path == os.devnull or os.path.realpath(path).startswith(watching)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(12.0))
        self.register_buffer("mean", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.w).sum() + self.mean.sum()


def make_base(folder: Path) -> Any:
    """A sound checkpoint; the engine that saved it."""
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    engine = dsjob.initialize(model=Net(), config=config)[0]
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 12)))
        engine.step()
    engine.save_checkpoint(str(folder), tag=TAG, client_state={"mine": 1})
    step = next(folder.glob(f"{TAG}-a*"))
    if not (step / "job.json").exists():
        (step / "job.json").write_text('{"name": "attacked"}')
    return engine


def load(engine: Any, root: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if engine.load_checkpoint(root)[0] is None:
            raise NoCheckpointError("nothing was loaded")


def run_script(root: str, out: str) -> None:
    code = plain.main([root, out])
    if code:
        raise DsjobError(f"exit code {code}")


def list_readers(engine: Any, base: str) -> dict[str, Callable[[str, str], Any]]:
    def check(root: str, out: str) -> None:
        if any(one.damages for one in verify.verify(root)):
            raise DsjobError("damaged")

    return {
        "ls": lambda root, out: inventory.take_inventory(root),
        "info": lambda root, out: inventory.describe(root),
        "verify": check,
        "convert": lambda root, out: convert.convert(root, f"{out}/w.safetensors", to="bf16"),
        "script": lambda root, out: run_script(root, f"{out}/w.bin"),
        "copy": lambda root, out: transfer.copy(root, f"{out}/copy"),
        "diff": lambda root, out: compare.compare(root, base),
        "gc": lambda root, out: garbage.collect(root, dry_run=True),
        "weights": lambda root, out: weights.read_weights(root),
        "load": lambda root, out: load(engine, root),
    }


def main(folder: Path, names: Iterable[str]) -> None:
    global watching
    ctypes.CDLL(None).mallopt(-8, 2)  # M_ARENA_MAX: each thread would reserve addresses for an arena of its own
    engine = make_base(folder / "base")
    readers = list_readers(engine, str(folder / "base"))
    for reader in readers.values():
        reader(str(folder / "base"), str(folder / "warm"))
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (pages + MEMORY,) * 2)
    sys.addaudithook(hook)
    results: dict[str, dict[str, str]] = {}
    for number, name in enumerate(names):
        root, out = folder / f"case{number}", folder / f"case{number}" / "out"
        shutil.copytree(folder / "base", root / "c")
        CASES[name](root / "c")
        found = results[name] = {}
        for reader_name, reader in readers.items():
            started = time.monotonic()
            os.makedirs(out / reader_name)
            watching = os.path.realpath(out) + os.sep
            try:
                with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                    reader(str(root / "c"), str(out / reader_name))
                found[reader_name] = "ok"
            except DsjobError:
                found[reader_name] = "refused"
            except BaseException as error:
                found[reader_name] = f"{type(error).__name__}: {error}"[:300]
            watching = ""
            if time.monotonic() - started > 20:
                found[reader_name] = f"took {time.monotonic() - started:.0f} s"
        shutil.rmtree(root)
    print(json.dumps({"results": results, "events": events}))  # noqa: T201


if __name__ == "__main__":
    plain.signal.signal = lambda *_: None  # type: ignore[assignment]  # a timeout has to be able to end this process
    main(Path(sys.argv[1]), CASES if sys.argv[2] == "all" else SOME)
    sys.stdout.flush()
    os._exit(0)
