"""From the sources to one draft: which files name which others, and in what order they are asked."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dsjob.check import suggest
from dsjob.errors import UsageError
from dsjob.importing import accelerate, sources
from dsjob.importing.arguments_table import SCRIPT_ARGUMENTS, TRAINER_ONLY
from dsjob.importing.command_line import Command
from dsjob.importing.deepspeed import draft_deepspeed
from dsjob.importing.given import PRECEDENCE, Draft, Given, Rank, Settings, differs, is_off
from dsjob.importing.settle import Imported, settle
from dsjob.importing.sources import Source
from dsjob.importing.task import draft_task
from dsjob.importing.training_arguments import draft_arguments, fill_settings, sort_arguments
from dsjob.paths import Path

# Options of launchers that say nothing a job needs, and those with a meaning elsewhere.
_NODES = "start dsjob with torchrun on each machine"
_LAUNCHER_OPTIONS = {
    "num_nodes": _NODES, "nnodes": _NODES, "hostfile": _NODES, "node_rank": _NODES, "master_addr": _NODES,
    "master_port": "a free port is found", "rdzv_endpoint": _NODES, "rdzv_id": _NODES, "rdzv_backend": _NODES,
    "rdzv_conf": _NODES, "launcher": _NODES, "launcher_args": _NODES, "ssh_port": _NODES,
    "exclude": "set CUDA_VISIBLE_DEVICES", "max_restarts": "start the job again: it goes on",
    "log_dir": "ranks log to the run's folder", "enable_each_rank_log": "ranks log to the run's folder",
    "autotuning": "sweep with dsjob -m", "bind_cores_to_rank": "bind ranks with numactl",
}  # fmt: skip
_SILENT = {"module", "no_python", "use_env", "standalone", "no_local_rank", "force_multi", "save_pid"}


@dataclass
class Gathered:
    """What all sources hold, each kind joined by rank."""

    draft: Draft = field(default_factory=Draft)
    configs: list[tuple[dict[str, Any], Any]] = field(default_factory=list)
    arguments: Settings = field(default_factory=dict)
    accelerate: Settings = field(default_factory=dict)
    script: Given | None = None
    launched: bool = False
    trainer: bool = False
    read: set[str] = field(default_factory=set)


def import_sources(found: list[Source], command: Command | None = None) -> Imported:
    """One job document of several sources, and the notes.

    Raises DocumentError where a value is of a kind that the job document cannot have, UsageError where there are two
    launch commands.
    """
    gathered = Gathered(read={os.path.basename(source.name) for source in found})
    commands = [source.command for source in found if source.command] + ([command] if command else [])
    if len(commands) > 1:
        raise UsageError("two launch commands: one job at a time")
    for source in found:
        _take(source, gathered)
    for one in commands:
        _take_command(one, gathered, next((source.name for source in found if source.command is one), ""))
    _follow(gathered)
    return _draft(gathered)


def _take(source: Source, gathered: Gathered) -> None:
    if source.kind == "deepspeed":
        gathered.configs.append((source.content, source.locate))
    elif source.kind == "accelerate":
        _join(gathered.accelerate, accelerate.read_settings(source.content, source.locate).items(), gathered.draft)
    elif source.kind == "arguments":
        gathered.trainer = True
        settings = {
            key.replace("-", "_"): Given(value, key, source.locate((key,)), Rank.ARGUMENTS)
            for key, value in source.content.items()
        }
        _join(gathered.arguments, settings.items(), gathered.draft)


def _join(settings: Settings, more: Iterable[tuple[str, Given]], draft: Draft) -> None:
    """Adds settings that win over those that are there, and notes where they differ."""
    for name, given in more:
        before = settings.get(name)
        if before is not None and before.value != given.value and not is_off(before.value):
            draft.note("conflict", f"{name}: {given} wins over {before}: {PRECEDENCE}")
        settings[name] = given


def _take_command(command: Command, gathered: Gathered, home: str) -> None:
    draft = gathered.draft
    gathered.script, gathered.launched = command.script, True
    if command.before:
        first = command.before[0]
        origin = Given(None, "", first.place, Rank.DEFAULT)
        draft.note("left out", f"{first.text}: start dsjob with it where you need it", origin)
    for name, given in command.environment.items():
        draft.note("left out", f"{name}: set it for dsjob too", given)
    for word in command.files:
        path = sources.find_beside(word.text, home) if word.text.endswith((".json", ".yaml", ".yml")) else None
        origin = Given(None, "", word.place, Rank.COMMAND_LINE)
        if path is not None:
            _take_named(path, gathered)
        elif os.path.basename(word.text) not in gathered.read:
            draft.note("unknown", f"{word.text}: an argument without a name", origin)
    if command.launcher == "accelerate":
        config = command.launcher_options.get("config_file")
        if config is not None:
            _name_file(config, gathered, home)
        _join(gathered.accelerate, command.launcher_options.items(), draft)
    else:
        _draft_launcher(command, draft)
    gathered.trainer = gathered.trainer or any(name in TRAINER_ONLY for name, _ in command.options)
    _join(gathered.arguments, command.options, draft)
    for _, given in command.options:
        if isinstance(given.value, str) and re.search(r"\$\w|\$\(|`", given.value):
            draft.note("fill in", f"{given.told}: the shell knows what that is", given)


def _take_named(path: str, gathered: Gathered, kind: sources.SourceKind | None = None) -> None:
    gathered.read.add(os.path.basename(path))
    _take(sources.read_source(path, kind), gathered)


def _name_file(given: Given, gathered: Gathered, home: str, kind: sources.SourceKind | None = None) -> None:
    """Reads a file that a source names, unless it was given itself."""
    name = str(given.value)
    if os.path.basename(name) in gathered.read:
        return
    path = sources.find_beside(name, home)
    if path is None:
        gathered.draft.note(
            "left out", f"{given.name}={name}: there is no such file here; give it as another FILE", given
        )
    else:
        _take_named(path, gathered, kind)


def _follow(gathered: Gathered) -> None:
    """Reads the DeepSpeed configs that arguments and accelerate name."""
    for settings, names in (
        (gathered.accelerate, ("deepspeed_config_file",)),
        (gathered.arguments, ("deepspeed", "deepspeed_config")),
    ):
        for name in names:
            given = settings.get(name)
            if given is None or is_off(given.value) or given.value is True:
                continue
            if isinstance(given.value, dict):
                origin = given.place

                def locate(path: Path, place: str = origin) -> str:
                    return place

                gathered.configs.append((given.value, locate))
            else:
                _name_file(given, gathered, re.sub(r"(:\d+)+$", "", given.place), "deepspeed")


def _draft(gathered: Gathered) -> Imported:
    draft = gathered.draft
    for config, locate in gathered.configs:
        draft_deepspeed(config, locate, draft)
    accelerate.draft_accelerate(gathered.accelerate, draft)
    trainer, script = sort_arguments(gathered.arguments, draft)
    _draft_script(gathered.script, script, draft)
    nproc = draft.best("launch.nproc")
    ranks = int(nproc.value) if nproc is not None else None if gathered.launched else 1
    limit = script.get("max_train_samples")
    samples = None if limit is None or is_off(limit.value) else int(limit.number())
    settings = fill_settings(trainer)
    if gathered.trainer:
        draft_arguments(settings, ranks, samples, draft)
    else:
        _draft_without_trainer(settings, draft)
    return settle(draft, gathered.trainer)


def _draft_without_trainer(settings: Settings, draft: Draft) -> None:
    """The Trainer's defaults are only wanted for "auto", and say nothing of their own."""
    explicit = {name: given for name, given in settings.items() if given.rank > Rank.DEFAULT}
    before, unfilled = list(draft.notes), set(draft.unfilled)
    draft_arguments(settings, None, None, draft)
    named = {given.place for given in explicit.values()}
    draft.notes = before + [note for note in draft.notes[len(before) :] if note.place in named]
    draft.unfilled = unfilled


def _draft_script(script: Given | None, settings: Settings, draft: Draft) -> None:
    for name, given in settings.items():
        row = SCRIPT_ARGUMENTS[name]
        if not row.keys and differs(given.value, row.default):
            draft.note("left out", f"{given.told}: {row.about}", given)
    draft_task(script, settings, draft)


def _draft_launcher(command: Command, draft: Draft) -> None:
    """The options of deepspeed and torchrun."""
    options = command.launcher_options
    for name, given in options.items():
        if name in ("num_gpus", "nproc_per_node", "num_accelerators", "include"):
            continue
        if name in _LAUNCHER_OPTIONS:
            if given.value not in (1, "1", "localhost", "127.0.0.1"):
                draft.note("left out", f"{given.told}: {_LAUNCHER_OPTIONS[name]}", given)
        elif name not in _SILENT:
            hint = suggest(name, [*_LAUNCHER_OPTIONS, *_SILENT, "num_gpus", "nproc_per_node", "include"])
            draft.note("unknown", f"{given.told}: {hint or 'an option of the launcher'}", given)
    count = next(
        (options[name] for name in ("num_gpus", "nproc_per_node", "num_accelerators") if name in options), None
    )
    if count is not None and isinstance(count.value, int):
        if count.value > 0:
            draft.put("launch.nproc", count)
    elif "include" in options:
        _draft_include(options["include"], draft)
    elif count is not None or command.launcher == "deepspeed":
        origin = count or command.script
        text = "launch.nproc: the launcher takes every GPU that it finds; say how many ranks there are"
        draft.note("fill in", text, origin)


def _draft_include(given: Given, draft: Draft) -> None:
    """`--include localhost:0,1`: GPUs of this machine."""
    host, _, slots = str(given.value).partition(":")
    if "@" in str(given.value) or host not in ("localhost", "127.0.0.1"):
        draft.note("left out", f"{given.told}: {_NODES}", given)
        return
    if slots:
        draft.put("launch.nproc", given.to(len(slots.split(","))))
        draft.note("changed", f"{given.told}: set CUDA_VISIBLE_DEVICES={slots}", given)
