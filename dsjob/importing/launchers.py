"""The options of the launchers deepspeed and torchrun, mainly the number of ranks. `accelerate` has accelerate's."""

from __future__ import annotations

from typing import Any

from dsjob.contract.hints import suggest
from dsjob.importing.command_line import Command
from dsjob.importing.given import Draft, Given

_NODES = "start dsjob with torchrun on each machine"
_LOGS = "ranks log to the run's folder"
# Options that a job does not need: what to do instead, and values that need no note.
OPTIONS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "num_nodes": (_NODES, (1,)),
    "nnodes": (_NODES, (1, "1:1")),
    "hostfile": (_NODES, ()),
    "node_rank": (_NODES, (0,)),
    "master_addr": (_NODES, ("localhost", "127.0.0.1")),
    "master_port": ("dsjob finds a free port", ()),
    "rdzv_endpoint": (_NODES, ()),
    "rdzv_id": (_NODES, ()),
    "rdzv_backend": (_NODES, ()),
    "rdzv_conf": (_NODES, ()),
    "launcher": (_NODES, ()),
    "launcher_args": (_NODES, ()),
    "ssh_port": (_NODES, ()),
    "max_restarts": ("start the job again, and it resumes", (0,)),
    "log_dir": (_LOGS, ()),
    "enable_each_rank_log": (_LOGS, ()),
    "save_pid": ("dsjob writes no such file", ()),
    "autotuning": ("sweep with dsjob -m", ()),
    "elastic_training": ("a run resumes on any number of ranks", ()),
    "bind_cores_to_rank": ("bind ranks with numactl", ()),
    "run_path": ("the job document defines what to run", ()),
}
# Options on how to start a program, which have no meaning for a job.
_SILENT = ("module", "no_python", "use_env", "standalone", "no_local_rank", "force_multi", "u", "O", "OO", "B")
_COUNTS = ("num_gpus", "nproc_per_node", "num_accelerators")
_FILTERS = ("include", "exclude")
_ALL = {"deepspeed": (-1,), "torchrun": ("gpu", "auto", "cpu", "xpu")}  # as many as the machine has


def draft_launcher(command: Command, draft: Draft) -> None:
    """Adds the number of ranks to the draft, and notes on the other options."""
    options = command.launcher_options
    for name, given in options.items():
        if name in OPTIONS:
            about, silent = OPTIONS[name]
            if isinstance(given.value, bool) or given.value not in silent:
                draft.note("left out", f"{given.label}: {about}", given)
        elif name not in (*_SILENT, *_COUNTS, *_FILTERS):
            hint = suggest(name, [*OPTIONS, *_SILENT, *_COUNTS, *_FILTERS]) or f"unknown option of {command.launcher}"
            draft.note("unknown", f"{given.label}: {hint}", given)
    for name in ("num_nodes", "nnodes"):
        if name in options:
            nodes = options[name].value
            draft.nodes = nodes if isinstance(nodes, int) else 1 if nodes == "1:1" else None
    counts = [options[name] for name in _COUNTS if name in options]
    for given in counts:
        _draft_count(given, command.launcher, draft)
    for name in _FILTERS:
        if name in options:
            _draft_gpus(name, options[name], draft)
    if not counts and "include" not in options and command.launcher == "deepspeed":
        _ask(command.script, draft)


def _draft_count(given: Given, launcher: str, draft: Draft) -> None:
    if given.value in _ALL.get(launcher, ()) or given.is_open:
        _ask(given, draft)
    elif isinstance(given.value, int) and not isinstance(given.value, bool) and given.value > 0:
        draft.put("launch.nproc", given)
    else:
        words = ", ".join(str(word) for word in _ALL.get(launcher, ()))
        hint = f"{words} would mean all that the machine has" if words else ""
        draft.refuse(given, "must be a number of ranks, at least 1", hint=hint)


def _ask(given: Given | None, draft: Draft) -> None:
    source = "the launcher" if given is None or given.name == "script" else given.label
    text = f"launch.nproc: {source} uses all devices of the machine; set the number of ranks"
    draft.note("fill in", text, given)


def _draft_gpus(name: str, given: Given, draft: Draft) -> None:
    """`--include` or `--exclude`, the `name`, of GPUs of this machine: `localhost:0,1`. An included one has a rank."""
    host, _, slots = str(given.value).partition(":")
    if "@" in str(given.value) or host not in ("localhost", "127.0.0.1") or not slots:
        draft.note("left out", f"{given.label}: {_NODES}", given)
        return
    if name == "include":
        draft.put("launch.nproc", given.to(len(slots.split(","))))
    draft.put(f"launch.{name}", given)
