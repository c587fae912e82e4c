"""The state of callbacks, metrics and named random states in checkpoints."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_jobs
import torch
from small_jobs import at_step, list_steps, make_document, read_digests, read_losses, run, send
from stateful import Holds, Patience
from torch import nn

from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.live.objects import Kept, capture_objects, restore_objects
from dsjob.compute.activation.rng import TRACKER
from dsjob.errors import CheckpointError, Interrupted, Preempted
from dsjob.ranks.mesh import Ranks

ALONE = Ranks()


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    yield
    small_jobs.MORE.clear()
    TRACKER.reset()


def make(folder: Path, *callbacks: str, **sections: Any) -> dict[str, Any]:
    named = {name.lower(): {"_target_": f"stateful.{name}"} for name in callbacks}
    hooks = {"hooks": {"_target_": "small_jobs.Hooks"}}
    return make_document(folder, **{"scheduler": None, "callbacks": {**named, **hooks}, **sections})


def run_to(step: int, document: dict[str, Any]) -> None:
    """Runs a job until SIGTERM, sent at the end of a step, and the step after it has ended it."""
    small_jobs.MORE.append(at_step(step - 1, lambda: send(signal.SIGTERM)))
    with pytest.raises(Preempted):
        run(document)
    small_jobs.MORE.clear()
    TRACKER.reset()  # what a process that has ended does not leave to the next


def read_state(folder: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        next((folder / "checkpoints").glob(f"step-{step:08d}-a*/state.json")).read_text()
    )
    return found


def read_metric(folder: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


EVALUATED = {
    "data": {"train": {"_target_": "small_jobs.Data"}, "eval": {"_target_": "small_jobs.Data", "n": 16}},
    "metrics": {"all": {"_target_": "stateful.MeanOfAll"}},
    "trainer": {"eval_every": 1},
}


@pytest.mark.parametrize("step", [2, 5, 7])
def test_a_run_goes_on_bit_for_bit_with_what_callbacks_and_metrics_have_seen(tmp_path: Path, step: int) -> None:
    run(make(tmp_path / "whole", "Patience", **EVALUATED))
    assert read_state(tmp_path / "whole", 8)["objects"]["callbacks.patience"][0]["values"]["lowered"]
    run_to(step, make(tmp_path / "cut", "Patience", **EVALUATED))
    assert list_steps(tmp_path / "cut") == [step]
    run(make(tmp_path / "cut", "Patience", **EVALUATED))
    assert read_digests(tmp_path / "cut", 8) == read_digests(tmp_path / "whole", 8)
    assert read_losses(tmp_path / "cut") == read_losses(tmp_path / "whole")
    assert read_metric(tmp_path / "cut", "eval/all") == read_metric(tmp_path / "whole", "eval/all")
    assert read_state(tmp_path / "cut", 8) == read_state(tmp_path / "whole", 8)


def test_named_random_states_go_on(tmp_path: Path) -> None:
    model = {"_target_": "stateful.Masked"}
    run(make(tmp_path / "whole", model=model))
    TRACKER.reset()
    run_to(4, make(tmp_path / "cut", model=model))
    run(make(tmp_path / "cut", model=model))
    assert read_digests(tmp_path / "cut", 8) == read_digests(tmp_path / "whole", 8)


def test_what_has_no_state_there_or_none_to_take_it_is_told_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_to(3, make(tmp_path, "Patience"))
    run_to(5, make(tmp_path, "OwnNumber"))
    told = capsys.readouterr().out
    assert told.count("callbacks.ownnumber was reset: the checkpoint does not contain its state") == 1
    assert (
        told.count("the state of callbacks.patience was not restored: this job has no stateful object of that name")
        == 1
    )
    run(make(tmp_path, "OwnNumber"))
    assert "anew" not in capsys.readouterr().out
    assert read_state(tmp_path, 8)["objects"] == {
        "callbacks.ownnumber": [{"values": {"numbers": [40, 50, 60, 70, 80]}}]
    }


def test_state_that_cannot_be_kept_is_told_once_and_the_rest_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(make(tmp_path, "Nested", "Grows", "OwnNumber", checkpoint={"every": 1, "keep": 0}))
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("not saved") == 2
    assert "checkpoints will not contain the state of callbacks.nested; a resume resets it" in told
    assert "cannot save callbacks.nested.deep[0]: checkpoints cannot store values of type Tensor" in told
    assert "it has 1,200,011 bytes of state; the limit is 1,048,576" in told
    assert list_steps(tmp_path) == list(range(1, 9))
    kept = ["callbacks.grows", "callbacks.ownnumber"]
    assert [sorted(read_state(tmp_path, step)["objects"]) for step in (3, 4)] == [kept, kept[1:]]
    run(make(tmp_path, "Nested", "Grows", "OwnNumber", trainer={"max_steps": 9}))
    assert "callbacks.nested was reset" in capsys.readouterr().out


def test_what_a_job_is_not_to_lose_a_save_for() -> None:
    class Broken(nn.Module):
        def state_dict(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("mine")

    loop: dict[str, Any] = {}
    loop["loop"] = loop
    objects = np.array([object()])
    states = [{"a": objects}, {"a": object()}, {"a": type}, {"a": any}, [1], None, loop, {"a": torch.zeros(1 << 19)}]
    states += [{1: torch.zeros(1)}, {"a": torch.zeros(1, device="meta")}, {"a": torch.zeros(1 << 18), "b": 1}]
    odd = {str(number): Holds(state) for number, state in enumerate(states)}
    told: list[str] = []
    kept = Kept(lambda title, text: told.append(text), odd={**odd, "broken": Broken()}, good={"a": Holds({"a": 1})})
    for _ in range(2):
        assert capture_objects(ALONE, kept) == {"good.a": [{"values": {"a": 1}}]}
    assert len(told) == len(states) + 1
    assert "odd.broken.state_dict(): RuntimeError: mine" in told[-1]
    assert "it has 2,097,152 bytes of tensors; the limit is 1,048,576" in told[7]


@pytest.mark.parametrize("behind", [False, True])
def test_plain_state_that_no_reader_would_take_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    def limit(run: Any, step: int) -> None:
        behind = run.checkpointer._background
        assert behind is None or behind.wait(60)
        if step == 3:
            monkeypatch.setattr(layout, "MAX_MANIFEST", 1000)

    small_jobs.MORE.append(limit)
    with pytest.raises(CheckpointError, match=r"step-00000004-a0001/state\.json would have [\d,]+ bytes"):
        run(make(tmp_path, "OwnNumber", checkpoint={"every": 2, "async": behind}))
    assert list_steps(tmp_path) == [2]


def test_a_signal_is_no_state_that_cannot_be_kept() -> None:
    class Ended(Holds):
        def state_dict(self) -> Any:
            raise Interrupted(signal.SIGTERM)

    with pytest.raises(Interrupted):
        capture_objects(ALONE, Kept(a={"b": Ended()}))


def test_a_callback_that_cannot_take_its_state_back_is_named(tmp_path: Path) -> None:
    run_to(3, make(tmp_path, "Fails"))
    with pytest.raises(CheckpointError, match=r"callbacks\.fails\.load_state_dict\(\): KeyError: 'mine'"):
        run(make(tmp_path, "Fails"))


def test_a_module_with_many_weights_is_no_state_and_that_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = {name: {"_target_": "stateful.Judge", "width": width} for name, width in (("large", 300), ("small", 2))}
    run(make(tmp_path, **{**EVALUATED, "metrics": metrics}))
    assert "it has 1,228,800 bytes of tensors; the limit is" in capsys.readouterr().out
    assert list(read_state(tmp_path, 8)["objects"]) == ["metrics.small"]


def test_without_state_nothing_is_written(tmp_path: Path) -> None:
    run(make(tmp_path))
    assert "objects" not in read_state(tmp_path, 8)


def test_tensors_keep_their_dtype_shape_and_bits() -> None:
    dtypes = [torch.float64, torch.bfloat16, torch.bool, torch.int8, torch.float8_e4m3fn]
    given = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype).T for dtype in dtypes}
    given |= {"none": torch.zeros(0, 4), "number": torch.tensor(3), "shared": given["torch.bool"]}
    holder = Holds({**given, "text": ("x", 1.5)})
    saved = json.loads(json.dumps(capture_objects(ALONE, Kept(a={"b": holder}))))
    holder.state = None
    assert restore_objects(ALONE, Kept(a={"b": holder}), saved) == ()
    assert holder.state.pop("text") == ("x", 1.5)
    assert holder.state.keys() == given.keys()
    for name, tensor in given.items():
        found = holder.state[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        bits = [each.contiguous().flatten().view(torch.uint8) for each in (found, tensor)]
        assert torch.equal(*bits), name


def test_a_callback_copies_what_comes_back_on_the_cpu_into_tensors_of_its_own() -> None:
    saving, loading = Patience(), Patience()
    saving.mean += 3
    own = loading.mean
    assert restore_objects(ALONE, Kept(a={"b": loading}), capture_objects(ALONE, Kept(a={"b": saving}))) == ()
    assert loading.mean is own
    assert own.tolist() == [3, 3]
