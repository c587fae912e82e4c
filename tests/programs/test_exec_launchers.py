"""`dsjob exec` under launchers that have started the ranks: torchrun, srun, accelerate."""

from __future__ import annotations

import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from executed import execute, read_result
from jobs import dsjob, read_metrics
from programs import DSJOB, clean_env, run_program

from dsjob.programs.alias import stand_in


def test_under_torchrun_no_ranks_are_started(folder: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "dsjob", "exec"]
    done = run_program([*launch, "--run-dir", "run", "train.py", "--steps", "1"], cwd=folder)
    assert done.returncode == 0, done.stderr
    # Not by lines: both ranks write to one pipe, and `print` writes the end of a line separately.
    assert sorted(re.findall(r"rank \d step 0", done.stdout)) == [f"rank {n} step 0" for n in "0011"]
    assert list(read_metrics(folder / "run")) == [1]
    assert read_result(folder)["status"] == "done"
    done = run_program([*launch, "train.py", "--at", "1", "--do", "raise"], cwd=folder)
    assert done.returncode == 1
    assert "dsjob: error: rank 1: ValueError: boom" in done.stderr
    assert "rank 0: ValueError" not in done.stderr


TYPO = """\
import deepspeed, torch
config = {"train_batch_size": 2, "zero_optimisation": {}}
deepspeed.initialize(model=torch.nn.Linear(4, 1), config=config)
"""
FOUND = "typo.py:3: error[unknown-key]: zero_optimisation: unknown key"
TYPO_IN_A_FILE = """\
from accelerate.utils.deepspeed import HfDeepSpeedConfig
HfDeepSpeedConfig("ds.json")  # before there is a process group
"""


def test_under_torchrun_an_error_of_all_ranks_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "typo.py").write_text(TYPO)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "dsjob", "exec"]
    done = run_program([*launch, "typo.py"], cwd=tmp_path)
    assert done.stderr.count(FOUND) == 1, done.stderr


@pytest.mark.parametrize("text", [TYPO, TYPO_IN_A_FILE], ids=["group", "file"])
def test_under_srun_an_error_of_all_ranks_is_told_by_rank_0(tmp_path: Path, text: str) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "typo.py").write_text(text)
    (tmp_path / "ds.json").write_text('{"zero_optimisation": {}}')
    with socket.socket() as found:
        found.bind(("", 0))
        port = str(found.getsockname()[1])

    def run(rank: int) -> Any:
        slurm = {"SLURM_NTASKS": "3", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "MASTER_PORT": port}
        return dsjob("exec", "typo.py", cwd=tmp_path, **slurm)

    with ThreadPoolExecutor(3) as pool:
        ranks = list(pool.map(run, range(3)))
    assert ["error[unknown-key]: zero_optimisation" in done.stderr for done in ranks] == [True, False, False], [
        done.stderr for done in ranks
    ]
    assert all(done.returncode == 2 for done in ranks)


def test_under_another_launcher_too_debug_keeps_the_frames_of_dsjob(folder: Path) -> None:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    words = ("train.py", "--at", "0", "--do", "engine")
    shown = [execute(folder, *debug, *words, **place).stderr for debug in ((), ("--debug",))]
    assert [("Traceback" in each, "/dsjob/engine/" in each) for each in shown] == [(False, False), (True, True)]


def test_under_torch_distributed_launch_the_program_gets_its_local_rank(tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text("import sys; print(sys.argv[1:])")
    launch = [sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node", "2", "-m", "dsjob", "exec"]
    done = run_program([*launch, "look.py", "a"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"\[[^]]*\]", done.stdout)) == ["['--local_rank=0', 'a']", "['--local_rank=1', 'a']"]


LAUNCHED = "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:])"


def test_under_srun_no_ranks_are_started(tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(LAUNCHED)
    slurm = {"SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "9", "SLURM_LOCALID": "2"}
    for pmi in ({}, {"PMI_RANK": "2", "PMI_SIZE": "4"}):  # with --mpi=pmi2
        done = dsjob("exec", "look.py", "a", cwd=tmp_path, **slurm, **pmi)
        assert (done.returncode, done.stdout) == (0, "2 4 ['a']\n"), done.stderr


def test_under_mpirun_no_ranks_are_started(tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(LAUNCHED)
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    local = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    # mpirun's own step
    slurm = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "9"}
    for more in ({}, slurm):
        done = dsjob("exec", "look.py", "a", cwd=tmp_path, **mpi, **local, **more)
        assert (done.returncode, done.stdout) == (0, "1 2 ['a']\n"), done.stderr
    done = dsjob("exec", "look.py", cwd=tmp_path, **mpi, OMPI_COMM_WORLD_LOCAL_RANK="0", OMPI_COMM_WORLD_LOCAL_SIZE="1")
    assert done.returncode == 1
    assert "MPI has started 2 ranks, 1 of them here, but MASTER_ADDR is not set" in done.stderr
    alone = {"PMI_RANK": "0", "PMI_SIZE": "1"}  # as in a shell that srun has started
    done = dsjob("exec", "--num_gpus", "2", "look.py", cwd=tmp_path, **alone)
    assert (done.returncode, done.stdout) == (0, "0 2 ['--local_rank=0']\n"), done.stderr


@pytest.mark.slow
def test_under_accelerate_launch_no_ranks_are_started(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "look.py").write_text(LAUNCHED)
    settings = "num_machines: 1\nmixed_precision: 'no'\nuse_cpu: true\ncompute_environment: LOCAL_MACHINE\n"
    (tmp_path / "1.yaml").write_text(f"{settings}distributed_type: 'NO'\nnum_processes: 1\n")
    zero = "deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 1}"
    (tmp_path / "2.yaml").write_text(f"{settings}distributed_type: DEEPSPEED\n{zero}\nnum_processes: 2\n")
    for ranks in (1, 2):
        launch = ["-m", "accelerate.commands.launch", "--config_file", f"{ranks}.yaml"]
        environment = clean_env()
        stand_in(environment)  # accelerate asks whether DeepSpeed is installed
        done = run_program([sys.executable, *launch, "-m", "dsjob", "exec", "look.py"], cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        assert sorted(line[:3] for line in done.stdout.splitlines()) == [f"{rank} {ranks}" for rank in range(ranks)]


def test_flags_for_ranks_have_no_place_under_another_launcher(folder: Path) -> None:
    environment = clean_env(RANK="0", WORLD_SIZE="1")
    done = run_program([DSJOB, "exec", "--num_gpus", "2", "train.py"], cwd=folder, env=environment)
    assert done.returncode == 2
    assert "--num_gpus has no effect on ranks that another launcher has started" in done.stderr
