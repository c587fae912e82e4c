"""`benchmarks.library_tests` on checkouts with a few tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.library_tests.__main__ import print_table, run_tests

pytest.importorskip("accelerate")

TESTS = """
def test_deepspeed_is_dsjobs():
    import deepspeed
    assert deepspeed.__name__ == "dsjob.deepspeed"

def test_a_model_of_the_hub_is_made():
    from transformers import AutoConfig
    assert AutoConfig.from_pretrained("sshleifer/tiny-gpt2").n_layer == 12
"""

# The launcher is dsjob's, and its ranks may use bf16 with gloo.
LAUNCHED = """
import os, subprocess, sys

def test_the_launcher_starts_ranks(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from accelerate import PartialState\\n"
        "from transformers import TrainingArguments\\n"
        "assert TrainingArguments('out', bf16=True, warmup_steps=0).get_warmup_steps(10) == 3\\n"
        "assert PartialState()._prepare_backend()[0] == 'gloo'\\n"
    )
    done = subprocess.run(["deepspeed", "--num_gpus", "2", "--no_local_rank", program], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-1000:]
"""


def make_checkout(folder: Path, tests: str) -> Path:
    (folder / "tests" / "deepspeed").mkdir(parents=True)
    (folder / "tests" / "deepspeed" / "test_deepspeed_some.py").write_text(tests)
    return folder


@pytest.mark.slow
@pytest.mark.full
def test_results_name_each_test_and_why_it_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.jsonl"
    passed, failed = run_tests("accelerate", make_checkout(tmp_path, TESTS), "dsjob", results)
    assert passed["outcome"] == "passed"
    assert (failed["outcome"], "assert 2 == 12" in failed["error"]) == ("failed", True)
    print_table([passed, failed])
    assert "| test_deepspeed_some.py | 2 | 1 | 1 | 0 |" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.full
def test_ranks_of_a_test_run_on_the_cpu(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    (entry,) = run_tests("transformers", make_checkout(tmp_path, LAUNCHED), "dsjob", results, warmup=3)
    assert entry["outcome"] == "passed", entry["error"]
