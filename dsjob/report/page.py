"""Writes the HTML page of a report. Python writes the text and the tables; page.js draws the curves with Plotly.

Names of runs and metrics can come from anyone. Tables are escaped here, the data are JSON without `<`, and the page's
content security policy runs only the page's own scripts and opens no connection.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from dsjob import storage
from dsjob.errors import DsjobError, how_to_install
from dsjob.report.gather import Reported, gather

_NOT_DRAWN = ("epoch", "eta_seconds")
_TITLES = {
    "loss": "Training loss",
    "eval/loss": "Evaluation loss",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "loss_scale": "Loss scale",
    "samples_per_second": "Throughput (samples/s)",
    "tokens_per_second": "Throughput (tokens/s)",
}
_SETTINGS = 12  # differing settings in the table of runs
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
    storage.write_bytes(output, make_page(found, get_plotlyjs()).encode())


def make_page(runs: Sequence[Reported], library: str) -> str:
    """The page as HTML. `library`: the source of plotly.js."""
    names = _name_runs(runs)
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs"
    script = resources.files("dsjob.report").joinpath("page.js").read_text()
    style = resources.files("dsjob.report").joinpath("page.css").read_text()
    scripts = [library.replace("</script", "<\\/script"), script]
    hashes = " ".join(f"'sha256-{_hash(text)}'" for text in scripts)
    # Parts of Plotly (parallel coordinates) compile functions: hence unsafe-eval.
    policy = f"default-src 'none'; script-src 'unsafe-eval' {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    data = json.dumps(_make_data(runs, names), allow_nan=False).replace("<", "\\u003c")
    body = [
        f"<header><h1>{escape(title)}</h1><p>Report of dsjob, {time.strftime('%Y-%m-%d %H:%M')}</p></header>",
        _show_tiles(runs[0]) if len(runs) == 1 else _show_runs(runs, names),
        '<section><h2>Curves</h2><div id="curves" class="grid"></div></section>',
        *(_show_details(run, name, len(runs) == 1) for run, name in zip(runs, names, strict=True)),
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


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _name_runs(runs: Sequence[Reported]) -> list[str]:
    """The runs' names, with their folders where a name is not unique."""
    names = [run.info.name or run.info.folder for run in runs]
    return [
        name if names.count(name) == 1 else f"{name} ({run.info.folder})" for name, run in zip(names, runs, strict=True)
    ]


def _make_data(runs: Sequence[Reported], names: Sequence[str]) -> dict[str, Any]:
    metrics = dict.fromkeys([*_TITLES, *(name for run in runs for name in run.curves)])
    charts = []
    for metric in metrics:
        curves = [(index, run.curves[metric]) for index, run in enumerate(runs) if metric in run.curves]
        if metric in _NOT_DRAWN or not any(curve.count for _, curve in curves):
            continue
        lines = [
            {"run": index, "x": [x for x, _ in points], "y": [y for _, y in points], "notFinite": curve.not_finite}
            for index, curve in curves
            if (points := curve.list_points() if curve.count else [])
        ]
        charts.append({"title": _TITLES.get(metric, metric), "metric": metric, "lines": lines})
    return {"runs": list(names), "charts": charts, "axes": _make_axes(runs) if len(runs) > 1 else []}


def _make_axes(runs: Sequence[Reported]) -> list[dict[str, Any]]:
    """The axes of the parallel coordinates: settings that differ, then the metric."""
    axes = []
    for path in _list_differing(runs)[:_AXES]:
        values = [run.values.get(path) for run in runs]
        if all(type(value) in (int, float) for value in values):
            axes.append({"label": path, "values": values})
        else:
            texts = [_show(value) for value in values]
            known = list(dict.fromkeys(texts))
            axes.append({"label": path, "values": [known.index(text) for text in texts], "texts": known})
    metrics = [_choose(run) for run in runs]
    if axes and all(value is not None for value in metrics):
        axes.append({"label": runs[0].info.metric, "values": metrics})
    return axes


def _choose(run: Reported) -> float | None:
    return run.info.last if run.info.best is None else run.info.best


def _list_differing(runs: Sequence[Reported]) -> list[str]:
    """The dotted paths of settings that differ between runs, without names and folders."""
    paths = dict.fromkeys(path for run in runs for path in run.values if path not in ("name", "output.dir"))
    return [path for path in paths if len({_show(run.values.get(path)) for run in runs}) > 1]


def _show(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _show_tiles(run: Reported) -> str:
    info = run.info
    tiles = [("Status", info.status), ("Step", _show_step(run))]
    if (value := _choose(run)) is not None:
        tiles.append((f"{'Best' if info.best is not None else 'Last'} {info.metric}", f"{value:.4g}"))
    for name in ("loss", "samples_per_second", "tokens_per_second"):
        curve = run.curves.get(name)
        if curve is not None and curve.last is not None and name != info.metric:
            tiles.append(
                (
                    f"Last {_TITLES[name].lower()}",
                    f"{curve.last[1]:,.0f}" if curve.last[1] >= 1000 else f"{curve.last[1]:.4g}",
                )
            )
    tiles.append(("Checkpoints", str(len(run.checkpoints))))
    shown = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in tiles)
    return f'<dl class="tiles">{shown}</dl>'


def _show_step(run: Reported) -> str:
    step, steps = run.info.step, run.info.max_steps
    return "–" if step is None else f"{step:,} / {steps:,}" if steps else f"{step:,}"


def _show_runs(runs: Sequence[Reported], names: Sequence[str]) -> str:
    settings = _list_differing(runs)[:_SETTINGS]
    metric = dict.fromkeys(run.info.metric for run in runs)
    head = ["run", "status", "step", f"best or last {' or '.join(metric)}", "last loss", *settings]
    rows = []
    for run, name in zip(runs, names, strict=True):
        loss = run.curves.get("loss")
        last = None if loss is None or loss.last is None else loss.last[1]
        rows.append([name, run.info.status, run.info.step, _choose(run), last, *map(run.values.get, settings)])
    chart = '<h2>Parallel coordinates</h2><div class="wide"><div id="parallel"></div></div>' if settings else ""
    return f"<section><h2>Runs</h2>{_show_table(head, rows, sortable=True)}{chart}</section>"


def _show_details(run: Reported, name: str, alone: bool) -> str:
    changed = [(path, value, default) for path, (value, default) in run.changed.items()]
    checkpoints = [(each.get("tag"), each.get("step"), _show_metrics(each.get("metrics"))) for each in run.checkpoints]
    parts: list[tuple[str, Sequence[str], Sequence[Sequence[Any]]]] = [
        ("Differs from the defaults", ("key", "value", "default"), changed),
        ("Checkpoints", ("tag", "step", "metrics"), checkpoints),
        ("Environment", ("name", "value"), list(run.environment.items())),
    ]
    error = run.result.get("error")
    inner = f'<p class="error">{escape(_show(error))}</p>' if error else ""
    for title, head, rows in parts:
        inner += f"<h3>{title}</h3>{_show_table(head, rows) if rows else '<p>None.</p>'}"
    return (
        f"<details{' open' if alone else ''}><summary>{escape(name)}</summary>"
        f'<p class="folder">{escape(run.info.folder)}</p>{inner}</details>'
    )


def _show_metrics(metrics: Any) -> str:
    return ", ".join(f"{k} {_show(v)}" for k, v in metrics.items()) if isinstance(metrics, Mapping) else ""


def _show_table(head: Sequence[str], rows: Iterable[Sequence[Any]], *, sortable: bool = False) -> str:
    button = "<button type='button'>{}</button>" if sortable else "{}"
    top = "".join(f"<th scope='col'>{button.format(escape(text))}</th>" for text in head)
    body = "".join("<tr>" + "".join(_show_cell(value) for value in row) + "</tr>" for row in rows)
    kind = ' class="sortable"' if sortable else ""
    return f'<div class="wide"><table{kind}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _show_cell(value: Any) -> str:
    number = type(value) in (int, float)
    sort = f' class="number" data-value="{value!r}"' if number else ""
    return f"<td{sort}>{escape(_show(value))}</td>"
