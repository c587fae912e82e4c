"""Evaluations: the one that is rehearsed before the first step, and the one after the last."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import small_jobs
import torch
from ranks import run_ranks
from small_jobs import list_steps, read_digests, train

from dsjob.checkpoint.offline.convert import read_weights
from dsjob.errors import ContractError, DataError, MetricError, Preempted
from dsjob.ranks.mesh import World

EVALUATED = {"train": {"_target_": "small_jobs.Data"}, "eval": {"_target_": "rehearsed.Noisy"}}
DECAYING = {"type": "ReduceLROnPlateau", "params": {"mode": "max", "patience": 0, "factor": 0.5}}

pytestmark = pytest.mark.usefixtures("hooks")


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_jobs, "TRUST", small_jobs.Trust(("small_jobs", "rehearsed"), small_jobs.TRUST.folders))


@pytest.mark.parametrize("what", ["metrics", "eval_step", "data"])
def test_what_evaluation_would_fail_with_shows_before_the_first_step(tmp_path: Path, what: str) -> None:
    sections: dict[str, Any] = {"data": EVALUATED}
    if what == "metrics":
        sections["metrics"] = {"mine": {"_target_": "rehearsed.fail"}}
    elif what == "eval_step":
        sections["trainer"] = {"eval_step": {"_target_": "rehearsed.fail"}}
    else:
        sections["data"] = {**EVALUATED, "eval": {"_target_": "rehearsed.Broken"}}
    with pytest.raises((ZeroDivisionError, DataError, MetricError), match="on purpose"):
        train(tmp_path, **sections)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("target", "phase"), [("rehearsed.fail", "eval"), ("rehearsed.FailingLate", "eval"), ("rehearsed.fail", "train")]
)
def test_a_failing_metric_is_told_in_one_form(tmp_path: Path, target: str, phase: str) -> None:
    """In the rehearsal, in an evaluation, in training: its name, its error, its place, and how to see the rest."""
    with pytest.raises(MetricError) as told:
        train(tmp_path, data=EVALUATED, metrics={"mine": {"_target_": target, "phases": [phase]}})
    where = r"\(.*/rehearsed\.py:\d+ in \w+\)"
    assert re.fullmatch(rf"metrics\.mine: ZeroDivisionError: on purpose {where}", told.value.message)
    kept = tmp_path / "logs" / "traceback-00000.txt"  # where training had begun
    assert kept.exists() == (target == "rehearsed.FailingLate")
    hint = f"the traceback is in {kept}" if kept.exists() else "run again with --debug for the traceback"
    assert told.value.hint == hint


def test_a_set_without_targets_is_named(tmp_path: Path) -> None:
    sections = {"targets": ["absent"], "loss": {"_target_": "torch.nn.MSELoss"}}
    with pytest.raises(ContractError, match=r"targets\[0\]: the batch, .* \(on a batch of data\.eval\)"):
        train(tmp_path, data=EVALUATED, **sections)


def test_what_the_best_are_chosen_by_is_among_what_an_evaluation_gives(tmp_path: Path) -> None:
    step, best = {"eval_step": {"_target_": "rehearsed.evaluate"}}, {"metric": "eval/acuracy", "mode": "max"}
    with pytest.raises(
        ContractError, match=r"checkpoint\.best\.metric: evaluation produces no metric eval/acuracy"
    ) as told:
        train(tmp_path, data=EVALUATED, trainer=step, checkpoint={"best": best})
    assert told.value.hint == "available: eval/accuracy, eval/loss"


@pytest.mark.parametrize(("size", "sizes"), [(None, (8, 8, 5)), (5, (5, 5, 5, 5, 1)), (40, (21,))])
def test_an_evaluation_may_use_another_micro_batch(tmp_path: Path, size: int | None, sizes: tuple[int, ...]) -> None:
    data = {"train": {"_target_": "small_jobs.Data"}, "eval": {"_target_": "small_jobs.Data", "n": 21}}
    trainer = {"eval_step": {"_target_": "rehearsed.measure_size"}, "max_steps": 1}
    train(tmp_path, data=data, trainer={**trainer, **({"eval_micro_batch": size} if size else {})})
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["eval/loss"] == pytest.approx(sum(n * n for n in sizes) / 21)


def test_a_metric_that_cannot_be_copied_may_choose_the_best(tmp_path: Path) -> None:
    best = {"best": {"metric": "eval/seen", "mode": "max"}}
    train(tmp_path, data=EVALUATED, metrics={"seen": {"_target_": "rehearsed.Fixed"}}, checkpoint=best)
    assert "eval/seen" in (tmp_path / "metrics.jsonl").read_text()


def test_what_a_schedule_follows_has_to_be_there(tmp_path: Path) -> None:
    step = {"eval_step": {"_target_": "rehearsed.rate"}, "eval_every": 4}
    with pytest.raises(ContractError, match="no `loss`, which ReduceLROnPlateau requires"):
        train(tmp_path, data=EVALUATED, trainer=step, scheduler=DECAYING)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_rehearsal_leaves_nothing_behind(tmp_path: Path, resumed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Dropout, a data set that draws random numbers, a buffer that counts batches, a metric that counts its calls."""
    model, metrics = {"_target_": "rehearsed.Counting"}, {"seen": {"_target_": "rehearsed.Seen"}}
    train(tmp_path / "without", model=model)
    if resumed:
        train(tmp_path / "with", model=model, trainer={"max_steps": 4})
    capsys.readouterr()
    train(tmp_path / "with", model=model, data=EVALUATED, metrics=metrics)
    assert capsys.readouterr().out.count("\neval ") == 1
    lines = [json.loads(line) for line in (tmp_path / "with" / "metrics.jsonl").read_text().splitlines()]
    assert [line["eval/seen"] for line in lines if "eval/seen" in line] == [(1 + 2 + 3 + 4 + 5) / 5]
    without, evaluated = (read_digests(tmp_path / name, 8) for name in ("without", "with"))
    calls = [hashlib.sha256(struct.pack("<f", 8 + count)).hexdigest() for count in (0, 5)]
    assert [without.pop("model.calls"), evaluated.pop("model.calls")] == [[call] for call in calls]
    assert evaluated == without


def test_data_that_can_be_read_once_are_not_rehearsed_with(tmp_path: Path) -> None:
    train(tmp_path, data={**EVALUATED, "eval": {"_target_": "rehearsed.read_once"}})
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1]).keys() == {"step", "eval/loss"}


def read_commit(folder: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "checkpoints" / "commits" / f"step-{step:08d}.json").read_text())
    return found


def test_the_last_step_is_saved_before_its_evaluation_once_and_gets_its_metrics(tmp_path: Path) -> None:
    data = {**EVALUATED, "eval": {"_target_": "rehearsed.Quiet"}}
    best = {"mode": "max"}  # the loss falls: the first
    train(tmp_path, data=data, trainer={"eval_every": 4}, checkpoint={"keep": 1, "best": best})
    commit = read_commit(tmp_path, 8)
    assert commit["dir"] == "step-00000008-a0001"
    assert list(commit["metrics"]) == ["eval/loss"]
    assert list_steps(tmp_path) == [4, 8]
    train(tmp_path, data=data, trainer={"max_steps": 9, "eval_every": 9}, checkpoint={"keep": 1, "best": best})
    assert list_steps(tmp_path) == [4, 9]


@pytest.mark.parametrize("behind", [False, True])
def test_a_step_that_is_evaluated_too_is_saved_first_and_the_next_run_makes_up_for_what_failed(
    tmp_path: Path, behind: bool
) -> None:
    sections: dict[str, Any] = {
        "data": {**EVALUATED, "eval": {"_target_": "rehearsed.Quiet"}},
        "trainer": {"eval_every": 4},
        "checkpoint": {"every": 4, "async": behind, "keep": 1, "best": {"mode": "max"}},
    }
    with pytest.raises(MetricError):
        train(tmp_path / "broken", metrics={"late": {"_target_": "rehearsed.FailingLate"}}, **sections)
    assert list_steps(tmp_path / "broken") == [4]
    assert "metrics" not in read_commit(tmp_path / "broken", 4)
    for name in ("broken", "whole"):
        train(tmp_path / name, **sections)
    assert list_steps(tmp_path / "whole") == list_steps(tmp_path / "broken") == [4, 8]  # the loss falls: 4 is the best
    for step in (4, 8):
        found, whole = (read_commit(tmp_path / name, step) for name in ("broken", "whole"))
        assert whole["dir"] == f"step-{step:08d}-a0001", "it is saved once"
        assert found["metrics"] == whole["metrics"]


@pytest.mark.parametrize("behind", [False, True])
def test_a_run_that_is_asked_to_end_saves_and_evaluates_when_it_goes_on(
    tmp_path: Path, behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections: dict[str, Any] = {
        "data": {**EVALUATED, "eval": {"_target_": "rehearsed.Quiet"}},
        "trainer": {"eval_every": 2},
        "scheduler": DECAYING,
        "checkpoint": {"every": 4, "async": behind},
    }
    train(tmp_path / "whole", **sections)
    stop = small_jobs.at_step(3, lambda: small_jobs.send(small_jobs.SIGTERM))
    with monkeypatch.context() as patched:
        patched.setattr(small_jobs, "MORE", [stop])
        with pytest.raises(Preempted, match="stopped by SIGTERM after step 4"):
            train(tmp_path / "stopped", **sections)
    assert "metrics" not in read_commit(tmp_path / "stopped", 4)
    train(tmp_path / "stopped", **sections)
    assert read_rates(tmp_path / "stopped") == read_rates(tmp_path / "whole")
    for step in (4, 8):
        assert read_digests(tmp_path / "stopped", step) == read_digests(tmp_path / "whole", step)
        found, whole = (read_commit(tmp_path / name, step) for name in ("stopped", "whole"))
        assert found["metrics"] == whole["metrics"]


def test_a_schedule_that_follows_the_loss_goes_on_after_the_last_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rate is halved by each evaluation but the first; the last of the shorter run is one of them."""
    sections: dict[str, Any] = {
        "data": {**EVALUATED, "eval": {"_target_": "rehearsed.Quiet"}},
        "scheduler": DECAYING,
    }
    train(tmp_path / "whole", trainer={"eval_every": 2}, **sections)
    train(tmp_path / "longer", trainer={"eval_every": 2, "max_steps": 4}, **sections)
    assert read_commit(tmp_path / "longer", 4)["dir"] == "step-00000004-a0001.2"
    printed = capsys.readouterr().out
    assert "step-00000004-a0001.2 (again: its evaluation changed what it contains)" in printed
    assert not (tmp_path / "longer" / "checkpoints" / "step-00000004-a0001").exists()
    train(tmp_path / "longer", trainer={"eval_every": 2}, **sections)
    rates = {name: read_rates(tmp_path / name) for name in ("whole", "longer")}
    assert rates["whole"][7] == rates["whole"][0] / 4
    assert rates["longer"] == rates["whole"]
    assert read_digests(tmp_path / "longer", 8) == read_digests(tmp_path / "whole", 8)


def test_only_the_first_evaluation_that_outdates_its_checkpoint_costs_a_second_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections: dict[str, Any] = {
        "data": {**EVALUATED, "eval": {"_target_": "rehearsed.Quiet"}},
        "scheduler": DECAYING,
        "checkpoint": {"every": 2, "keep": 9},
    }
    train(tmp_path / "run", trainer={"eval_every": 2}, **sections)
    saved = re.findall(r"^saved +(\S+)", capsys.readouterr().out, re.MULTILINE)
    tags = [Path(url).name for url in saved]
    again = [f"step-{step:08d}-a0001.2" for step in (4, 2)]  # the first evaluation leaves the rate as it is
    assert [tag for tag in tags if tag.endswith(".2")] in ([again[0]], [again[1]])
    assert len(tags) == 5
    for step in (2, 4, 6, 8):
        assert read_commit(tmp_path / "run", step)["metrics"]


def read_rates(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["lr"] for line in lines if "lr" in line]


def test_a_run_continues_bit_for_bit_after_a_final_evaluation(tmp_path: Path) -> None:
    """The data of the evaluation draw random numbers, and the run that is not interrupted has one evaluation less."""
    data = {"train": {"_target_": "small_jobs.Data"}, "eval": {"_target_": "small_jobs.Data", "n": 8}}
    for name, ends in (("whole", [8]), ("parts", [4, 8])):
        for end in ends:
            train(tmp_path / name, data=data, trainer={"max_steps": end})
    assert read_digests(tmp_path / "parts", 8) == read_digests(tmp_path / "whole", 8)


def train_norms(world: World, folder: str) -> None:
    parts = [("Linear", [8, 4]), ("BatchNorm1d", [4]), ("Linear", [4, 1])]
    for stage in (0, 3):
        document = small_jobs.make_document(
            f"{folder}/{stage}",
            model={
                "_target_": "torch.nn.Sequential",
                "_args_": [{"_target_": f"torch.nn.{name}", "_args_": sizes} for name, sizes in parts],
            },
            inputs=[0],
            targets=[1],
            loss={"_target_": "torch.nn.MSELoss"},
            data={"train": {"_target_": "small_jobs.Data"}, "eval": {"_target_": "small_jobs.Data", "n": 21}},
            tasks=["train", "predict"],
            trainer={"max_steps": 3},
            zero_optimization={"stage": stage},
        )
        small_jobs.run(document, world)


def test_ranks_evaluate_with_the_statistics_of_the_checkpoint(tmp_path: Path) -> None:
    """Each rank's batch norms have seen other samples in the last step; checkpoints contain rank 0's statistics."""
    run_ranks(train_norms, 2, str(tmp_path))
    data = [small_jobs.Data(21)[index] for index in range(21)]
    x, y = (torch.stack(each) for each in zip(*data, strict=True))
    for stage in (0, 3):
        net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).eval()
        net.load_state_dict(read_weights(str(tmp_path / str(stage))))
        with torch.no_grad():
            expected = net(x)
        lines = (tmp_path / str(stage) / "predictions-eval.jsonl").read_text().splitlines()
        torch.testing.assert_close(torch.tensor([json.loads(line)["logits"] for line in lines]), expected)
        record = json.loads((tmp_path / str(stage) / "metrics.jsonl").read_text().splitlines()[-1])
        assert record["eval/loss"] == pytest.approx((expected - y).square().mean().item(), rel=1e-5)
