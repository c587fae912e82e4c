"""Chooses one value for each key: by rank, by what "auto" means, and so that batch sizes fit. Then makes the
document."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from dsjob.contract import schema as contract
from dsjob.contract.paths import Path
from dsjob.errors import DocumentError
from dsjob.importing.given import KINDS, LATER, MODULE, Draft, Given, Note, Rank, is_off, pick, show
from dsjob.importing.sound import assemble, find_wrong, note_gaps, note_refused, take_out

_BATCH = ("train_batch", "micro_batch", "grad_accum")
_METHODS = ("optimizer", "scheduler")


@dataclass(frozen=True)
class Imported:
    """A job document, and notes on it for the user."""

    document: dict[str, Any]
    notes: tuple[Note, ...]


def settle(draft: Draft, trainer: bool) -> Imported:
    """The job document of a draft. `trainer`: whether the Trainer's defaults apply.

    Raises DocumentError with all invalid values.
    """
    winners: dict[Path, Given] = {}
    for path, found in draft.values.items():
        winner = _choose(path, found, trainer, draft)
        if winner is not None:
            winners[path] = winner
    winners = {path: replace(given, value=_own_number(path, given.value, draft)) for path, given in winners.items()}
    _name_methods(winners, draft)
    _settle_precision(winners, draft)
    _settle_batch(winners, draft)
    find_wrong(winners, draft)
    if draft.problems:
        raise DocumentError(list(draft.problems.values()))
    document = assemble(winners, draft)
    take_out(document, winners, draft)
    note_gaps(document, draft)
    document = contract.sort_keys(document, contract.job_schema())
    note_refused(document, winners, draft)
    order = {kind: index for index, kind in enumerate(KINDS)}
    return Imported(document, tuple(sorted(draft.notes, key=lambda note: order[note.kind])))


def _choose(path: Path, found: list[Given], trainer: bool, draft: Draft) -> Given | None:
    """The value to use at a path; None if dsjob's default should apply."""
    autos = [given for given in found if given.value == "auto"]
    auto = next((given for given in autos if _counts(path, given, None, trainer, draft)), None)
    fixed = [given for given in found if given.value != "auto" and _counts(path, given, auto, trainer, draft)]
    if not fixed:
        return _keep_auto(path, auto, draft) if auto else None
    winner = pick(fixed)
    dotted = ".".join(map(str, path))
    for given in found:
        if given.value not in ("auto", winner.value) and _is_notable(given):
            why = ": the latter is the Trainer's default" if given.rank == Rank.DEFAULT else ""
            why = LATER if given.rank == winner.rank else why
            draft.note("conflict", f"{dotted}: {winner} overrides {given}{why}")
    if auto is not None and auto.rank > Rank.DEFAULT:
        draft.note("auto", f"{dotted}: auto means {show(winner.value)} ({_origin(winner)})", auto)
    elif winner.rank == Rank.DEFAULT and winner.value == _schema_at(path, draft).get("default"):
        return None
    return winner


def _counts(path: Path, given: Given, auto: Given | None, trainer: bool, draft: Draft) -> bool:
    if given.rank > Rank.DEFAULT or auto is not None:
        return True
    # A section in a file is complete: the Trainer adds no defaults to it.
    kind = draft.best(f"{path[0]}.type") if path[0] in _METHODS else None
    return trainer and (kind is None or kind.rank >= Rank.ARGUMENTS)


def _origin(winner: Given) -> str:
    return "the Trainer's default" if not winner.place else f"{winner.name}, {winner.place}"


def _is_notable(given: Given) -> bool:
    """Whether a note should mention an overridden value. Defaults, disabled switches and placeholders are not noted."""
    if given.rank > Rank.DEFAULT:
        return True
    return bool(re.search(r":\d", given.place)) and not is_off(given.value) and MODULE not in str(given.value)


def _keep_auto(path: Path, auto: Given, draft: Draft) -> Given | None:
    if path in draft.unfilled or _schema_at(path, draft).get("x-auto"):
        if path[:1] != ("trainer",):
            return auto
        if auto.rank > Rank.DEFAULT:  # missing batch sizes are always derived
            text = "auto means that it is derived from the other batch sizes and the ranks, so it is left out"
            draft.note("auto", f"{'.'.join(map(str, path))}: {text}", auto)
        return None
    if auto.rank > Rank.DEFAULT:
        draft.note("left out", f"{auto.name}=auto: no source gives its value; dsjob's default applies", auto)
    return None


def _schema_at(path: Path, draft: Draft) -> contract.Schema:
    kind = draft.values.get((path[0], "type"))  # which arguments there are
    return contract.find_at(contract.job_schema(), path, {path[0]: {"type": pick(kind).value}} if kind else {})


def _own_number(path: Path, value: Any, draft: Draft) -> Any:
    """`value` as an integer, if the key requires one and it is a whole float such as 5e8."""
    whole = isinstance(value, float) and value.is_integer() and "integer" in str(_schema_at(path, draft).get("type"))
    return int(value) if whole else value


def _name_methods(winners: dict[Path, Given], draft: Draft) -> None:
    """Adds a type to an optimizer or schedule that only has arguments: the Trainer's, if the arguments come from it."""
    for section in _METHODS:
        given = [found for path, found in winners.items() if path[0] == section and len(path) > 1]
        if not given or (section, "type") in winners or (section, "_target_") in winners:
            continue
        first, path = max(given, key=lambda found: found.rank), (section, "type")
        default = next((found for found in draft.values.get(path, ()) if found.value != "auto"), None)
        if first.rank < Rank.ARGUMENTS or default is None:
            draft.note("fill in", f"{section}.type: no source names the type to which {first.label} belongs", first)
        else:
            winners[path] = default
            text = f"{section}.type={default.value}: the Trainer's default, to which {first.label} belongs"
            draft.note("changed", text, first)


def _settle_precision(winners: dict[Path, Given], draft: Draft) -> None:
    fp16, bf16 = winners.get(("fp16", "enabled")), winners.get(("bf16", "enabled"))
    if fp16 is None or bf16 is None or not (fp16.value is True and bf16.value is True):
        return
    winner = pick([fp16, bf16])
    loser = fp16 if winner is bf16 else bf16
    winners["fp16" if loser is fp16 else "bf16", "enabled"] = loser.to(False)
    draft.note("conflict", f"precision: {winner} overrides {loser}")


def _settle_batch(winners: dict[Path, Given], draft: Draft) -> None:
    """Settles train_batch = micro_batch x grad_accum x ranks: the factors override a train_batch of a lower rank."""
    given = {name: winners.get(("trainer", name)) for name in _BATCH}
    train, micro, accum = given["train_batch"], given["micro_batch"], given["grad_accum"]
    if train is None or micro is None:
        return
    if accum is not None and accum.rank == Rank.DEFAULT:
        del winners["trainer", "grad_accum"]  # follows from the other two
        return
    if accum is None or not all(isinstance(part.value, (int, float)) for part in (train, micro, accum)):
        return
    nproc, nodes = winners.get(("launch", "nproc")), draft.nodes or 1
    one_rank = int(micro.value * accum.value)
    ranks, rest = divmod(int(train.value), one_rank * nodes) if one_rank else (0, 1)
    if nproc is None and not rest and ranks > 0:
        if ranks * nodes > 1:
            winners["launch", "nproc"] = train.to(ranks)
            machines = f" on each of {nodes} machines" if nodes > 1 else ""
            text = f"launch.nproc={ranks}: {train.value} = {micro.value} x {accum.value} x {ranks * nodes} ranks"
            draft.note("changed", f"{text}{f', {ranks}{machines}' if machines else ''}", train)
        if nodes > 1:
            del winners["trainer", "train_batch"]  # follows from the others on any number of ranks
        return
    if not isinstance(nproc.value if nproc else 1, int):
        return
    if int(train.value) == one_rank * nodes * (nproc.value if nproc else 1):
        if nodes > 1:
            del winners["trainer", "train_batch"]
    elif max(micro.rank, accum.rank) > train.rank:
        del winners["trainer", "train_batch"]
        draft.note("conflict", f"trainer: {micro} and {accum} override {train}")
