"""Parts of jobs of `small_jobs` whose running is measured."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from small_jobs import Data

from dsjob.callbacks import Callback, RunView


class SlowData(Data):
    """Data of which each sample takes 2 ms."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return super().__getitem__(index)


class Returns(Callback):
    """Returns a value that log records already have."""

    def on_record(self, run: RunView, record: Mapping[str, float]) -> dict[str, float]:
        return {"loss": 0.0}
