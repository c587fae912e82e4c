"""Monitors: destinations for a run's metrics. Each module has one, and imports its package only when it begins."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsjob.errors import Problem
from dsjob.monitors.monitor import Monitor


@dataclass(frozen=True)
class Service:
    """A monitor that the section `monitor` has a key for. package: what it imports, and distribution: what pip calls
    it; both are empty if Python itself is enough."""

    module: str
    name: str
    package: str = ""
    distribution: str = ""

    def build(self, section: Any) -> Monitor:
        """The monitor with its section of the job."""
        made: Monitor = getattr(importlib.import_module(self.module), self.name)(section)
        return made


SERVICES = {
    "tensorboard": Service("dsjob.monitors.tensorboard", "TensorBoardMonitor", "tensorboard", "tensorboard"),
    "csv_monitor": Service("dsjob.monitors.csv_files", "CsvMonitor"),
    "wandb": Service("dsjob.monitors.wandb", "WandbMonitor", "wandb", "wandb"),
    "comet": Service("dsjob.monitors.comet", "CometMonitor", "comet_ml", "comet_ml"),
    "mlflow": Service("dsjob.monitors.mlflow", "MlflowMonitor", "mlflow", "mlflow-skinny"),
}


def find_missing(document: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems for the enabled monitors of a document whose package is not installed. Imports nothing."""
    for name, service in SERVICES.items():
        section = document["monitor"].get(name)
        enabled = isinstance(section, Mapping) and section.get("enabled") is True
        if enabled and service.package and not _is_installed(service.package):
            message = f"needs the package {service.package}, which is not installed"
            yield Problem(message, ("monitor", name), "missing-package", f"pip install {service.distribution}")


def _is_installed(package: str) -> bool:
    """Whether a package can be imported. A folder of that name does not count: wandb leaves one beside its runs."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
