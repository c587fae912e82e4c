"""One value for each key: who wins, what "auto" stands for, what the contract does not know; then the document."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from dsjob import schema as contract
from dsjob.check import check_shape
from dsjob.errors import DocumentError, Problem
from dsjob.importing.given import KINDS, MODULE, PRECEDENCE, Draft, Given, Note, Rank, is_off, nest, pick, show
from dsjob.paths import Path

_BATCH = ("train_batch", "micro_batch", "grad_accum")
_DECAYING = ("WarmupDecayLR", "WarmupCosineLR")


@dataclass(frozen=True)
class Imported:
    """A job document, and what a user has to know about it."""

    document: dict[str, Any]
    notes: tuple[Note, ...]


def settle(draft: Draft, trainer: bool) -> Imported:
    """The job document of a draft. `trainer`: whether the Trainer's defaults count.

    Raises DocumentError for values that a job document cannot have.
    """
    winners: dict[Path, Given] = {}
    for path, found in draft.values.items():
        winner = _choose(path, found, trainer, draft)
        if winner is not None:
            winners[path] = winner
    winners = {path: given.to(_own_number(path, given.value, draft)) for path, given in winners.items()}
    _settle_precision(winners, draft)
    _settle_batch(winners, draft)
    document: dict[str, Any] = {}
    for path, given in winners.items():
        _add(document, nest(path, given.value))
    _check(document, winners, draft)
    _note_gaps(document, draft)
    order = {kind: index for index, kind in enumerate(KINDS)}
    notes = sorted(draft.notes, key=lambda note: order[note.kind])
    return Imported(contract.sort_keys(document, contract.job_schema()), tuple(notes))


def _choose(path: Path, found: list[Given], trainer: bool, draft: Draft) -> Given | None:
    """The value that counts at a path; None where it is better left to dsjob's default."""
    autos = [given for given in found if given.value == "auto"]
    auto = next((given for given in autos if _counts(path, given, None, trainer, draft)), None)
    fixed = [given for given in found if given.value != "auto" and _counts(path, given, auto, trainer, draft)]
    if not fixed:
        return _keep_auto(path, auto, draft) if auto else None
    winner = pick(fixed)
    dotted = ".".join(map(str, path))
    for given in found:
        if given.value not in ("auto", winner.value) and _is_said(given):
            why = PRECEDENCE if given.rank > Rank.DEFAULT else "the other is the Trainer's default"
            draft.note("conflict", f"{dotted}: {winner} wins over {given}: {why}")
    if auto is not None and auto.rank > Rank.DEFAULT:
        draft.note("auto", f"{dotted}: auto stands for {show(winner.value)} ({_origin(winner)})", auto)
    elif winner.rank == Rank.DEFAULT and winner.value == _schema_at(path, draft).get("default"):
        return None
    return winner


def _counts(path: Path, given: Given, auto: Given | None, trainer: bool, draft: Draft) -> bool:
    if given.rank > Rank.DEFAULT or auto is not None:
        return True
    # A section that a file has is complete: the Trainer adds nothing to it that nobody gave.
    kind = draft.best(f"{path[0]}.type") if path[0] in ("optimizer", "scheduler") else None
    return trainer and (kind is None or kind.rank >= Rank.ARGUMENTS)


def _origin(winner: Given) -> str:
    return "the Trainer's default" if not winner.place else f"{winner.name}, {winner.place}"


def _is_said(given: Given) -> bool:
    """Whether a value that lost deserves a word: defaults, switches that are off and placeholders do not."""
    if given.rank > Rank.DEFAULT:
        return True
    return bool(re.search(r":\d", given.place)) and not is_off(given.value) and MODULE not in str(given.value)


def _keep_auto(path: Path, auto: Given, draft: Draft) -> Given | None:
    if path in draft.unfilled or _schema_at(path, draft).get("x-auto"):
        return auto if path[:1] != ("trainer",) else None  # the triad is completed without being told to
    if auto.rank > Rank.DEFAULT:
        draft.note("left out", f"{auto.name}=auto: nothing says what it stands for; dsjob's default counts", auto)
    return None


def _schema_at(path: Path, draft: Draft) -> contract.Schema:
    kind = draft.values.get((path[0], "type"))  # which arguments there are
    return contract.find_at(contract.job_schema(), path, {path[0]: {"type": pick(kind).value}} if kind else {})


def _own_number(path: Path, value: Any, draft: Draft) -> Any:
    """5e8 is an integer where one is asked."""
    whole = isinstance(value, float) and value.is_integer() and _schema_at(path, draft).get("type") == "integer"
    return int(value) if whole else value


def _settle_precision(winners: dict[Path, Given], draft: Draft) -> None:
    fp16, bf16 = winners.get(("fp16", "enabled")), winners.get(("bf16", "enabled"))
    if fp16 is None or bf16 is None or not (fp16.value is True and bf16.value is True):
        return
    winner = pick([fp16, bf16])
    loser = fp16 if winner is bf16 else bf16
    winners["fp16" if loser is fp16 else "bf16", "enabled"] = loser.to(False)
    draft.note("conflict", f"precision: {winner} wins over {loser}: {PRECEDENCE}")


def _settle_batch(winners: dict[Path, Given], draft: Draft) -> None:
    """train_batch = micro_batch x grad_accum x ranks: the parts win over a product of a lower rank."""
    given = {name: winners.get(("trainer", name)) for name in _BATCH}
    train, micro, accum = given["train_batch"], given["micro_batch"], given["grad_accum"]
    if train is None or micro is None:
        return
    if accum is not None and accum.rank == Rank.DEFAULT:
        del winners["trainer", "grad_accum"]  # follows from the other two
        return
    if accum is None or not all(isinstance(part.value, (int, float)) for part in (train, micro, accum)):
        return
    nproc = winners.get(("launch", "nproc"))
    one_rank = int(micro.value * accum.value)
    ranks, rest = divmod(int(train.value), one_rank) if one_rank else (0, 1)
    if nproc is None and not rest and ranks > 0:
        if ranks > 1:
            winners["launch", "nproc"] = train.to(ranks)
            text = f"launch.nproc={ranks}: {train.value} = {micro.value} x {accum.value} x {ranks} ranks"
            draft.note("changed", text, train)
    elif max(micro.rank, accum.rank) > train.rank and int(train.value) != one_rank * (nproc.value if nproc else 1):
        del winners["trainer", "train_batch"]
        draft.note("conflict", f"trainer: {micro} and {accum} win over {train}: {PRECEDENCE}")


def _add(document: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(document.get(key), dict):
            _add(document[key], value)
        else:
            document[key] = value


def _check(document: dict[str, Any], winners: dict[Path, Given], draft: Draft) -> None:
    """Notes what dsjob does not support, takes out what it does not know, and refuses what is wrong."""
    wrong = []
    for problem in check_shape(document, contract.job_schema()):
        origin = next((given for path, given in winners.items() if path[: len(problem.path)] == problem.path), None)
        name = origin.name if origin else problem.dotted
        if problem.severity != "error" or problem.path in draft.unfilled or problem.rule == "required":
            continue
        if problem.rule == "unsupported":
            draft.note("not supported", f"{problem.dotted} {problem.message}: {problem.hint}", origin)
        elif problem.rule == "unknown-key":
            draft.note("unknown", f"{name}={show(_take_out(document, problem.path))}: {problem.hint}", origin)
        else:
            wrong.append(_place(problem, origin))
    if wrong:
        raise DocumentError(wrong)


def _place(problem: Problem, origin: Given | None) -> Problem:
    if origin is None:
        return problem
    placed = origin.wrong(problem.message).problems[0]
    return replace(placed, path=problem.path, rule=problem.rule, hint=problem.hint)


def _take_out(document: dict[str, Any], path: Path) -> Any:
    home = document
    for key in path[:-1]:
        home = home[key]  # type: ignore[index]
    return home.pop(str(path[-1]), None)


def _note_gaps(document: dict[str, Any], draft: Draft) -> None:
    """What a job needs and nobody has said: `validate` asks for it too."""
    trainer, scheduler = document.get("trainer", {}), document.get("scheduler", {})
    if "max_steps" not in trainer and "max_epochs" not in trainer:
        draft.note("fill in", "trainer.max_steps or trainer.max_epochs: nothing says how long to train")
    if not {"train_batch", "micro_batch"} & set(trainer):
        draft.note("fill in", "trainer.micro_batch: nothing says how many samples there are in a batch")
    if "optimizer" not in document:
        draft.note("fill in", "optimizer: the program made its own; {type: AdamW, params: {lr: 1e-3}}, for example")
    total = scheduler.get("params", {}).get("total_num_steps", "auto")
    if scheduler.get("type") in _DECAYING and total == "auto" and "max_steps" not in trainer:
        text = "scheduler.params.total_num_steps (or trainer.max_steps): the schedule has to know its end"
        draft.note("fill in", text)
    target = document.get("data", {}).get("eval", {}).get("_target_", "")
    if target.startswith(f"{MODULE}.") and not any("data.eval:" in note.message for note in draft.notes):
        draft.note("fill in", f"data.eval: {target} stands for the evaluation set")
