"""CSV files, one for each value, as DeepSpeed writes them."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence

from dsjob import storage
from dsjob.contract.monitors import MonitorFiles
from dsjob.files import append_bytes, explained, open_append, open_read
from dsjob.monitors.monitor import Event, Monitor, Series

_LONGEST = 4096  # bytes of a header


class CsvMonitor(Monitor):
    """Writes files to `output_path/job_name`, or to the folder `csv` in the run's folder: `Train_Samples_lr.csv` has
    the columns `step` (samples seen) and `lr`."""

    rewinds = True

    def __init__(self, section: MonitorFiles) -> None:
        self._section, self._folder = section, ""

    def begin(self, series: Series) -> None:
        self._folder = series.choose_folder(self._section, "csv")
        os.makedirs(self._folder, exist_ok=True)
        for name in os.listdir(self._folder) if series.of_job else ():
            if name.endswith(".csv"):
                _cut(os.path.join(self._folder, name), series.begin)

    def write_events(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            path = os.path.join(self._folder, name.replace("/", "_").replace(" ", "_") + ".csv")
            with explained(path), io.TextIOWrapper(open_append(path), encoding="utf-8", newline="") as file:
                rows = csv.writer(file)
                if os.path.getsize(path) == 0:
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([samples, value])


def _cut(path: str, samples: int) -> None:
    """Moves the rows behind `samples`, and one that a kill has truncated, to `NAME.csv.superseded`: they may be those
    of another run that had the same output_path and job_name. Leaves files that no monitor has written."""
    if not _is_own(path):
        return
    lines = storage.read_text(path).splitlines(keepends=True)
    behind = [line for line in lines if not _is_kept(line, samples)]
    if behind:
        append_bytes(f"{path}.superseded", "".join(behind).encode())
        storage.write_bytes(path, "".join(line for line in lines if _is_kept(line, samples)).encode())


def _is_own(path: str) -> bool:
    """Whether the header of a file is that of a monitor: `step`, and the end of the file's name."""
    with open_read(path) as file:
        header = next(csv.reader([file.readline(_LONGEST).decode(errors="replace")]), [])
    name = os.path.basename(path).removesuffix(".csv")
    return len(header) == 2 and header[0] == "step" and name.endswith(header[1].replace(" ", "_"))


def _is_kept(line: str, samples: int) -> bool:
    step, whole = line.partition(",")[0], line.endswith("\n")
    return whole and (step == "step" or (step.isdecimal() and int(step) <= samples))
