"""Checks the imported document: wrong values of all sources, unknown keys, and what the user has to fill in."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from dsjob.contract import schema as contract
from dsjob.contract.check import check_shape
from dsjob.contract.paths import Path, get_at, has_at
from dsjob.document.places import Place
from dsjob.document.resolve import resolve_job
from dsjob.document.sizes import read_nproc
from dsjob.errors import DocumentError
from dsjob.importing.given import MODULE, Draft, Given, Rank, nest, show

_OTHERWISE = ("unsupported", "unknown-key", "required")  # these become notes, not errors


def assemble(values: Mapping[Path, Given], draft: Draft) -> dict[str, Any]:
    """The document with these values by path. Refuses a value if others are below its path: it must be an object."""
    document: dict[str, Any] = {}
    for path, given in values.items():
        blocked = next((path[:n] for n in range(1, len(path)) if path[:n] in values), None)
        if blocked is not None:
            draft.refuse(values[blocked], "must be an object", path=blocked)
        else:
            _add(document, nest(path, given.value))
    return document


def _add(document: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(document.get(key), dict):
            _add(document[key], value)
        else:
            document[key] = value


def find_wrong(winners: Mapping[Path, Given], draft: Draft) -> None:
    """Refuses invalid values, including those that are overridden by others, each only once."""
    for values in (winners, *_split(winners, draft)):
        for problem in check_shape(assemble(values, draft), contract.job_schema()):
            if problem.severity != "error" or problem.rule in _OTHERWISE or problem.path in draft.unfilled:
                continue
            origin = _find_origin(problem.path, values)
            if origin is None:
                draft.problems.setdefault(("", str(problem)), problem)
            else:
                draft.refuse(origin, problem.message, path=problem.path, rule=problem.rule, hint=problem.hint)


def _split(winners: Mapping[Path, Given], draft: Draft) -> list[dict[Path, Given]]:
    """All values, as one document per rank, and further ones if a rank has several values at a path."""
    layers: dict[tuple[Rank, int], dict[Path, Given]] = {}
    for path, found in draft.values.items():
        for rank in {given.rank for given in found} - {Rank.DEFAULT}:
            same = [given for given in found if given.rank == rank and given.value != "auto"]
            for index, given in enumerate(same):
                layers.setdefault((rank, index), {})[path] = given
    # These decide what the keys beside them may be.
    kinds = {path: given for path, given in winners.items() if path[1:] in (("type",), ("eval", "_target_"))}
    return [{**kinds, **values} for values in layers.values()]


def _find_origin(path: Path, values: Mapping[Path, Given]) -> Given | None:
    for length in range(len(path), 0, -1):
        if path[:length] in values:
            return values[path[:length]]
    return next((given for given_path, given in values.items() if given_path[: len(path)] == path), None)


def take_out(document: dict[str, Any], winners: Mapping[Path, Given], draft: Draft) -> None:
    """Replaces unsupported values by the nearest supported ones, or removes them, and removes unknown keys; each with a
    note."""
    while replaced := _take_out_unsupported(document, winners, draft):
        draft.unfilled -= replaced
    for problem in check_shape(document, contract.job_schema()):
        origin = _find_origin(problem.path, winners)
        if problem.rule == "unknown-key" and _is_known(document, problem.path):
            # The object has more unknown keys than `check` reports one by one.
            _pop_rest(document, problem.path, origin, draft)
        elif problem.rule == "unknown-key":
            name = origin.name if origin else problem.dotted
            draft.note("unknown", f"{name}={show(_pop(document, problem.path))}: {problem.hint}", origin)


def _take_out_unsupported(document: dict[str, Any], winners: Mapping[Path, Given], draft: Draft) -> set[Path]:
    """Removes or replaces unsupported values, and returns their paths. A replaced optimizer has other arguments, so the
    caller repeats this until nothing is left."""
    found = [problem for problem in check_shape(document, contract.job_schema()) if problem.rule == "unsupported"]
    for problem in found:
        if not has_at(document, problem.path):
            continue  # it was in a section that has been removed
        home, key = get_at(document, problem.path[:-1]), problem.path[-1]
        instead = contract.find_at(contract.job_schema(), problem.path, document).get("x-instead")
        done = "left out" if instead is None else f"replaced by {show(instead)}"
        origin = _find_origin(problem.path, winners)
        draft.note("not supported", f"{problem.dotted} {problem.message}: {done}; {problem.hint}", origin)
        if instead is None:
            _remove(document, problem.path)
            continue
        home[key] = instead
        for idle in _list_idle(document, problem.path[:-1]):
            origin = _find_origin((*problem.path[:-1], idle), winners)
            name = ".".join(map(str, (*problem.path[:-1], idle)))
            draft.note("left out", f"{name}={show(home.pop(idle))}: no effect with {show(instead)}", origin)
    return {problem.path for problem in found}


def _list_idle(document: dict[str, Any], path: Path) -> list[str]:
    """The keys of a section that have no effect."""
    section, schema = get_at(document, path), contract.find_at(contract.job_schema(), path, document)
    return [key for key in section if (contract.child(schema, key, section) or {}).get("x-status") == "no-effect"]


def _remove(document: dict[str, Any], path: Path) -> None:
    """Removes a value, and sections that become empty."""
    _pop(document, path)
    if path[1:] and not get_at(document, path[:-1]):
        _remove(document, path[:-1])


def _is_known(document: dict[str, Any], path: Path) -> bool:
    if not path:
        return True
    node = contract.find_at(contract.job_schema(), path[:-1], document)
    return contract.child(node, str(path[-1]), get_at(document, path[:-1])) is not None


def _pop_rest(document: dict[str, Any], path: Path, origin: Given | None, draft: Draft) -> None:
    section = get_at(document, path)
    unknown = [key for key in section if not _is_known(document, (*path, key))]
    for key in unknown:
        del section[key]
    names = ", ".join(unknown)
    draft.note("unknown", f"{len(unknown)} more keys of {'.'.join(map(str, path))}: {names}", origin)


def _pop(document: dict[str, Any], path: Path) -> Any:
    home = get_at(document, path[:-1])
    return home.pop(str(path[-1]), None)


def note_gaps(document: dict[str, Any], draft: Draft) -> None:
    """Adds notes on values that a job needs and no source gives; `validate` asks for them too."""
    trainer = document.get("trainer", {})
    if not {"max_steps", "max_epochs", "max_length"} & set(trainer):
        draft.note("fill in", "trainer.max_steps or trainer.max_epochs: no source says how long to train")
    if not {"train_batch", "micro_batch"} & set(trainer):
        draft.note("fill in", "trainer.micro_batch: no source gives a batch size")
    if "optimizer" not in document:
        draft.note("fill in", "optimizer: no source names one; for example {type: AdamW, params: {lr: 1e-3}}")
    target = document.get("data", {}).get("eval", {}).get("_target_", "")
    if target.startswith(f"{MODULE}.") and not any("data.eval:" in note.message for note in draft.notes):
        draft.note("fill in", f"data.eval: replace {target} with your evaluation set")


def note_refused(document: dict[str, Any], winners: Mapping[Path, Given], draft: Draft) -> None:
    """Adds notes on the problems that `dsjob validate` would still find after everything has been filled in."""
    filled = _fill_in(document, winners, draft)
    try:
        resolve_job(filled, world_size=read_nproc(filled), locate=lambda path: _locate(path, winners))
    except DocumentError as error:
        for problem in error.problems:
            hint = f"; {problem.hint}" if problem.hint else ""
            origin = _find_origin(problem.path, winners)
            draft.note("mend", f"{problem.dotted}: {problem.message}{hint}", origin)


def _locate(path: Path, winners: Mapping[Path, Given]) -> Place:
    origin = _find_origin(path, winners)
    if origin is None:
        return "nowhere", 0, 0
    place = origin.problem("")
    return place.source, place.line, place.column


def _fill_in(document: dict[str, Any], winners: Mapping[Path, Given], draft: Draft) -> dict[str, Any]:
    """The document with valid values in all places that the user has to fill in."""
    filled = copy.deepcopy(document)
    for path in {*draft.unfilled, *(path for path, given in winners.items() if given.is_open)}:
        if has_at(filled, path):
            _pop(filled, path)
    trainer = filled.setdefault("trainer", {})
    if not {"max_steps", "max_epochs", "max_length"} & set(trainer):
        trainer["max_steps"] = 1_000_000
    if not {"train_batch", "micro_batch"} & set(trainer):
        trainer["micro_batch"] = 1
    for section in ("optimizer", "scheduler"):
        if section in filled and not {"type", "_target_"} & set(filled[section]):
            del filled[section]
    filled.setdefault("optimizer", {"type": "AdamW"})
    return filled
