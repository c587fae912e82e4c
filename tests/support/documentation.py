"""The code blocks of a page of docs/, and how they are run.

A block belongs to the file that the line before it names at its end (`spirals.py`:). A `console` block is a session:
what follows `$ ` is run, and the rest is its output, where numbers may differ and `...` stands for anything. A `sh`
block cannot be run here: it needs a GPU, a cluster, the network or another program's files.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from programs import DSJOB, clean_env, run_program

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(
    r"(?:`(?P<file>[\w./-]+)`:\n\n)?^```(?P<language>[\w-]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_NUMBER = re.compile(r"\d[\d.,:]*(?:e[+-]?\d+)?k?")


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    file: str | None = None


def read_blocks(page: Path) -> list[Block]:
    return [Block(found["language"], found["text"], found["file"]) for found in _BLOCK.finditer(page.read_text())]


def run_page(page: Path, folder: Path) -> None:
    """Writes the page's files to `folder` and runs its sessions there, in their order."""
    for block in read_blocks(page):
        if block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.language == "console":
            for command, shown in split_session(block.text):
                run_command(command, shown, folder)


def split_session(text: str) -> list[tuple[str, str]]:
    """The commands of a session, each with the output that the page shows."""
    first, *parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    assert not first, f"output before the first command: {first!r}"
    return [(command, shown) for command, _, shown in (part.partition("\n") for part in parts)]


def run_command(command: str, shown: str, folder: Path) -> None:
    program, *arguments = shlex.split(command, comments=True)
    if program in ("dsjob", "python") and not re.search(r"[|>;&]", command):
        started = {"dsjob": DSJOB, "python": sys.executable}[program]
        ran = run_program([started, *arguments], cwd=folder, timeout=300)
    else:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        ran = subprocess.run(
            command, shell=True, cwd=folder, env=clean_env(PATH=path), text=True, capture_output=True, timeout=300,
            check=False,
        )  # fmt: skip
    printed = ran.stdout + ran.stderr
    assert (ran.returncode != 0) == ("error" in shown), f"$ {command}\nended with {ran.returncode}:\n{printed}"
    assert matches(shown, printed), f"$ {command}\nprinted\n{printed}\nwhere the page shows\n{shown}"


def matches(shown: str, printed: str) -> bool:
    """Whether a command printed what a page shows; a page may show nothing at all."""
    pattern = re.escape(_simplify(shown)).replace(r"\.\.\.", ".*")
    return not shown.strip() or re.fullmatch(pattern, _simplify(printed), re.DOTALL) is not None


def _simplify(output: str) -> str:
    """Output with one space between words, without frames and empty lines, and without the values of numbers."""
    kept, ellipsis = [], "\0"
    for line in output.replace("...", ellipsis).splitlines():
        words = _NUMBER.sub("#", re.sub("[─━]+", " ", line)).split()
        kept += [" ".join(words)] if words else []
    return re.sub(r"\n?\0\n?", ellipsis, "\n".join(kept)).replace(ellipsis, "...")
