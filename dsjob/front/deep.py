"""`dsjob validate --deep`: imports the targets that a document names, and checks their arguments against signatures.
Then it calls the model, its losses and metrics with one batch of each set of data.

No batch is tried if that would take long, unless the document says how its models are called, trained or evaluated, or
what the loss, the metrics or the predictions are. The trust rules are those of `dsjob run`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dsjob import storage
from dsjob.contract.job_lengths import list_lengths
from dsjob.contract.paths import Path
from dsjob.contract.spec import LOSS_KEYS, METRIC_KEYS, JobSpec, view
from dsjob.errors import DsjobError, Problem, TargetError
from dsjob.launch.rank import add_import_folders
from dsjob.trust.argument_types import find_wrong_types
from dsjob.trust.exits import refuse_exits
from dsjob.trust.grant import Trust
from dsjob.trust.hub import needs_hub
from dsjob.trust.signatures import find_misfits, find_role_misfits, name_loss_arguments
from dsjob.trust.targets import MAKERS, find_target

# A function at these places is not called when it is built. Its arguments are bound (see `targets.build_callable`) and
# the rest follows with each call, so missing arguments are not an error.
_KEPT = ("loss", "data.collate", "data.loader", "launch.init_distributed", "trainer.step", "trainer.eval_step")
_GIVEN: dict[Path, int] = {("optimizer",): 1, ("scheduler",): 1, ("data", "loader"): 1}  # positional arguments by dsjob
_MOST_TEXT = 16 << 20  # bytes that are tokenised only to try a batch


def check_targets(document: Mapping[str, Any], trust: Trust, known: set[Path]) -> list[Problem]:
    """The problems of a document's targets. Skips the paths in `known`, which already have a problem."""
    add_import_folders(trust.importable)
    problems: list[Problem] = []
    with contextlib.redirect_stdout(sys.stderr):  # keeps what modules print at import out of the report
        for path, target in _list_targets(document, ()):
            if (*path, "_target_") not in known:
                problems += _check(path, target, trust, document)
    return problems


def check_batch(document: Mapping[str, Any], ranks: int, trust: Trust) -> list[Problem]:
    """The problems that calling the model, the losses and the metrics with one batch of each set shows. document: a
    resolved one."""
    from dsjob.training.trial import can_try, says_how, try_on_batch

    spec = view(JobSpec, document)
    if not can_try(spec) or not (says_how(spec) or _is_cheap(document)):
        return []
    with contextlib.redirect_stdout(sys.stderr), refuse_exits():
        return try_on_batch(document, spec, ranks, trust)


def _is_cheap(document: Mapping[str, Any]) -> bool:
    """Whether models and data can be built without a download, and without tokenising much."""
    parts = {key: document.get(key) for key in ("model", "models", "data")}
    targets = [target for _, target in _list_targets(parts, ())]
    return not any(map(needs_hub, targets)) and sum(map(_measure_text, targets)) <= _MOST_TEXT


def _measure_text(target: Mapping[str, Any]) -> float:
    """The bytes of files that a target tokenises; inf for those that are elsewhere."""
    if target["_target_"] != "dsjob.text.Text":
        return 0
    source: Any = target.get("source") or next(iter(target.get("_args_") or ()), [])
    urls = [source] if isinstance(source, str) else source
    if not all(map(storage.is_local, urls)):
        return math.inf
    with contextlib.suppress(DsjobError):  # a missing file, which the trial tells
        return sum(file.size for url in urls for file in _list_files(url))
    return 0


def _list_files(url: str) -> list[storage.Found]:
    return list(storage.find_files(url).values()) if storage.is_folder(url) else [storage.describe(url)]


def count_data(document: Mapping[str, Any], ranks: int, trust: Trust) -> tuple[int | None, int]:
    """The samples of the training data (None if unknown), and the tokens of a step (0 if unknown), as far as lengths of
    the document need them. document: a resolved one."""
    spec = view(JobSpec, document)
    units = {length.unit for length in list_lengths(spec).values()}
    if spec.data.train is None or not units & {"epochs", "tokens"}:
        return None, 0
    from dsjob.data.batches import count_elements, is_tokens
    from dsjob.training.probe import load_data

    spec, tokens = replace(spec, data=replace(spec.data, num_workers=0)), 0
    with contextlib.redirect_stdout(sys.stderr), refuse_exits():
        try:
            loader = load_data(spec, ranks, trust)
            if "tokens" in units and is_tokens(batch := next(iter(loader))):
                tokens = count_elements(batch) * spec.trainer.train_batch // spec.trainer.micro_batch
            return loader.samples_per_epoch, tokens
        except Exception:  # of the user's data: a run shows it
            return None, 0


def _list_targets(value: Any, path: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    if isinstance(value, Mapping):
        if isinstance(value.get("_target_"), str):
            yield path, value
        for key, item in value.items():
            yield from _list_targets(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _list_targets(item, (*path, index))


def _check(path: Path, target: Mapping[str, Any], trust: Trust, document: Mapping[str, Any]) -> Iterator[Problem]:
    name = target["_target_"]
    try:
        function = find_target(name, trust)
    except TargetError as error:
        yield Problem(error.message, (*path, "_target_"), "target", error.hint)
        return
    except DsjobError as error:  # raised by the module itself
        yield Problem(f"cannot import {name}: {error.message}", (*path, "_target_"), "target", error.hint)
        return
    arguments = {key: value for key, value in target.items() if key not in ("_target_", "_partial_", "_args_")}
    section = path[2:] if path[:1] == ("models",) else path
    if section == ("optimizer",):
        arguments.pop("param_groups", None)
    is_metric, is_named_loss = (path[:1] == (section,) and len(path) == 2 for section in ("metrics", "losses"))
    if is_metric or is_named_loss:
        own = METRIC_KEYS if is_metric else LOSS_KEYS
        arguments = {key: value for key, value in arguments.items() if key not in own}
    passed = None
    if is_named_loss or path == ("loss",):
        given = target if is_named_loss else {}
        passed = name_loss_arguments(*(given.get(key) or document.get(key) for key in ("outputs", "targets")))
    listed = target.get("_args_")
    positional = _GIVEN.get(section, 0) + (len(listed) if isinstance(listed, list) else 0)
    joins = path[:1] == ("metrics",) and path[2:] == ("reduce",)
    kept = ".".join(map(str, path)) in _KEPT or joins or is_named_loss or (is_metric and name not in MAKERS)
    partial = target.get("_partial_", kept and inspect.isroutine(function))
    misfits = find_misfits(name, function, positional, arguments, partial=bool(partial))
    misfits = misfits or find_wrong_types(name, function, arguments)
    if not misfits and not inspect.isclass(function):
        made = functools.partial(function, *[None] * positional, **dict.fromkeys(arguments)) if partial else None
        misfits = find_role_misfits(name, ".".join(map(str, path)), made, passed) if made is not None else []
    elif not misfits and not partial:
        misfits = find_role_misfits(name, ".".join(map(str, path)), function, passed)
    for misfit in misfits:
        yield Problem(misfit.message, (*path, misfit.argument or "_target_"), "target", misfit.hint)
