"""The text output of `dsjob ckpt`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dsjob.planning.report import show_bytes
from dsjob.terminal import make_printable

if TYPE_CHECKING:
    from dsjob.checkpoint.offline.compare import Difference
    from dsjob.checkpoint.offline.transfer import Copied
    from dsjob.checkpoint.offline.verify import Damage, Verified
    from dsjob.checkpoint.root.garbage import Garbage
    from dsjob.checkpoint.root.inventory import Inventory

SHOWN = 20  # lines of differences
_AFTER_DAMAGE = (
    "next: restore the damaged files from a copy, or resume from an older checkpoint: "
    "dsjob run FOLDER checkpoint.on_corrupt=previous"
)


def show_inventory(inventory: Inventory) -> str:
    """One line per checkpoint or folder."""
    now = time.time()
    rows = [("state", "tag", "step", "saved", "all files", "ranks", "ZeRO", "")]
    for entry in inventory.checkpoints:
        marks = ", ".join(["newest"] * entry.newest + ["best"] * entry.best)
        note = marks or entry.problem or (entry.folder if entry.state != "committed" else "")
        age = "?" if entry.saved is None else f"{show_age(now - entry.saved)} ago"
        numbers = ("" if n is None else str(n) for n in (entry.world_size, entry.zero_stage))
        step = "" if entry.step is None else str(entry.step)
        rows.append((entry.state, entry.tag, step, age, show_bytes(entry.size), *numbers, note))  # type: ignore[arg-type]
    return f"{make_printable(inventory.url)}\n\n{align(rows)}"


def show_checkpoint(found: dict[str, Any], *, tensors: bool) -> str:
    """The description of a checkpoint; with `tensors`, also one line per tensor."""
    counters = found["counters"] if isinstance(found["counters"], dict) else {}
    optimizer = found["optimizer"]
    several = isinstance(optimizer, dict)
    rows = [
        ("checkpoint", found["url"]),
        ("job", found["job"]),
        ("step", found["step"]),
        ("saved by", _plural(found["world_size"], "rank") + f", ZeRO stage {found['zero_stage']}"),
        ("precision", found["precision"]),
        ("models", ", ".join(map(str, found["models"])) or None),
        ("optimizer", ", ".join(f"{k}: {v}" for k, v in optimizer.items()) if several else optimizer),
        ("parameters", f"{found['parameters']:,}"),
        *((f"{role} tensors", _sum(sums)) for role, sums in found["roles"].items()),
        *((dtype, _sum(sums)) for dtype, sums in found["dtypes"].items()),
        ("tied names", ", ".join(f"{a} = {b}" for a, b in list(found["aliases"].items())[:5]) or None),
        ("shards", f"{_plural(len(found['files']), 'file')}, {show_bytes(found['bytes'])} of weights and optimizer"),
        *((key, value) for key, value in counters.items()),
    ]
    lines = align([(name, str(value)) for name, value in rows if value is not None])
    if not tensors:
        return lines
    listed = [("tensor", "role", "dtype", "shape", "size")]
    for name, entry in found["tensors"].items():
        listed.append((name, entry["role"], entry["dtype"], str(entry["shape"]), show_bytes(entry["bytes"])))
    return f"{lines}\n\n{align(listed)}"


def show_verified(found: Sequence[Verified]) -> str:
    """One line per checkpoint, followed by one line per damaged file. (JSON lists every damaged tensor.)"""
    lines = []
    for one in found:
        unchecked = f", {one.unchecked} of them without a digest" if one.unchecked else ""
        what = f"{_plural(one.chunks, 'chunk')}{unchecked}, {show_bytes(one.size)} of weights and optimizer"
        files: dict[str, list[Damage]] = {}
        for damage in one.damages:
            files.setdefault(damage.file, []).append(damage)
        verdict = f"DAMAGED in {_plural(len(files), 'file')}" if files else "intact"
        lines.append(make_printable(f"{one.tag}  {verdict}  {what}"))
        lines += [f"  {make_printable(_show_damages(file, found))}" for file, found in files.items()]
    if any(one.damages for one in found):
        lines.append(_AFTER_DAMAGE)
    return "\n".join(lines)


def _show_damages(file: str, damages: Sequence[Damage]) -> str:
    """The damages of one file on one line."""
    tensors = sorted({damage.tensor for damage in damages if damage.tensor})
    if len(damages) == 1 or not tensors:
        return "; ".join([str(damages[0]), *(damage.what for damage in damages[1:])])
    whats = [damage.what for damage in damages if not damage.tensor]
    count = f"{_plural(len(tensors), 'tensor')} damaged, such as {tensors[0][:200]!r} (--json lists all)"
    return f"{file}: {'; '.join([*whats, count])}"


def show_differences(found: Sequence[Difference]) -> str:
    """The differences, largest first, then the number of equal tensors."""
    other = [one for one in found if one.kind != "same"]
    other.sort(key=lambda one: (one.kind == "values", -one.max_abs, one.name))
    rows = [("tensor", "", "max abs", "max rel", "elements", "")]
    for one in other[:SHOWN]:
        measured = one.kind in ("values", "dtype")
        numbers = (f"{one.max_abs:.3g}", f"{one.max_rel:.3g}", f"{one.elements:,} of {one.size:,}")
        what = " | ".join(part for part in (one.a, one.b) if part) if one.kind != "values" else one.a
        rows.append((one.name, one.kind, *(numbers if measured else ("", "", "")), what))
    lines = [align(rows)] if other else []
    if len(other) > SHOWN:
        lines.append(f"... and {len(other) - SHOWN} more (--json lists all)")
    same = len(found) - len(other)
    return "\n".join([*lines, f"{_plural(same, 'tensor')} equal, {len(other)} different"])


def show_garbage(root: str, found: Sequence[Garbage], uploads: int, *, dry_run: bool) -> str:
    """One line per leftover, and the total size of what was deleted."""
    gone = [one for one in found if not one.kept]
    rows = [
        (
            "keep" if one.kept else "would delete" if dry_run else "deleted",
            one.kind,
            one.path,
            show_bytes(one.size),
            "?" if one.age is None else f"{show_age(one.age)} ago",
            one.kept,
        )
        for one in found
    ]
    total = show_bytes(sum(one.size for one in gone))
    end = f"{'would delete' if dry_run else 'deleted'} {len(gone)}, {total}" if gone else "nothing to delete"
    ended = [f"aborted {_plural(uploads, 'unfinished upload')}"] if uploads else []
    return "\n".join([make_printable(root), *([align(rows)] if rows else []), end, *ended])


def show_copied(found: Sequence[Copied]) -> str:
    """One line per checkpoint."""
    sizes = [f"{show_bytes(one.size)} of weights and optimizer" if one.size else "already there" for one in found]
    return align([(one.tag, size, one.url) for one, size in zip(found, sizes, strict=True)])


def show_age(seconds: float) -> str:
    """An age in its largest unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


def _plural(count: object, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _sum(sums: dict[str, int]) -> str:
    return f"{sums['tensors']}, {show_bytes(sums['bytes'])}"


def align(rows: Sequence[tuple[str, ...]]) -> str:
    """Aligned columns, two spaces apart, without empty ones."""
    columns = [i for i in range(len(rows[0])) if any(row[i] for row in rows)]
    rows = [tuple(make_printable(row[i]) for i in columns) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
