"""Where compiled code is kept: not in the folder of the temporary directory that any user can create first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from executed import execute
from jobs import dsjob, make_job

from dsjob.files import open_cache

TELL = """
import json, os
from my_model import Net

def build():
    import torch
    from torch._inductor import codecache
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir, triton_cache_dir
    found = [cache_dir(), default_cache_dir(), triton_cache_dir(0), codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR]
    with open(f"caches-{os.environ.get('RANK', '0')}.json", "w") as file:
        json.dump(found, file)
    return Net()
"""
PROGRAM = """
import telling, torch, deepspeed
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}, "compile": {"enabled": True}}
deepspeed.initialize(model=torch.nn.Linear(1, 1), config=config)
telling.build()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # which an engine in another test may have set
    make_job(tmp_path, trainer={"train_batch": 8, "max_steps": 2}, model={"_target_": "telling.build"})
    (tmp_path / "telling.py").write_text(TELL)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "cache").mkdir(mode=0o700)
    return tmp_path


def run(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    places = {"TMPDIR": str(folder / "tmp"), "XDG_CACHE_HOME": str(folder / "cache"), **env}
    return dsjob("cfg.json", *words, cwd=folder, **places)


def read_caches(folder: Path, rank: int = 0) -> list[str]:
    found: list[str] = json.loads((folder / f"caches-{rank}.json").read_text())
    return found


@pytest.mark.parametrize(("nproc", "fresh"), [(1, True), (2, False)])
def test_every_rank_has_the_users_private_folder(folder: Path, nproc: int, fresh: bool) -> None:
    """Also where the model's own code calls torch.compile."""
    env: dict[str, Any] = {"TMPDIR": str(folder / "tmp"), "XDG_CACHE_HOME": str(folder / "cache")}
    done = dsjob("cfg.json", f"launch.nproc={nproc}", cwd=folder, fresh=fresh, **env)
    assert done.returncode == 0, done.stderr
    (private,) = (folder / "cache/dsjob/compiled").iterdir()
    assert private.stat().st_mode & 0o777 == 0o700
    for rank in range(nproc):
        assert all(Path(path).is_relative_to(private) for path in read_caches(folder, rank))
    assert list((folder / "tmp").iterdir()) == []


def test_an_engine_of_a_program_has_it_too(folder: Path) -> None:
    (folder / "program.py").write_text(PROGRAM)
    done = execute(folder, "program.py", XDG_CACHE_HOME=str(folder / "cache"), TMPDIR=str(folder / "tmp"))
    assert done.returncode == 0, done.stderr
    assert all(Path(path).is_relative_to(folder / "cache/dsjob/compiled") for path in read_caches(folder))


def test_a_folder_that_the_user_chooses_is_used_for_all_of_it(folder: Path) -> None:
    done = run(folder, TORCHINDUCTOR_CACHE_DIR=str(folder / "mine"))
    assert done.returncode == 0, done.stderr
    assert all(Path(path).is_relative_to(folder / "mine") for path in read_caches(folder))


def test_torchs_own_choice_is_not_the_users(folder: Path) -> None:
    """torch sets the variable when it first asks for its folder, here in the program that runs the job."""
    program = (
        "import os, dsjob\n"
        "from torch._inductor import codecache\n"
        "from torch._inductor.runtime.cache_dir_utils import cache_dir\n"
        "assert cache_dir().startswith(os.environ['TMPDIR'])\n"
        "dsjob.run('cfg.json')\n"
        "assert cache_dir().startswith(os.environ['TMPDIR'])\n"  # as before the run
    )
    env = {**os.environ, "TMPDIR": str(folder / "tmp"), "XDG_CACHE_HOME": str(folder / "cache")}
    subprocess.run([sys.executable, "-c", program], cwd=folder, env=env, check=True, capture_output=True)
    assert all(Path(path).is_relative_to(folder / "cache/dsjob/compiled") for path in read_caches(folder))


def test_a_folder_that_others_can_write_to_is_refused_where_code_is_compiled(folder: Path) -> None:
    assert run(folder).returncode == 0
    (private,) = (folder / "cache/dsjob/compiled").iterdir()
    private.chmod(0o777)
    assert run(folder, "output.dir=again").returncode == 0  # nothing is compiled
    done = run(folder, "compile.enabled=true", "compile.backend=eager", "output.dir=third")
    assert done.returncode == 1
    assert f"other users can write to the folder of compiled code {private}" in done.stderr
    assert "chmod 700" in done.stderr
    assert "TORCHINDUCTOR_CACHE_DIR" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder to another user")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dsjob").mkdir(mode=0o700)
    os.chown(tmp_path / "dsjob", 65534, 65534)
    with pytest.raises(Exception, match="other users can write to the folder of compiled code"):
        open_cache("compiled", "compiled code", str(tmp_path / "dsjob"), "DIR")


@pytest.mark.slow
def test_inductor_neither_reads_nor_writes_the_shared_folder(folder: Path) -> None:
    """It belongs to another user, who has put code there that would run; the next run uses the private one again."""
    shared = folder / "tmp/torchinductor_victim"
    (shared / "precompiled_headers").mkdir(parents=True)
    (shared / "cache").write_text("not a folder")  # an error for whoever looks for files in it
    if os.geteuid() == 0:
        os.chown(shared, 65534, 65534)
    before = [(path, path.stat().st_mtime_ns, path.stat().st_atime_ns) for path in sorted(shared.rglob("*"))]
    names = {"USER": "victim", "LOGNAME": "victim"}
    built: set[Path] = set()
    for name in ("first", "second"):
        done = run(folder, "compile.enabled=true", f"output.dir={name}", **names)
        assert done.returncode == 0, done.stderr
        found = set((folder / "cache/dsjob/compiled").rglob("*.so"))
        assert found
        assert not built or found == built
        built = found
    assert [(path, path.stat().st_mtime_ns, path.stat().st_atime_ns) for path in sorted(shared.rglob("*"))] == before
