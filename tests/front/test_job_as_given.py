"""job.jsonl: the job as it was given at each start, and where each value comes from."""

import json
from pathlib import Path
from typing import Any

from jobs import dsjob, make_job


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "job.jsonl").read_text().splitlines()]


def test_each_start_adds_a_line(tmp_path: Path) -> None:
    make_job(tmp_path)
    assert dsjob("cfg.json", "optimizer.params.lr=0.5", cwd=tmp_path).returncode == 0
    assert dsjob("run", "run", "trainer.max_steps=9", "launch.nproc=2", cwd=tmp_path).returncode == 0
    assert dsjob("run", "run", "trainer.max_steps=9", "launch.nproc=2", cwd=tmp_path).returncode == 0  # finished
    first, second = read(tmp_path / "run")
    assert first["file"] == str(tmp_path / "cfg.json")
    assert first["document"] == json.loads((tmp_path / "cfg.json").read_text())
    assert first["overrides"] == ["optimizer.params.lr=0.5"]
    assert first["origins"]["optimizer.params.lr"] == "command line: optimizer.params.lr=0.5"
    assert first["origins"]["model._target_"].startswith("cfg.json:")
    assert first["origins"]["data.shuffle"] == "default"
    assert first["origins"]["trainer.micro_batch"].startswith("derived: ")
    assert second["document"] is None  # it was resumed from resolved.json, which no user wrote
    assert "trainer.max_steps=9" in second["overrides"]
    assert second["origins"]["model._target_"].startswith("run/resolved.json:")


def test_what_is_kept_of_a_job_holds_no_secret(tmp_path: Path) -> None:
    make_job(tmp_path, data={"train": {"_target_": "tokens.make", "token": "${oc.env:MY_TOKEN}"}})
    (tmp_path / "tokens.py").write_text("from my_model import *\n\ndef make(token):\n    return Data()\n")
    done = dsjob("cfg.json", cwd=tmp_path, MY_TOKEN="not-to-be-seen")
    assert done.returncode == 0, done.stderr
    (record,) = read(tmp_path / "run")
    assert record["document"]["data"]["train"]["token"] == "${oc.env:MY_TOKEN}"
    assert "not-to-be-seen" not in (tmp_path / "run" / "job.jsonl").read_text()
