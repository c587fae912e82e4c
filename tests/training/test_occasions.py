"""When a save that was asked for is due, by a clock that the test turns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsjob.contract.spec import Checkpoint
from dsjob.ranks.mesh import World
from dsjob.training.occasions import Occasions

SPEC = Checkpoint(
    dir=None,
    every=0,
    every_minutes=None,
    every_epochs=None,
    at_end=True,
    on_signal=True,
    keep=0,
    keep_every=0,
    best=None,
    load_best_at_end=False,
    save_on_error="warn",
    resume="auto",
    strict=True,
    ema=False,
    on_corrupt="stop",
    single_writer=False,
    async_=True,
)


class Asked:
    """A run on one rank that is asked to save by a file; a step takes half a second."""

    def __init__(self, folder: Path) -> None:
        self.file, self.now = folder / "save-now", 0.0
        self.occasions = Occasions(
            SPEC,
            World(data_rank=0, local_rank=0, data_size=1, device=torch.device("cpu")),
            str(self.file),
            lambda: self.now,
        )
        self.file.touch()

    def is_due(self) -> bool:
        return self.occasions.agree(0, news=False).saves

    def wait(self) -> float:
        """Trains until a save is due; seconds."""
        began = self.now
        while not self.is_due():
            self.now += 0.5
            assert self.now < began + 1e4
        return self.now - began


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(tmp_path)


def test_what_fails_on_is_tried_after_pauses_that_double_up_to_five_minutes(asked: Asked) -> None:
    pauses = []
    for _ in range(13):
        pauses.append(asked.wait())
        asked.occasions.note_failure()
    assert pauses == [0, 0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


@pytest.mark.parametrize("behind", [False, True])
def test_a_save_that_is_made_ends_the_pauses(asked: Asked, behind: bool) -> None:
    for _ in range(6):
        asked.occasions.note_failure()
    asked.occasions.note_save(behind=behind)
    assert not asked.file.exists()
    if behind:
        asked.occasions.note_settled(True)
    assert not asked.is_due()
    asked.file.touch()
    assert asked.is_due()
    asked.occasions.note_failure()
    assert asked.is_due(), "the first time at once"
    asked.occasions.note_failure()
    assert asked.wait() == 1


def test_what_is_only_under_way_ends_no_pause_and_a_failure_of_it_asks_again(asked: Asked) -> None:
    for _ in range(3):
        asked.occasions.note_failure()
    asked.occasions.note_save(behind=True)
    assert not asked.is_due()
    asked.occasions.note_settled(None)  # there was none to settle: nothing is known
    assert not asked.is_due()
    asked.occasions.note_settled(False)
    assert asked.wait() == 4


def test_what_nobody_asked_for_is_not_tried_again(asked: Asked) -> None:
    asked.file.unlink()
    asked.occasions.note_save(behind=True)
    asked.occasions.note_settled(False)
    asked.now += 1e4
    assert not asked.is_due()
