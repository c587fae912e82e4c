"""The site: Sphinx reads the Markdown files of docs/ as they lie; this module adds what they do not say themselves."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from importlib.metadata import version as read_version
from io import StringIO
from pathlib import Path
from typing import Any

from docutils import nodes

from dsjob.cli import main

HERE = Path(__file__).parent
KEY_TABLE = re.compile(r"^\| Key \|.*\n(?:\|.*\n)+", re.MULTILINE)
FROM_SCHEMAS = "<!-- Made from schemas/"  # how the pages begin that `python -m dsjob.contract.reference` writes

project = "dsjob"
author = "the dsjob authors"
release = version = read_version("dsjob")
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "dsjob"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = html_show_copyright = False
python_maximum_signature_line_length = 88
smartquotes_action = "q"  # no dashes: `--option` stands in prose, too
pygments_style, pygments_dark_style = "friendly", "monokai"
nitpicky = False  # docstrings name types of torch, which are documented elsewhere

myst_heading_anchors = 4  # links such as `page.md#a-heading`, which GitHub understands too
myst_enable_extensions = ["colon_fence", "deflist"]

default_role = "code"  # docstrings write `name` as Markdown does
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True


def setup(app: Any) -> None:
    app.connect("source-read", complete_page)
    app.connect("autodoc-process-docstring", mark_literal_blocks)
    app.connect("doctree-resolved", mark_long_words)


def complete_page(_: Any, name: str, source: list[str]) -> None:
    """Adds what is generated or belongs to the site alone, so that GitHub shows a clean page."""
    if source[0].startswith(FROM_SCHEMAS):
        source[0] = KEY_TABLE.sub(list_keys, source[0])
    if name == "reference/index":
        source[0] += list_pages(lambda page: page != "index" and not page.startswith("deepspeed"))
    elif name == "reference/deepspeed":
        source[0] += list_pages(lambda page: page.startswith("deepspeed."))
    elif name == "reference/cli":
        source[0] = source[0].replace("<!-- help of every command -->", show_help())


def list_pages(is_wanted: Callable[[str], bool]) -> str:
    """A hidden table of contents with the pages that are made from the schemas."""
    made = sorted(page for page in (HERE / "reference").glob("*.md") if page.read_text().startswith(FROM_SCHEMAS))
    names = [page.stem for page in made if is_wanted(page.stem)]
    return "\n".join(["\n```{toctree}", ":hidden:", "", *names, "```\n"])


def list_keys(table: re.Match[str]) -> str:
    """A table of keys as a definition list: six columns, one of them prose, fit on no screen."""
    head, _, *rows = [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in table[0].splitlines()
    ]
    items = []
    for row in rows:
        cells = {title: cell for title, cell in zip(head, row, strict=True) if cell}
        facts = [cells.get("Type", "")]
        if default := cells.get("Default"):
            facts.append(default if default == "required" else f"default {default}")
        facts += [cells["Status"]] if cells.get("Status") != "implemented" else []
        names = {"DeepSpeed": "same key in DeepSpeed", "In a job": "same key in a job", "Other spellings": ""}
        for title, same in names.items():
            if given := cells.get(title):
                facts.append(same if given == "the same" else f"{title}: {given}")
        items.append(f"{cells['Key']}\n: {' · '.join(filter(None, facts))}\n\n  {cells.get('Description', '')}\n")
    return "\n".join(items)


def show_help() -> str:
    """The text that each command prints for `--help`, one section a command."""
    usage = ask_for_help()
    sections = [show("dsjob", usage)]
    for command in dict.fromkeys(re.findall(r"^  dsjob ([a-z][a-z-]+) ", usage, re.MULTILINE)):
        text = ask_for_help(command)
        sections += [show(f"dsjob {command}", text)] if text != usage else []
        below = re.search(r"([a-z]+(?:\|[a-z]+)+) \.\.\.", text)
        for name in below[1].split("|") if below else ():
            sections.append(show(f"dsjob {command} {name}", ask_for_help(command, name)))
    return "\n".join(sections)


def ask_for_help(*command: str) -> str:
    os.environ["COLUMNS"] = "80"
    with redirect_stdout(StringIO()) as output, suppress(SystemExit):
        main([*command, "--help"])
    return output.getvalue()


def show(title: str, text: str) -> str:
    return f"## {title}\n\n```text\n{text}```\n"


def mark_long_words(app: Any, page: Any, name: str) -> None:
    """Gives the class `long` to inline code with words that are wider than a phone. The style sheet lets them break."""
    for literal in page.findall(nodes.literal):
        if max(map(len, literal.astext().split()), default=0) > 40:
            literal["classes"].append("long")


def mark_literal_blocks(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Docstrings indent what is to be shown as it is; reStructuredText wants `::` before it."""
    marked: list[str] = []
    for line in lines:
        before = marked[-2:]
        if line.startswith("    ") and len(before) == 2 and before[0] and not before[1] and before[0][0] != " ":
            marked += ["::", ""]
        marked.append(line)
    lines[:] = marked
