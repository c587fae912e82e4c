"""`dsjob ops`: what is there, what can be built, and building it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from machine import lacks_commands

from dsjob.cli import main
from dsjob.ops import registry, toolchain

LACKING = lacks_commands(os.environ.get("CXX", "c++"))


@pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
def test_ops_are_listed_and_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSJOB_OPS_DIR", str(tmp_path / "ops"))
    # The real sources take ten seconds to compile, and tests/ops compiles them anyway.
    monkeypatch.setattr(registry, "SOURCES", tmp_path / "csrc")
    for name in registry.OPS:
        (tmp_path / "csrc" / name).mkdir(parents=True)
        (tmp_path / "csrc" / name / "binding.cpp").write_text('extern "C" int answer() { return 42; }\n')
    assert main(["ops"]) == 0
    listed = capsys.readouterr().out
    assert "cpu_optimizers (cpu): not built yet\n  used by: optimizer.type Adam" in listed
    assert all(len(line) < 140 for line in listed.splitlines())
    assert main(["ops", "build", "cpu_optimizers"]) == 0
    out, err = capsys.readouterr()
    library = out.removeprefix("cpu_optimizers: ").strip()
    assert err == "dsjob: building the native op cpu_optimizers (once per machine, about 10 seconds)\n"
    assert main(["ops", "build", "cpu_optimizers"]) == 0
    assert capsys.readouterr().err == ""
    assert Path(library).is_relative_to(tmp_path)
    assert main(["ops", "--json"]) == 0
    op, *others = json.loads(capsys.readouterr().out)["ops"]
    assert [each["name"] for each in others] == [
        *("onebit", "onebit_cuda", "transformer"),
        *("lamb", "linear_cross_entropy", "fused_adam", "foreach_lion"),
    ]
    assert others[0]["state"] == "not built yet"
    assert main(["ops", "build", "fused_adam"]) == 2
    assert "fused_adam is plain torch: there is nothing to build" in capsys.readouterr().err
    assert (op["name"], op["state"], op["library"]) == ("cpu_optimizers", "built", library)


def test_the_reason_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSJOB_OPS_DIR", str(tmp_path / "ops"))
    monkeypatch.setenv("CXX", "a-compiler-that-does-not-exist")
    toolchain.find_toolchain.cache_clear()
    try:
        assert main(["ops"]) == 0
        reason = "CXX is a-compiler-that-does-not-exist, which cannot be run"
        assert f"cannot be built: {reason}" in capsys.readouterr().out
        assert main(["ops", "build", "cpu_optimizers"]) == 1
        assert "install g++ or clang++, or set CXX" in capsys.readouterr().err
        assert main(["ops", "build"]) == 1
        out, err = capsys.readouterr()
        assert f"cpu_optimizers is left out: {reason}" in out
        assert f"no op can be built on this machine\n  {reason}" in err
        assert main(["ops", "build", "cpu_optimizer"]) == 2
        assert "available: cpu_optimizers" in capsys.readouterr().err
    finally:
        toolchain.find_toolchain.cache_clear()
