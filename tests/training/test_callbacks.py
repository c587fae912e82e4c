"""Callbacks that a document names."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_jobs import make_document, run

from dsjob.errors import ContractError


def test_a_hook_that_is_never_called_is_refused_before_the_first_step(tmp_path: Path) -> None:
    callbacks = {"mine": {"_target_": "stateful.Misspelt"}}
    with pytest.raises(ContractError, match=r"callbacks.mine: stateful.Misspelt has on_stepped, .* never") as told:
        run(make_document(tmp_path, callbacks=callbacks))
    assert (
        told.value.hint
        == "hooks: on_setup, on_start, on_step, on_record, on_log, on_eval_start, on_eval, on_save, on_end, on_error"
    )
    assert not list(tmp_path.glob("checkpoints/step-*"))


def test_attributes_that_are_called_like_hooks_are_none(tmp_path: Path) -> None:
    run(make_document(tmp_path, callbacks={"mine": {"_target_": "stateful.WithSwitches"}}))
