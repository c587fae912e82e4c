"""Arguments of callbacks that have a wrong type are problems of the document, with their place."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from job_documents import resolve
from jobs import dsjob, make_job
from small_jobs import TRUST, make_document

from dsjob import callbacks
from dsjob.callbacks import Callback
from dsjob.document.resolve import complete_job
from dsjob.errors import DsjobError
from dsjob.training.build import build_callbacks

BUILT_IN = {
    name: kind for name, kind in vars(callbacks).items() if inspect.isclass(kind) and issubclass(kind, Callback)
}
REQUIRED: dict[str, dict[str, Any]] = {"SampledText": {"prompts": ["a"]}, "StopAfter": {"steps": 1}}
WRONG = [
    (name, parameter)
    for name, kind in BUILT_IN.items()
    for parameter, hint in typing.get_type_hints(kind.__init__).items()
    if parameter != "return" and hint is not Any
]


def test_the_table_is_not_empty() -> None:
    assert ("EarlyStopping", "patience") in WRONG
    assert {"EMA", "Flops", "GradientNorms", "NanGuard", "Profiler", "SampledText", "StopAfter"} <= {
        n for n, _ in WRONG
    }


def is_right(value: Any, hint: Any) -> bool:
    kinds = typing.get_args(hint) or (hint,)
    return type(value) in kinds or (isinstance(value, list) and hint == Sequence[int] | None)


@pytest.mark.parametrize(("name", "parameter"), WRONG)
def test_a_wrong_type_is_an_error_with_its_place(name: str, parameter: str) -> None:
    hint = typing.get_type_hints(BUILT_IN[name].__init__)[parameter]
    for value in ("3", [3], {"a": 3}, None, True, 3.5):
        if is_right(value, hint):
            continue
        target = {"_target_": f"dsjob.callbacks.{name}", **REQUIRED.get(name, {}), parameter: value}
        data = {part: {"_target_": "small_jobs.Data"} for part in ("train", "eval")}
        job = complete_job(resolve(make_document("run", data=data, callbacks={"mine": target}), world_size=1))
        with pytest.raises(DsjobError, match=parameter) as told:
            build_callbacks(job.spec, TRUST)
        assert told.value.path[:2] == ("callbacks", "mine")


def test_the_command_names_the_line(tmp_path: Path) -> None:
    stopping = {"_target_": "dsjob.callbacks.EarlyStopping", "patience": "3"}
    folder = make_job(tmp_path, callbacks={"stop": stopping})
    line = (folder / "cfg.json").read_text().splitlines().index('      "patience": "3"') + 1
    message = 'dsjob.callbacks.EarlyStopping: patience must be a whole number, but is "3"'
    for command in (("cfg.json",), ("validate", "--deep", "cfg.json")):
        done = dsjob(*command, cwd=folder)
        assert done.returncode != 0
        assert message in done.stdout + done.stderr
        assert f"cfg.json:{line}:" in done.stdout + done.stderr
