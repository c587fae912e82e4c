"""Reads the DeepSpeed config that a program passes to `initialize`, and words the warnings about it."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dsjob import document as documents
from dsjob import storage, terminal
from dsjob.config import Config
from dsjob.contract import locations
from dsjob.contract.bounds import check_values
from dsjob.contract.deepspeed_keys import CALLBACKS
from dsjob.document.bare import leave_unknown_out
from dsjob.document.places import Locate, place_problems
from dsjob.errors import ConfigError, ConfigWarning, DocumentError, Problem, StorageError, UsageError
from dsjob.trust.grant import Trust

LENIENT = "DSJOB_LENIENT"  # set by `dsjob exec --lenient`


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a config comes from: the places of its values, and the values before a library changed any."""

    written: Mapping[str, Any]
    locate: Locate


def _find_nothing(config: Mapping[str, Any]) -> Origin:
    return Origin(config, lambda path: ("config", 0, 0))


# What `dsjob exec` replaces: the origin of a config that is a dict, and the texts of the warnings about a config.
find_origin: Callable[[Mapping[str, Any]], Origin] = _find_nothing


@dataclasses.dataclass(frozen=True)
class Given:
    """A config as `initialize` receives it, where it comes from, and what it may import."""

    config: dict[str, Any]
    origin: Origin
    trust: Trust


def read_given(args: Any, config: str | Mapping[str, Any] | None, trust: Sequence[str]) -> Given:
    """Reads the config for `initialize`. Raises ConfigError, UsageError."""
    granted = _read_trust(trust)
    locations.allow(lambda: granted.prefixes)
    plain, folders, origin = read_config(args, config)
    return Given(plain, origin, dataclasses.replace(granted, folders=folders))


def _read_trust(prefixes: Sequence[str]) -> Trust:
    """The grant for `trust`. Its UsageErrors name the argument, not the command-line flag."""
    if isinstance(prefixes, str):
        raise UsageError(f"trust={prefixes!r} must be a list of prefixes", hint=f'write trust=["{prefixes}"]')
    try:
        return Trust(prefixes=tuple(prefixes))
    except UsageError as error:
        message = error.message.replace("--trust ", "trust=", 1)
        raise UsageError(message, hint='trust=["my_package.models"], for example') from error


def read_config(args: Any, config: str | Mapping[str, Any] | None) -> tuple[dict[str, Any], tuple[str, ...], Origin]:
    """Reads the config. Also returns the folders whose modules it may name, and where it comes from.

    With `dsjob exec --lenient`, unknown keys are left out, and rank 0 warns.
    """
    given, folders, origin = _read_config(args, config)
    if os.environ.get(LENIENT):
        given, problems = leave_unknown_out(given, locate=origin.locate)
        warn_of_unknown(problems)
    return given, folders, origin


def warn_of_unknown(problems: Sequence[Problem]) -> None:
    """Warns on rank 0 of unknown keys that were left out."""
    for problem in problems if os.environ.get("RANK", "0") == "0" else ():
        terminal.warn(str(problem), ConfigWarning, stacklevel=5)


def _read_config(args: Any, config: str | Mapping[str, Any] | None) -> tuple[dict[str, Any], tuple[str, ...], Origin]:
    from_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if config is not None and from_args is not None:
        raise UsageError("the config is given twice: as an argument, and as args.deepspeed_config")
    config = config if config is not None else from_args
    if config is None:
        raise UsageError(
            "dsjob.initialize needs a config", hint='for example config={"train_batch_size": 8, "optimizer": {...}}'
        )
    if isinstance(config, Mapping):
        if problems := check_values(config, "config"):
            raise ConfigError(problems)
        plain = _make_plain(config)
        _refuse_job(plain, "config")
        return plain, (os.getcwd(),), find_origin(config)
    if not isinstance(config, (str, os.PathLike)):
        raise UsageError(f"the config is {name_type(config)}", hint="pass a dict, or the path of a JSON file")
    source = os.fspath(config)
    is_url = "://" in source
    try:
        document = documents.require_few(documents.parse(storage.read_text(source), source))
    except DocumentError as error:
        raise ConfigError(error.problems, error.warnings) from error
    except StorageError as error:
        hint = "" if is_url else f"config is the path of a JSON file; a relative path starts at {os.getcwd()}"
        raise UsageError(error.message, hint=hint or error.hint) from error
    _refuse_job(document.value, source)
    beside = () if is_url else (os.path.dirname(os.path.abspath(source)),)
    return document.value, (os.getcwd(), *beside), Origin(document.value, document.locate)


def _make_plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the config as a dict, in which structs of `dsjob.config` are dicts too."""
    plain = config.as_config() if isinstance(config, Config) else config
    made = {key: value.to_dict() if isinstance(value, Config) else _list(value) for key, value in plain.items()}
    if made.get("steps_per_print") == math.inf:  # accelerate's way to say never, which is the default
        del made["steps_per_print"]
    return made


def _list(value: Any) -> Any:
    """A copy with lists in place of tuples, which Python programs write for betas, for example."""
    if isinstance(value, dict):
        return {key: _list(each) for key, each in value.items()}
    return [_list(each) for each in value] if isinstance(value, (list, tuple)) else value


def _refuse_job(config: Mapping[Any, Any], source: str) -> None:
    """Raises ConfigError if the config is a job document, which only `dsjob run` supports."""
    sections = [key for key in ("model", "data", "trainer", "deepspeed") if key in config]
    if sections:
        message = f"this is a job document (it has {', '.join(sections)}), but initialize takes a DeepSpeed config"
        hint = "run it with the command dsjob, or pass only its engine sections, with DeepSpeed's batch sizes"
        raise ConfigError([Problem(message, (sections[0],), "job-document", hint, source)])


def find_reports(config: Mapping[str, Any]) -> list[Problem]:
    """Warnings for the enabled monitors and breakdowns of a config, for an engine that has none."""
    found = {key: config.get(key) for key in ("tensorboard", "csv_monitor", "wandb", "comet", *CALLBACKS)}
    asked = [key for key, value in found.items() if (value.get("enabled") if isinstance(value, Mapping) else value)]
    hint = "dsjob.deepspeed.initialize returns an engine that does this"
    return [Problem("has no effect here", (key,), "no-effect", hint, severity="warning") for key in asked]


def find_replaced(given: Given, passed: Mapping[str, object]) -> list[Problem]:
    """Warnings for sections of a config that what the program passes to `initialize` replaces, as in DeepSpeed."""
    found = [
        Problem(
            f"has no effect: the program passes {_name_passed(value)}, which replaces it", (section,), "replaced",
            "remove one of the two", severity="warning",
        )
        for section, value in passed.items()
        if value is not None and given.config.get(section)
    ]  # fmt: skip
    return place_problems(found, given.origin.locate)


def _name_passed(value: object) -> str:
    return "a function" if callable(value) else f"its own {type(value).__name__}"


def warn(problems: Sequence[Problem], origin: Origin) -> None:
    """Warns, at the line that calls `initialize`. To be called by what `initialize` calls."""
    for text in describe_warnings(problems, origin):
        terminal.warn(text, ConfigWarning, stacklevel=4)


def list_warnings(problems: Sequence[Problem], origin: Origin) -> list[str]:
    """The texts: one about all keys without effect, one about all values for "auto", one about each other problem."""
    idle = [f"{problem.dotted}: {problem.hint}" for problem in problems if problem.rule == "no-effect"]
    auto = [f"{problem.dotted}: {problem.message}" for problem in problems if problem.rule == "auto"]
    listed = [
        ("these keys of the DeepSpeed config have no effect here; keep or delete them", idle),
        ('these keys of the DeepSpeed config are "auto"; to choose another value, write it', auto),
    ]
    texts = ["\n  ".join([title, *lines]) for title, lines in listed if lines]
    texts += [str(problem) for problem in problems if problem.rule not in ("no-effect", "auto")]
    return texts


describe_warnings: Callable[[Sequence[Problem], Origin], list[str]] = list_warnings


def name_type(value: object) -> str:
    """How messages name the type of an argument."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"
