"""The sections of monitors in the typed job (`dsjob.contract.spec`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class MonitorFiles:
    enabled: bool
    output_path: str
    job_name: str


@dataclass(frozen=True, slots=True)
class Wandb:
    enabled: bool
    group: str | None
    team: str | None
    project: str


@dataclass(frozen=True, slots=True)
class Comet:
    enabled: bool
    samples_log_interval: int
    project: str | None
    workspace: str | None
    api_key: str | None
    experiment_name: str | None
    experiment_key: str | None
    online: bool | None
    mode: Literal["get", "create", "get_or_create"] | None


@dataclass(frozen=True, slots=True)
class Mlflow:
    enabled: bool
    tracking_uri: str | None
    experiment: str
    run_name: str | None
