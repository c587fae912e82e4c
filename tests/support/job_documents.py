"""Job documents for tests, and the shortest ways to resolve and to complain about them."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dsjob.document.compose import compose
from dsjob.document.origins import Composed, read_document
from dsjob.document.places import Locate
from dsjob.document.resolve import resolve_job
from dsjob.errors import DocumentError, Problem

_JOB: dict[str, Any] = {
    "name": "job",
    "model": {"_target_": "torch.nn.Identity"},
    "data": {"train": {"_target_": "torch.utils.data.TensorDataset"}},
    "trainer": {"micro_batch": 4, "max_steps": 10},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
}


def make_job(**sections: Any) -> dict[str, Any]:
    """A valid job document with some sections replaced, or left out where they are None."""
    job = copy.deepcopy(_JOB) | copy.deepcopy(sections)
    return {key: value for key, value in job.items() if value is not None}


def nowhere(path: tuple[str | int, ...]) -> tuple[str, int, int]:
    """The place of values in a document that somebody has typed into a file without a name."""
    return "", 1, 1


def resolve(document: dict[str, Any], *, world_size: int = 1, locate: Locate = nowhere) -> dict[str, Any]:
    """A document resolved, its warnings left out."""
    return resolve_job(document, world_size=world_size, locate=locate).document


def resolve_composed(composed: Composed, *, world_size: int = 1) -> dict[str, Any]:
    """What Hydra composed, resolved."""
    return resolve(composed.document, world_size=world_size, locate=composed.locate)


def write_json(path: Path, value: Any) -> Path:
    """Writes a document, one key a line."""
    path.write_text(json.dumps(value, indent=2))
    return path


def compose_file(path: Path, overrides: Sequence[str] = (), **kwargs: Any) -> Composed:
    """A job file with overrides, composed."""
    return compose(list(overrides), file=read_document(str(path)), **kwargs)


def find_problems(document: dict[str, Any], *, world_size: int = 1, locate: Locate = nowhere) -> tuple[Problem, ...]:
    """What resolving a document finds wrong with it, which must be something."""
    with pytest.raises(DocumentError) as caught:
        resolve(document, world_size=world_size, locate=locate)
    return caught.value.problems
