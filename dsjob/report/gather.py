"""What the report says about a run, collected from the run's folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsjob import provenance
from dsjob.contract import schema as contract
from dsjob.contract.paths import Path
from dsjob.contract.secrets import hide_secrets
from dsjob.errors import DsjobError, UsageError
from dsjob.front.runs import RunInfo, list_commits, list_runs, read_document
from dsjob.report.series import Curve, read_curves
from dsjob.run_folder import RESOLVED_NAME, read_given, read_result

# The origin of a value in a resumed run, whose document is that of the run before.
_OF_RESUMED = re.compile(rf"(^|/){re.escape(RESOLVED_NAME)}:\d+:\d+$")


@dataclass(frozen=True)
class Reported:
    """A run as the report shows it.

    values: of the document, by dotted path. changed: those that somebody has set, and that differ from the defaults,
    each with its default.
    environment: of the last attempt, see `dsjob.provenance`. checkpoints: their tags with their metrics.
    """

    info: RunInfo
    curves: Mapping[str, Curve]
    values: Mapping[str, Any]
    changed: Mapping[str, tuple[Any, Any]]
    environment: Mapping[str, Any]
    checkpoints: Sequence[Mapping[str, Any]]
    result: Mapping[str, Any]

    @property
    def metric(self) -> float | None:
        """The best value of the run's metric, or else the last one."""
        if self.info.best is not None:
            return self.info.best
        curve = self.curves.get(self.info.metric)
        return curve.last[1] if curve is not None and curve.last is not None else self.info.last

    @property
    def better(self) -> str:
        """Which values of the metric are better: `min` or `max`."""
        return str(self.values.get("checkpoint.best.mode", "min"))


def gather(folders: Sequence[str]) -> list[Reported]:
    """The runs in `folders` and below them, each once. Raises UsageError for a folder without runs."""
    found = dict[str, RunInfo]()
    for folder in folders:
        infos = list_runs(folder)
        if not infos:
            raise UsageError(f"no runs in {folder}", hint="dsjob runs lists runs and their folders")
        found.update({os.path.realpath(info.folder): info for info in infos})
    return [_read(info) for info in found.values()]


def _read(info: RunInfo) -> Reported:
    try:
        document = hide_secrets(read_document(info.folder))
        result = read_result(info.folder)
        environment = provenance.read(info.folder)
        curves, unset = read_curves(info.folder), find_unset(read_given(info.folder))
    except DsjobError:
        if info.status != "unreadable":
            raise
        return Reported(info, {}, {}, {}, {}, (), {})
    leaves = dict(_list_leaves(document))
    return Reported(
        info,
        curves,
        {_dot(path): value for path, value in leaves.items() if path[0] != "resolved"},
        {_dot(path): pair for path, pair in _find_changed(document, leaves) if _dot(path) not in unset},
        environment,
        _list_checkpoints(info.folder, document),
        result,
    )


def _find_changed(document: Mapping[str, Any], leaves: Mapping[Path, Any]) -> Iterator[tuple[Path, tuple[Any, Any]]]:
    schema = contract.job_schema()
    for path, value in leaves.items():
        default = contract.find_at(schema, path, document).get("default")
        if path[0] != "resolved" and value != default and value not in ({}, None):
            yield path, (value, default)


def find_unset(starts: Iterable[Mapping[str, Any]]) -> set[str]:
    """The dotted paths of values that nobody has set: they have a default, or follow from other values. starts: the
    records of job.jsonl, see `dsjob.run_folder.read_given`."""
    unset: set[str] = set()
    for start in starts:
        origins = start.get("origins")
        for path, origin in origins.items() if isinstance(origins, dict) else ():
            if origin == "default" or str(origin).startswith("derived:"):
                unset.add(path)
            elif not _OF_RESUMED.search(str(origin)):
                unset.discard(path)
    return unset


def _list_checkpoints(folder: str, document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    commits = (each for each in list_commits(folder, document) if isinstance(each, dict))
    return sorted(commits, key=lambda each: each["step"] if isinstance(each.get("step"), int) else -1)


def list_differing(runs: Sequence[Reported]) -> list[str]:
    """The dotted paths of settings that differ between runs, without names and folders."""
    paths = dict.fromkeys(path for run in runs for path in run.values if path not in ("name", "output.dir"))
    return [path for path in paths if any(run.values.get(path) != runs[0].values.get(path) for run in runs)]


def _list_leaves(value: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield from _list_leaves(item, (*above, key))
        else:
            yield (*above, key), item


def _dot(path: Path) -> str:
    return ".".join(map(str, path))
