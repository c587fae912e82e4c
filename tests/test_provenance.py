"""What a run was run with: its record of packages, git state and variables, without secrets and of bounded size."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from pathlib import Path

import pytest
import torch
from jobs import dsjob, make_job

from dsjob import provenance
from dsjob.front.runs import compare_runs

SECRETS = (
    "hunter2-hunter2",
    "correct horse",
    "ghp_0123456789abcdefghijABCDEFGHIJ",
    "MIIEpQIBAAKCAQEA",
    "s3cr3t-s3cr3t",
)


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", "-b", "trunk")
    (tmp_path / "train.py").write_text("lr = 0.1\n")
    (tmp_path / ".env").write_text("A=1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_a_job_records_each_attempt_and_the_diff_of_its_project(repository: Path) -> None:
    make_job(repository, output={"dir": "run"}, trainer={"max_steps": 2, "train_batch": 8, "log_every": 1})
    assert dsjob("cfg.json", cwd=repository).returncode == 0
    first = provenance.read(str(repository / "run"))
    (repository / "train.py").write_text("lr = 0.2\n")
    done = dsjob("cfg.json", "trainer.max_steps=4", cwd=repository, NCCL_DEBUG="WARN", API_TOKEN="hunter22")
    assert done.returncode == 0, done.stderr
    lines = (repository / "run/environment.jsonl").read_text().splitlines()
    assert [json.loads(line)["git"]["changed"] for line in lines] == [False, True]
    second = provenance.read(str(repository / "run"))
    assert second["git"]["commit"] == git(repository, "rev-parse", "HEAD")
    assert second["git"]["branch"] == "trunk"
    assert "-lr = 0.1\n+lr = 0.2" in second["git"]["diff"]
    assert second["torch"]["version"] == torch.__version__
    assert (second["devices"], second["ranks"]) == (["cpu"], 1)
    assert second["packages"]["numpy"] == importlib.metadata.version("numpy")
    assert "hunter22" not in lines[1]
    found = provenance.list_differing(first, second)
    assert found.pop("git.diff")[0] == ""
    assert found == {"git.changed": (False, True), "variables.NCCL_DEBUG": (None, "WARN")}


def test_runs_are_compared_by_what_they_ran_with(tmp_path: Path) -> None:
    for name, version in (("a", "1"), ("b", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "resolved.json").write_text("{}")
        provenance.append(str(tmp_path / name), {"time": name, "packages": {"torch": version, "x": "1"}})
        with open(tmp_path / name / "environment.jsonl", "a", encoding="utf-8") as file:
            file.write('{"packages": {"tor')  # killed while it wrote
    assert compare_runs(str(tmp_path / "a"), str(tmp_path / "b")).environment == {"packages.torch": ("1", "2")}


def test_variables_differ_only_where_they_change_what_is_computed() -> None:
    same = ("PATH", "USER", "SLURM_JOB_ID", "MASTER_PORT", "TORCHINDUCTOR_CACHE_DIR", "HF_HOME", "TORCH_HOME", "RANK")
    same += ("DSJOB_FORM", "PYTHONPYCACHEPREFIX", "VIRTUAL_ENV", "CUDA_CACHE_PATH", "CUDA_PATH", "CUDA_HOME")
    different = (
        "NCCL_ALGO",
        "CUBLAS_WORKSPACE_CONFIG",
        "OMP_NUM_THREADS",
        "PYTHONPATH",
        "PYTHONHASHSEED",
        "TORCH_LOGS",
    )
    first, second = ({"variables": dict.fromkeys((*same, *different), value)} for value in ("a", "b"))
    assert set(provenance.list_differing(first, second)) == {f"variables.{name}" for name in different}


def test_secrets_of_a_project_are_not_recorded(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRETS[0])
    (repository / ".env").write_text(f"A={SECRETS[0]}\n")
    (repository / "train.py").write_text(
        f'login("{SECRETS[0]}")\nself.api_key: str = "{SECRETS[1]}"\nx = "{SECRETS[2]}"\n'
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRETS[3]}\n-----END RSA PRIVATE KEY-----\n"
        f'url = "https://me:{SECRETS[4]}@host/path"\nmax_tokens = 7\n'
    )
    found = provenance.describe_git(str(repository))
    assert found
    assert [secret for secret in SECRETS if secret in json.dumps(found)] == []
    assert "max_tokens = 7" in found["diff"]
    assert ".env" not in found["diff"]


def test_a_large_diff_is_cut_and_takes_no_time(repository: Path) -> None:
    (repository / "train.py").write_text("a" * (8 << 20))
    found = provenance.describe_git(str(repository))
    assert found
    assert found["diff_truncated"]
    assert len(found["diff"]) <= 64 << 10


def test_a_folder_outside_a_repository_has_no_git(tmp_path: Path) -> None:
    assert provenance.describe_git(str(tmp_path)) is None
    assert provenance.read(str(tmp_path)) == {}
