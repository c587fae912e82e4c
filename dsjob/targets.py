"""Targets: from `_target_` and arguments to the object. The one place that imports what a document names."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from dsjob.check import suggest
from dsjob.errors import DsjobError, TargetError
from dsjob.spec import Target, make_target


def call_target(target: Target, *positional: Any) -> Any:
    """Calls a target with `positional` and then its own arguments; targets among the arguments are called first.

    `_partial_: true` binds the arguments instead. Raises TargetError where the target cannot be imported or does not
    take the arguments; an error inside the target passes through.
    """
    arguments = dict(target.arguments)
    partial = bool(arguments.pop("_partial_", False))
    listed = [*positional, *(_build(item) for item in arguments.pop("_args_", []))]
    keywords = {key: _build(value) for key, value in arguments.items()}
    function = find_target(target.path)
    _check_call(target.path, function, listed, keywords, partial)
    return functools.partial(function, *listed, **keywords) if partial else function(*listed, **keywords)


def build_callable(target: Target, role: str) -> Callable[..., Any]:
    """What the loop calls as `role`: an object made by a class, or a function with the target's arguments bound.

    `_partial_` says otherwise where it is given: false calls a function that makes the callable, true binds a class.
    Raises TargetError where what was made cannot be called.
    """
    binds = inspect.isroutine(find_target(target.path))
    built = call_target(Target(target.path, {"_partial_": binds, **target.arguments}))
    if not callable(built):
        raise TargetError(f"{role}: {target.path} made {type(built).__name__}, which cannot be called")
    made: Callable[..., Any] = built
    return made


def _build(value: Any) -> Any:
    if isinstance(value, Mapping):
        if "_target_" in value:
            return call_target(make_target(value))
        return {key: _build(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_build(item) for item in value]
    return value


def find_target(path: str) -> Callable[..., Any]:
    """The callable at a dotted path. Raises TargetError saying which part of the path is not there."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
                continue  # this part of the path is no module: it may be a class in the one above
            raise TargetError(f"cannot import {path}: {name} needs {error.name}, which is not installed") from error
        except DsjobError:
            raise
        except Exception as error:
            raise TargetError(
                f"cannot import {path}: importing {name} failed: {type(error).__name__}: {error}"
            ) from error
        return _descend(found, parts, length)
    raise TargetError(
        f"cannot import {path}: there is no module {parts[0]!r}",
        hint="modules in the current folder and installed packages can be named",
    )


def _descend(found: Any, parts: list[str], length: int) -> Callable[..., Any]:
    for index in range(length, len(parts)):
        owner = ".".join(parts[:index])
        if not hasattr(found, parts[index]):
            names = [name for name in dir(found) if not name.startswith("_")]
            raise TargetError(
                f"cannot import {'.'.join(parts)}: {owner} has no {parts[index]!r}", hint=suggest(parts[index], names)
            )
        found = getattr(found, parts[index])
    if not callable(found):
        raise TargetError(f"{'.'.join(parts)} is {type(found).__name__}, which cannot be called")
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
