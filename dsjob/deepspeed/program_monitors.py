"""`engine.monitor`: writes what a program's engine measures, and what the program adds, to the monitors of its config.

Names, steps and folders are those of DeepSpeed 0.19, which calls monitors at the end of each optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dsjob.contract.monitors import Comet, MonitorFiles, Wandb
from dsjob.contract.spec import view
from dsjob.deepspeed.utils import logger
from dsjob.document.places import place_problems
from dsjob.engine.configs import Given
from dsjob.errors import ConfigError, UsageError
from dsjob.monitors import SERVICES, find_missing
from dsjob.monitors.delivery import Receivers
from dsjob.monitors.monitor import Event, Series
from dsjob.terminal import split_text

# The sections of a DeepSpeed config. MLflow is one of jobs only.
_SECTIONS: dict[str, type[Any]] = {
    "tensorboard": MonitorFiles,
    "csv_monitor": MonitorFiles,
    "wandb": Wandb,
    "comet": Comet,
}


def require_packages(given: Given) -> None:
    """Raises ConfigError if the package of an enabled monitor is not installed."""
    sections = {name: given.config.get(name) for name in _SECTIONS}
    found = [replace(problem, path=problem.path[1:]) for problem in find_missing({"monitor": sections})]
    if found:
        raise ConfigError(place_problems(found, given.origin.locate))


class Monitor(Receivers):
    """The monitors of one engine. enabled: whether the config enables any. Only rank 0 imports packages and writes.

    They begin with the engine, as in DeepSpeed: a program may then use what a package holds globally, such as
    `wandb.run`.
    """

    def __init__(self, config: Mapping[str, Any], rank: int) -> None:
        sections = {name: config.get(name) or {} for name in _SECTIONS}
        asked = [name for name, section in sections.items() if section.get("enabled") is True]
        self.enabled = bool(asked)
        made = {name: SERVICES[name].build(view(_SECTIONS[name], sections[name])) for name in asked if rank == 0}
        super().__init__(made, _warn)
        for name in made:
            self._try(name, lambda monitor: monitor.begin(Series.of_program()))

    def write_events(self, events: Sequence[tuple[str, Any, int]]) -> None:
        """Writes events (name, value, step) on rank 0; the engine's own have samples as steps. Values are numbers, or
        tensors and arrays with one element. Raises UsageError for other events."""
        if not self._monitors:
            return
        plain = [_make_plain(event) for event in events]
        for name in list(self._monitors) if plain else ():
            self._try(name, lambda monitor: monitor.write_events(plain))


def _warn(title: str, text: str) -> None:
    logger.warning("%s", "\n".join(split_text(f"{title} {text}")))


def _make_plain(event: Any) -> Event:
    """An event with Python's own numbers, which all monitors accept."""
    try:
        name, value, step = event
        number, samples = _read_number(value), int(_read_number(step))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        shown = repr(event)[:100]
        raise UsageError(
            f"write_events got {shown}", hint="an event is (name, value, step), with numbers as value and step"
        ) from error
    return str(name), number, samples


def _read_number(value: Any) -> float:
    """A number as it is, since CSV files show 3 and 3.0 differently; else the only element of a tensor or array."""
    number: object = value.item() if hasattr(value, "item") else value
    if not isinstance(number, (int, float)):
        raise TypeError
    return number
