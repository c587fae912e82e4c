"""A command under an audit hook: run as a script, it prints what the process tried, as JSON, after its own output.

watched.py MODE FILE...     MODE: validate, show, run; or `find`: call each target of a JSON list as a job would
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

WATCHED = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "os.fork", "pty.spawn", "subprocess.Popen",
    "socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request", "ctypes.dlopen", "pickle.find_class",
    "shutil.copyfile", "shutil.copytree", "os.mkdir", "os.remove", "os.rename", "sqlite3.connect", "webbrowser.open",
)  # fmt: skip
events: list[str] = []
watching = False


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not watching:
        return
    if event in WATCHED and not (event == "ctypes.dlopen" and arguments[0] is None):  # what `import ctypes` does
        events.append(f"{event} {arguments!r}")
    elif event == "open":
        path, mode, flags = arguments
        writes = (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) if mode is None else set(mode) & set("wax+")
        if writes and path != os.devnull:
            events.append(f"open {path!r} {mode!r}")
    elif event == "exec" and "pwned" in getattr(arguments[0], "co_names", ()) + getattr(arguments[0], "co_consts", ()):
        events.append("exec of the marker")


def find(path: str) -> None:
    """Each try in turn, with the folder's own modules trusted; those that were not refused are told."""
    global watching
    import torch  # noqa: F401 (what it does at its own import is nobody's try)
    import transformers  # noqa: F401

    from dsjob.contract.spec import make_target
    from dsjob.errors import TargetError
    from dsjob.trust.grant import Trust
    from dsjob.trust.targets import call_target

    sys.path.append(os.getcwd())
    trust = Trust(folders=(os.getcwd(),))
    with open(path, encoding="utf-8") as file:
        tries = json.load(file)
    watching = True
    for value in tries:
        try:
            call_target(make_target(value), trust=trust)
            events.append(f"{value['_target_']} was called")
        except TargetError as error:
            print(f"{value['_target_']}\t{error.message}\t{error.hint}")  # noqa: T201
        except Exception as error:
            events.append(f"{value['_target_']} was called: {error!r}")


def main(mode: str, *paths: str) -> int:
    global watching
    sys.addaudithook(hook)
    if mode == "find":
        for path in paths:
            find(path)
        codes = [0]
    else:
        watching = True
        from dsjob.cli import main as command

        codes = [command([mode, path]) for path in paths]
    watching = False
    heavy = sorted({"torch", "transformers", "my_model"} & set(sys.modules)) if mode != "find" else []
    print(json.dumps({"codes": codes, "events": events, "imported": heavy}))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
