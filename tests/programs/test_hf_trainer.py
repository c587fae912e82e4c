"""Programs with HF's Trainer, unmodified: on dsjob's engine they record what they record on DeepSpeed's.

The normal run compares some of them with the records in tests/data/hf_trainer. `-m full` runs all on both engines.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_cases import CASES, DATA, RECORDED, SAVED, Case, make_run, make_start
from jobs import dsjob
from programs import run_program
from safetensors.torch import load_file
from side_by_side import TIMINGS, compare, run_on

pytestmark = pytest.mark.slow
NORMAL = [  # one of most programs, stages and kinds of config; the others of RECORDED are marked `full`
    "causal_lm, stage 0, fp32",
    "causal_lm, stage 3, fp32",
    "causal_lm, stage 1, fp32, DeepSpeed's optimizer and schedule",
    SAVED,
    "seq2seq, stage 3, fp32",
]
RESUMED = [name for name in CASES if name.endswith("saving")]
OFFLOADED = "causal_lm, stage 3, fp32, all offloaded"
GENERATED = ("eval_length", "eval_same_words", "eval_exact_match", "generated")  # in bf16, a tie may break another way


def find_differences(case: Case, ours: Any, theirs: Any, *others: str) -> list[str]:
    """Differences of two records, but for the keys in `others`.

    At stage 0 in fp32, DeepSpeed reports no gradient norm. In bf16, it rounds masters that begin with more digits.
    """
    ignored = (*TIMINGS, *others, *(["grad_norm"] if case.stage == 0 else []))
    ignored += GENERATED if case.precision == "bf16" else ()
    return compare(ours, theirs, 1e-4 if case.precision == "fp32" else 2e-2, ignored=ignored)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(scope="module")
def ours(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the recorded cases record on dsjob's engine; and two runs that resume a checkpoint of step 2."""
    start = folder / "start"
    recorded = RECORDED if "full" in request.config.option.markexpr else NORMAL
    runs = {name: make_run(CASES[name], folder / name, start) for name in [*recorded, OFFLOADED]}
    for origin, checkpoint in (("own", folder / SAVED / "out" / "checkpoint-2"), ("theirs", DATA / "checkpoint-2")):
        more = ["--resume_from_checkpoint", str(checkpoint)]
        runs[origin] = make_run(CASES[SAVED], folder / origin, start, *more)
    return dict(zip(runs, run_on("dsjob", [make_start(start), *runs.values()])[1:], strict=True))


@pytest.mark.parametrize(
    "name", [name if name in NORMAL else pytest.param(name, marks=pytest.mark.full) for name in RECORDED]
)
def test_a_program_records_what_it_records_on_deepspeed(ours: dict[str, Any], name: str) -> None:
    theirs = json.loads((DATA / "records.json").read_text())["records"][name]
    assert not find_differences(CASES[name], ours[name], theirs)


def test_offloading_changes_no_number(ours: dict[str, Any]) -> None:
    assert not compare(ours[OFFLOADED], ours["causal_lm, stage 3, fp32"], 1e-6)


@pytest.mark.parametrize("origin", ["own", "theirs"])
def test_a_resumed_run_follows_the_unbroken_one(ours: dict[str, Any], origin: str) -> None:
    """From its own checkpoint, and from one that DeepSpeed saved."""
    tolerance = 1e-6 if origin == "own" else 1e-4
    assert not compare(ours[origin], ours[SAVED], tolerance, ignored=(*TIMINGS, "train_loss"))


@pytest.mark.full
def test_commands_and_the_script_in_a_checkpoint_read_it(ours: dict[str, Any], folder: Path) -> None:
    out = folder / SAVED / "out"
    checkpoint = out / "checkpoint-4"
    assert "saved by           2 ranks, ZeRO stage 2" in dsjob("ckpt", "info", "checkpoint-4", cwd=out).stdout
    assert "intact" in dsjob("ckpt", "verify", "checkpoint-4", cwd=out).stdout
    for form in ("fp32", "hf"):
        assert dsjob("convert", "checkpoint-4", form, "--to", form, cwd=out).returncode == 0
    done = run_program([sys.executable, "zero_to_fp32.py", ".", "weights"], cwd=checkpoint)
    assert done.returncode == 0, done.stderr
    expected = load_file(out / "model.safetensors")  # what save_model wrote
    for written in (out / "fp32", out / "hf", checkpoint / "weights"):
        found = load_file(written / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (out / "hf" / "config.json").exists()


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """What the cases of the selected tests record on both engines. "resumed NAME": with a checkpoint of DeepSpeed's."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install '.[deepspeed]'")
    tests = test_every_program_records_the_same_on_both_engines, test_deepspeeds_checkpoints_are_resumed_at_every_stage
    selected = [item for item in request.session.items if isinstance(item, pytest.Function)]
    whole, resumed = ([item.callspec.params["name"] for item in selected if item.function is test] for test in tests)
    base = tmp_path_factory.mktemp("both")
    start = base / "start"
    theirs = {
        name: make_run(CASES[name], base / "deepspeed" / name, start) for name in dict.fromkeys([*whole, *resumed])
    }
    their_records = run_on("deepspeed", [make_start(start), *theirs.values()])[1:]
    ours = {name: make_run(CASES[name], base / "dsjob" / name, start) for name in whole}
    for name in resumed:
        more = ["--resume_from_checkpoint", str(theirs[name].folder / "out" / "checkpoint-2")]
        ours[f"resumed {name}"] = make_run(CASES[name], base / "resumed" / name, start, *more)
    found = dict(zip(ours, run_on("dsjob", list(ours.values())), strict=True))
    expected = dict(zip(theirs, their_records, strict=True))
    return {name: (record, expected[name.removeprefix("resumed ")]) for name, record in found.items()}


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CASES)
def test_every_program_records_the_same_on_both_engines(both: dict[str, tuple[Any, Any]], name: str) -> None:
    assert not find_differences(CASES[name], *both[name])


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", RESUMED)
def test_deepspeeds_checkpoints_are_resumed_at_every_stage(both: dict[str, tuple[Any, Any]], name: str) -> None:
    assert not find_differences(CASES[name], *both[f"resumed {name}"], "train_loss")  # the mean over fewer steps
