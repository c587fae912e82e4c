"""Several states of one random generator by name, as Megatron's models use them: model-parallel ranks draw the same
numbers where they hold the same tensor, and different ones where each holds a part.

The generator is that of the current CUDA device; of the CPU where there is no CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from dsjob.errors import UsageError

MODEL_PARALLEL = "model-parallel-rng"


class CudaRNGStatesTracker:
    """Named states of the generator; `fork` draws from one of them."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forgets all states."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, Tensor]:
        """The states by name (uint8): a copy of the mapping, whose tensors nobody writes to."""
        return dict(self.states_)

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Puts `states`, from `get_states`, in the place of all states."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Adds the state that `seed` gives. Raises UsageError for a name or seed that is there already."""
        if seed in self.seeds_:
            raise UsageError(f"seed {seed} is that of another state", hint="each state needs a seed of its own")
        if name in self.states_:
            raise UsageError(f"there is a state {name} already", hint="reset() forgets all of them")
        before = read_state()
        seed_generator(seed)
        self.seeds_.add(seed)
        self.states_[name] = read_state()
        write_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Within it random numbers are those of the state `name`, which moves on; those outside are not touched."""
        if name not in self.states_:
            known = ", ".join(self.states_) or "none"
            raise UsageError(
                f"there is no random state {name}; known are: {known}",
                hint="model_parallel_cuda_manual_seed(seed) adds the model-parallel one, add(name, seed) any other",
            )
        before = read_state()
        write_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = read_state()
            write_state(before)


TRACKER = CudaRNGStatesTracker()


@contextmanager
def go_back_to(states: Mapping[str, Tensor]) -> Iterator[None]:
    """Within it the tracker's states begin as `states`; those of before are there again afterwards."""
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
    """Puts the generator into `state`."""
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def seed_generator(seed: int) -> None:
    """Seeds the generator, and no other."""
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
