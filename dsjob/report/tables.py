"""The tables of a report, as HTML. Every text is escaped: names and values can come from anyone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from dsjob.errors import UsageError
from dsjob.pipelines.drawing import draw_svg
from dsjob.pipelines.orders import SCHEDULES
from dsjob.pipelines.timeline import simulate
from dsjob.report.gather import Reported, list_differing

_MOST_DRAWN = 64  # stages, micro batches or chunks
_SETTINGS = 12  # differing settings in the table of runs
_FOLDED = ("packages", "variables")  # parts of an environment that are long


def show(value: Any) -> str:
    """A value as text: numbers rounded, and with separators if they are whole."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.5g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def show_tiles(run: Reported, last: Mapping[str, float]) -> str:
    """The most important values of a run. last: the last values of metrics, by title."""
    info = run.info
    steps = f"{show(info.step)} / {info.max_steps:,}" if info.max_steps else show(info.step)
    tiles = [("Status", info.status), ("Step", steps)]
    if run.metric is not None:
        tiles.append((f"{'Best' if info.best is not None else 'Last'} {info.metric}", show(run.metric)))
    if isinstance(step := run.result.get("best_step"), int):
        tiles.append(("Result", f"step {step:,}, the best"))
    for title, value in last.items():
        tiles.append((f"Last {title.lower()}", f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"))
    tiles.append(("Checkpoints", show(len(run.checkpoints))))
    shown = "".join(
        f"<div><dt>{escape(name)}</dt><dd{_mark(text) if name == 'Status' else ''}>{escape(text)}</dd></div>"
        for name, text in tiles
    )
    return f'<dl class="tiles">{shown}</dl>'


def show_runs(runs: Sequence[Reported], names: Sequence[str]) -> str:
    """The sortable table of several runs, and where their parallel coordinates go."""
    settings = list_differing(runs)[:_SETTINGS]
    metrics = list(dict.fromkeys(run.info.metric for run in runs if run.metric is not None))
    head = ["run", "status", "step", *metrics, "last loss", *settings]
    head = [text for text in head if text != "last loss" or metrics != ["loss"]]
    rows = []
    for run, name in zip(runs, names, strict=True):
        own = [run.metric if run.info.metric == metric else None for metric in metrics]
        loss = run.curves.get("loss")
        last = [None if loss is None or loss.last is None else loss.last[1]] if "last loss" in head else []
        rows.append([name, _Status(run.info.status), run.info.step, *own, *last, *map(run.values.get, settings)])
    best = any(run.info.best is not None for run in runs)
    which = "the best among its checkpoints" if best else "the last"
    note = f"Click a heading to sort. The metric of a run is {which}."
    return f'<section><h2>Runs</h2>{show_table(head, rows, sortable=True)}<p class="note">{note}</p></section>'


def show_details(run: Reported, name: str, *, alone: bool) -> str:
    """All about one run. alone: the page is about this run only, so nothing is folded."""
    changed = [(path, value, default) for path, (value, default) in run.changed.items()]
    checkpoints = [(each.get("tag"), each.get("step"), _show_metrics(each.get("metrics"))) for each in run.checkpoints]
    error = run.result.get("error")
    inner = f'<p class="error">{escape(show(error))}</p>' if error else ""
    inner += f"<h3>Settings that differ from the defaults</h3>{_or_none(('setting', 'value', 'default'), changed)}"
    inner += _draw_pipeline(run.values)
    inner += f"<h3>Checkpoints</h3>{_or_none(('tag', 'step', 'metrics'), checkpoints)}"
    inner += f"<h3>Environment</h3>{_show_environment(run.environment)}"
    return (
        f'<details class="fold"{" open" if alone else ""}><summary>{escape("Details" if alone else name)}</summary>'
        f'<p class="folder">{escape(run.info.folder)}</p>{inner}</details>'
    )


def _draw_pipeline(values: Mapping[str, Any]) -> str:
    """The timeline of a run's pipeline stages, as planned; "" without a pipeline, and for a schedule of the user's."""
    stages, micro, chunks = (values.get(key) for key in ("pipeline.stages", "trainer.grad_accum", "pipeline.chunks"))
    chunks, kind = chunks or 1, SCHEDULES.get(str(values.get("pipeline.schedule", "1f1b")))
    sizes = (stages, micro, chunks)
    if kind is None or not all(isinstance(size, int) and 0 < size <= _MOST_DRAWN for size in sizes) or stages == 1:
        return ""
    try:
        made = [kind(int(micro or 1), int(stages or 1), stage, int(chunks)) for stage in range(int(stages or 1))]
    except UsageError:  # sizes that do not fit together
        return ""
    timeline = simulate([[each for step in one for each in step] for one in made], chunks)
    return f"<h3>Pipeline</h3>{draw_svg(timeline)}"


def _show_environment(environment: Mapping[str, Any]) -> str:
    if not environment:
        return '<p class="note">Not recorded.</p>'
    git = environment.get("git") or {}
    diff = git.get("diff") if isinstance(git, dict) else None
    short = {key: value for key, value in environment.items() if key not in _FOLDED}
    rows = [(path, text) for path, text in _flatten(short) if path != "git.diff" and text is not None]
    shown = show_table(("name", "value"), rows)
    for key in _FOLDED:
        if isinstance(part := environment.get(key), dict) and part:
            table = show_table((key.removesuffix("s"), "value"), [(name, show(value)) for name, value in part.items()])
            shown += f"<details><summary>{len(part):,} {key}</summary>{table}</details>"
    if isinstance(diff, str) and diff:
        cut = " (cut)" if git.get("diff_truncated") else ""
        lines = f"{diff.count(chr(10)):,} lines{cut}"
        pre = f'<div class="wide"><pre>{escape(diff)}</pre></div>'
        shown += f"<details><summary>Uncommitted changes, {lines}</summary>{pre}</details>"
    return shown


def _flatten(value: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _flatten(item, f"{above}{key}.")
        else:
            yield f"{above}{key}", ", ".join(map(show, item)) if isinstance(item, list) else item


def _show_metrics(metrics: Any) -> str:
    return ", ".join(f"{key} {show(value)}" for key, value in metrics.items()) if isinstance(metrics, Mapping) else ""


def _or_none(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    return show_table(head, rows) if rows else '<p class="note">None.</p>'


def show_table(head: Sequence[str], rows: Iterable[Sequence[Any]], *, sortable: bool = False) -> str:
    """A table that scrolls by itself if it is wider than the page."""
    button = "<button type='button'>{}</button>" if sortable else "{}"
    top = "".join(f"<th scope='col'>{button.format(escape(text))}</th>" for text in head)
    body = "".join("<tr>" + "".join(_show_cell(value) for value in row) + "</tr>" for row in rows)
    kind = ' class="sortable"' if sortable else ""
    return f'<div class="wide"><table{kind}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


class _Status(str):
    """The status of a run, shown in a colour."""


def _mark(status: str) -> str:
    return f' class="status-{escape(status)}"'


def _show_cell(value: Any) -> str:
    number = type(value) in (int, float)
    mark = f' class="number" data-value="{value!r}"' if number else _mark(value) if isinstance(value, _Status) else ""
    text = show(value)
    title = f' title="{escape(text)}"' if len(text) > 30 else ""
    return f"<td{mark}{title}>{escape(text)}</td>"
