"""Starts ranks: detects another launcher, runs a single rank in this process, or starts several processes.

Several ranks rendezvous through a file in a private folder. Each rank reads the resolved job from there, and never
composes or resolves it again. Ranks also record their failures in that folder. The launcher shows the first one.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from dsjob import storage
from dsjob.contract.resolved import ResolvedJob
from dsjob.contract.spec import Launch
from dsjob.errors import DsjobError, FencedError, Interrupted, LaunchError, Preempted, UsageError
from dsjob.files import temporary_folder
from dsjob.launch import devices, rank
from dsjob.launch.supervisor import Supervisor
from dsjob.launch.surroundings import list_variables, make_logs, touching_save_request
from dsjob.ranks.mpi import count_ranks, discover_mpi
from dsjob.ranks.signals import handling
from dsjob.run_folder import (
    METRICS_NAME,
    RESOLVED_NAME,
    RESULT_NAME,
    list_commits,
    read_result,
    write_resolved,
    write_result,
)
from dsjob.terminal import print_error, quote_path
from dsjob.trust.frames import describe_failure
from dsjob.trust.grant import Trust


def read_world_size() -> int | None:
    """The number of ranks if another launcher (torchrun, srun, mpirun) has started this process; otherwise None."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _read_number("WORLD_SIZE")
    # Before Slurm: mpirun starts its ranks from a Slurm step of its own, whose variables they inherit.
    if "RANK" not in os.environ and count_ranks() > 1:
        discover_mpi()
        os.environ.setdefault("MASTER_PORT", "29500")
        return _read_number("WORLD_SIZE")
    if (
        int(os.environ.get("SLURM_NTASKS", "1") or 1) > 1
        and "SLURM_PROCID" in os.environ
        and "SLURM_STEP_ID" in os.environ
    ):
        _adopt_slurm()
        return _read_number("WORLD_SIZE")
    return None


def is_first() -> bool:
    """Whether this process prints for the whole job: it is rank 0, or no other launcher has started it."""
    return read_world_size() is None or os.environ["RANK"] == "0"


def _read_number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise LaunchError(f"environment variable {name}={os.environ[name]!r} is not a number") from None


def _adopt_slurm() -> None:
    """Sets the variables that torch expects from those of srun."""
    env = os.environ
    first = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", "localhost"))
    host = first.split(",")[0]
    if "[" in host:  # node[01-04] begins with node01
        prefix, _, rest = first.partition("[")
        host = prefix + rest.split(",")[0].split("-")[0].rstrip("]")
    env.setdefault("RANK", env["SLURM_PROCID"])
    env.setdefault("WORLD_SIZE", env["SLURM_NTASKS"])
    env.setdefault("LOCAL_RANK", env.get("SLURM_LOCALID", "0"))
    # "2" or "2(x3),1": the number of tasks on each node, in node order
    counts: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", env["SLURM_NTASKS"])).split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    env.setdefault("LOCAL_WORLD_SIZE", str(counts[min(int(env.get("SLURM_NODEID", "0")), len(counts) - 1)]))
    env.setdefault("MASTER_ADDR", host)
    # All nodes derive the same port from the job's id.
    env.setdefault("MASTER_PORT", str(15000 + int(env.get("SLURM_JOB_ID", "0")) % 40000))


@contextmanager
def telling_what_is_kept(run_dir: str, document: Mapping[str, Any]) -> Iterator[None]:
    """If the run in the block fails after it has trained, prints how to resume it, or that nothing was saved, and
    writes result.json.

    Prints nothing for a run that fails before its first log record: it has nothing to lose, and its error is enough.
    Writes result.json for it if the folder is new and remains, with a traceback for example.
    """
    # Compared afterwards: only what this run has added counts as its own.
    before, commits = _read_progress(run_dir), list_commits(run_dir, document)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        with suppress(DsjobError):  # the storage itself may have failed
            kept = list_commits(run_dir, document)
            if kept != commits or _read_progress(run_dir) != before:
                print_error(f"dsjob: {_describe_kept(run_dir, document, kept, commits)}")
                _write_failure(run_dir, error)
            elif before is None and os.path.exists(os.path.join(run_dir, RESOLVED_NAME)):
                _write_failure(run_dir, error)
        raise


def _write_failure(run_dir: str, error: BaseException) -> None:
    """Writes result.json for a run that `error` has ended. Keeps an existing one, which is an earlier run's, and leaves
    the folder to a newer run."""
    if os.path.exists(os.path.join(run_dir, RESULT_NAME)) or isinstance(error, FencedError):
        return
    code = error.exit_code if isinstance(error, DsjobError) else 130 if isinstance(error, KeyboardInterrupt) else 1
    status = "stopped" if isinstance(error, (Interrupted, Preempted, KeyboardInterrupt)) else "failed"
    message = error.message if isinstance(error, DsjobError) else describe_failure(error)
    write_result(run_dir, {"status": status, "exit_code": code, "error": message})


def _read_progress(run_dir: str) -> tuple[int, int] | None:
    """Differs once a run in the folder has written its first log record."""
    with suppress(OSError):
        found = os.stat(os.path.join(run_dir, METRICS_NAME))
        return found.st_mtime_ns, found.st_size
    return None


def _describe_kept(run_dir: str, document: Mapping[str, Any], commits: Sequence[str], before: Sequence[str]) -> str:
    if not commits:
        every = (document.get("checkpoint") or {}).get("every")
        hint = f"checkpoint.every is {every}" if every else "set checkpoint.every=N to save every N steps"
        return f"nothing was saved in {run_dir}; {hint}"
    newest = max(commits, key=lambda name: (len(name), name)).removesuffix(".json")
    news = "nothing newer was saved; " if commits == before else ""
    return f"{news}the newest checkpoint is {newest}; to resume: dsjob run {quote_path(run_dir)}"


def start(job: ResolvedJob, run_dir: str, *, trust: Trust, debug: bool, apart: bool = False) -> dict[str, Any]:
    """Runs a resolved job, in this process or in one process per rank. Returns the contents of `result.json`.

    apart: a single rank, too, has a process of its own.
    """
    if not os.path.exists(os.path.join(run_dir, RESOLVED_NAME)):
        write_resolved(run_dir, job.document)  # keeps the one of an earlier run until this run has begun
    # Before CUDA is initialised in any process: it reads these variables only once.
    visible = _choose_gpus(job.spec.launch)
    if job.spec.launch.nproc == 1 and not apart:
        os.environ.update(visible)
        _run_here(job, run_dir, trust)
    else:
        _start_ranks(job, run_dir, trust, debug, visible)
    return {**read_result(run_dir), "run_dir": run_dir}


def _choose_gpus(options: Launch) -> dict[str, str]:
    """The variables that let the ranks see the GPUs that `include` and `exclude` choose. Raises UsageError."""
    key = "include" if options.include is not None else "exclude"
    if (options.include is None and options.exclude is None) or options.device == "cpu":
        return {}
    torch = sys.modules.get("torch")
    try:
        gpus = devices.choose_gpus(options.include, options.exclude, devices.count_gpus(), "launch.{}")
        if len(gpus) < options.nproc:
            raise UsageError(f"launch.{key} leaves {len(gpus)} GPUs for {options.nproc} ranks (launch.nproc)")
        visible = devices.make_visible(gpus[: options.nproc])
        seen = {name: os.environ.get(name) for name in visible}
        # Several ranks are new processes. The second run of a sweep finds the variables of the first.
        if options.nproc == 1 and torch is not None and torch.cuda.is_initialized() and seen != visible:
            hint = "start the run in a process that has not used a GPU"
            raise UsageError(f"launch.{key} has no effect: this process uses a GPU already", hint=hint)
    except UsageError as error:
        error.put_at(("launch", key))
        raise
    return visible


def _run_here(job: ResolvedJob, run_dir: str, trust: Trust) -> None:
    from dsjob.ranks.mesh import join_world, leave_world
    from dsjob.ranks.watchdog import position
    from dsjob.training.job import run_job

    def stop(number: int, _: Any) -> None:
        raise Interrupted(number)

    rank.add_import_folders(trust.importable)
    rank.show_crashes()
    position.begin()
    # The default handler of SIGTERM would end the process without cleaning up.
    with handling({signal.SIGTERM: stop, signal.SIGINT: signal.default_int_handler}):
        run_job(job, run_dir, join_world(device=job.spec.launch.device), trust)
        leave_world()  # a single rank with offloaded parameters has a process group too


def _start_ranks(job: ResolvedJob, run_dir: str, trust: Trust, debug: bool, visible: Mapping[str, str]) -> None:
    options = job.spec.launch
    with temporary_folder() as private:
        handed = os.path.join(private, "job.json")
        # In a private folder, not among the arguments: other users could read those.
        storage.write_bytes(handed, job.to_text().encode())
        # -P keeps the current folder off sys.path: modules there would shadow installed ones, including dsjob itself.
        command = [sys.executable, "-P", "-m", rank.__name__, handed, run_dir]
        variables = {
            **list_variables(private, options.nproc, debug),
            **visible,
            "DSJOB_STORE": os.path.join(private, "store"),
            rank.TRUST_VARIABLE: trust.to_text(),
        }
        logs = make_logs(run_dir)
        with touching_save_request(run_dir):
            Supervisor(private, logs, options.timeout, options.grace).run(command, variables, options.nproc)
