"""`deepspeed.utils.timer`: how fast an engine trains."""

from __future__ import annotations

import time

from dsjob.deepspeed.absent import explain_names as _explain_names


class ThroughputTimer:
    """Measures the samples per second of an engine's steps, from a forward pass to the end of `step`.

    The first `start_step` optimizer steps do not count, because they are slower. `epoch_count` counts the calls of
    `update_epoch_count`.
    """

    def __init__(self, batch_size: int, start_step: int = 2) -> None:
        self.batch_size, self.start_step = batch_size, start_step
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = 0.0  # seconds
        self._started: float | None = None

    def update_epoch_count(self) -> None:
        """Says that an epoch ended."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Starts the clock, unless it runs."""
        if self._started is None:
            self._started = time.perf_counter()

    def stop(self, global_step: bool = False) -> None:
        """Stops the clock after a micro batch. global_step: the optimizer stepped."""
        if self._started is None:
            return
        seconds, self._started = time.perf_counter() - self._started, None
        self.micro_step_count += 1
        if self.global_step_count >= self.start_step:
            self.total_elapsed_time += seconds
        self.global_step_count += global_step

    def avg_samples_per_sec(self) -> float:
        """Samples per second, over all ranks; minus infinity before the first step that counts."""
        counted = self.global_step_count - self.start_step
        if counted <= 0 or not self.total_elapsed_time:
            return float("-inf")
        return counted * self.batch_size / self.total_elapsed_time


__getattr__ = _explain_names(__name__)
