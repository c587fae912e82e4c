"""Which of several failures came first, and which only followed from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dsjob.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    DataError,
    DsjobError,
    Interrupted,
    LaunchError,
    MetricError,
    Preempted,
    Problem,
    StorageError,
    TargetError,
    UsageError,
)
from dsjob.ranks.failures import (
    End,
    Failure,
    Scene,
    blame,
    follows_from_another,
    has_waited,
    read_failures,
    record_failure,
)
from dsjob.ranks.stalls import Beat, parse_stack

LOST = [
    "[.../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:909. This is typically caused by ...",
    "[.../gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:39129: Connection reset by peer",
    "[.../gloo/transport/tcp/pair.cc:598] Write error [10.0.0.2]:4242: Broken pipe",
    "Gloo connectFullMesh failed with [.../gloo/transport/tcp/pair.cc:144] no error",
    "NCCL error in: .../ProcessGroupNCCL.cpp:2077, remote process exited or there was a network error, NCCL version 2",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "NCCL communicator was aborted on rank 3.",
    "failed to recv, got 0 bytes",
    "DataLoader worker (pid 77) is killed by signal: Terminated.",
]
WAITED = [
    "[.../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete",
    "Application timeout caused pair closure",
    "wait timeout after 300000ms, keys: /default_pg/0//cuda//0/0",
    "Socket Timeout",
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=57, OpType=ALLREDUCE, Timeout(ms)=600000)",
]


@pytest.mark.parametrize("text", LOST)
def test_an_error_over_a_lost_rank_follows_from_it(text: str) -> None:
    assert follows_from_another(RuntimeError(text))
    assert not has_waited(RuntimeError(text))


@pytest.mark.parametrize("text", WAITED)
def test_an_error_over_a_late_rank_follows_from_it(text: str) -> None:
    assert follows_from_another(RuntimeError(text))
    assert follows_from_another(CheckpointError(f"rank 0: RuntimeError: {text}"))
    assert has_waited(RuntimeError(text))


def test_errors_of_torchs_own_kinds_follow_and_those_of_data_do_not() -> None:
    kind = type("DistBackendError", (RuntimeError,), {})
    assert follows_from_another(kind("whatever NCCL says"))
    assert not follows_from_another(ConnectionResetError("Connection reset by peer: the data server"))
    assert not follows_from_another(ValueError("shapes do not fit"))


@pytest.mark.parametrize("kind", [DataError, StorageError, TargetError, MetricError])
def test_an_error_that_quotes_the_users_connections_is_the_ranks_own(kind: type[DsjobError]) -> None:
    text = "Connection reset by peer, then Socket Timeout"
    own, quoted = kind(f"data.train[5] failed: {text}"), kind(f"data.train[5] failed: {text}")
    quoted.__cause__ = ConnectionResetError(text)
    for error in (own, quoted):
        assert not follows_from_another(error)
        assert not has_waited(error)
    quoted.__cause__ = RuntimeError(LOST[0])  # of a collective in the user's code
    assert follows_from_another(quoted)


def fail(rank: int, time: int, message: str = "ValueError: no", **changes: Any) -> Failure:
    return Failure(
        **{"rank": rank, "time": time, "message": message, "hint": "", "exit_code": 1, "follows": False} | changes
    )


def follow(rank: int, time: int, **changes: Any) -> Failure:
    return fail(rank, time, "RuntimeError: Connection closed by peer", follows=True, **changes)


def set_scene(*, size: int = 3, **found: Any) -> Scene:
    empty: dict[str, Any] = {"failures": [], "ends": [], "beats": {}, "stacks": {}, "stopped": frozenset()}
    return Scene(**{**empty, **found}, world_size=size, logs="run/logs")


@pytest.mark.parametrize(
    ("scene", "said"),
    [
        (set_scene(failures=[follow(0, 1), fail(1, 5), fail(2, 7)]), "rank 1: ValueError: no"),
        (set_scene(failures=[follow(0, 5), follow(2, 4)], ends=[End(1, -9, 6, False)]), "rank 1 was killed by SIGKILL"),
        (set_scene(failures=[fail(0, 5)], ends=[End(1, -11, 4, False)]), "rank 1 was killed by SIGSEGV"),
        (set_scene(failures=[fail(0, 3)], ends=[End(1, -11, 4, False)]), "rank 0: ValueError: no"),
        (set_scene(failures=[follow(0, 5)], ends=[End(1, 0, 4, False)]), "rank 1 exited with code 0"),
        (set_scene(failures=[follow(0, 5)], ends=[End(1, 0, 4, True), End(0, 1, 6, False)]), "rank 0: RuntimeError"),
        (set_scene(failures=[follow(2, 5), follow(0, 6)]), "rank 2: RuntimeError: Connection closed by peer"),
    ],
)
def test_the_first_own_failure_is_blamed(scene: Scene, said: str) -> None:
    assert str(blame(scene)).startswith(said)


def test_a_rank_is_named_with_its_stage_of_a_pipeline() -> None:
    beats = {rank: Beat(3, 6, 9 - rank, "training", stage=rank // 2) for rank in range(4)}
    killed = blame(set_scene(size=4, ends=[End(2, -9, 6, False)], beats=beats))
    assert str(killed).startswith("rank 2 (stage 1 of the pipeline) was killed by SIGKILL")
    stuck = blame(set_scene(size=4, beats=beats, stuck=True))
    assert str(stuck).startswith("rank 3 (stage 1 of the pipeline) has stalled in step 4 (training)")
    assert str(blame(set_scene(failures=[fail(1, 5)], beats=beats))).startswith("rank 1 (stage 0 of the pipeline): Val")
    early = set_scene(failures=[fail(1, 5, stage=1)], beats={1: Beat(0, 0, 0, "training")})  # since its last beat
    assert str(blame(early)).startswith("rank 1 (stage 1 of the pipeline): Val")


@pytest.mark.parametrize("output", ["", "epoch 3\n"])
def test_the_logs_are_named_where_they_have_output(output: str) -> None:
    hint = blame(set_scene(ends=[End(1, -9, 6, False, output=output)])).hint
    assert ("its output is in run/logs" in hint) == bool(output)


def test_ranks_that_nccl_has_aborted_are_not_blamed_for_the_one_they_waited_for() -> None:
    text = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=57, OpType=ALLREDUCE)"
    ends = [End(0, -6, 4, False, timed_out=True), End(2, -6, 5, False, output=text)]
    beats = {0: Beat(7, 14, 57, "training"), 1: Beat(7, 13, 56, "evaluating"), 2: Beat(7, 14, 57, "training")}
    stacks = {1: ("/home/me/data.py:12 in read", "/home/me/data.py:40 in __getitem__")}
    error = blame(set_scene(ends=ends, beats=beats, stacks=stacks))
    assert error.message.startswith("rank 1 has stalled in step 8 (evaluating), at /home/me/data.py:12 in read")
    assert "/home/me/data.py:40 in __getitem__" in error.hint


def test_of_ranks_that_are_late_the_one_behind_all_others_is_named() -> None:
    waits = ("/site-packages/torch/distributed/distributed_c10d.py:99 in all_reduce", "/home/me/net.py:3 in forward")
    stacks = {1: waits, 2: ("/home/me/net.py:9 in forward",)}
    failures = [follow(0, 1, waited=True)]
    beats = {0: Beat(4, 4, 30, "training"), 1: Beat(4, 4, 30, "training"), 2: Beat(4, 4, 30, "training")}
    assert "rank 2 has stalled" in str(blame(set_scene(failures=failures, beats=beats, stacks=stacks)))
    behind = {**beats, 1: Beat(4, 4, 28, "training"), 2: Beat(4, 4, 29, "training")}
    assert "rank 1 has stalled" in str(blame(set_scene(failures=failures, beats=behind, stacks=stacks)))
    held = set_scene(failures=failures, beats=beats, stacks=stacks, stopped=frozenset({1}))
    assert "rank 1 was stopped by a signal" in str(blame(held))


class RefusedError(DataError):
    """An error of a program's own, whose module the launcher does not import."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (CorruptCheckpointError("weights.safetensors has 200 bytes", hint="restore it from a copy"), None),
        (UsageError("checkpoint.resume: no such folder", hint="correct it"), None),
        (Interrupted(15, "stopped by SIGTERM"), None),
        (LaunchError("no such device", exit_code=9), None),
        (RefusedError("no such split", hint="use train"), DataError),
        (ConfigError([Problem("must be positive", ("zero_optimization", "stage"), hint="use 1")]), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_reads_the_same_from_all_ranks_as_from_one(
    tmp_path: Path, error: DsjobError, kind: type[DsjobError] | None
) -> None:
    error.path = ("data", "train")
    for rank in range(2):
        record_failure(str(tmp_path), Failure.of(rank, error))
    failures = read_failures(str(tmp_path))
    found = blame(set_scene(size=2, failures=failures))
    assert type(found) is (kind or type(error))
    assert (str(found), found.exit_code) == (str(error), error.exit_code)
    assert getattr(found, "problems", ()) == getattr(error, "problems", ())
    alone = blame(set_scene(size=2, failures=failures[1:]))
    assert type(alone) is type(found)
    if not isinstance(error, ConfigError):
        assert (alone.message, alone.path) == (f"rank 1: {error.message}", ("data", "train"))


def test_an_error_without_a_text_is_recorded() -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise KeyError("no text")

    assert Failure.of(0, BrokenError()).message.startswith(
        "BrokenError: (its text cannot be shown: __str__ raised KeyError)"
    )


def test_an_error_of_user_code_is_a_launch_error() -> None:
    found = Failure.of(3, KeyError("hidden")).to_error()
    assert type(found) is LaunchError
    assert str(found) == "rank 3: KeyError: 'hidden'\n  run again with --debug for the traceback"


def test_an_error_of_user_code_that_ran_out_of_memory_says_what_to_lower() -> None:
    for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("[...] can't allocate memory: 4 TB")):
        assert Failure.of(0, error).hint.startswith("lower trainer.micro_batch, or see what fits with `dsjob plan`; ")


def test_a_save_for_a_signal_is_what_the_run_ended_with() -> None:
    saved = fail(0, 9, "stopped by SIGTERM after step 3", exit_code=Preempted.exit_code, kind="Preempted")
    assert isinstance(blame(set_scene(failures=[follow(1, 2), saved])), Preempted)


def test_the_main_thread_is_read_out_of_what_faulthandler_writes() -> None:
    text = """Fatal Python error: Aborted

Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f2 (most recent call first):
  File "/home/me/net.py", line 9 in forward
  File "/home/me/net.py", line 20 in <module>
"""
    assert parse_stack(text) == ("/home/me/net.py:9 in forward", "/home/me/net.py:20 in <module>")
    assert parse_stack("") == ()
