"""Targets: from `_target_` and arguments to the object. The one place that imports what a document names.

What may be imported and called is for `trust` to say; it is asked before the import, and again about what was found.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from dsjob import trust as trusting
from dsjob.check import suggest
from dsjob.errors import DsjobError, TargetError
from dsjob.redaction import REFERENCE
from dsjob.spec import Target, make_target
from dsjob.trust import Trust


def call_target(target: Target, *positional: Any, trust: Trust = Trust()) -> Any:  # noqa: B008 (frozen)
    """Calls a target with `positional` and then its own arguments; targets among the arguments are called first.

    `${oc.env:NAME}`, which stands for a secret, is read from the environment; with `,null` it may be absent there.
    `_partial_: true` binds the arguments instead. Raises TargetError where the target is not trusted, cannot be
    imported or does not take the arguments; an error inside the target passes through.
    """
    problems = trusting.check_document({"_target_": target.path, **target.arguments}, trust)
    if problems:
        where = problems[0].path[:-1] if problems[0].rule == "untrusted-target" else problems[0].path
        place = "" if not where else f"{target.path}: {'.'.join(map(str, where))}: "
        raise TargetError(place + problems[0].message, hint=problems[0].hint)
    arguments = dict(target.arguments)
    partial = bool(arguments.pop("_partial_", False))
    listed = [*positional, *(_build(item, trust) for item in arguments.pop("_args_", []))]
    keywords = {key: _build(value, trust) for key, value in arguments.items()}
    function = find_target(target.path, trust)
    _check_call(target.path, function, listed, keywords, partial)
    return functools.partial(function, *listed, **keywords) if partial else function(*listed, **keywords)


def build_callable(target: Target, role: str, trust: Trust = Trust()) -> Callable[..., Any]:  # noqa: B008 (frozen)
    """What the loop calls as `role`: an object made by a class, or a function with the target's arguments bound.

    `_partial_` says otherwise where it is given: false calls a function that makes the callable, true binds a class.
    Raises TargetError where what was made cannot be called.
    """
    binds = inspect.isroutine(find_target(target.path, trust))
    built = call_target(Target(target.path, {"_partial_": binds, **target.arguments}), trust=trust)
    if not callable(built):
        raise TargetError(f"{role}: {target.path} made {type(built).__name__}, which cannot be called")
    made: Callable[..., Any] = built
    return made


def _build(value: Any, trust: Trust) -> Any:
    if isinstance(value, Mapping):
        if "_target_" in value:
            return call_target(make_target(value), trust=trust)
        return {key: _build(item, trust) for key, item in value.items()}
    if isinstance(value, list):
        return [_build(item, trust) for item in value]
    if isinstance(value, str) and (found := REFERENCE.fullmatch(value)):
        if found[1] not in os.environ and found[2]:
            return None
        if found[1] not in os.environ:
            raise TargetError(f"{value}: there is no {found[1]} in the environment", hint=f"export {found[1]}=...")
        return os.environ[found[1]]
    return value


def find_target(path: str, trust: Trust = Trust()) -> Callable[..., Any]:  # noqa: B008 (frozen)
    """The callable at a dotted path. Raises TargetError where it is not trusted, or saying which part is not there."""
    parts = path.split(".")
    if not all(re.fullmatch(r"[^\W\d]\w*", part) for part in parts):
        raise TargetError(f"{path!r} is not a dotted path", hint="package.module.name")
    _require(path, trusting.explain_distrust(path, trust))
    if len(parts) == 1 or trusting.find_top(parts[0], trust.folders) is None:
        raise TargetError(
            f"cannot import {path}: there is no module {parts[0]!r}",
            hint="modules in the current folder or beside the job file can be named; an installed package with --trust",
        )
    module, length = _import(path, parts[0]), 1
    while length < len(parts) - 1 and hasattr(module, "__path__"):
        name = ".".join(parts[: length + 1])
        spec = importlib.util.find_spec(name)  # imports nothing: the package above has been
        if spec is None:
            break  # this part of the path is no module: it may be a class in the one above
        _require(path, trusting.explain_module(spec, path, trust))
        module, length = _import(path, name), length + 1
    return _descend(module, parts, length, trust)


def _require(path: str, distrust: str) -> None:
    if distrust:
        raise TargetError(f"{path} is not trusted: {distrust}", hint=trusting.hint(path))


def _import(path: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or name == error.name:
            raise TargetError(f"cannot import {path}: there is no module {name!r}") from error
        raise TargetError(f"cannot import {path}: {name} needs {error.name}, which is not installed") from error
    except DsjobError:
        raise
    except Exception as error:
        raise TargetError(f"cannot import {path}: importing {name} failed: {type(error).__name__}: {error}") from error


def _descend(found: Any, parts: list[str], length: int, trust: Trust) -> Callable[..., Any]:
    path, above = ".".join(parts), found
    for index in range(length, len(parts)):
        owner, part = ".".join(parts[:index]), parts[index]
        if part.startswith("__") and not trust.names(path):
            _require(path, f"{part} is Python's own way into {owner}")
        if not hasattr(found, part):
            names = [name for name in dir(found) if not name.startswith("_")]
            raise TargetError(f"cannot import {path}: {owner} has no {part!r}", hint=suggest(part, names))
        above, found = found, getattr(found, part)
        if isinstance(found, ModuleType) and not (
            trusting.is_trusted_module(found.__name__, trust) or trusting.is_listed(path)
        ):
            _require(path, f"{owner}.{part} is the module {found.__name__}, which {owner} has imported")
    if not callable(found):
        raise TargetError(f"{path} is {type(found).__name__}, which cannot be called")
    _require(path, trusting.explain_found(path, above, found, trust))
    result: Callable[..., Any] = found
    return result


def _check_call(
    path: str, function: Callable[..., Any], listed: list[Any], keywords: dict[str, Any], partial: bool
) -> None:
    """Tells a wrong argument from a TypeError inside the target, and names the one that was meant."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built-ins need not have one
        return
    try:
        (signature.bind_partial if partial else signature.bind)(*listed, **keywords)
    except TypeError as error:
        raise TargetError(describe_call_error(path, function, error)) from error


def describe_call_error(name: str, function: Callable[..., Any], error: TypeError) -> str:
    """What is wrong with a call, and the arguments that there are."""
    known = [p for p in inspect.signature(function).parameters if p not in ("self", "args", "kwargs")]
    unexpected = (
        str(error).rpartition("unexpected keyword argument ")[2].strip("'\"") if "unexpected" in str(error) else ""
    )
    near = suggest(unexpected, known) if unexpected else ""
    return f"{name}: {error}; {near + ' ' if near else ''}it takes {', '.join(known) or 'no arguments'}"
