"""What processes of ranks on this machine find around them: environment variables and a folder for logs.

The launchers of jobs (`launcher`) and of programs (`dsjob.programs.launch`) share it.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from dsjob.files import open_append
from dsjob.home import find_again
from dsjob.launch import rank
from dsjob.ranks.signals import handling
from dsjob.run_folder import LOGS_NAME, SAVE_REQUEST

_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"  # DDP and gloo print warnings that users cannot act on


def make_logs(run_dir: str) -> str:
    """Creates the folder for the output of ranks, and returns its path."""
    logs = os.path.join(run_dir, LOGS_NAME)
    os.makedirs(logs, exist_ok=True)
    return logs


@contextmanager
def touching_save_request(run_dir: str) -> Iterator[None]:
    """Makes SIGUSR1 request a checkpoint while the block runs: rank 0 looks for the file that this creates."""
    request = os.path.join(run_dir, SAVE_REQUEST)
    with handling({signal.SIGUSR1: lambda *_: open_append(request).close()}):
        yield


def quiet_torch() -> None:
    """Hides the warnings of torch's C++ code. Has an effect only before torch is imported."""
    os.environ.setdefault(_LOG_LEVEL, "ERROR")


def list_variables(private: str, nproc: int, debug: bool) -> dict[str, str]:
    """The environment variables of `nproc` ranks. `private`: the temporary folder that they share with the launcher."""
    found = {
        **find_again(),
        _LOG_LEVEL: os.environ.get(_LOG_LEVEL, "ERROR"),
        rank.FOLDER_VARIABLE: private,
        rank.DEBUG_VARIABLE: "1" if debug else "",
        rank.LAUNCHER_VARIABLE: str(os.getpid()),
        # Otherwise each rank would start a thread per core, and they would slow each other down.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc))),
    }
    # Ranks on one machine need no interface beyond loopback, and the host's name may not resolve.
    if "lo" in (name for _, name in socket.if_nameindex()):
        found["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return found
