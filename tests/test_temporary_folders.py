"""Temporary folders: a killed process's are deleted at the next start, and no others."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsjob.files import keep_only, temporary_folder

HOLD = """
import os, sys, time
from dsjob.files import temporary_folder
with temporary_folder() as folder:
    if os.fork() == 0:  # a child, such as a worker that loads data, outlives the process
        time.sleep(60)
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process in a temporary folder, and that folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        os.killpg(process.pid, signal.SIGKILL)


def start() -> None:
    with temporary_folder():
        pass


def test_the_folder_of_a_killed_process_is_deleted_at_the_next_start(
    owner: tuple[subprocess.Popen[str], Path], tmp_path: Path
) -> None:
    process, folder = owner
    (folder / "job.json").write_text("{}")
    start()
    assert (folder / "job.json").exists()  # its process lives
    process.kill()
    process.wait()
    start()
    assert list(tmp_path.iterdir()) == []


def test_only_folders_of_ones_own_dead_processes_are_deleted(
    owner: tuple[subprocess.Popen[str], Path], tmp_path: Path
) -> None:
    process, dead = owner
    process.kill()
    process.wait()
    mine = (dead / ".owner").read_bytes()
    assert mine == socket.gethostname().encode()
    elsewhere = tmp_path / "elsewhere"
    for folder, name in ((elsewhere, mine), (tmp_path / "dsjob-node", b"another machine"), (tmp_path / "other", mine)):
        folder.mkdir()
        (folder / ".owner").write_bytes(name)
    (tmp_path / "dsjob-link").symlink_to(elsewhere)
    (tmp_path / "dsjob-unmarked").mkdir()
    (tmp_path / "dsjob-pipe").mkdir()
    os.mkfifo(tmp_path / "dsjob-pipe" / ".owner")
    (tmp_path / "dsjob-file").write_text("")
    if os.geteuid() == 0:
        (tmp_path / "dsjob-others").mkdir()
        (tmp_path / "dsjob-others" / ".owner").write_bytes(mine)
        os.chown(tmp_path / "dsjob-others", 65534, 65534)
    before = {path.name for path in tmp_path.iterdir()}
    start()
    assert before - {path.name for path in tmp_path.iterdir()} == {dead.name}
    assert (elsewhere / ".owner").exists()


def test_a_folder_that_is_kept_stays_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with temporary_folder("smoke") as name:
        folder = Path(name)
        (folder / "logs").mkdir()
        (folder / "resolved.json").write_text("{}")
        keep_only(name, "logs")
    start()
    assert [path.name for path in folder.iterdir()] == ["logs"]
    assert list(tmp_path.iterdir()) == [folder]
