"""rich's console and tables, for texts that may come from anyone: printable, and without markup.

Only here may rich's own classes be used, which print what they are given (`tests/test_layers.py`).
"""

from __future__ import annotations

from typing import Any

from rich import box, console, table, text

from dsjob.terminal import make_printable, split_text


class Console(console.Console):
    """A console on standard output, or on standard error."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints lines and tables."""
        super().print(*(make_printable(each) if isinstance(each, str) else each for each in objects), **options)

    def say(self, title: str, text_: str, separator: str = "  ") -> None:
        """Prints a text after its title, or, if it has several lines, below it."""
        first, *rest = split_text(text_)
        if not rest:
            parts = (make_printable(title), "bold"), separator, first
            super().print(text.Text.assemble(*parts), soft_wrap=True)
            return
        self.print(title, style="bold", soft_wrap=True)
        for line in (f"  {first.removeprefix('  ')}", *rest):
            super().print(line, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Raises BrokenPipeError, as `print` does. rich would end the process."""
        raise


class Table(table.Table):
    """A table with a line below its header."""

    def __init__(self, title: str = "", **options: Any) -> None:
        options = {"box": box.SIMPLE_HEAD, "title_justify": "left", **options}
        super().__init__(title=make_printable(title) or None, **options)

    def add_column(self, header: str = "", **options: Any) -> None:  # type: ignore[override]
        """Adds a column."""
        super().add_column(make_printable(header), **options)

    def add_row(self, *cells: str, **options: Any) -> None:  # type: ignore[override]
        """Adds a row."""
        super().add_row(*map(make_printable, cells), **options)
