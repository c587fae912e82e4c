"""Environment variables in documents: harmless ones, and references to all others.

A reference, `${oc.env:NAME}`, stays that text in every document that is printed or saved; `targets` reads the variable
when it calls the target. From then on its value is masked wherever text leaves the process
(`dsjob.contract.masking`, `dsjob.contract.masked_output`).

Not masked are values of fewer than 6 characters, and names of existing files. Hydra's `--cfg all --resolve` prints
values, because the user asks for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsjob.contract.masking import add_value

# Names of users, machines, jobs and ranks, and their folders: these values may appear in any file and any URL.
HARMLESS = frozenset(
    (
        *("USER", "LOGNAME", "HOME", "HOSTNAME", "TMPDIR", "SCRATCH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"),
        *("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"),
        *("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE"),
        *("SLURM_CPUS_PER_TASK", "SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_RESTART_COUNT"),
        *("SLURM_CLUSTER_NAME", "SLURM_JOB_PARTITION", "SLURM_SUBMIT_DIR", "SLURM_TMPDIR"),
        *("PBS_JOBID", "PBS_JOBNAME", "PBS_ARRAY_INDEX", "LSB_JOBID", "LSB_JOBINDEX", "JOB_ID", "SGE_TASK_ID"),
    )
)
CONFIG = "~/.config/dsjob/config.yaml"  # its list `environment` adds to HARMLESS
_MAX_NESTED = 10  # levels of references in defaults of references
_OPEN = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)\s*")
_LITERAL = re.compile(r"'([^'\"\\${}\n]*)'|\"([^'\"\\${}\n]*)\"|([\w./:@%+-]+(?: +[\w./:@%+-]+)*)")


@dataclass(frozen=True)
class Reference:
    """An environment variable, and its default if it is not set: text, null, or another reference."""

    name: str
    has_default: bool = False
    default: str | Reference | None = None

    def __str__(self) -> str:
        """In OmegaConf's syntax, which `parse_reference` reads."""
        if not self.has_default:
            return "${oc.env:" + self.name + "}"
        shown = "null" if self.default is None else f"'{self.default}'"
        return f"${{oc.env:{self.name},{self.default if isinstance(self.default, Reference) else shown}}}"

    @property
    def names(self) -> tuple[str, ...]:
        """All variables that may be read."""
        return (self.name, *(self.default.names if isinstance(self.default, Reference) else ()))

    @property
    def has_literal(self) -> bool:
        """Whether a default is plain text."""
        return self.default.has_literal if isinstance(self.default, Reference) else self.default is not None

    def find_missing(self) -> str:
        """The name of a variable that must be set and is not; empty if there is none."""
        if self.name in os.environ:
            return ""
        if isinstance(self.default, Reference):
            return self.default.find_missing()
        return "" if self.has_default else self.name

    def read(self) -> str | None:
        """Its value, which is masked from then on. Raises KeyError if it has neither a value nor a default."""
        value = os.environ.get(self.name)
        if value is None:
            if not self.has_default:
                raise KeyError(self.name)
            return self.default.read() if isinstance(self.default, Reference) else self.default
        add_value(value)
        return value


def parse_reference(text: object) -> Reference | None:
    """The reference, if a text consists of one and nothing else; otherwise None."""
    if not isinstance(text, str) or not text.startswith("${oc.env:"):
        return None
    found, at = _parse(text, 0, _MAX_NESTED)
    return found if at == len(text) else None


def _parse(text: str, at: int, depth: int) -> tuple[Reference | None, int]:
    """The reference that starts at index `at`, and the index after it; None if there is none or it is too deep."""
    opened = _OPEN.match(text, at)
    if not opened or not depth:
        return None, at
    name, at = opened[1], opened.end()
    if text[at : at + 1] == "}":
        return Reference(name), at + 1
    if text[at : at + 1] != ",":
        return None, at
    at += 1 + len(text[at + 1 :]) - len(text[at + 1 :].lstrip(" "))
    default: str | Reference | None
    if text.startswith("${", at):
        default, at = _parse(text, at, depth - 1)
        if default is None:
            return None, at
    elif literal := _LITERAL.match(text, at):
        plain, at = literal[3], literal.end()
        default = None if plain == "null" else next(part for part in literal.groups() if part is not None)
    else:
        return None, at
    at += len(text[at:]) - len(text[at:].lstrip(" "))
    return (Reference(name, True, default), at + 1) if text[at : at + 1] == "}" else (None, at)


def list_references(value: Any) -> Iterator[Reference]:
    """The references among the values of a document."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from list_references(item)
    elif found := parse_reference(value):
        yield found


def hide_values(document: Any) -> None:
    """Masks the values of all references in a document from now on, whether or not this process reads them."""
    for reference in list_references(document):
        for name in reference.names:
            add_value(os.environ.get(name, ""))
