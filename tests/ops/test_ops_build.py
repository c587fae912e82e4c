"""Building: one build for many processes, nothing half-built, and no library from a folder that others can write to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from machine import lacks_commands
from programs import Program, clean_env, run_program

from dsjob.errors import BuildError
from dsjob.home import find_again
from dsjob.ops import build, loading, registry, toolchain
from dsjob.ops.registry import Op
from dsjob.ops.toolchain import Toolchain

LACKING = lacks_commands(os.environ.get("CXX", "c++"))
needs_compiler = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))

GOOD = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Op:
    """An op of one line, and an empty cache. Forks compile it: a new interpreter would import torch for that."""

    def run(command: list[str], *, env: dict[str, str], **_: object) -> Any:
        return run_program(command, env=env, cwd=tmp_path, merged=True)

    monkeypatch.setattr(build, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT))
    monkeypatch.setenv("DSJOB_OPS_DIR", str(tmp_path / "cache"))
    (tmp_path / "csrc" / "tiny").mkdir(parents=True)
    (tmp_path / "csrc" / "tiny" / "tiny.cpp").write_text(GOOD)
    monkeypatch.setattr(registry, "SOURCES", tmp_path / "csrc")
    op = Op("tiny", "cpu", "tests", "nothing", ("TINY",))
    monkeypatch.setitem(registry.OPS, "tiny", op)
    return op


# A process of its own does not know the op of the fixture.
BUILD = """
import sys, time
from pathlib import Path
from dsjob.ops import build, registry
registry.SOURCES = Path(sys.argv[1])
op = registry.OPS["tiny"] = registry.Op("tiny", "cpu", "tests", "nothing", ("TINY",))
def compiled(op, work):
    (work / "out").mkdir()
    print("compiling", flush=True)
    (work / "out" / "tiny.so").write_text("half")
    while not Path(sys.argv[2]).exists():
        time.sleep(0.01)
    (work / "out" / "tiny.so").write_text("whole")
build._compile = compiled
print(build.build(op).read_text(), flush=True)
"""


def start(sources: Path) -> Program:
    """Builds, but ends only when there is a file `go`."""
    command = [sys.executable, "-c", BUILD, str(sources), str(sources.parent / "go")]
    return Program(command, env=clean_env(**find_again()), cwd=sources.parent)


def wait_until_it_compiles(program: Program) -> None:
    while program.stdout != "compiling\n":
        assert program.returncode is None, program.stderr
        time.sleep(0.01)


def test_many_processes_build_once_and_a_killed_build_leaves_nothing(tiny: Op, tmp_path: Path) -> None:
    sources = tmp_path / "csrc"
    first = start(sources)
    wait_until_it_compiles(first)
    waiting = [start(sources) for _ in range(2)]
    first.kill()
    first.wait(60)
    # Exactly one of those that wait takes over; the other finds what it built.
    (tmp_path / "go").touch()
    outputs = [process.communicate(timeout=60)[0] for process in waiting]
    assert sorted(outputs) == ["compiling\nwhole\n", "whole\n"]
    cache = tmp_path / "cache"
    assert sorted(path.name for path in cache.iterdir()) == [build.key_of(tiny), f"{build.key_of(tiny)}.lock"]


@needs_compiler
def test_an_op_is_built_again_only_if_something_changed(
    tiny: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0)
    try:
        library = build.build(tiny)
    finally:
        os.umask(before)
    assert library.parent.stat().st_mode & 0o777 == 0o700  # nobody else may exchange the library
    built = library.stat().st_mtime_ns
    assert build.build(tiny) == library == build.find_built(tiny)
    assert library.stat().st_mtime_ns == built
    (tmp_path / "csrc" / "tiny" / "tiny.h").write_text("// only included\n")
    assert build.find_built(tiny) is None
    key = build.key_of(tiny)
    monkeypatch.setattr(toolchain.torch, "__version__", "9.9.9")
    assert build.key_of(tiny) != key


@needs_compiler
def test_a_compiler_error_is_shown_and_leaves_nothing(tiny: Op, tmp_path: Path) -> None:
    (tmp_path / "csrc" / "tiny" / "tiny.cpp").write_text("int answer() { return undeclared; }\n")
    with pytest.raises(
        BuildError, match=r"cannot build tiny: the compiler failed:\n.*tiny.cpp:1:23: error: .undeclared"
    ):
        build.build(tiny)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    loading.load.cache_clear()
    assert "undeclared" in loading.load("tiny")


DIGITS = """
#include <sstream>
extern "C" int answer() { std::ostringstream text; text << 12345L; return int(text.str().size()); }
"""


@needs_compiler
def test_a_compiler_that_links_its_library_statically_makes_ops_that_share_torchs(
    tiny: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with such a compiler, the message of an op's error ended in a segmentation fault."""
    wrapper = tmp_path / "g++"
    wrapper.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "c++")} "$@" -static-libstdc++\n')
    wrapper.chmod(0o700)
    monkeypatch.setenv("CXX", str(wrapper))
    (tmp_path / "csrc" / "tiny" / "tiny.cpp").write_text(DIGITS)
    library = build.build(tiny)
    script = f"import ctypes, torch; print(ctypes.CDLL({str(library)!r}).answer())"
    assert run_program([sys.executable, "-c", script], env=clean_env(), cwd=tmp_path).stdout == "5\n"


TRACEBACK = "Traceback (most recent call last):\n  File x\n"


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("a.cpp:1:1: error: boom\nmore\na.cpp:1:1: error: boom\n", ["a.cpp:1:1: error: boom"]),
        (
            f"nvcc fatal   : Unsupported gpu architecture 'compute_99'\n{TRACEBACK}RuntimeError: failed",
            ["nvcc fatal   : Unsupported gpu architecture 'compute_99'"],
        ),
        (
            f"running\n{TRACEBACK}\n{TRACEBACK}ValueError: no",
            ["running", "ValueError: no"],
        ),
        ("out of memory\n", ["out of memory"]),
        ("", []),
    ],
)
def test_a_failed_build_shows_what_is_wrong_without_tracebacks(output: str, shown: list[str]) -> None:
    assert build._find_errors(output) == shown


def test_a_folder_that_others_can_write_to_is_refused(
    tiny: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else another user could place a library there, and this one would run its code."""
    cache = build.open_cache()
    assert cache.stat().st_mode & 0o777 == 0o700
    cache.chmod(0o770)
    with pytest.raises(BuildError, match="other users can write to the folder of built ops"):
        build.build(tiny)
    assert build.find_built(tiny) is None
    cache.chmod(0o700)
    tmp_path.chmod(0o777)
    with pytest.raises(BuildError, match=f"they can write to {tmp_path}"):
        build.open_cache()
    tmp_path.chmod(0o700)
    for name in ("DSJOB_OPS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def lack(user: int) -> None:
        raise KeyError(user)

    with monkeypatch.context() as nameless:
        nameless.delenv("HOME")
        nameless.setattr("pwd.getpwuid", lack)
        with pytest.raises(BuildError, match="this user has no home folder"):
            build.open_cache()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DSJOB_OPS_DIR", "~/own")
    assert build.open_cache() == tmp_path / "own"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSJOB_OPS_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(BuildError, match="cannot create the folder of built ops"):
        build.open_cache()


@pytest.mark.parametrize(
    ("environment", "chosen"),
    [
        ({}, False),
        ({"DSJOB_BUILD_OPS": "1"}, True),
        ({"DS_BUILD_OPS": "1"}, True),
        ({"DS_BUILD_OPS": "1", "DS_BUILD_CPU_ADAM": "0"}, False),
        ({"DS_BUILD_CPU_ADAM": "1"}, True),
        ({"DS_BUILD_FUSED_LAMB": "1"}, False),
    ],
)
def test_the_environment_chooses_what_a_wheel_contains(
    environment: dict[str, str], chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    op = registry.OPS["cpu_optimizers"]
    assert (op in registry.choose_prebuilt()) is chosen
    assert registry.is_demanded(op) is ("DS_BUILD_CPU_ADAM" in environment and chosen)


@needs_compiler
def test_a_library_in_the_wheel_needs_no_cache(tiny: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prebuilt = tmp_path / "built"
    prebuilt.mkdir()
    library = build.build_prebuilt(tiny, prebuilt)
    monkeypatch.setattr(build, "PREBUILT", prebuilt)
    monkeypatch.setenv("DSJOB_OPS_DIR", "/proc/nowhere")
    # The machine that runs the wheel may have no compiler.
    monkeypatch.setattr(toolchain, "find_toolchain", lambda: Toolchain("", "", "2.13", "", "", ""))
    assert build.build(tiny) == library
    (library.parent / "architectures").write_text("8.0")
    monkeypatch.setattr(build, "own_architectures", lambda: "9.0")
    assert build.find_built(tiny) is None  # it would not run on this machine's GPUs


@pytest.mark.full
def test_a_waiting_process_ends_with_ctrl_c(tiny: Op, tmp_path: Path) -> None:
    first = start(tmp_path / "csrc")
    wait_until_it_compiles(first)
    second = start(tmp_path / "csrc")
    try:
        time.sleep(2)  # until it waits for the lock
        os.kill(second.pid, signal.SIGINT)
        assert second.wait(timeout=30) != 0
    finally:
        first.kill()
        second.kill()
