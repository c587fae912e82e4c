"""Gradients that are not finite: named before a step uses them, and raised, skipped or the end of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from small_jobs import list_steps, make_document, read_losses, run

from dsjob.callbacks import NanGuard
from dsjob.checkpoint.offline.convert import read_weights
from dsjob.errors import ContractError, NonFiniteLossError
from dsjob.ranks.mesh import World

FOUND = "the gradients of out.bias are not finite in step 3"


def guarded(folder: str, action: str, **sections: Any) -> dict[str, Any]:
    guard = {"_target_": "dsjob.callbacks.NanGuard", "action": action}
    model, checkpoint = {"_target_": "unstable.Unstable"}, {"every": 1, "keep": 0}
    return make_document(folder, model=model, callbacks={"guard": guard}, checkpoint=checkpoint, **sections)


def guard_on_ranks(world: World, folder: str, action: str, sections: dict[str, Any]) -> str:
    try:
        run(guarded(folder, action, **sections), world)
    except NonFiniteLossError as error:
        return error.message
    return ""


@pytest.mark.parametrize(("ranks", "stage", "clipping"), [(1, 0, 0.0), (1, 0, 1.0), (2, 0, 1.0), (2, 3, 1.0)])
@pytest.mark.full("2-0-1.0")
def test_what_is_not_finite_is_named_and_never_reaches_the_weights(
    tmp_path: Path, ranks: int, stage: int, clipping: float
) -> None:
    sections = {"zero_optimization": {"stage": stage}, "gradient_clipping": clipping}
    folders = {action: tmp_path / action for action in ("raise", "skip", "stop")}
    said = {action: run_ranks(guard_on_ranks, ranks, str(folders[action]), action, sections) for action in folders}
    assert said == {"raise": [FOUND] * ranks, "skip": [""] * ranks, "stop": [""] * ranks}
    assert list_steps(folders["raise"]) == [1, 2]
    assert list(read_losses(folders["skip"])) == list(range(1, 9))
    stopped = json.loads((folders["stop"] / "result.json").read_text())
    assert stopped["stopped"] == FOUND
    assert stopped["step"] == list_steps(folders["stop"])[-1] < 8
    for action in ("skip", "stop"):
        weights = read_weights(str(folders[action]))
        assert all(bool(weight.isfinite().all()) for weight in weights.values())


def test_without_a_guard_the_run_raises_at_its_next_record(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLossError, match="the gradients' norm became nan in step 3"):
        run(guarded(str(tmp_path), "skip") | {"callbacks": {}})


def test_another_action_is_refused() -> None:
    with pytest.raises(ContractError, match="action is 'ignore'"):
        NanGuard("ignore")  # type: ignore[arg-type]
