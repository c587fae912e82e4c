"""`benchmarks.accelerate_tests` on a checkout with two tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.accelerate_tests.__main__ import print_table, run_tests

pytest.importorskip("accelerate")

TESTS = """
def test_deepspeed_is_dsjobs():
    import deepspeed
    assert deepspeed.__name__ == "dsjob.deepspeed"

def test_a_model_of_the_hub_is_made():
    from transformers import AutoConfig
    assert AutoConfig.from_pretrained("gpt2").n_layer == 12
"""


@pytest.mark.slow
def test_results_name_each_test_and_why_it_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tests" / "deepspeed"
    folder.mkdir(parents=True)
    (folder / "test_deepspeed_two.py").write_text(TESTS)
    passed, failed = run_tests(tmp_path, "dsjob", tmp_path / "results.jsonl")
    assert passed["outcome"] == "passed"
    assert (failed["outcome"], "assert 2 == 12" in failed["error"]) == ("failed", True)
    print_table([passed, failed])
    assert "| test_deepspeed_two.py | 2 | 1 | 1 | 0 |" in capsys.readouterr().out
