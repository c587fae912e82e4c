"""Delivers values to monitors, each once, and continues without a monitor that fails."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from dsjob.contract.masking import mask, mask_texts
from dsjob.contract.secrets import hide_secrets
from dsjob.errors import DsjobError, Preempted
from dsjob.files import require_own
from dsjob.monitors.monitor import Event, Monitor, Series
from dsjob.run_folder import MONITORS_NAME, read_json


class Receivers:
    """Monitors by name. One that fails is named once, and dropped. say: shows a title and a text."""

    def __init__(self, monitors: Mapping[str, Monitor], say: Callable[[str, str], None]) -> None:
        self._monitors, self._say = dict(monitors), say

    def _try(self, name: str, action: Callable[[Monitor], None]) -> None:
        try:
            if name in self._monitors:
                action(self._monitors[name])
        except Exception as error:
            self._drop(f"monitor {name}", error, [name])

    def _drop(self, title: str, error: Exception, names: Sequence[str]) -> None:
        """Continues without these monitors."""
        for name in names:
            self._monitors.pop(name, None)
        reason = mask(str(error)).strip().split("\n")[0][:300] or type(error).__name__
        self._say(title, f"failed, and receives no more values of this run: {type(error).__name__}: {reason}")


class Delivery(Receivers):
    """Passes values to the monitors of a run. They begin with the first value, so that a run that fails at once leaves
    nothing behind.

    The file monitors.json in the run's folder has the run's key and, by monitor and name, the samples of the last
    value: values that a resumed run repeats are left out. It is written before a monitor receives a value, so a kill
    between the two loses that value, and never doubles one.
    """

    def __init__(
        self,
        monitors: Mapping[str, Monitor],
        *,
        name: str,
        run_dir: str,
        document: Mapping[str, Any],
        say: Callable[[str, str], None],
    ) -> None:
        super().__init__(monitors, say)
        self._name, self._document = name, mask_texts(hide_secrets(dict(document)))
        self._run_dir, self._path = run_dir, os.path.join(run_dir, MONITORS_NAME)
        self._begin = 0
        self._key = ""  # empty until the monitors have begun
        self._sent: dict[str, dict[str, int]] = {}  # by monitor and name, the samples of the last value

    def __enter__(self) -> Delivery:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None and not issubclass(kind, Preempted))

    def start(self, samples: int) -> None:
        """Training begins after `samples` samples."""
        self._begin = samples

    def send(self, values: Mapping[str, float], samples: int) -> None:
        """Passes values by name to all monitors. They were measured after `samples` samples."""
        if not self._monitors:
            return
        if not self._key:
            self._open()
        due: dict[str, list[Event]] = {}
        for name, monitor in self._monitors.items():
            sent = self._sent.setdefault(name, {})
            kept = values if monitor.rewinds else [each for each in values if samples > sent.get(each, -1)]
            due[name] = [(each, values[each], samples) for each in kept]
            sent |= dict.fromkeys(kept, samples)
        self._write_state()
        for name, events in due.items():
            if events:
                self._try(name, partial(_write, events))

    def close(self, failed: bool) -> None:
        """Ends all monitors that have begun."""
        for name in list(self._monitors) if self._key else ():
            self._try(name, lambda monitor: monitor.end(failed))
        self._monitors = {}

    def _open(self) -> None:
        state: dict[str, Any] = {}
        if self._begin:  # else the run starts again, with a series of its own
            with suppress(DsjobError):
                state = read_json(self._path)
        self._key, self._sent = state.get("key") or uuid.uuid4().hex, state.get("sent", {})
        series = Series(self._name, self._run_dir, self._key, self._begin, self._document)
        for name in list(self._monitors):
            self._try(name, lambda monitor: monitor.begin(series))

    def _write_state(self) -> None:
        try:
            temporary = f"{self._path}.tmp"
            for path in (self._path, temporary):
                require_own(path)
            # Replaced, so that a kill leaves it whole; not synced, since it is written with every record.
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump({"key": self._key, "sent": self._sent}, file)
            os.replace(temporary, self._path)
        except (OSError, DsjobError) as error:
            self._drop("monitors", error, [*self._monitors])


def _write(events: Sequence[Event], monitor: Monitor) -> None:
    monitor.write_events(events)


def name_values(record: Mapping[str, float]) -> dict[str, float]:
    """A log record's values by the names that DeepSpeed uses. Other names with a slash, such as `train/f1`, stay as
    they are. Tokens per second are left out where samples are not tokens."""
    own = {"loss": "Train/Samples/train_loss"}
    own |= {f"time/{part}_ms": f"Train/Samples/elapsed_time_ms_{part}" for part in ("forward", "backward", "step")}
    left_out = ("step", "eta_seconds")  # the first is on the other axis, the second is no measurement
    return {
        own.get(name, name if "/" in name else f"Train/Samples/{name}"): value
        for name, value in record.items()
        if name not in left_out and (value or name != "tokens_per_second")
    }
