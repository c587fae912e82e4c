"""Named states of one random generator, as Megatron's models use them: model-parallel ranks draw equal numbers for
tensors that they all hold, and different numbers for tensors of which each holds a part.

The generator is that of the current CUDA device, or without CUDA, that of the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from dsjob.errors import UsageError

MODEL_PARALLEL = "model-parallel-rng"


class CudaRNGStatesTracker:
    """Named states of the generator. `fork` switches to one of them."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forgets all states."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, Tensor]:
        """The states by name (uint8). The mapping is a copy; its tensors are never written to."""
        return dict(self.states_)

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Replaces all states by `states`, from `get_states`."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Adds a state seeded with `seed`. Raises UsageError if the name or the seed is in use."""
        if seed in self.seeds_:
            raise UsageError(f"another random state has the seed {seed}", hint="give each state a different seed")
        if name in self.states_:
            raise UsageError(f"random state {name} exists already", hint="reset() removes all states")
        # There is only one generator, so seed it, keep that state, and restore its own.
        before = read_state()
        seed_generator(seed)
        self.seeds_.add(seed)
        self.states_[name] = read_state()
        write_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draws random numbers from the state `name` within the block. The generator's own state is restored after."""
        if name not in self.states_:
            known = ", ".join(self.states_) or "none"
            raise UsageError(
                f"unknown random state {name}; known states: {known}",
                hint="model_parallel_cuda_manual_seed(seed) adds the model-parallel one, add(name, seed) any other",
            )
        before = read_state()
        write_state(self.states_[name])
        try:
            yield
        finally:
            # The next `fork` continues from here.
            self.states_[name] = read_state()
            write_state(before)


TRACKER = CudaRNGStatesTracker()


@contextmanager
def go_back_to(states: Mapping[str, Tensor]) -> Iterator[None]:
    """Sets the tracker's states to `states` within the block, and restores the current ones afterwards."""
    now = TRACKER.get_states()
    TRACKER.set_states(states)
    try:
        yield
    finally:
        TRACKER.set_states(now)


def read_state() -> Tensor:
    """The generator's state, uint8."""
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def write_state(state: Tensor) -> None:
    """Sets the generator's state."""
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def seed_generator(seed: int) -> None:
    """Seeds this generator only. (torch.manual_seed would seed those of all devices.)"""
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
