"""What reaches a terminal: no control character that came from outside, and commands that can be pasted."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import unicodedata
import warnings
from collections.abc import Iterator

import pytest
from test_layers import MODULES

from dsjob.console import Console, Table
from dsjob.errors import DsjobError, Problem
from dsjob.terminal import (
    format_traceback,
    make_printable,
    print_lines,
    print_text,
    printable_warnings,
    quote_path,
    quote_word,
    split_text,
    warn,
    write_now,
)

HARMFUL = [
    "\x1b[2J",
    "\r",
    "\b",
    "\x07",
    "\x7f",
    "\x9b31m",
    "\u202e",
    "\u2066",
    "\u200f",
    "\u2028",
    "\x85",
    "\0",
    "\udc9b",
]
WORDS = [
    "plain",
    "a b",
    "it's",
    'say "so"',
    "a;b",
    "a#b",
    "#a",
    "$HOME",
    "`id`",
    "$(id)",
    "a\nb",
    "a\tb",
    "a\\b",
    "-x",
    "~",
]
WORDS += [
    "+x",
    "=x",
    "a&b|c>d<e",
    "ü",
    "\x1b[31m",
    "\u202e",
    "a'b\nc",
    "*",
    "?",
    "!x",
    "\\'\n",
    "\udcff",
    "{a,b}",
    "1\n2",
]


def is_raw(character: str) -> bool:
    """Whether a character may not reach a terminal."""
    bidirectional = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    return unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in bidirectional


@pytest.mark.parametrize("text", HARMFUL, ids=range(len(HARMFUL)))
def test_what_a_terminal_would_obey_is_shown_as_an_escape(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    problem = Problem(f"is {text}", (f"key{text}",), "rule", f"not {text}", f"{text}.yaml", 1)
    shown = [make_printable(text), *split_text(text), str(problem), str(DsjobError(text, hint=text))]
    console = Console(width=200, force_terminal=False)
    table = Table(f"title {text}")
    table.add_column(text)
    table.add_row(f"cell {text}")
    # Recorded, since pytest-xdist cannot send a warning with a lone surrogate.
    with warnings.catch_warnings(record=True) as caught, printable_warnings():
        warnings.simplefilter("always")
        warn(text)
        warnings.warn(text, stacklevel=1)  # a library's
        shown += [warnings.formatwarning(w.message, w.category, w.filename, w.lineno) for w in caught]
    console.print(f"line {text}")
    console.print(table)
    console.say(f"title {text}", f"text {text}")
    print_lines(text, f"{text}{text}")
    print_text(text)
    write_now(text)
    out, err = capfd.readouterr()
    assert not [c for line in (*shown, out, err) for c in line.replace("\n", "") if is_raw(c)]
    assert ascii(text[0])[1:-1] in out
    assert ascii(text[0])[1:-1] in err


def test_a_newline_makes_no_line_of_dsjobs_own(capfd: pytest.CaptureFixture[str]) -> None:
    forged = "a\ndsjob: error: forged\n"
    error = DsjobError(forged, hint=forged)
    console = Console(width=200, force_terminal=False)
    table = Table()
    table.add_column(forged)
    table.add_row(forged)
    console.print(table)
    console.print(forged)
    console.say(forged, forged)
    print_lines(forged, str(Problem(forged, (forged,), "", forged)))
    print_text(f"dsjob: error: {error}")
    write_now(forged)
    print_lines(*format_traceback(ValueError(forged)))
    out, err = capfd.readouterr()
    assert "forged" in out
    assert "forged" in err
    assert not re.search(r"^dsjob: error: forged", out + err, re.MULTILINE)
    assert not re.search(r"^dsjob: error: forged", str(error), re.MULTILINE)


def test_texts_of_any_language_are_shown() -> None:
    text = "“naïve” \N{SNOWMAN} 日本\N{IDEOGRAPHIC SPACE}語 می\u200cخواهم 12\N{NO-BREAK SPACE}km\n\tindented"
    assert split_text(text, indented=False) == text.split("\n")
    assert make_printable("naïve 日本語") == "naïve 日本語"


@pytest.mark.parametrize("word", WORDS)
def test_a_quoted_word_is_that_word_for_bash(word: str) -> None:
    assert quote_word(word).isprintable()
    done = subprocess.run(["bash", "-c", f"printf %s {quote_word(word)}"], capture_output=True, check=True)
    assert os.fsdecode(done.stdout) == word
    done = subprocess.run(["bash", "-c", f"printf %s {quote_path(word)}"], capture_output=True, check=True)
    path = os.fsdecode(done.stdout)
    assert os.path.normpath(path) == os.path.normpath(word)
    assert path[0] not in "-+~"


def test_plain_words_stay_as_they_are() -> None:
    words = ["runs/a", "s3://bucket/a", "trainer.max_steps=200", "optimizer.params.lr=1e-3,3e-4", "+recipe=quickstart"]
    assert [quote_word(word) for word in words] == words


# ---- no way around it

# Those that print by other means: the module itself; rich's home; a file that stands alone; the process that passes on
# what others have printed; and a program's own last words.
PRINTS = {
    "terminal": {"print", "os.write", "warnings.warn"},
    "console": {"super().print"},
    "checkpoint.format.zero_to_fp32": {"print"},
    "contract.output_filter": {"os.write"},
    "programs.rank": {"sys.stderr.write"},
    "cli.convert": {"logging.basicConfig"},  # with a formatter of its own
}
FORBIDDEN = re.compile(
    r"print|pprint\.\w+|sys\.(__)?std(out|err)(__)?(\.buffer)?\.write(lines)?|os\.write|warnings\.(warn|showwarning)\w*"
    r"|traceback\.print_\w+|logging\.(basicConfig|warning|error|info|critical|exception)|click\.\w+|super\(\)\.print"
    r"|faulthandler\.dump_traceback"
)
# Texts that end with one of these are followed by a word of a command.
COMMAND = re.compile(
    r"\bdsjob (?:run|exec|validate|show|plan|import|eval|predict|generate|convert|report|ckpt \w+|-m|init)"
    r"(?: [\w.=+-]+)*"
    r"(?: --)?(?: python| OUT)? $|--trust $|--config-dir $|\bchmod \S+ $|\brm $|(?:^|[ (])cd $"
)
QUOTED = ("quote_word(", "quote_path(", "name_change(")


def find_prints(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and FORBIDDEN.fullmatch(name := ast.unparse(node.func)):
            yield name, node.lineno


def find_unquoted(tree: ast.AST) -> Iterator[str]:
    """Values that follow a command in a formatted text, and are not quoted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            for before, value in zip(node.values, node.values[1:], strict=False):
                text = before.value if isinstance(before, ast.Constant) else ""
                if COMMAND.search(str(text)) and isinstance(value, ast.FormattedValue):
                    shown = ast.unparse(value.value)
                    if not shown.startswith(QUOTED):
                        yield shown


@pytest.mark.parametrize("name", sorted(MODULES))
def test_no_other_module_prints(name: str) -> None:
    found = {what for what, _ in find_prints(ast.parse(MODULES[name].read_text()))}
    assert found == PRINTS.get(name, set())


# Words that dsjob itself has chosen, or has quoted before; and texts that are no commands.
CHOSEN = {
    "command", "again", "base", "flag", "'--no_python ' * first.endswith('.sh')", "form", "plan.name", "quoted",
    "granting", "ranks", "len(FILES)", "time.strftime('%Y-%m-%d %H:%M')", "GRANT", "GRANT_FOLDER", "prefix",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(MODULES))
def test_commands_in_messages_are_quoted(name: str) -> None:
    assert set(find_unquoted(ast.parse(MODULES[name].read_text()))) - CHOSEN == set()


def test_prints_and_commands_are_found() -> None:
    calls = ["print", "sys.stdout.write", "os.write", "warnings.warn"]
    texts = "f'run dsjob run {x}'\nf'dsjob run {quote_path(x)}'\nf'the run {x}'"
    tree = ast.parse("".join(f"{call}(x)\n" for call in calls) + texts)
    assert [name for name, _ in find_prints(tree)] == calls
    assert list(find_unquoted(tree)) == ["x"]
