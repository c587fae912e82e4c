"""Builds objects from `_target_` and its arguments. The only module that imports names from a document.

`trust` decides what may be imported and called. It is checked before the import, and again for the imported object.

The object itself must be defined in a trusted module or be listed, whatever path leads to it. A name that a trusted
library merely imports from elsewhere is not trusted.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

from dsjob.contract.access import restricting
from dsjob.contract.environment import parse_reference
from dsjob.contract.hints import suggest
from dsjob.contract.paths import Path
from dsjob.contract.spec import Target, make_target
from dsjob.errors import ContractError, DsjobError, Interrupted, Preempted, Problem, TargetError, name_target
from dsjob.trust import grant as trusting
from dsjob.trust.argument_types import find_wrong_types
from dsjob.trust.data_folders import check_data
from dsjob.trust.exits import refuse_exits
from dsjob.trust.frames import describe_failure, put_at
from dsjob.trust.grant import Trust
from dsjob.trust.hub import check_models
from dsjob.trust.listed import is_listed
from dsjob.trust.presence import explain_no_module
from dsjob.trust.signatures import find_misfits, find_role_misfits, takes_keyword

T = TypeVar("T")
MAKERS = ("evaluate.load",)  # factory functions: called once, and the loop calls their result


def call_target(
    target: Target,
    *positional: Any,
    trust: Trust = Trust(),  # noqa: B008 (frozen)
    where: Path = (),
) -> Any:
    """Calls a target with `positional` followed by its own arguments. Targets among the arguments are called first.

    `${oc.env:NAME}` is read from the environment; with a default, NAME may be unset. `_partial_: true` binds the
    arguments instead of calling. `where`: the target's path in the document. Raises TargetError if the target is not
    trusted, cannot be imported or does not accept the arguments. Errors inside the target pass through, with `where`
    attached.
    """
    with placing_target(where):
        return _call(target, positional, trust, where)


def _call(target: Target, positional: Sequence[Any], trust: Trust, where: Path) -> Any:
    given = {"_target_": target.path, **target.arguments}
    _require_trusted(target.path, trusting.check_target(given, trust))
    arguments = dict(target.arguments)
    partial = bool(arguments.pop("_partial_", False))
    listed = [*positional, *_build(arguments.pop("_args_", []), trust, where and (*where, "_args_"))]
    keywords = {key: _build(value, trust, where and (*where, key)) for key, value in arguments.items()}
    function = find_target(target.path, trust)
    _require_trusted(target.path, trusting.check_target(_read_references(given), trust, function))
    if positional and trusting.takes_literals(target.path, trust, function):
        raise TargetError(f"{target.path} reads files, and takes literals only: it has no place here")
    if not trust.remote_code and trusting.loads_models(target.path, function):
        passed = {"_target_": target.path, **keywords, "_args_": listed}
        problems, commit = check_models(passed)
        _require_trusted(target.path, problems)
        keywords |= trusting.refuse_remote_code(function, keywords)
        if commit is not None and takes_keyword(function, "revision"):
            keywords["revision"] = commit
    if trusting.takes_literals(target.path, trust, function) and function.__module__.startswith("datasets."):
        passed = {"_target_": f"datasets.{function.__name__}", **keywords, "_args_": listed}
        _require_trusted(target.path, check_data(passed, trust.access))
    misfits = find_misfits(target.path, function, len(listed), keywords, partial=partial)
    for misfit in misfits or find_wrong_types(target.path, function, keywords):
        error = TargetError(misfit.message, hint=misfit.hint)
        at_fault = misfit.argument or ("_args_" if "_args_" in given and misfit.too_many else "_target_")
        error.put_at((*where, at_fault) if where else ())
        raise error
    if partial:
        return functools.partial(function, *listed, **keywords)
    restricted = trust.access if trusting.is_restricted(target.path, trust, function) else None
    try:
        with refuse_exits(), restricting(restricted):
            return function(*listed, **keywords)
    except (Interrupted, Preempted):  # a signal arrived during the call; not the target's error
        raise
    except Exception as error:
        put_at(error, (*where, "_target_") if where else ())
        raise


def _read_references(value: Any) -> Any:
    """Arguments with references to the environment replaced by their values, or by the default in the document."""
    if isinstance(value, Mapping):
        return {key: _read_references(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_read_references(item) for item in value]
    reference = parse_reference(value)
    return reference.read() if reference is not None and not reference.find_missing() else value


def _require_trusted(target: str, problems: list[Problem]) -> None:
    if problems:
        where = problems[0].path[:-1] if problems[0].rule == "untrusted-target" else problems[0].path
        place = "" if not where else f"{target}: {'.'.join(map(str, where))}: "
        raise TargetError(place + problems[0].message, hint=problems[0].hint)


def build_callable(
    target: Target,
    role: str,
    trust: Trust = Trust(),  # noqa: B008 (frozen)
    where: Path = (),
    *,
    passed: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Callable[..., Any]:
    """The callable that the loop uses as `role`: an instance of a class, or a function with bound arguments.

    `_partial_` overrides this: false calls a function that returns the callable, true binds the arguments of a class.
    `passed`: the names of the positional and keyword arguments that it is called with, if `role` does not determine
    them. Raises TargetError if the result is not callable, or not with what the loop passes.
    """
    where = where or tuple(role.split(".", 1))
    made: Any = build_object(target, trust, where)
    if not callable(made):
        error = TargetError(f"{role}: {target.path} returned {type(made).__name__}, which cannot be called")
        error.put_at((*where, "_target_"))
        raise error
    for misfit in find_role_misfits(target.path, role, made, passed):
        error = TargetError(misfit.message, hint=misfit.hint)
        error.put_at((*where, "_target_"))
        raise error
    built: Callable[..., Any] = made
    return built


def build_object(target: Target, trust: Trust = Trust(), where: Path = ()) -> Any:  # noqa: B008 (frozen)
    """Like `build_callable`, but the result need not be callable. `where`: the target's path in the document."""
    with placing_target(where):
        binds = inspect.isroutine(find_target(target.path, trust)) and target.path not in MAKERS
    return call_target(Target(target.path, {"_partial_": binds, **target.arguments}), trust=trust, where=where)


def build_instance(target: Target, kind: type[T], called: str, trust: Trust, where: Path) -> T:
    """Calls the target at `where`. Raises ContractError if the result is not of `kind`, and errors of `call_target`."""
    made = call_target(target, trust=trust, where=where)
    if not isinstance(made, kind):
        found = f"{target.path} returned {type(made).__name__}, not {called}"
        error = ContractError(f"{name_target(where)}: {found}")
        error.put_at((*where, "_target_"))
        raise error
    return made


@contextmanager
def placing_section(document: Mapping[str, Any], model: str) -> Iterator[None]:
    """Corrects the path of errors about the optimizer or schedule of one of several models: it is in the model's own
    entry, or in the job."""
    try:
        yield
    except (TargetError, ContractError) as error:
        own = (document.get("models") or {}).get(model, {})
        if error.path and error.path[0] in own:
            error.message = error.message.replace(str(error.path[0]), f"models.{model}.{error.path[0]}", 1)
            error.path = ("models", model, *error.path)
        raise


@contextmanager
def placing_target(where: Path) -> Iterator[None]:
    """Sets the path of a TargetError or ContractError to the target at `where`, unless it already has a path."""
    try:
        yield
    except (TargetError, ContractError) as error:
        error.put_at((*where, "_target_") if where else ())
        raise


def _build(value: Any, trust: Trust, where: Path) -> Any:
    if isinstance(value, Mapping):
        if "_target_" in value:
            return call_target(make_target(value), trust=trust, where=where)
        return {key: _build(item, trust, where and (*where, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_build(item, trust, where and (*where, index)) for index, item in enumerate(value)]
    if reference := parse_reference(value):
        if missing := reference.find_missing():
            error = TargetError(f"{value}: environment variable {missing} is not set", hint=f"export {missing}=...")
            error.put_at(where)
            raise error
        return reference.read()
    return value


def find_target(path: str, trust: Trust = Trust()) -> Callable[..., Any]:  # noqa: B008 (frozen)
    """The callable at a dotted path. Raises TargetError if it is not trusted or cannot be found."""
    parts = path.split(".")
    if not all(re.fullmatch(r"[^\W\d]\w*", part) for part in parts):
        raise TargetError(f"{path!r} is not a dotted path", hint="package.module.name")
    _require(path, trusting.explain_distrust(path, trust), trust)
    if len(parts) == 1 or trusting.find_top(parts[0], trust.folders) is None:
        if rejected := trusting.explain_rejected(path, trust):
            raise TargetError(f"cannot import {path}: {rejected}", hint=trusting.hint(path, trust))
        message, hint = explain_no_module(parts[0], trust)
        raise TargetError(f"cannot import {path}: {message}", hint=hint)
    module, length = _import(path, parts[0]), 1
    while length < len(parts) - 1 and hasattr(module, "__path__"):
        name = ".".join(parts[: length + 1])
        spec = importlib.util.find_spec(name)  # imports nothing: the parent package is already imported
        if spec is None:
            break  # this part of the path is not a module; it may be a class in the module above
        _require(path, trusting.explain_module(spec, path, trust), trust)
        module, length = _import(path, name), length + 1
    return _descend(module, parts, length, trust)


def _require(path: str, distrust: str, trust: Trust) -> None:
    if distrust:
        raise TargetError(f"{path} is not trusted: {distrust}", hint=trusting.hint(path, trust))


def _import(path: str, name: str) -> ModuleType:
    try:
        with refuse_exits():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or name == error.name:
            raise TargetError(f"cannot import {path}: there is no module {name!r}") from error
        if error.name.startswith("dsjob."):
            message = f"cannot import {path}: {name} imports {error.name}, which is not a module of dsjob"
            raise TargetError(message, hint="write: from dsjob import NAME") from error
        raise TargetError(f"cannot import {path}: {name} needs {error.name}, which is not installed") from error
    except DsjobError:
        raise
    except SyntaxError as error:
        place, text = f"{error.filename}:{error.lineno}:{error.offset or 1}", (error.text or "").strip()
        message = f"cannot import {path}: {place}: {type(error).__name__}: {error.msg}"
        raise TargetError(message, hint=f"the line is: {text}" if text else "") from error
    except Exception as error:
        raise TargetError(f"cannot import {path}: importing {name} failed: {describe_failure(error)}") from error


def _descend(found: Any, parts: list[str], length: int, trust: Trust) -> Callable[..., Any]:
    path, above = ".".join(parts), found
    for index in range(length, len(parts)):
        owner, part = ".".join(parts[:index]), parts[index]
        if part.startswith("__") and not trust.names(path):
            _require(path, f"{part} is Python's own way into {owner}", trust)
        if not hasattr(found, part):
            inside = pkgutil.iter_modules(getattr(found, "__path__", None) or [])  # those that are not imported yet
            names = [name for name in (*dir(found), *(each.name for each in inside)) if not name.startswith("_")]
            raise TargetError(f"cannot import {path}: {owner} has no {part!r}", hint=suggest(part, names))
        above, found = found, getattr(found, part)
        if isinstance(found, ModuleType) and not (trusting.is_trusted_module(found.__name__, trust) or is_listed(path)):
            _require(path, f"{owner}.{part} is the module {found.__name__}, which {owner} has imported", trust)
    if not callable(found):
        raise TargetError(f"{path} is {type(found).__name__}, which cannot be called")
    _require(path, trusting.explain_found(path, above, found, trust), trust)
    result: Callable[..., Any] = found
    return result
