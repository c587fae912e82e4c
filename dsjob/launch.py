"""Starting ranks: joining those of torchrun or srun, running one in this process, or starting several.

Several ranks are started through torch.distributed's own launcher, with a file in a private folder to meet at. They
read resolved.json and never compose again. A rank that fails leaves a record there; the launcher shows the first one.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from dsjob import storage
from dsjob.errors import DsjobError, Interrupted, LaunchError, Preempted
from dsjob.run_folder import RESOLVED_NAME, SAVE_REQUEST, make_run_dir, read_result, write_resolved
from dsjob.trust import Trust

_TRUST_VARIABLE = "DSJOB_TRUST"  # for ranks alone: what the launcher was granted, never read by a command
_ERRORS_VARIABLE = "DSJOB_ERRORS"
_DEBUG_VARIABLE = "DSJOB_DEBUG"
_LAUNCHER_VARIABLE = "DSJOB_LAUNCHER"  # its process


def read_world_size() -> int | None:
    """The number of ranks where this process is one of several that somebody else has started; None where it is not."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _read_number("WORLD_SIZE")
    if (
        int(os.environ.get("SLURM_NTASKS", "1") or 1) > 1
        and "SLURM_PROCID" in os.environ
        and "SLURM_STEP_ID" in os.environ
    ):
        _adopt_slurm()
        return _read_number("WORLD_SIZE")
    return None


def _read_number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise LaunchError(f"environment variable {name}={os.environ[name]!r} is not a number") from None


def _adopt_slurm() -> None:
    """Gives srun's tasks the variables that torch looks for."""
    env = os.environ
    first = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", "localhost"))
    host = first.split(",")[0]
    if "[" in host:  # node[01-04] begins with node01
        prefix, _, rest = first.partition("[")
        host = prefix + rest.split(",")[0].split("-")[0].rstrip("]")
    env.setdefault("RANK", env["SLURM_PROCID"])
    env.setdefault("WORLD_SIZE", env["SLURM_NTASKS"])
    env.setdefault("LOCAL_RANK", env.get("SLURM_LOCALID", "0"))
    # "2" or "2(x3),1": tasks on each node, in the order of the nodes
    counts: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", env["SLURM_NTASKS"])).split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    env.setdefault("LOCAL_WORLD_SIZE", str(counts[min(int(env.get("SLURM_NODEID", "0")), len(counts) - 1)]))
    env.setdefault("MASTER_ADDR", host)
    env.setdefault("MASTER_PORT", str(15000 + int(env.get("SLURM_JOB_ID", "0")) % 40000))


def start(document: Mapping[str, Any], run_dir: str, *, trust: Trust, debug: bool) -> dict[str, Any]:
    """Runs a resolved job to its end, in this process or in ranks of its own; what `result.json` says of it."""
    if not os.path.exists(os.path.join(run_dir, RESOLVED_NAME)):
        write_resolved(run_dir, document)  # where an earlier run has left one, it stays until this one gets going
    if document["launch"]["nproc"] == 1:
        _run_here(document, run_dir, trust)
    else:
        _start_ranks(document, run_dir, trust, debug)
    return {**read_result(run_dir), "run_dir": run_dir}


def join(document: Mapping[str, Any], *, trust: Trust) -> dict[str, Any]:
    """Runs a resolved job as one of the ranks that somebody else has started; rank 0's document counts.

    Returns what `result.json` says on rank 0, nothing on the others.
    """
    import torch.distributed as dist

    from dsjob.job import run_job
    from dsjob.mesh import join_world, leave_world

    _add_import_folders(trust.folders)
    options = document["launch"]
    world = join_world(device=options["device"], backend=options["backend"], timeout=options["timeout"])
    shared: list[Any] = [None, None, None]
    if world.rank == 0:
        try:
            shared = [json.dumps(document), make_run_dir(document["output"]["dir"], document["name"]), None]
        except DsjobError as error:  # the other ranks are waiting: they have to hear of it
            shared[2] = error
    if world.world_size > 1:
        dist.broadcast_object_list(shared, src=0)
    if shared[2] is not None:
        raise shared[2]
    run_job(json.loads(shared[0]), shared[1], world, trust)
    leave_world()  # not after a failure: it would wait for ranks that are in a collective
    return {**read_result(shared[1]), "run_dir": shared[1]} if world.rank == 0 else {}


def _run_here(document: Mapping[str, Any], run_dir: str, trust: Trust) -> None:
    from dsjob.job import run_job
    from dsjob.mesh import join_world, leave_world

    def stop(number: int, _: Any) -> None:
        raise Interrupted(number)

    _add_import_folders(trust.folders)
    before = signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run_job(document, run_dir, join_world(device=document["launch"]["device"]), trust)
        leave_world()  # one rank has a group where its parameters come from the host
    finally:
        signal.signal(signal.SIGTERM, before)


def _start_ranks(document: Mapping[str, Any], run_dir: str, trust: Trust, debug: bool) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in logging.root.manager.loggerDict:  # failures are told once, by _explain; each logger has its own level
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    nproc: int = document["launch"]["nproc"]
    private = tempfile.mkdtemp(prefix="dsjob-")
    resolved = os.path.join(private, RESOLVED_NAME)
    storage.write_bytes(resolved, json.dumps(document).encode())
    logs = os.path.join(run_dir, "logs")
    os.makedirs(logs, exist_ok=True)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=os.path.join(private, "rendezvous"),
        rdzv_configs={"store_type": "file"},
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=dict.fromkeys(range(1, nproc), Std.ALL)),
    )
    changed = _list_variables(private, nproc, trust, debug)
    before = {key: os.environ.get(key) for key in changed}
    os.environ.update(changed)
    request = os.path.join(run_dir, SAVE_REQUEST)
    usual = signal.signal(signal.SIGUSR1, lambda *_: open(request, "a").close())  # rank 0 looks there
    try:
        # -P keeps the current folder off sys.path: a source tree of dsjob there would hide the installed one.
        elastic_launch(config, sys.executable)("-P", "-m", "dsjob.launch", resolved, run_dir)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        raise _explain(private, codes, logs) from None
    except SignalException as error:
        saved = [record for record in _read_failures(private) if record["exit_code"] == Preempted.exit_code]
        if saved:
            raise Preempted(saved[0]["message"], hint=saved[0]["hint"]) from None
        raise Interrupted(int(error.sigval)) from None
    finally:
        signal.signal(signal.SIGUSR1, usual)
        for key, value in before.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value
        shutil.rmtree(private, ignore_errors=True)


def _list_variables(private: str, nproc: int, trust: Trust, debug: bool) -> dict[str, str]:
    """What ranks find in their environment."""
    found = {
        "DSJOB_STORE": os.path.join(private, "store"),
        # The agent would open a store on all interfaces for its ranks; they meet in the file.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # DDP and gloo print warnings that nobody who runs a job can act on.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        _ERRORS_VARIABLE: private,
        _DEBUG_VARIABLE: "1" if debug else "",
        _TRUST_VARIABLE: trust.to_text(),
        _LAUNCHER_VARIABLE: str(os.getpid()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc))),
    }
    if "lo" in (name for _, name in socket.if_nameindex()):
        found["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return found


def _explain(private: str, codes: Mapping[int, int], logs: str) -> DsjobError:
    """The failure that came first, out of what the ranks have left behind."""
    records = _read_failures(private)
    for record in records:
        if record["exit_code"] == Preempted.exit_code:
            return Preempted(record["message"], hint=record["hint"])
    own = [record for record in records if not record["follows"]]
    if own:
        first = min(own, key=lambda record: int(record["time"]))
        return LaunchError(
            f"rank {first['rank']}: {first['message']}", hint=first["hint"], exit_code=first["exit_code"]
        )
    killed = {rank: -code for rank, code in codes.items() if code < 0 and -code != signal.SIGTERM}
    if killed:
        rank, number = min(killed.items())
        reason = " (the system kills processes that way when memory runs out)" if number == signal.SIGKILL else ""
        return LaunchError(
            f"rank {rank} was killed by {signal.Signals(number).name}{reason}", hint=f"its output is in {logs}"
        )
    if records:
        first = min(records, key=lambda record: int(record["time"]))
        return LaunchError(f"rank {first['rank']}: {first['message']}", hint=first["hint"])
    return LaunchError(f"ranks ended with exit codes {dict(codes)}", hint=f"their output is in {logs}")


def _read_failures(private: str) -> list[dict[str, Any]]:
    """What ranks have left behind of their ends."""
    records = []
    for name in sorted(os.listdir(private)):
        if name.startswith("error-"):
            with open(os.path.join(private, name), encoding="utf-8") as file:
                records.append(json.load(file))
    return records


def _add_import_folders(folders: Sequence[str]) -> None:
    """Makes the user's own modules importable, after everything that is installed."""
    for folder in folders:
        if folder not in sys.path:
            sys.path.append(folder)


def describe_failure(error: BaseException) -> str:
    """An error of somebody else's code in one line, with the last place in it that is neither dsjob's nor torch's."""
    frames = traceback.extract_tb(error.__traceback__)
    here = os.path.dirname(os.path.abspath(__file__))
    users = [
        f for f in frames if not f.filename.startswith(here) and "/torch/" not in f.filename and f.filename[:1] != "<"
    ]
    place = f" ({users[-1].filename}:{users[-1].lineno} in {users[-1].name})" if users else ""
    return f"{type(error).__name__}: {error}{place}"


def _run_rank(resolved: str, run_dir: str) -> int:
    """The main function of a rank: trains, and leaves a record of what went wrong."""
    # A rank may sit in a collective that no Python handler can interrupt; checkpoints survive a sudden end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent(int(os.environ[_LAUNCHER_VARIABLE]))
    from dsjob.job import run_job
    from dsjob.mesh import join_world, leave_world

    trust = Trust.from_text(os.environ[_TRUST_VARIABLE])
    _add_import_folders(trust.folders)
    rank = int(os.environ["RANK"])
    try:
        document = json.loads(storage.read_text(resolved))
        options = document["launch"]
        world = join_world(device=options["device"], backend=options["backend"], timeout=options["timeout"])
        run_job(document, run_dir, world, trust)
        leave_world()
    except Exception as error:
        known = isinstance(error, DsjobError)
        if os.environ.get(_DEBUG_VARIABLE):
            traceback.print_exc()
        # Where one rank fails, the others find their connections closed.
        follows = not known and ("Connection closed by peer" in str(error) or "Connection reset by peer" in str(error))
        record = {
            "rank": rank,
            "time": time.time_ns(),
            "message": error.message if isinstance(error, DsjobError) else describe_failure(error),
            "hint": error.hint if isinstance(error, DsjobError) else "run with --debug for the traceback",
            "exit_code": error.exit_code if isinstance(error, DsjobError) else 1,
            "follows": follows,
        }
        with open(os.path.join(os.environ[_ERRORS_VARIABLE], f"error-{rank:05d}.json"), "w", encoding="utf-8") as file:
            json.dump(record, file)
        return int(record["exit_code"])  # type: ignore[call-overload,no-any-return]
    return 0


def end_with_parent(parent: int) -> None:
    """Lets this process never outlive the one that started it, process `parent`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it was gone before this asked to be told
            end_rank(1)


def end_rank(code: int) -> NoReturn:
    """Ends this process, one of several ranks, at once.

    The interpreter's own end may wait for a process group that never answers, and torch's threads are sometimes still
    there when their destructors run, which aborts the process after its work is done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end_rank(_run_rank(sys.argv[1], sys.argv[2]))
