"""Programs of accelerate, unmodified: on dsjob's engine they record what they record on DeepSpeed's.

The normal run compares some of them with records in tests/data. `-m full` runs all on both engines.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from accelerate_cases import CASES, DATA, IMPORTED, RECORDED, Case
from side_by_side import Engine, compare, run_on

SAVED = "classify, stage 3, saving"
CONFIGURED = "config file, stage 3, config and config"
NORMAL = [SAVED, CONFIGURED]
ENGINES: tuple[Engine, Engine] = ("dsjob", "deepspeed")


def differences(case: Case, ours: Any, theirs: Any) -> list[str]:
    # In bf16, losses have three digits, and DeepSpeed begins with rounded masters.
    loose = ["accuracy", "weights", "logits"]
    fp32 = case.precision == "no"
    ignored = ["seconds", "peak", *(["norm"] if case.plain else []), *([] if fp32 else loose)]
    return compare(ours, theirs, 1e-4 if fp32 else 2e-2, ignored=ignored)


def list_saved(run: Any) -> list[list[bool]]:
    """For each time a program saved its model: whether each file has all weights. Some programs save none."""
    records = run["records"] if isinstance(run, dict) else run
    return [record["saved"] for record in records if "saved" in record]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("accelerate")


@pytest.fixture(scope="module")
def ours(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the recorded cases record on dsjob's engine, and two that resume a checkpoint of theirs."""
    recorded = RECORDED if "full" in request.config.option.markexpr else NORMAL
    runs = {name: CASES[name].run(folder / name) for name in recorded}
    saved, epoch = str(folder / SAVED / "saved"), str(folder / CONFIGURED / "epoch_0")
    runs["resumed step"] = CASES[SAVED].run(folder / "resumed step", "--resume", saved)
    runs["resumed epoch"] = CASES[CONFIGURED].run(folder / "resumed epoch", "--resume", epoch)
    return dict(zip(runs, run_on("dsjob", list(runs.values()), imported=IMPORTED), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in NORMAL else pytest.param(name, marks=pytest.mark.full) for name in RECORDED]
)
def test_a_program_records_what_it_records_on_deepspeed(ours: dict[str, Any], name: str) -> None:
    theirs = json.loads(DATA.read_text())["records"][name]
    assert not differences(CASES[name], ours[name], theirs)


@pytest.mark.slow
def test_a_run_resumed_within_an_epoch_equals_the_unbroken_one(ours: dict[str, Any]) -> None:
    resumed, unbroken = ours["resumed step"]["records"], ours[SAVED]["records"]
    assert resumed[0]["step"] == 5
    assert resumed == unbroken[-len(resumed) :]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_at_other_stages_a_loaded_state_continues_the_run_and_saved_files_have_all_weights(
    tmp_path: Path, stage: int
) -> None:
    case = CASES[f"classify, stage {stage}, saving"]
    unbroken = case.run(tmp_path / "unbroken")
    resumed = case.run(tmp_path / "resumed", "--resume", str(unbroken.folder / "saved"))
    whole, rest = (run["records"] for run in run_on("dsjob", [unbroken, resumed], imported=IMPORTED))
    assert rest[0]["step"] == 5
    assert rest == whole[-len(rest) :]
    assert list_saved(rest) == [[True, True]]


@pytest.mark.slow
def test_a_run_resumed_at_an_epoch_equals_the_unbroken_one(ours: dict[str, Any]) -> None:
    resumed, unbroken = ours["resumed epoch"], ours[CONFIGURED]
    trained = [record for record in resumed if "lr" in record]
    assert len(trained) == 4
    assert trained == [record for record in unbroken if "lr" in record][-len(trained) :]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("program", sorted({case.program for case in CASES.values()}))
def test_all_cases_record_what_they_record_on_deepspeed(folder: Path, program: str) -> None:
    cases = [case for case in CASES.values() if case.program == program]
    found = {}
    for engine in ENGINES:
        runs = [case.run(folder / engine / case.name) for case in cases]
        found[engine] = run_on(engine, runs, imported=IMPORTED)
    differ = {
        case.name: differences(case, *pair)
        for case, *pair in zip(cases, found["dsjob"], found["deepspeed"], strict=True)
    }
    assert not {name: found for name, found in differ.items() if found}
    # Two engines that both save wrong files would be equal.
    saved = [each for engine in ENGINES for run in found[engine] for each in list_saved(run)]
    assert all(map(all, saved))
    assert bool(saved) == (program == CASES[SAVED].program)
