"""Writes the HTML page of a report. Python writes the text and the tables; page.js draws the curves with Plotly.

Names of runs and metrics can come from anyone. Tables are escaped, the data are JSON without `<`, and the page's
content security policy runs only the page's own scripts and opens no connection.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from dsjob import storage
from dsjob.errors import DsjobError, how_to_install
from dsjob.report.gather import Reported, gather, list_differing
from dsjob.report.tables import show, show_details, show_runs, show_tiles

_NOT_DRAWN = ("epoch", "eta_seconds")
_SMOOTH = ("lr", "loss_scale")
_NAMED = {  # title and unit
    "loss": ("Training loss", ""),
    "eval/loss": ("Evaluation loss", ""),
    "lr": ("Learning rate", ""),
    "grad_norm": ("Gradient norm", ""),
    "loss_scale": ("Loss scale", ""),
    "samples_per_second": ("Samples per second", "samples/s"),
    "tokens_per_second": ("Tokens per second", "tokens/s"),
    "memory/peak_gib": ("Peak of memory", "GiB"),
}
_PARTS = (  # pattern, title and unit
    (r"memory/(\w+)_gib", "Memory: {}", "GiB"),
    (r"time/(\w+)_ms", "Time: {}", "ms"),
    (r"time/(\w+)_share", "Share of time: {}", ""),
)
_AXES = 8  # settings in the parallel coordinates


def write_report(runs: Sequence[str], output: str = "report.html") -> None:
    """Writes a page about the runs in the folders `runs` to the file `output`.

    Raises UsageError for a folder without runs, and DsjobError if plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise DsjobError("dsjob report needs plotly", hint=how_to_install("plotly")) from None
    found = gather(runs)
    storage.make_folder(os.path.dirname(output) or ".")
    storage.write_bytes(output, make_page(found, get_plotlyjs()).encode(errors="replace"))


def make_page(runs: Sequence[Reported], library: str) -> str:
    """The page as HTML. `library`: the source of plotly.js."""
    names, alone = _name_runs(runs), len(runs) == 1
    title = names[0] if alone else f"{len(runs)} runs"
    script = resources.files("dsjob.report").joinpath("page.js").read_text()
    style = resources.files("dsjob.report").joinpath("page.css").read_text()
    scripts = [library.replace("</script", "<\\/script"), script]
    hashes = " ".join(f"'sha256-{_hash(text)}'" for text in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    made = _make_data(runs, names)
    data = json.dumps(made, allow_nan=False).replace("<", "\\u003c")
    last = _list_last(runs[0]) if alone else {}
    drawn = '<div class="chart"><div id="parallel"></div></div>'
    drawn = drawn if made["axes"] else f'<p class="note">{escape(_explain_no_axes(runs))}</p>'
    parallel = f"<section><h2>Settings and results</h2>{drawn}</section>"
    empty = '<p class="note">No metrics were logged.</p>'
    body = [
        f"<header><h1>{escape(title)}</h1><p>dsjob report of {time.strftime('%Y-%m-%d %H:%M')}</p></header>",
        show_tiles(runs[0], last) if alone else show_runs(runs, names) + parallel,
        '<section><h2>Curves</h2><div id="controls" class="controls"></div>',
        f'<div id="curves" class="grid"></div>{"" if made["charts"] else empty}</section>',
        *(show_details(run, name, alone=alone) for run, name in zip(runs, names, strict=True)),
    ]
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)} · dsjob</title><style>{style}</style></head><body>",
            *body,
            f'<script type="application/json" id="data">{data}</script>',
            *(f"<script>{text}</script>" for text in scripts),
            "</body></html>\n",
        ]
    )


def _list_last(run: Reported) -> dict[str, float]:
    """The last values of what the page's tiles show, by title."""
    names = (name for name in ("loss", "samples_per_second", "tokens_per_second") if name != run.info.metric)
    curves = {_NAMED[name][0]: run.curves[name] for name in names if name in run.curves}
    return {title: curve.last[1] for title, curve in curves.items() if curve.last and curve.last[1]}


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _name_runs(runs: Sequence[Reported]) -> list[str]:
    """The runs' names, with their folders where a name is not unique."""
    names = [run.info.name or run.info.folder for run in runs]
    return [
        name if names.count(name) == 1 else f"{name} ({run.info.folder})" for name, run in zip(names, runs, strict=True)
    ]


def _make_data(runs: Sequence[Reported], names: Sequence[str]) -> dict[str, Any]:
    metrics = dict.fromkeys(name for run in runs for name in run.curves)
    charts = []
    for metric in sorted(metrics, key=_place):
        lines = []
        for index, curve in ((index, run.curves[metric]) for index, run in enumerate(runs) if metric in run.curves):
            points = curve.list_points() if curve.count else []
            xs, ys = [x for x, _ in points], [y for _, y in points]
            if points and (any(ys) or metric != "tokens_per_second"):  # 0 where samples are not tokens
                lines.append({"run": index, "x": xs, "y": ys, "notFinite": curve.not_finite})
        if metric not in _NOT_DRAWN and lines:
            title, unit = _NAMED.get(metric) or _name_part(metric)
            noisy = metric.rpartition("/")[2] not in _SMOOTH and not metric.startswith("memory/")
            charts.append({"title": title, "unit": unit, "metric": metric, "noisy": noisy, "lines": lines})
    return {"runs": list(names), "charts": charts, "axes": _make_axes(runs) if len(runs) > 1 else []}


def _name_part(metric: str) -> tuple[str, str]:
    """The title and unit of what `MemoryUse` and `WallClock` measure of a part of training; of others, the name."""
    for pattern, title, unit in _PARTS:
        if found := re.fullmatch(pattern, metric):
            return title.format(found[1]), unit
    return metric, ""


def _place(metric: str) -> tuple[int, int]:
    """Losses come first, then evaluations, then other metrics as they were logged (sorting is stable)."""
    known = list(_NAMED)
    if metric in known[:2]:
        return 0, known.index(metric)
    return (1, 0) if metric.startswith("eval/") else (2, known.index(metric)) if metric in known else (3, 0)


def _explain_no_axes(runs: Sequence[Reported]) -> str:
    """Why there are no parallel coordinates."""
    measured = sorted({run.info.metric for run in runs if run.metric is not None})
    if not measured:
        return "Not drawn: no run has logged its metric."
    if measured[1:]:
        return (
            f"Not drawn: the runs have different metrics ({', '.join(measured)}). Give them the same checkpoint.best."
        )
    return "Not drawn: the settings of the runs are equal."


def _is_number(value: Any) -> bool:
    """Whether JSON and JavaScript have this number."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _make_axes(runs: Sequence[Reported]) -> list[dict[str, Any]]:
    """The axes of the parallel coordinates: settings that differ, then the metric, null where a run has none."""
    measured = {run.info.metric: run.better for run in runs if run.metric is not None}
    if len(measured) != 1:
        return []
    ((name, better),) = measured.items()
    axes: list[dict[str, Any]] = []
    for path in list_differing(runs)[:_AXES]:
        values = [run.values.get(path) for run in runs]
        if all(map(_is_number, values)):
            axes.append({"label": path, "values": values})
        else:
            texts = [show(value) for value in values]
            known = list(dict.fromkeys(texts))
            axes.append({"label": path, "values": [known.index(text) for text in texts], "texts": known})
    result = {"label": name, "values": [run.metric for run in runs], "better": better}
    return [*axes, result] if axes else []
