"""Draws the timeline of a pipeline: as text, and as SVG."""

from __future__ import annotations

from html import escape

from dsjob.pipelines.timeline import Span, Timeline

_WIDE, _NARROW = 3, 1  # columns of a unit of time: with and without the numbers of micro batches
_COLUMNS = 150
_COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#72b7b2"}
_MEANINGS = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}


def draw_text(timeline: Timeline) -> list[str]:
    """One line per rank: F0 is the forward pass of micro batch 0, B0 its backward pass (or its halves I0 and W0), and
    dots are time in which the rank waits. Chunks beyond the first are letters: F0b. The last line explains."""
    unit = _WIDE if timeline.length * _WIDE <= _COLUMNS else _NARROW
    lines = []
    for rank, spans in enumerate(timeline.ranks):
        cells = ["."] * round(timeline.length * unit)
        for span in spans:
            start, end = round(span.start * unit), round(span.end * unit)
            text = _name(span) if unit == _WIDE else span.kind
            cells[start:end] = list(text[: end - start].ljust(end - start, "-" if unit == _NARROW else " "))
        line = "".join(cells)
        cut = f"{line[:_COLUMNS]}..." if len(line) > _COLUMNS else line
        lines.append(f"stage {rank}  {cut}")
    kinds = dict.fromkeys(span.kind for spans in timeline.ranks for span in spans)
    meanings = ", ".join(f"{kind} {_MEANINGS[kind]}" for kind in "FBIW" if kind in kinds)
    return [*lines, f"{meanings}; . waiting: {timeline.bubble:.1%} of the time"]


def _name(span: Span) -> str:
    chunk = "" if span.chunk == 0 else chr(ord("a") + span.chunk)
    return f"{span.kind}{span.micro}{chunk}"


def draw_svg(timeline: Timeline, *, width: int = 960, row: int = 26) -> str:
    """The same as a picture of `width` pixels. Chunks beyond the first are darker."""
    left, height = 64, row * len(timeline.ranks) + 24
    scale = (width - left) / timeline.length if timeline.length else 1.0
    label = f"Timeline of {len(timeline.ranks)} pipeline stages"
    shape = f'viewBox="0 0 {width} {height}" width="100%" role="img" aria-label="{label}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {shape} font-family="sans-serif" font-size="11">']
    for rank, spans in enumerate(timeline.ranks):
        top = rank * row
        parts.append(f'<text x="0" y="{top + row / 2 + 4:g}" fill="currentColor">stage {rank}</text>')
        for span in spans:
            x, wide = left + span.start * scale, (span.end - span.start) * scale
            dark = 1 - 0.25 * min(span.chunk, 2)
            parts.append(
                f'<rect x="{x:.1f}" y="{top + 2}" width="{max(wide - 1, 0.5):.1f}" height="{row - 4}"'
                f' fill="{_COLOURS[span.kind]}" fill-opacity="{dark:g}"><title>{escape(_name(span))}</title></rect>'
            )
            if wide > 22:
                parts.append(f'<text x="{x + 4:.1f}" y="{top + row / 2 + 4:g}" fill="white">{_name(span)}</text>')
    told = f"waiting: {timeline.bubble:.1%} of the time, if a backward pass takes twice as long as a forward pass"
    parts.append(f'<text x="{left}" y="{height - 6}" fill="currentColor">{told}</text></svg>')
    return "".join(parts)
