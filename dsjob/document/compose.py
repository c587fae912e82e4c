"""Composes recipes, a job file and overrides into one plain document. Only this module calls Hydra.

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
from dataclasses import replace
from itertools import islice
from typing import Any, NoReturn, cast

from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.conf import HydraConf
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, QuotedString, RangeSweep
from hydra.types import RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf

from dsjob.contract import schema as contract
from dsjob.contract.paths import Path
from dsjob.contract.secrets import describe_secret, find_secrets, is_reference, list_texts
from dsjob.document import Document, interpolation
from dsjob.document.hydra_errors import NoKeyError, say_error, translating
from dsjob.document.job_file import require_job_file
from dsjob.document.origins import Composed, settle
from dsjob.document.overrides import GROUPS, require_keys, require_small, split_key
from dsjob.document.places import place_problems
from dsjob.errors import DocumentError, Problem, UsageError

CONFIG_NAME = "config"
_composing = threading.RLock()
_FILE_GROUP = "job_file"
_MOST_UNKNOWN = 20  # overrides of unknown keys to report: finding each composes the document once more


@contextmanager
def open_hydra(
    overrides: Sequence[str],
    *,
    config_dir: str | None = None,
    file: Document | None = None,
    whole: bool = False,
    only_job: bool = False,
) -> Iterator[Hydra]:
    """Opens Hydra with dsjob's own configs, those in `config_dir`, and a job file. Its errors become UsageError.

    whole: with all keys of the job document, not only those that this job needs. only_job: to compose the job and
    nothing else, so that Hydra may do without its configs of launchers, sweepers, logging and help.

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
        _store_base(_build_tree(overrides, file, whole or config_dir is not None), overrides, file)
        if only_job and not _may_refer_to_hydra(overrides, file, search_path):
            _leave_out_hydra()
        GlobalHydra.instance().clear()
        try:
            with translating(overrides):
                yield Hydra.create_main_hydra2(task_name="dsjob", config_search_path=search_path)
        finally:
            GlobalHydra.instance().hydra = of_program
            ConfigStore.instance().repo = stored


def _build_tree(overrides: Sequence[str], file: Document | None, whole: bool) -> DictConfig:
    """The unset keys of the job document that Hydra needs: it compares overrides with them, and interpolations may
    read them.

    Hydra copies the tree about ten times, which takes longer than all else. So sections that nothing refers to are
    left out. Recipes may contain interpolations, and are only read by Hydra itself.
    """
    keys = contract.unset_tree(contract.job_schema())
    texts = [*overrides, *(str(text) for _, text in list_texts(file.value if file is not None else {}))]
    recipe = any(override.lstrip("+~").startswith("recipe") for override in overrides)
    if not whole and not recipe and not any("${" in text for text in texts):
        keys = {key: below for key, below in keys.items() if any(key in override for override in overrides)}
    tree = OmegaConf.create(keys)
    # `check` compares the arguments with those of the type, so Hydra may accept any without a "+". It also knows which
    # keys of the job a model may override.
    for path in ("optimizer.params", "optimizer.param_groups", "scheduler.params", "models"):
        if (section := OmegaConf.select(tree, path)) is not None:
            OmegaConf.set_struct(section, False)
    return tree


def _may_refer_to_hydra(overrides: Sequence[str], file: Document | None, search_path: ConfigSearchPath) -> bool:
    """Whether anything to compose may set or read Hydra's own section. Folders of users may hold any config."""
    foreign = {each.provider for each in search_path.get_path()} - {"hydra", "main", "schema"}
    values = file.value if file is not None else {}
    texts = [*overrides, *values, *(str(text) for _, text in list_texts(values))]
    return bool(foreign) or any("hydra" in text for text in texts)


def _leave_out_hydra() -> None:
    """Replaces Hydra's own section by one without its default configs: composing those takes most of the time."""
    store = ConfigStore.instance()
    store.repo = {**store.repo, "hydra": dict(store.repo["hydra"])}
    store.store(group="hydra", name="config", node=HydraConf(defaults=[]), provider="hydra")


def _store_base(tree: DictConfig, overrides: Sequence[str], file: Document | None) -> None:
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
        for name in {override.split("=")[0].lstrip("~") for override in overrides} & GROUPS.keys():
            _delete(node, GROUPS[name])
        try:
            with translating():  # OmegaConf parses each ${...} here
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
    with open_hydra(overrides, config_dir=args.config_dir, file=file, whole=True) as hydra:
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
    with translating():
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
    with translating():
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
    with translating():
        sweep = _parse(overrides)
    yield first
    for index, parsed in enumerate(sweep):
        if isinstance(parsed.value(), ChoiceSweep):
            for value in islice(parsed.sweep_string_iterator(), 1, None):
                yield [*first[:index], f"{parsed.get_key_element()}={value}", *first[index + 1 :]]


def find_literal_secrets(overrides: Sequence[str]) -> list[Path]:
    """The places of literal secrets in overrides, including all values of a sweep."""
    found: list[Path] = []
    with translating():
        for parsed in _parse(overrides):
            if isinstance(parsed.value(), RangeSweep):
                continue  # holds only numbers
            path = split_key(parsed.get_key_element().lstrip("+~"))
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
    composed = compose_known(overrides, file=file, config_dir=config_dir, environment=environment)
    if composed.unknown:
        raise DocumentError(composed.unknown)
    return composed


def compose_known(
    overrides: Sequence[str],
    *,
    file: Document | None = None,
    config_dir: str | None = None,
    environment: Collection[str] = (),
) -> Composed:
    """Like `compose`, but leaves out overrides of unknown keys. Their problems are in `unknown` of the result, so that
    a check can report them together with its own."""
    known, problems = list(overrides), list[Problem]()
    while True:
        try:
            return replace(_compose(known, file, config_dir, environment), unknown=tuple(problems))
        except NoKeyError as error:  # Hydra stops at the first one
            problems += error.problems
            rest = [word for word in known if word.partition("=")[0] != error.key]
            if rest == known or len(problems) == _MOST_UNKNOWN:
                raise DocumentError(problems) from error
            known = rest
        except DocumentError as error:
            raise DocumentError([*problems, *error.problems], error.warnings) from error


def _compose(
    overrides: Sequence[str], file: Document | None, config_dir: str | None, environment: Collection[str]
) -> Composed:
    with open_hydra(overrides, config_dir=config_dir, file=file, only_job=True) as hydra:
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
        with translating():
            # Hydra's own node is not part of the job, and its interpolations are not the user's.
            job = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
            plain = interpolation.resolve(job, say_error, environment)
    except DocumentError as error:
        locate = Composed({}, file, recipes, overrides).locate
        raise DocumentError(place_problems(list(error.problems), locate)) from error
    for path, text in overrides.items():
        # Hydra's ~scheduler removes only the group choice. Keys that a recipe or file adds to the section stay.
        if text.startswith("~") and path in GROUPS.values() and not _is_set_below(path, overrides):
            _delete(plain, path)
    if recipes and isinstance(plain.get("recipe"), dict) and (file is None or ("recipe",) not in file.keys):
        raise DocumentError(_explain_packages(config, recipes))
    return replace(
        settle(plain, file=file, recipes=recipes, overrides=overrides), named=_list_named(overrides.values())
    )


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


def _list_named(overrides: Iterable[str]) -> frozenset[Path]:
    """The paths of the values that overrides set. A mapping is merged into that of the document, so each value in it
    has its own path."""
    return frozenset(
        path
        for parsed in _parse(list(overrides))
        if (key := parsed.get_key_element().lstrip("+~")) not in GROUPS
        for path in _list_leaves(_unquote(parsed.value()), split_key(key))
    )


def _list_leaves(value: Any, path: Path) -> Iterator[Path]:
    if not isinstance(value, dict):
        yield path
    for key, item in value.items() if isinstance(value, dict) else ():
        yield from _list_leaves(item, (*path, key))


def _override_paths(overrides: Sequence[str]) -> dict[Path, str]:
    paths: dict[Path, str] = {}
    for parsed in _parse(overrides):
        key = parsed.get_key_element().lstrip("+~")
        paths[GROUPS.get(key, split_key(key))] = parsed.input_line or key
    return paths
