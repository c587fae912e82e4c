"""The precision of matrix products in fp32 is the job's while it runs, and the program's own afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_jobs import MORE, make_document, run

from dsjob.ranks.mesh import join_world


@pytest.fixture
def precisions() -> Iterator[list[str]]:
    found: list[str] = []
    MORE.append(lambda *_: found.append(torch.get_float32_matmul_precision()))
    yield found
    MORE.clear()
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("wanted", ["highest", "high", "medium"])
def test_matrix_products_are_as_precise_as_the_job_says(tmp_path: Path, precisions: list[str], wanted: str) -> None:
    torch.set_float32_matmul_precision("high" if wanted != "high" else "highest")
    before = torch.get_float32_matmul_precision()
    run(make_document(tmp_path, trainer={"matmul_precision": wanted, "max_steps": 1}), join_world(device="cpu"))
    assert precisions == [wanted]
    assert torch.get_float32_matmul_precision() == before


def test_a_job_that_does_not_say_leaves_it(tmp_path: Path, precisions: list[str]) -> None:
    torch.set_float32_matmul_precision("high")
    run(make_document(tmp_path, trainer={"max_steps": 1}), join_world(device="cpu"))
    assert precisions == ["high"]
