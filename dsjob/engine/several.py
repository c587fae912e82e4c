"""Several engines that train together: accessed by name, saved and loaded as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dsjob.checkpoint.live.joint import JointState
from dsjob.engine.engine import Engine
from dsjob.parallel.strategy import broadcast


class Engines(Mapping[str, Engine]):
    """Engines by name. The first one counts the steps and samples of the run."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = dict(engines)

    def __getitem__(self, name: str) -> Engine:
        return self._engines[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    @property
    def first(self) -> Engine:
        """The engine that counts steps and samples."""
        return next(iter(self._engines.values()))

    def state(self) -> JointState:
        """The joint state for checkpoints."""
        return JointState({name: engine.state() for name, engine in self._engines.items()})

    def counters(self) -> dict[str, int]:
        """The counters of the first engine, and those of all engines by name."""
        own = {f"{name}.{key}": n for name, engine in self._engines.items() for key, n in engine.counters().items()}
        return {**self.first.counters(), **own}

    def restore_counters(self, counters: Mapping[str, int]) -> None:
        """Restores the counters of a checkpoint."""
        for name, engine in self._engines.items():
            kept = {key: counters.get(f"{name}.{key}") for key in engine.counters()}
            engine.restore_counters({key: count for key, count in kept.items() if count is not None})

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage of the first engine."""
        return self.first.zero_stage

    def train(self) -> None:
        """Puts engines with an optimizer in training mode, and the others in evaluation mode."""
        for engine in self._engines.values():
            engine.train(engine.optimizer is not None)

    def eval(self) -> None:
        """Puts all engines in evaluation mode."""
        for engine in self._engines.values():
            engine.eval()

    def align_buffers(self) -> None:
        """Overwrites the buffers of all ranks with rank 0's, which checkpoints contain. A collective.

        The statistics of batch norms differ by rank after a step: without this, an evaluation would find something else
        than one of the checkpoint does.
        """
        for engine in self._engines.values():
            if engine.world.data_size > 1:
                broadcast([buffer for buffer in engine.module.buffers() if buffer.numel()], engine.world)
