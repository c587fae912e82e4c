"""The text of `dsjob ckpt`."""

from __future__ import annotations

import pytest

from dsjob.checkpoint.offline.verify import Damage, Verified
from dsjob.cli.ckpt_text import show_verified


@pytest.mark.parametrize(("count", "verdict"), [(0, "intact"), (1, "DAMAGED in 1 file"), (2, "DAMAGED in 2 files")])
def test_the_number_of_damages_agrees_with_its_noun(count: int, verdict: str) -> None:
    damages = [Damage(f"a/r{rank:05d}-of-00002.safetensors", "a digest differs") for rank in range(count)]
    found = Verified("step-00000001", "a", 4, 1, 0, tuple(damages))
    first, *rest = show_verified([found]).splitlines()
    assert first == f"step-00000001  {verdict}  1 chunk, 4 B of weights and optimizer"
    assert len(rest) == count + bool(count)
    assert rest[-1:] == [line for line in rest if line.startswith("next: restore the damaged files")]
