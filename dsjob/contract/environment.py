"""Environment variables in documents: harmless ones, references to all others, and masking of their values.

A reference, `${oc.env:NAME}`, stays that text in every document that is printed or saved; `targets` reads the variable
when it calls the target. From then on its value is masked wherever text leaves the process: `watch_output` covers
standard output and error, `mask` and `mask_texts` cover what is written to files.

Not masked are values of fewer than 6 characters, names of existing files, and output of native code or of the user's
child processes. Hydra's `--cfg all --resolve` prints values, because the user asks for it.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO
from urllib.parse import quote, quote_plus

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
MIN_MASKED = 6  # characters: masking shorter values would garble unrelated output
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
        _add_value(value)
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


# ---- masking


_spellings: set[str] = set()
_pattern: re.Pattern[str] | None = None


def hide_values(document: Any) -> None:
    """Masks the values of all references in a document from now on, whether or not this process reads them."""
    for reference in list_references(document):
        for name in reference.names:
            _add_value(os.environ.get(name, ""))


def _add_value(value: str) -> None:
    global _pattern
    for text in {value, *(line.strip() for line in value.splitlines())}:
        # Names of files and folders are no secrets, and dsjob's messages need them. A short number is not masked
        # either: it would be found in many other numbers.
        if len(text) >= MIN_MASKED and not (os.path.exists(text) or (len(text) < 8 and _is_number(text))):
            _spellings.update(spelling for spelling in _list_spellings(text) if spelling not in _spellings)
    if _spellings:
        _pattern = re.compile("|".join(re.escape(text) for text in sorted(_spellings, key=len, reverse=True)))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _list_spellings(value: str) -> Iterator[str]:
    """The forms in which a value may occur in a text: as it is, escaped for Python, JSON or a URL, and in base64."""
    raw = value.encode(errors="surrogateescape")
    yield from (value, repr(value)[1:-1], ascii(value)[1:-1], repr(raw)[2:-1])
    yield from (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])
    yield from (quote(raw), quote(raw, safe=""), quote_plus(raw))
    yield "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value)
    yield base64.b64encode(raw).decode().rstrip("=")


def mask(text: str) -> str:
    """`text` with *** for each value that was read from the environment."""
    return _pattern.sub("***", text) if _pattern is not None else text


def mask_texts(value: Any) -> Any:
    """A JSON value with its texts and keys masked; numbers stay."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, Mapping):
        return {mask_texts(key): mask_texts(item) for key, item in value.items()}
    return [mask_texts(item) for item in value] if isinstance(value, (list, tuple)) else value


class _Masked:
    """A text stream that masks what is written to it, and otherwise behaves like the stream that it wraps."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(mask(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def watch_output() -> Iterator[None]:
    """Masks what Python code writes to standard output and error while the block runs."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Masked(sys.stdout), _Masked(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
