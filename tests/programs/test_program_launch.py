"""How `dsjob exec` starts ranks, and how it becomes one that another launcher has started."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from executed import execute


@pytest.mark.parametrize("given", ["taken", "99999"])
def test_a_port_that_cannot_be_used_is_told_before_ranks_start(tmp_path: Path, given: str) -> None:
    (tmp_path / "train.py").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1]) if given == "taken" else given
        done = execute(tmp_path, "--master_port", port, "train.py")
    assert done.returncode == 2
    assert f"dsjob: error: --master_port {port} cannot be used: " in done.stderr
    assert "leave it out, and a free port is chosen" in done.stderr
    assert not (tmp_path / "run").exists()


def test_under_another_launcher_rank_0_alone_tells_that_a_signal_stopped_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "stopped.py").write_text("from dsjob.errors import Preempted\nraise Preempted('saved', hint='again')\n")
    ranks = [execute(tmp_path, "stopped.py", RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2") for rank in ("0", "1")]
    began = "dsjob exec: stopped.py on 2 ranks, run folder run\n"
    assert [(done.returncode, done.stderr) for done in ranks] == [(75, f"{began}dsjob: saved\n  again\n"), (75, "")]


def test_more_ranks_than_a_machine_has_room_for_are_refused(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("open('ran', 'w')")
    done = execute(tmp_path, "--num_gpus", "100000", "program.py")
    assert done.returncode == 2
    assert "dsjob: error: --num_gpus 100000 is more than 1,024, the most ranks of one machine" in done.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "program.py"]
