"""The base class of monitors, and what a monitor learns of its run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsjob.contract.monitors import MonitorFiles

Event = tuple[str, float, int]  # a value's name, the value, and the samples that the run had seen, as in DeepSpeed
UNNAMED = "DeepSpeedJobName"  # DeepSpeed's default for job_name


@dataclass(frozen=True)
class Series:
    """The run whose values a monitor receives.

    name: of the job. run_dir: the run's folder. key: 32 hexadecimal digits that identify the run; a resumed run keeps
    them, one that starts again has new ones. begin: samples seen before the first value; more than 0 in a resumed run.
    document: the resolved document, without secrets.

    A program with an engine of its own has none of these (`of_program`): values are added to those of earlier runs.
    """

    name: str
    run_dir: str
    key: str
    begin: int
    document: Mapping[str, Any]

    @classmethod
    def of_program(cls) -> Series:
        """The series of a program, whose monitors behave as DeepSpeed's do."""
        return cls("", "", "", 0, {})

    @property
    def of_job(self) -> bool:
        """Whether a job's run sends the values."""
        return bool(self.key)

    def choose_folder(self, section: MonitorFiles, default: str) -> str:
        """`output_path/job_name`; without an output_path, the folder `default` in the run's folder. DeepSpeed's default
        for job_name stands for the name of the run's folder, so that runs do not share a folder. For a program, always
        `output_path/job_name`."""
        if not self.of_job:
            return os.path.join(os.path.expanduser(section.output_path), section.job_name)
        if not section.output_path:
            return os.path.join(self.run_dir, default)
        name = os.path.basename(os.path.abspath(self.run_dir)) if section.job_name == UNNAMED else section.job_name
        return os.path.join(os.path.expanduser(section.output_path), name)


class Monitor:
    """A destination for metrics. Derive from it, and name your class in the document:
    `monitor: {custom: {mine: {_target_: my_module.MyMonitor}}}`.

    dsjob calls a monitor on rank 0 only. If it raises an exception, training continues without it.
    """

    # Whether `begin` removes the values of an earlier run behind `series.begin`, which a resumed run repeats. Otherwise
    # dsjob leaves out what a resumed run repeats, so that no value is there twice.
    rewinds = False

    def begin(self, series: Series) -> None:
        """Called once, before the first values."""

    def write_events(self, events: Sequence[Event]) -> None:
        """Called with the values of a log record or an evaluation: (name, value, samples seen) for each.

        Names are those of DeepSpeed, such as `Train/Samples/train_loss`, and `eval/loss` for an evaluation.
        """
        raise NotImplementedError

    def end(self, failed: bool) -> None:
        """Called when the run ends, also if it has `failed`, but not if it is killed."""


def flatten(document: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A document's values by dotted path, for services that have a flat list of parameters."""
    found: dict[str, Any] = {}
    for key, value in document.items():
        inner = isinstance(value, Mapping) and value
        found |= flatten(value, f"{above}{key}.") if inner else {f"{above}{key}": value}
    return found
