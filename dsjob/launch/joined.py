"""One rank that torchrun, srun or another launcher has started: it joins the others, trains, and reports its failure.

A rank that fails only because another rank is gone says so, and ends with exit code 76. A job that Slurm has requeued
(`SLURM_RESTART_COUNT`) finds its run folder through `.slurm-JOB-STEP-NAME.json` next to that folder. Kubernetes offers
no count of pod restarts, so jobs there need an `output.dir` without `%time`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import count
from typing import Any

from dsjob.contract.resolved import ResolvedJob
from dsjob.errors import DocumentError, DsjobError, Interrupted, LostRankError, Preempted
from dsjob.launch import joining
from dsjob.launch.launcher import telling_what_is_kept
from dsjob.launch.rank import add_import_folders, show_crashes
from dsjob.ranks import meeting
from dsjob.ranks.agreement import on_rank_0
from dsjob.ranks.failures import Failure, has_hung_up, has_waited
from dsjob.ranks.mesh import World, abandon_world, leave_world
from dsjob.ranks.nodes import check_shared
from dsjob.ranks.signals import keeping_handler
from dsjob.ranks.stalls import place_records, record_collectives
from dsjob.ranks.watchdog import (
    OBSERVERS,
    StoreBoard,
    Watchdog,
    explain_stall,
    position,
)
from dsjob.run_folder import make_run_dir, marking_running, read_result
from dsjob.torch_private import get_store
from dsjob.training.job import run_job
from dsjob.trust.frames import drop_path
from dsjob.trust.grant import Trust

_runs = count()  # numbers the runs of this process: a sweep under torchrun has several


def join(
    job: ResolvedJob, *, trust: Trust, check_folder: Callable[[str], None], run_dir: str | None = None
) -> dict[str, Any]:
    """Runs a resolved job as one of the ranks of another launcher. All ranks use rank 0's job and `run_dir`.

    `run_dir`: the run's folder, if it exists already. `check_folder`: called with it on rank 0; raises a DocumentError
    if the job must not run there. Returns the contents of `result.json` on every rank. Raises LostRankError if another
    rank caused the failure. Otherwise the message names this rank; an exception of user code becomes a LaunchError.
    """
    add_import_folders(trust.importable)
    show_crashes()
    options = job.spec.launch
    record_collectives()
    abandon_world()  # a failed earlier run of a sweep leaves its process group behind
    world = joining.join(options, trust)
    if world.everyone.size == 1:
        return _run(job, world, trust, check_folder, run_dir)
    position.begin()
    # dsjob did not start these ranks, so they share no private folder, but they share the rendezvous store.
    board = StoreBoard(get_store(), world.everyone.rank, world.everyone.size)
    watchdog = Watchdog(board, rank=world.everyone.rank, timeout=options.timeout)
    with keeping_handler(signal.SIGTERM):  # training leaves it ignored when it fails
        try:
            return _run(job, world, trust, check_folder, run_dir)
        except (DocumentError, Preempted, Interrupted):  # all ranks raise these alike
            position.doing = "ending"
            raise
        except (Exception, SystemExit) as error:
            position.doing = "ending"
            described = _describe(error, world.everyone.rank, board, watchdog)
            with suppress(RuntimeError):  # the store is gone, so nobody could read the record
                board.tell_failed(described.message)
            raise described from error
        finally:
            watchdog.stop()


def _run(
    job: ResolvedJob, world: World, trust: Trust, check_folder: Callable[[str], None], run_dir: str | None
) -> dict[str, Any]:
    settled, run_dir = on_rank_0(world.everyone, lambda: _settle_folder(job, run_dir))
    on_rank_0(world.everyone, lambda: check_folder(run_dir))
    if job.spec.trains:
        check_shared(settled.spec.checkpoint.dir or os.path.join(run_dir, "checkpoints"), world)
    if os.path.isdir(run_dir):  # may be missing on other nodes if checkpoints go to an object store
        place_records(run_dir)
    first = world.everyone.rank == 0
    telling = telling_what_is_kept(run_dir, settled.document) if first else nullcontext()
    with telling, marking_running(run_dir) if first else nullcontext(), _dropping_foreign_places(job, settled):
        run_job(settled, run_dir, world, trust)
    result = on_rank_0(world.everyone, lambda: read_result(run_dir))
    leave_world()  # not after a failure: it would wait for ranks that are stuck in a collective
    return {**result, "run_dir": run_dir}


@contextmanager
def _dropping_foreign_places(own: ResolvedJob, counts: ResolvedJob) -> Iterator[None]:
    """Removes places from errors if this rank composed another document than rank 0, whose document is in use: line
    numbers may differ."""
    try:
        yield
    except Exception as error:
        if {**own.document, "checkpoint": None} != {**counts.document, "checkpoint": None}:  # a restart resumes
            drop_path(error)
        raise


def _settle_folder(job: ResolvedJob, run_dir: str | None) -> tuple[ResolvedJob, str]:
    """The job and the run's folder. After a restart by torchrun, the folder of the earlier start, to resume from."""
    key = f"run_dir/{next(_runs)}"
    earlier = meeting.recall(key)
    if earlier is not None:
        os.makedirs(earlier, exist_ok=True)
        policy = job.spec.checkpoint.resume
        if policy in ("auto", "required") or "/" in policy or not job.spec.trains:
            return job, earlier
        return job.resuming(), earlier  # the first start already followed `never` or the tag; a restart must resume
    run_dir = run_dir or make_run_dir(job.document["output"]["dir"], job.spec.name)
    # Absolute: the next start may be in another current folder.
    meeting.keep(key, os.path.abspath(run_dir))
    return job, run_dir


def _describe(error: BaseException, rank: int, board: StoreBoard, watchdog: Watchdog) -> DsjobError:
    """The error to report: this rank's own failure, or LostRankError if another rank caused it."""
    failure = Failure.of(rank, error)
    return describe_lost(error, failure, board, watchdog) if failure.follows else failure.to_error()


def describe_lost(error: BaseException, failure: Failure, board: StoreBoard, watchdog: Watchdog) -> LostRankError:
    """The error to report for `error`, the `failure` of this rank, which another rank has caused."""
    message, rank = failure.message, failure.rank
    if not has_waited(error):
        told = ""
        with suppress(RuntimeError):  # the store is gone with rank 0
            told = board.read_failure()
        if told:
            hint = "the output of that rank has more"
        else:
            hint = "the cause is in the output of the rank that failed first; if it has none, that rank was killed"
            told = "its connection was closed" if has_hung_up(error) else message
        return LostRankError(f"rank {rank} has lost another rank: {told}", hint=hint)
    try:
        late = explain_stall(board) if rank < OBSERVERS else ""
    except RuntimeError:
        late = ""
    told, _, stack = late.partition("\n")
    hint = "its stack is above" if watchdog.told else stack or "another rank has the cause"
    return LostRankError(f"rank {rank} timed out waiting for another rank: {told or message}", hint=hint)
