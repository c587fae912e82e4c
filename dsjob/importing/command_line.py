"""Launch commands: the words of a shell line with their places, the launcher's options, the script and its arguments.

It handles quotes, escapes, comments, line continuations, and variables that the same file sets. Nothing is executed.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsjob import document as documents
from dsjob.document.positions import MAX_EXPANSION, MAX_NUMBER
from dsjob.errors import DocumentError, Problem
from dsjob.importing.given import Given, Rank, Settings

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_REDIRECTION = re.compile(r"(?:\d|&)?[<>]+(?:&\d|\s*[^\s;&|]+)?")
_PLAIN = re.compile(r"(?:[^\s;&|<>'\"\\`$]|\$(?!\())+")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_TORCH = {"torchrun", "torch.distributed.run", "torch.distributed.launch"}
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
# Options of launchers that take no value; all others take one.
_SWITCHES = {
    "deepspeed": {
        "module", "no_python", "no_local_rank", "force_multi", "save_pid", "bind_cores_to_rank", "elastic_training",
        "no_ssh", "no_ssh_check",
    },
    "torchrun": {"standalone", "module", "no_python", "use_env", "run_path"},
    "accelerate": {
        "multi_gpu", "cpu", "tpu", "ipex", "use_deepspeed", "use_fsdp", "use_megatron_lm", "use_xpu", "use_mps_device",
        "quiet", "debug", "module", "no_python", "same_network", "use_parallelism_config", "enable_cpu_affinity",
        "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation",
    },
    "python": {"u", "O", "OO", "B", "E", "I", "s", "S", "P"},
}  # fmt: skip
_SHORT = {"m": "module", "q": "quiet", "H": "hostfile", "i": "include", "e": "exclude"}


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command, with quotes removed and variables expanded, and its place."""

    text: str
    place: str


@dataclass
class Command:
    """The parts of a launch command."""

    launcher: str = "python"
    launcher_options: Settings = field(default_factory=dict)
    script: Given | None = None
    options: list[tuple[str, Given]] = field(default_factory=list)  # in order; a name may occur twice
    files: list[Word] = field(default_factory=list)  # positional arguments of the script
    environment: Settings = field(default_factory=dict)
    before: list[Word] = field(default_factory=list)  # the command that started the launcher: srun, mpirun


def find_commands(text: str, source: str) -> list[Command]:
    """The launch commands in a text: a shell script, or a single line."""
    shell = _Shell(text, source, {})
    exported: Settings = {}
    found = []
    for words in shell.commands():
        command = read_command(words)
        if command is not None:
            unused = {name: given for name, given in exported.items() if name not in shell.used}
            command.environment = {**unused, **command.environment}
            found.append(command)
            continue
        exports = words[0].text == "export"
        for word in words[exports:]:
            if match := _ASSIGNMENT.fullmatch(word.text):
                shell.variables[match[1]] = match[2]
                if exports:
                    exported[match[1]] = Given(match[2], match[1], word.place, Rank.COMMAND_LINE)
    return found


def split_words(text: str, source: str, variables: dict[str, str]) -> Iterator[list[Word]]:
    """Yields one list of words for each simple command."""
    return _Shell(text, source, variables).commands()


class _Shell:
    def __init__(self, text: str, source: str, variables: dict[str, str]) -> None:
        self.text, self.source, self.variables, self.at = text, source, variables, 0
        self.line_starts = [0, *(newline.end() for newline in re.finditer("\n", text))]
        self.expanded = 0  # characters from expanded variables
        self.used: set[str] = set()  # variables that occur in words

    def commands(self) -> Iterator[list[Word]]:
        while (words := self.command()) is not None:
            if words:
                yield words

    def mark(self, at: int) -> tuple[int, int]:
        line = bisect_right(self.line_starts, at)
        return line, at - self.line_starts[line - 1] + 1

    def place(self, at: int) -> str:
        line, column = self.mark(at)
        return f"{self.source}:{line}:{column}"

    def fail(self, message: str, hint: str) -> DocumentError:
        return DocumentError([Problem(message, (), "syntax", hint, self.source, *self.mark(self.at))])

    def command(self) -> list[Word] | None:
        """The words up to the end of the command; None at the end of the text."""
        if self.at >= len(self.text):
            return None
        words: list[Word] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif char in " \t\r":
                self.at += 1
            elif char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif match := _REDIRECTION.match(self.text, self.at):
                self.at = match.end()
            elif char in "\n;&|":
                self.at += 1
                break
            else:
                words.append(self.word())
        return words

    def word(self) -> Word:
        start, parts = self.at, []
        while self.at < len(self.text) and self.text[self.at] not in " \t\r\n;&|<>":
            char = self.text[self.at]
            if char in "'\"":
                parts.append(self.quoted(char))
            elif self.text.startswith("$(", self.at) or char == "`":
                parts.append(self.substitution())
            elif char == "\\":
                parts.append("" if self.text.startswith("\\\n", self.at) else self.text[self.at + 1 : self.at + 2])
                self.at += 2
            else:
                plain = _PLAIN.match(self.text, self.at)
                assert plain is not None
                parts.append(self.expand(plain[0]))
                self.at = plain.end()
        return Word("".join(parts), self.place(start))

    def substitution(self) -> str:
        """The text of `$(...)` or of a command in backquotes, unchanged: nothing is executed."""
        start, depth = self.at, 0
        end = self.text.find("`", start + 1)
        if self.text[start] == "$":
            for end in range(start + 1, len(self.text)):
                depth += {"(": 1, ")": -1}.get(self.text[end], 0)
                if not depth:
                    break
        self.at = len(self.text) if end < 0 else end + 1
        return self.text[start : self.at]

    def quoted(self, quote: str) -> str:
        end = self.at + 1
        while end < len(self.text) and self.text[end] != quote:
            end += 2 if quote == '"' and self.text[end] == "\\" else 1
        if end >= len(self.text):
            raise self.fail("unclosed quote", f"close it with {quote}")
        inside = self.text[self.at + 1 : end]
        self.at = end + 1
        return inside if quote == "'" else self.expand(re.sub(r"\\([\"\\$`\n])", r"\1", inside))

    def expand(self, text: str) -> str:
        """`text` with variables replaced that the script sets. Others become `$NAME`, because a document would resolve
        `${...}` itself."""

        def fill(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            self.used.add(name)
            value = self.variables.get(name, f"${name}")
            self.expanded += len(value)
            if self.expanded > MAX_EXPANSION:
                raise self.fail(f"variables expand to more than {MAX_EXPANSION:,} characters", "write out the values")
            return value

        return _VARIABLE.sub(fill, text)


def read_command(words: Sequence[Word]) -> Command | None:
    """The launch command made of these words; None if they start no training program."""
    command, at = Command(), 0
    while at < len(words) and (match := _ASSIGNMENT.fullmatch(words[at].text)):
        command.environment[match[1]] = Given(match[2], match[1], words[at].place, Rank.COMMAND_LINE)
        at += 1
    start = next((index for index in range(at, len(words)) if _launcher(words, index)), None)
    if start is None:
        return None
    command.before = list(words[at:start])
    command.launcher, at = _launcher(words, start) or ("python", start)
    at = _read_launcher(command, words, at)
    if at < len(words):
        command.script = Given(words[at].text, "script", words[at].place, Rank.COMMAND_LINE)
        command.options, command.files = read_options(words[at + 1 :])
    return command if command.script or command.launcher != "python" else None


def _launcher(words: Sequence[Word], at: int) -> tuple[str, int] | None:
    """The launcher that starts at a word, and the index of the word after it."""
    name = words[at].text.rsplit("/", 1)[-1]
    following = [word.text for word in words[at + 1 : at + 3]]
    if name == "deepspeed":
        return name, at + 1
    if name in _TORCH:
        return "torchrun", at + 1
    if name == "accelerate" and following[:1] == ["launch"]:
        return name, at + 2
    if _PYTHON.fullmatch(words[at].text):
        index = at + 1
        while index < len(words) and words[index].text in ("-u", "-O", "-OO", "-B"):
            index += 1
        module = [word.text for word in words[index : index + 2]]
        if len(module) == 2 and module[0] == "-m":
            if module[1] in _TORCH:
                return "torchrun", index + 2
            if module[1] == "accelerate.commands.launch":
                return "accelerate", index + 2
            if module[1] == "deepspeed.launcher.runner":
                return "deepspeed", index + 2
        return "python", at + 1
    return ("python", at) if name.endswith(".py") and at == 0 else None


def _read_launcher(command: Command, words: Sequence[Word], at: int) -> int:
    """Reads the launcher's options; returns the index of the script."""
    switches = _SWITCHES[command.launcher]
    while at < len(words) and words[at].text.startswith("-"):
        word = words[at]
        name, equals, value = word.text.lstrip("-").partition("=")
        name = _SHORT.get(name, name) if command.launcher != "python" or name == "m" else name
        name = name.replace("-", "_")
        at += 1
        if name == "module" and command.launcher == "python":
            return at
        if equals:
            given: Any = parse_value(value)
        elif name in switches or at >= len(words):
            given = True
        else:
            given = parse_value(words[at].text)
            at += 1
        command.launcher_options[name] = Given(given, word.text.partition("=")[0], word.place, Rank.COMMAND_LINE)
    return at


def read_options(words: Sequence[Word]) -> tuple[list[tuple[str, Given]], list[Word]]:
    """The named arguments of a script, by name with underscores, and the positional ones.

    As in argparse, a name without a value is a switch, and several words after a name are a list.
    """
    options: list[tuple[str, Given]] = []
    rest: list[Word] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.text.startswith("--"):
            rest.append(word)
            continue
        name, equals, value = word.text[2:].partition("=")
        values = [value] if equals else []
        while not equals and at < len(words) and not _is_option(words[at].text):
            values.append(words[at].text)
            at += 1
        parsed = [parse_value(item) for item in values]
        content: Any = True if not parsed else parsed[0] if len(parsed) == 1 else parsed
        options.append((name.replace("-", "_"), Given(content, "--" + name, word.place, Rank.COMMAND_LINE)))
    return options, rest


def _is_option(text: str) -> bool:
    return text.startswith("-") and not _NUMBER.fullmatch(text)


def parse_value(text: str) -> Any:
    """The value of an argument: a number, a boolean, a JSON object or list, or text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text in ("None", "null"):
        return None
    if len(text) <= MAX_NUMBER and _NUMBER.fullmatch(text) and not re.match(r"0\d", text):
        number = int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)
        return number if math.isfinite(number) else text
    if text[:1] in "{[":
        try:
            parsed = documents.parse(f'{{"": {text}}}', "", format="json").value
        except DocumentError:
            return text
        return parsed[""] if len(parsed) == 1 else text
    return text
