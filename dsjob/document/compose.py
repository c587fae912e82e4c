"""Composes recipes, a job file and overrides into one plain document. The only module that uses Hydra.

Hydra composes on top of `base`, a tree of all keys in the schemas without values, so that it rejects misspelled
overrides. A job file is merged after the recipe and before the overrides. Nothing is checked here.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NoReturn, cast

from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, QuotedString, RangeSweep
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from dsjob.contract import schema as contract
from dsjob.contract.hints import suggest
from dsjob.contract.paths import Path
from dsjob.contract.secrets import describe_secret, find_secrets, hide_value, is_reference, list_texts
from dsjob.document import Document, interpolation
from dsjob.document.job_file import require_job_file
from dsjob.document.origins import Composed, settle
from dsjob.document.overrides import explain_no_key, explain_unreadable, require_keys, require_small
from dsjob.document.places import place_problems
from dsjob.errors import DocumentError, Problem, UsageError

CONFIG_NAME = "config"
_composing = threading.RLock()
_FILE_GROUP = "job_file"
_GROUPS: dict[str, Path] = {  # the path that each config group sets
    "optimizer": ("optimizer",),
    "scheduler": ("scheduler",),
    "precision": ("bf16", "enabled"),
    "zero": ("zero_optimization", "stage"),
}


@contextmanager
def open_hydra(
    overrides: Sequence[str], *, config_dir: str | None = None, file: Document | None = None
) -> Iterator[Hydra]:
    """Opens Hydra with dsjob's own configs, those in `config_dir`, and a job file. Its errors become UsageError.

    Hydra's state is global to the process. So a lock admits one thread at a time, and the state of a program's own
    Hydra is restored afterwards.
    """
    require_small(overrides)
    require_keys(overrides)
    search_path = create_config_search_path("pkg://dsjob.conf")
    if config_dir is not None:
        if not os.path.isdir(config_dir):
            raise UsageError(f"--config-dir: no such folder: {config_dir}")
        here = SearchPathQuery(provider="schema")
        search_path.prepend(provider="command-line", path=f"file://{os.path.abspath(config_dir)}", anchor=here)
    with _composing:
        stored, of_program = dict(ConfigStore.instance().repo), GlobalHydra.instance().hydra
        _store_base(overrides, file)
        GlobalHydra.instance().clear()
        try:
            with _renamed(overrides):
                yield Hydra.create_main_hydra2(task_name="dsjob", config_search_path=search_path)
        finally:
            GlobalHydra.instance().hydra = of_program
            ConfigStore.instance().repo = stored


def _store_base(overrides: Sequence[str], file: Document | None) -> None:
    tree = OmegaConf.create(contract.unset_tree(contract.job_schema()))
    for section in ("optimizer", "scheduler"):
        # `check` compares the arguments with those of the type, so Hydra may accept any without a "+".
        OmegaConf.set_struct(tree[section].params, False)
    OmegaConf.set_struct(tree.optimizer.param_groups, False)
    OmegaConf.set_struct(tree.models, False)  # `check` knows which keys of the job a model may override
    store = ConfigStore.instance()
    store.store(name="base", node=tree)
    if file is not None:
        require_job_file(file)
        locate = Composed({}, file).locate
        if problems := interpolation.check_texts(file.value):
            raise DocumentError(place_problems(problems, locate))
        # Hydra merges a group chosen on the command line before the file, so the file's section would win.
        node = copy.deepcopy(file.value)
        if isinstance(switch := node.get("zero_optimization"), bool):  # overrides cannot be merged into a boolean
            node["zero_optimization"] = {"stage": int(switch)}
        # Removing the keys that the group sets from the file lets the command line win.
        for name in {override.split("=")[0].lstrip("~") for override in overrides} & _GROUPS.keys():
            _delete(node, _GROUPS[name])
        try:
            with _renamed():  # OmegaConf parses each ${...} here
                store.store(group=_FILE_GROUP, name="given", package="_global_", node=node)
        except DocumentError as error:
            raise DocumentError(place_problems(list(error.problems), locate)) from error


def _is_set_below(path: Path, overrides: Iterable[Path]) -> bool:
    return any(other[: len(path)] == path and other != path for other in overrides)


def _delete(value: Any, path: Path) -> None:
    for part in path[:-1]:
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, dict):
        value.pop(path[-1], None)


def parse_arguments(
    arguments: Sequence[str], add_arguments: Callable[[argparse.ArgumentParser], None]
) -> argparse.Namespace:
    """Parses a command line with Hydra's flags and those that `add_arguments` adds. The rest is in `overrides`,
    including file names. Raises UsageError."""
    parser = get_args_parser()
    add_arguments(parser)
    parser.error = _refuse  # type: ignore[method-assign]
    return parser.parse_intermixed_args(list(arguments))


def _refuse(message: str) -> NoReturn:
    raise UsageError(message, hint="dsjob --help lists the commands and flags")


def answer(args: argparse.Namespace, overrides: Sequence[str], file: Document | None) -> None:
    """Handles Hydra's own informational flags: --cfg, --info, --shell-completion, --hydra-help."""
    config: dict[str, Any] = {"config_name": CONFIG_NAME, "overrides": list_overrides(overrides, file)}
    with open_hydra(overrides, config_dir=args.config_dir, file=file) as hydra:
        if args.shell_completion:
            hydra.shell_completion(config_name=CONFIG_NAME, overrides=list(overrides))
        elif args.info:
            hydra.show_info(args.info, **config)
        elif args.hydra_help:
            hydra.hydra_help(config_name=CONFIG_NAME, args_parser=get_args_parser(), args=args)
        else:
            hydra.show_cfg(cfg_type=args.cfg, package=args.package, resolve=args.resolve, **config)


def _parse(overrides: Sequence[str]) -> list[Override]:
    require_small(overrides)
    return OverridesParser.create().parse_overrides(list(overrides))


def count_runs(overrides: Sequence[str]) -> float:
    """The number of combinations in a sweep; infinite if a range has no end."""
    count = 1.0
    with _renamed():
        sweep = _parse(overrides)
    for parsed in sweep:
        value = parsed.value()
        if isinstance(value, RangeSweep):
            start, stop, step = (float(number or 0) for number in (value.start, value.stop, value.step))
            steps = (stop - start) / step if step else math.inf
            count *= max(0.0, steps if math.isinf(steps) else math.ceil(steps))
        elif isinstance(value, ChoiceSweep):
            count *= len(value.list)
    return count


def take_first(overrides: Sequence[str]) -> list[str]:
    """The overrides of a sweep's first run."""
    first = []
    with _renamed():
        for parsed in _parse(overrides):
            text = parsed.input_line or ""
            if isinstance(whole := parsed.value(), RangeSweep):  # may be too long to enumerate
                text = f"{parsed.get_key_element()}={whole.start}"
            elif parsed.is_sweep_override() and parsed.is_discrete_sweep():
                text = f"{parsed.get_key_element()}={next(iter(parsed.sweep_string_iterator()))}"
            elif isinstance(interval := parsed.value(), IntervalSweep):  # some sweepers sample from an interval
                text = f"{parsed.get_key_element()}={interval.start}"
            first.append(text)
    return first


def take_each(overrides: Sequence[str]) -> Iterator[list[str]]:
    """The overrides of runs that together have every listed value of a sweep once. Ranges hold only numbers."""
    first = take_first(overrides)
    with _renamed():
        sweep = _parse(overrides)
    yield first
    for index, parsed in enumerate(sweep):
        if isinstance(parsed.value(), ChoiceSweep):
            for value in islice(parsed.sweep_string_iterator(), 1, None):
                yield [*first[:index], f"{parsed.get_key_element()}={value}", *first[index + 1 :]]


def find_literal_secrets(overrides: Sequence[str]) -> list[Path]:
    """The places of literal secrets in overrides, including all values of a sweep."""
    found: list[Path] = []
    with _renamed():
        for parsed in _parse(overrides):
            if isinstance(parsed.value(), RangeSweep):
                continue  # holds only numbers
            path = _split(parsed.get_key_element().lstrip("+~"))
            sweeps = parsed.is_sweep_override() and parsed.is_discrete_sweep()
            for value in parsed.sweep_iterator() if sweeps else [parsed.value()]:
                tree = {path[-1]: _unquote(value)} if path else {}
                below = [place for place, item in find_secrets(tree) if not is_reference(item)]
                below += [place for place, item in list_texts(tree) if isinstance(item, str) and describe_secret(item)]
                found += [(*path[:-1], *place) for place in below]
    return list(dict.fromkeys(found))


def _unquote(value: Any) -> Any:
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, dict):
        return {str(_unquote(key)): _unquote(item) for key, item in value.items()}
    return [_unquote(item) for item in value] if isinstance(value, list) else value


def multirun(task: TaskFunction, overrides: Sequence[str], *, file: Document | None, config_dir: str | None) -> None:
    """Runs `task` with Hydra's multirun, using the sweeper and launcher that the overrides choose.

    Errors of composition are translated; exceptions of a run pass through unchanged.
    """
    with open_hydra(overrides, config_dir=config_dir, file=file) as hydra:
        hydra.multirun(config_name=CONFIG_NAME, task_function=task, overrides=list_overrides(overrides, file))


def list_overrides(overrides: Sequence[str], file: Document | None) -> list[str]:
    """The overrides for Hydra: the user's, then the one that adds the job file as the last group."""
    return [*overrides, f"+{_FILE_GROUP}=given"] if file is not None else list(overrides)


def compose(
    overrides: Sequence[str],
    *,
    file: Document | None = None,
    config_dir: str | None = None,
    environment: Collection[str] = (),
) -> Composed:
    """Composes recipes, job file and overrides into one document. `environment`: variables that may be read anywhere
    in it, in addition to `environment.HARMLESS`. Raises UsageError, DocumentError."""
    with open_hydra(overrides, config_dir=config_dir, file=file) as hydra:
        config = hydra.compose_config(
            config_name=CONFIG_NAME,
            overrides=list_overrides(overrides, file),
            run_mode=RunMode.RUN,
            with_log_configuration=False,
        )
        return finish(config, file, environment)


def finish(config: DictConfig, file: Document | None, environment: Collection[str] = ()) -> Composed:
    """Turns a composed Hydra config, which still has its `hydra` node, into a plain document. `environment`: as in
    `compose`."""
    choices = {str(key): value for key, value in config.hydra.runtime.choices.items() if value is not None}
    recipes = tuple(str(choices[key]) for key in choices if key.split("@")[0] == "recipe")
    # The raw texts: reading them as values would resolve their interpolations.
    overrides = _override_paths(cast("list[str]", OmegaConf.to_container(config.hydra.overrides.task, resolve=False)))
    try:
        with _renamed():
            # Hydra's own node is not part of the job, and its interpolations are not the user's.
            job = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
            plain = interpolation.resolve(job, _say, environment)
    except DocumentError as error:
        locate = Composed({}, file, recipes, overrides).locate
        raise DocumentError(place_problems(list(error.problems), locate)) from error
    for path, text in overrides.items():
        # Hydra's ~scheduler removes only the group choice. Keys that a recipe or file adds to the section stay.
        if text.startswith("~") and path in _GROUPS.values() and not _is_set_below(path, overrides):
            _delete(plain, path)
    if recipes and isinstance(plain.get("recipe"), dict) and (file is None or ("recipe",) not in file.keys):
        raise DocumentError(_explain_packages(config, recipes))
    return settle(plain, file=file, recipes=recipes, overrides=overrides)


def _explain_packages(config: DictConfig, recipes: Sequence[str]) -> list[Problem]:
    """The problems if Hydra put the keys of a recipe below `recipe`, as it does for configs without a package line."""
    folders = [str(source.path) for source in config.hydra.runtime.config_sources if source.schema == "file"]
    files = [os.path.join(folder, "recipe", f"{name}.yaml") for folder in folders for name in recipes]
    own = []
    for file in filter(os.path.isfile, files):
        with open(file, encoding="utf-8") as text:
            own += [] if re.search(r"^#\s*@package", text.read(), re.MULTILINE) else [file]
    message = "has no package line, so Hydra puts its keys under `recipe`, not at the top of the job"
    hint = "make this its first line: # @package _global_"
    if not own:
        return [Problem(f"a config of {', '.join(recipes)} {message}", (), "recipe-package", hint)]
    return [Problem(f"this recipe {message}", (), "recipe-package", hint, file, 1, 1) for file in own]


def _override_paths(overrides: Sequence[str]) -> dict[Path, str]:
    paths: dict[Path, str] = {}
    for parsed in _parse(overrides):
        key = parsed.get_key_element().lstrip("+~")
        paths[_GROUPS.get(key, _split(key))] = parsed.input_line or key
    return paths


def _split(key: str) -> Path:
    """Splits a path that OmegaConf writes as `a.b[0]`."""
    parts = re.sub(r"\[([^\]]+)\]", r".\1", key).split(".")
    return tuple(int(part) if part.isdigit() else part for part in parts if part)


@contextmanager
def _renamed(overrides: Sequence[str] = ()) -> Iterator[None]:
    """Translates errors of Hydra and OmegaConf into the project's own. `overrides`: those that may have caused them."""
    try:
        yield
    except MissingConfigException as error:
        missing = str(error.missing_cfg_file or "")
        group, _, name = missing.rpartition("/")
        options = sorted(error.options or [])
        meant, known = suggest(name, options), f"available: {', '.join(options)}" if options else ""
        hint = f"{meant} ({known})" if meant and known else meant or known
        raise UsageError(f"unknown {group or 'config'} {name or missing!r}", hint=hint) from error
    except OverrideParseException as error:
        raise explain_unreadable(error.override or "") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise _explain(error, overrides) from error
    except MarkedYAMLError as error:
        mark = error.problem_mark
        place = (mark.name, mark.line + 1, mark.column + 1) if mark else ("", 0, 0)
        raise DocumentError([Problem(error.problem or str(error), (), "syntax", "", *place)]) from error
    except RecursionError as error:
        raise UsageError(
            "the configs are nested too deeply to be composed", hint="write interpolations flat"
        ) from error
    except ValueError as error:  # Hydra raises it for a defaults list that it cannot read
        if not str(error).startswith("Config group override must be a string"):
            raise UsageError(f"the configs cannot be composed: {error}") from error
        raise _explain_group(overrides) from error


def _explain_group(overrides: Sequence[str]) -> UsageError:
    """The error for a group that is given a number, a list or null instead of the name of a config."""
    given = [override.partition("=")[::2] for override in overrides]
    group, value = next(((key, value) for key, value in given if key in _GROUPS), ("a group", ""))
    advice = (
        f"to remove it: ~{group}" if value in ("null", "") else f"to set a value: {_dot(_GROUPS.get(group, ()))}=..."
    )
    return UsageError(f"{group} takes the name of a config, not {value or 'a value'}", hint=advice)


def _dot(path: Path) -> str:
    return ".".join(map(str, path))


def _explain(error: Exception, overrides: Sequence[str]) -> UsageError | DocumentError:
    text = _say(error)
    if text.startswith("Ambiguous value for argument"):
        hint = "to run once per value, add -m; a list is 'key=[1,2]'; text with commas needs quotes: 'key=\"1,2\"'"
        return UsageError(f"{text.replace('Ambiguous value for argument', 'several values are given by')}", hint=hint)
    found = re.match(r"Could not (override|append|delete)[^']*'([^']+)'", text)
    act, key = (found[1], found[2]) if found else ("", "")
    cause = error.__cause__
    if act == "override" and not key.startswith("hydra."):
        parent = getattr(cause, "parent_node", None)
        siblings = [str(name) for name in parent] if isinstance(parent, DictConfig) else []
        return DocumentError([explain_no_key(key, suggest(str(getattr(cause, "key", "")), siblings))])
    words = [hide_value(word) for word in overrides if word.partition("=")[0].lstrip("+~") == key]
    if act == "append" and "already at" in text:
        hint = f"to change it, leave out the +: {words[-1].lstrip('+') if words else f'{key}=...'}"
        return UsageError(f"{words[-1] if words else f'+{key}'} adds a key, but {key} is already set", hint=hint)
    if act == "delete":
        return _explain_removal(key, words[-1] if words else f"~{key}", text)
    if text.startswith("Multiple values for "):
        group = text.split()[3].rstrip(".")
        return UsageError(f"{group} is chosen twice", hint=f"choose it once, without a +: {group}=NAME")
    if isinstance(error, OmegaConfBaseException) and getattr(error, "full_key", None):
        return DocumentError([Problem(text, _split(str(error.full_key)), "interpolation")])
    detail = str(cause).splitlines()[0] if isinstance(cause, OmegaConfBaseException) else ""
    return UsageError(f"{text}: {detail}" if detail and detail not in text else text)


def _explain_removal(key: str, word: str, text: str) -> UsageError:
    """The error for an override `~key` or `~key=value` (`word`) that removes nothing. `text`: Hydra's message."""
    if " and not " in text:
        message = f"{word} removes {key} only if it has this value, but it has another one"
        return UsageError(message, hint=f"to remove it in any case: ~{key}")
    unknown = explain_no_key(key, "")
    hint = unknown.hint if unknown.rule == "unknown-key" else "leave out this override"
    return UsageError(f"{word} removes a key, but the document does not set {key}", hint=hint)


def _say(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if found := re.fullmatch(r"Interpolation key '(.*)' not found", text):
        return f"${{{found[1]}}} names a key that the document does not set"
    if text == "Recursive interpolation detected":
        return "the interpolation refers to itself"
    return re.sub(r"\S+=\S+", lambda found: hide_value(found[0]), text)
