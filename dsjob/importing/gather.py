"""Collects all sources into one draft: follows files that name others, and applies them in order of priority."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsjob import storage
from dsjob.contract.access import Access
from dsjob.contract.paths import Path, has_at
from dsjob.contract.trainer_arguments import SCRIPT_ARGUMENTS, TRAINER_ONLY
from dsjob.errors import DocumentError, DsjobError, Problem, UsageError
from dsjob.importing import accelerate, sources
from dsjob.importing.command_line import Command, Word
from dsjob.importing.deepspeed import draft_deepspeed
from dsjob.importing.determined import draft_determined, read_hyperparameter
from dsjob.importing.given import SHELL, Draft, Given, Rank, Settings, differs, is_off, join, show
from dsjob.importing.launchers import draft_launcher
from dsjob.importing.settle import Imported, settle
from dsjob.importing.sources import Source
from dsjob.importing.task import draft_task
from dsjob.importing.training_arguments import draft_arguments, fill_settings, sort_arguments
from dsjob.terminal import quote_path

_Config = tuple[dict[str, Any], Callable[[Path], str]]  # a DeepSpeed config, and the place of each value


@dataclass
class Gathered:
    """The contents of all sources; sources of the same kind are merged by rank."""

    draft: Draft = field(default_factory=Draft)
    configs: list[_Config] = field(default_factory=list)
    overwriting: list[_Config] = field(default_factory=list)  # parts of a config that replace those in `configs`
    arguments: Settings = field(default_factory=dict)
    accelerate: Settings = field(default_factory=dict)
    script: Given | None = None
    launched: bool = False
    trainer: bool = False
    read: dict[str, str] = field(default_factory=dict)  # files that have been read, by base name


def import_sources(found: list[Source], command: Command | None = None, wrong: Sequence[Problem] = ()) -> Imported:
    """Merges several sources into one job document with notes. `wrong`: problems of files that could not be read.

    Raises DocumentError with all invalid values of all sources, and UsageError if there are two launch commands.
    """
    gathered = Gathered(read={os.path.basename(name): name for name in _list_names(found, wrong)})
    commands = [source.command for source in found if source.command] + ([command] if command else [])
    if len(commands) > 1:
        raise UsageError(
            "there are two launch commands, but only one job can be imported at a time", hint="leave one of them out"
        )
    gathered.draft.problems.update({(problem.place, str(problem)): problem for problem in wrong})
    for source in found:
        _take(source, gathered)
    for one in commands:
        _take_command(one, gathered, next((source.name for source in found if source.command is one), ""))
    _follow(gathered)
    return _draft(gathered)


def _list_names(found: list[Source], wrong: Sequence[Problem]) -> list[str]:
    return [source.name for source in found] + [problem.source for problem in wrong]


def _take(source: Source, gathered: Gathered) -> None:
    if source.kind == "deepspeed":
        gathered.configs.append((source.content, source.locate))
    elif source.kind == "accelerate":
        settings = accelerate.read_settings(source.content, source.locate, gathered.draft)
        join(gathered.accelerate, settings, gathered.draft)
    elif source.kind == "determined":
        draft_determined(source.content, source.locate, gathered.draft)
        config = read_hyperparameter(source.content, "deepspeed_config", source.locate, gathered.draft)
        if config is not None:
            _name_file(config, gathered, source.name, "deepspeed")
        part = read_hyperparameter(source.content, "overwrite_deepspeed_args", source.locate, gathered.draft)
        if part is not None and isinstance(part.value, dict):
            above: Path = ("hyperparameters", "overwrite_deepspeed_args")
            gathered.overwriting.append((part.value, lambda path: source.locate((*above, *path))))
        elif part is not None:
            gathered.draft.refuse(part, "must be an object with keys of a DeepSpeed config")
    elif source.kind == "arguments":
        gathered.trainer = True
        arguments = [
            (key.replace("-", "_"), Given(value, key, source.locate((key,)), Rank.ARGUMENTS))
            for key, value in source.content.items()
        ]
        join(gathered.arguments, arguments, gathered.draft)


def _take_command(command: Command, gathered: Gathered, home: str) -> None:
    draft = gathered.draft
    gathered.script, gathered.launched = command.script, True
    if command.before:
        first = command.before[0]
        words = show(" ".join(word.text for word in command.before))
        origin = Given(None, "", first.place, Rank.DEFAULT)
        draft.note("left out", f"{words}: start dsjob with it if you need it", origin)
    for name, given in command.environment.items():
        draft.note("left out", f"{name}: set it for dsjob too", given)
    for word in command.files:
        _take_word(word, len(command.files) == 1 and not command.options, gathered, home)
    if command.launcher == "accelerate":
        config = command.launcher_options.get("config_file")
        if config is not None:
            _name_file(config, gathered, home, "accelerate")
        join(gathered.accelerate, command.launcher_options.items(), draft)
    else:
        draft_launcher(command, draft)
    gathered.trainer = gathered.trainer or any(name in TRAINER_ONLY for name, _ in command.options)
    join(gathered.arguments, command.options, draft)
    for _, given in command.options:
        if given.is_open:
            draft.note("fill in", f"{given.label}: {SHELL}", given)


def _take_word(word: Word, alone: bool, gathered: Gathered, home: str) -> None:
    """Handles a positional argument: a file with arguments, if it is the only argument or its content shows that."""
    given = Given(word.text, "argument", word.place, Rank.COMMAND_LINE)
    is_file = word.text.endswith((".json", ".yaml", ".yml"))
    if is_file and alone:
        _name_file(given, gathered, home, "arguments")
        return
    path = sources.find_beside(word.text, home) if is_file else None
    if os.path.basename(word.text) in gathered.read:
        return
    try:
        if path is not None:
            _take_named(path, gathered)
            return
    except DsjobError:  # a file that belongs to the program
        pass
    gathered.draft.note("unknown", f"{word.text}: a positional argument", given)


def _take_named(path: str, gathered: Gathered, kind: sources.SourceKind | None = None) -> None:
    source = sources.read_source(path, kind)
    gathered.read[os.path.basename(path)] = path
    _take(source, gathered)


def _name_file(given: Given, gathered: Gathered, home: str, kind: sources.SourceKind) -> None:
    """Reads a file that a source names, unless it was also passed directly. Nothing is fetched from the network."""
    name = str(given.value)
    if not isinstance(given.value, str):
        gathered.draft.refuse(given, "must be the name of a file")
        return
    path, before = sources.find_beside(name, home), gathered.read.get(os.path.basename(name))
    if before is not None:
        if path is not None and storage.is_local(before) and not os.path.samefile(path, storage.local_path(before)):
            text = f"{given.label}: {before} is read instead, because it was passed directly"
            gathered.draft.note("changed", text, given)
    elif path is not None and (why := Access.of_source(home).explain(path)[1] if os.path.isfile(home) else ""):
        gathered.draft.refuse(given, f"{path}: {why}", rule="unreadable", hint="pass the file as another FILE")
    elif path is not None:
        _read_named(path, given, gathered, kind)
    elif given.is_open:
        gathered.draft.note("fill in", f"{given.label}: to import that file too, pass it as another FILE", given)
    elif not storage.is_local(name):
        text = f"files that a source names are not fetched; pass it as a FILE: dsjob import {quote_path(name)} ..."
        gathered.draft.note("left out", f"{given.label}: {text}", given)
    elif not storage.is_local(home):
        text = "a file from the network may not name local files; pass it as another FILE"
        gathered.draft.note("left out", f"{given.label}: {text}", given)
    else:
        hint = "correct the name, or pass the file as another FILE"
        gathered.draft.refuse(given, "no such file", rule="unreadable", hint=hint)


def _read_named(path: str, given: Given, gathered: Gathered, kind: sources.SourceKind) -> None:
    draft = gathered.draft
    try:
        _take_named(path, gathered, kind)
    except DocumentError as error:
        draft.problems.update({(problem.place, str(problem)): problem for problem in error.problems})
    except UsageError as error:
        draft.refuse(given, error.message, rule="unreadable", hint=error.hint)


def _follow(gathered: Gathered) -> None:
    """Reads the DeepSpeed configs that arguments and accelerate files name."""
    for settings, names in (
        (gathered.accelerate, ("deepspeed_config_file",)),
        (gathered.arguments, ("deepspeed", "deepspeed_config")),
    ):
        for name in names:
            given = settings.get(name)
            if given is not None and isinstance(given.value, dict):
                gathered.configs.append((given.value, _locate_at(given.place)))
            elif given is not None and not is_off(given.value) and given.value is not True:
                _name_file(given, gathered, given.source, "deepspeed")


def _locate_at(place: str) -> Callable[[Path], str]:
    """Places all values inside an object at the place of the object itself."""
    return lambda path: place


def _draft(gathered: Gathered) -> Imported:
    draft = gathered.draft
    for config, locate in _overwrite(gathered):
        draft_deepspeed(config, locate, draft)
    accelerate.draft_accelerate(gathered.accelerate, draft)
    trainer, script = sort_arguments(gathered.arguments, draft)
    _draft_script(gathered.script, script, draft)
    limit = script.get("max_train_samples")
    samples = None if limit is None or is_off(limit.value) else draft.whole(limit, 1)
    settings = fill_settings(trainer, draft)
    if gathered.trainer:
        draft_arguments(settings, _count_ranks(gathered), samples, draft)
    else:
        _draft_without_trainer(settings, draft)
    return settle(draft, gathered.trainer)


def _overwrite(gathered: Gathered) -> list[_Config]:
    """The DeepSpeed configs, with the values that an experiment of Determined overwrites; as it does, key by key."""
    configs = gathered.configs or [({}, lambda path: "")] * bool(gathered.overwriting)
    for part, place in gathered.overwriting:
        configs = [(_merge(config, part), _place(part, place, locate)) for config, locate in configs]
    return configs


def _merge(config: Any, part: Any) -> Any:
    if not (isinstance(config, dict) and isinstance(part, dict)):
        return part
    return {**config, **{key: _merge(config.get(key), value) for key, value in part.items()}}


def _place(part: dict[str, Any], place: Callable[[Path], str], locate: Callable[[Path], str]) -> Callable[[Path], str]:
    return lambda path: place(path) if has_at(part, path) else locate(path)


def _count_ranks(gathered: Gathered) -> int | None:
    """The number of ranks on all machines, if known."""
    nproc, nodes = gathered.draft.best("launch.nproc"), gathered.draft.nodes
    if nproc is None:
        return None if gathered.launched else 1
    return int(nproc.value) * nodes if isinstance(nproc.value, int) and nodes is not None else None


def _draft_without_trainer(settings: Settings, draft: Draft) -> None:
    """Adds the Trainer's defaults without notes: they only serve to fill in "auto"."""
    explicit = {name: given for name, given in settings.items() if given.rank > Rank.DEFAULT}
    before = list(draft.notes)
    draft_arguments(settings, None, None, draft)
    named = {given.place for given in explicit.values()}
    draft.notes = before + [note for note in draft.notes[len(before) :] if note.place in named]


def _draft_script(script: Given | None, settings: Settings, draft: Draft) -> None:
    for name, given in settings.items():
        row = SCRIPT_ARGUMENTS[name]
        if not row.keys and differs(given.value, row.default):
            draft.note("left out", f"{given.label}: {row.about}", given)
    draft_task(script, settings, draft)
