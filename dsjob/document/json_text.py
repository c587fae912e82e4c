"""Reads JSON. Comments with `//`, `#` and `/* */` and trailing commas are allowed."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from dsjob.contract.paths import is_comment
from dsjob.contract.shown import shorten
from dsjob.document.positions import Document, KeyPath, Reader, find_hint
from dsjob.errors import DocumentError

_SPACE: Final = re.compile(r"(?:[ \t\n]++|//[^\n]*+|#[^\n]*+|/\*.*?\*/)*+", re.DOTALL)
JSON_START: Final = re.compile(_SPACE.pattern + r"\{", re.DOTALL)
_PLAIN_STRING: Final = re.compile(r'"([^"\\\x00-\x1f]*+)"')
_WORD: Final = re.compile(r"""[^\s,:\[\]{}"'/#]++""")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*+)(\.[0-9]++)?([eE][+-]?[0-9]++)?")
_SHOWN: Final = re.compile(r""""[^"\n]{0,40}"?|'[^'\n]{0,40}'?|[^\s,:\[\]{}"'/#]{1,40}|.""", re.DOTALL)
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
JSON_CONSTANTS: Final = {"true": True, "false": False, "null": None}
_DECODER: Final = json.JSONDecoder()
_CLOSER: Final = {"{": "}", "[": "]"}
_JSON_HINTS: Final = (  # a pattern for the message, and the hint
    (r"a (?:key|value), found `(?:\.\.\.|…)", "the dots are a placeholder of an example: delete them"),
    (r"a (?:key|value), found `['`‘’“”]", 'strings take straight double quotes: "..."'),
    (r"a key, found `[\w$]", 'keys are written in double quotes: "..."'),
    (r"a value, found `(?i:true|false|null)`", "true, false and null are lowercase in JSON"),
    (r"a value, found `None`", "JSON writes null"),
    (r"a value, found `[+-]?(?i:nan|inf|infinity)`", "JSON has no such number: write null, or omit the key"),
    (
        r"a value, found `[+\-.0-9]",
        "numbers look like -12, 0.5 or 1e-4: no leading + or 0, no 1. or .5, no _ and no hex",
    ),
    (r"a value, found `[\w$/]", 'strings are written in double quotes: "..."'),
)


class JsonReader(Reader):
    """A recursive descent parser. Each method takes the offset of its part, and returns the offset after it."""

    def __init__(self, text: str, source: str) -> None:
        super().__init__(text, source)
        self.open: list[int] = []  # offsets of the brackets that are not closed yet

    def read(self) -> Document:
        at = self.skip(0)
        if not self.text.startswith("{", at):
            raise self.not_an_object(at, "is empty" if at == len(self.text) else f"starts with {self.shown(at)}")
        value, at = self.value(at, ())
        at = self.skip(at)
        if at < len(self.text):
            raise self.fail(at, f"expected the end of the text, found {self.shown(at)}", "one object only")
        return self.finish(value)

    def skip(self, at: int) -> int:
        """The offset after the whitespace and comments at `at`."""
        if space := _SPACE.match(self.text, at):
            at = space.end()
        if self.text.startswith("/*", at):
            raise self.fail(at, "this comment is never closed", "close it with */")
        return at

    def value(self, at: int, path: KeyPath) -> tuple[Any, int]:
        self.value_at[path] = at
        first = self.text[at : at + 1]
        if first == '"':
            return self.string(at)
        if first == "{":
            return self.object(at, path)
        if first == "[":
            return self.array(at, path)
        if word := _WORD.match(self.text, at):
            if word[0] in JSON_CONSTANTS:
                return JSON_CONSTANTS[word[0]], word.end()
            if number := _NUMBER.fullmatch(word[0]):
                return self.number(at, word[0], int if number.lastindex is None else float), word.end()
        raise self.unexpected(at, "a value")

    def object(self, at: int, path: KeyPath) -> tuple[dict[str, Any], int]:
        self.require_depth(at, len(path) + 1)
        self.open.append(at)
        result: dict[str, Any] = {}
        at = self.skip(at + 1)
        while not self.text.startswith("}", at):
            if not self.text.startswith('"', at):
                raise self.unexpected(at, "a key")
            key, end = self.string(at)
            child = (*path, key)
            if key in result:
                self.add_duplicate(child, self.key_at[child], at)
            elif not is_comment(key):  # comment keys may repeat
                self.key_at[child] = at
            at = self.skip(end)
            if not self.text.startswith(":", at):
                raise self.unexpected(at, f"a colon after the key {shorten(key, as_json=True)}")
            value, at = self.value(self.skip(at + 1), child)
            if not is_comment(key):
                result[key] = value
            at = self.next_item(at)
        self.open.pop()
        return result, at + 1

    def array(self, at: int, path: KeyPath) -> tuple[list[Any], int]:
        self.require_depth(at, len(path) + 1)
        self.open.append(at)
        result: list[Any] = []
        at = self.skip(at + 1)
        while not self.text.startswith("]", at):
            child = (*path, len(result))
            self.key_at[child] = at
            item, at = self.value(at, child)
            result.append(item)
            at = self.next_item(at)
        self.open.pop()
        return result, at + 1

    def next_item(self, end: int) -> int:
        """The offset of the next item, or of the closing bracket. `end`: the end of the item before."""
        at = self.skip(end)
        following = self.text[at : at + 1]
        if following == ",":
            return self.skip(at + 1)
        closer = _CLOSER[self.text[self.open[-1]]]
        if following == closer:
            return at
        if re.match(r"[\w$\-\"'{\[]", following):
            raise self.fail(end, f"a comma is missing before {self.shown(at)}", "separate items with a comma")
        raise self.unexpected(at, f"a comma or `{closer}`")

    def string(self, at: int) -> tuple[str, int]:
        if plain := _PLAIN_STRING.match(self.text, at):
            return plain[1], plain.end()
        try:
            value, end = _DECODER.raw_decode(self.text, at)
        except json.JSONDecodeError as error:
            char = self.text[error.pos : error.pos + 1]
            if error.msg.startswith("Unterminated") or char == "\n":
                raise self.fail(at, "this string is not closed on its line", 'close it with "') from None
            if error.msg.startswith("Invalid control"):
                message, hint = f"a raw U+{ord(char):04X} inside a string", f"write {json.dumps(char)[1:-1]}"
                raise self.fail(error.pos, message, hint) from None
            place = self.text.rfind("\\", at, error.pos + 1)
            hint = r"allowed are \" \\ \/ \b \f \n \r \t \uXXXX; a backslash itself is written \\"
            raise self.fail(place, f"{self.text[place : place + 2]} is not an escape", hint) from None
        if _SURROGATE.search(value):
            raise self.fail(at, "half of a surrogate pair inside a string", r"write both halves, as in \ud83d\ude00")
        return value, end

    def shown(self, at: int) -> str:
        found = _SHOWN.match(self.text, at)
        if found is None:
            return "the end of the text"
        return f"`{found[0] if found[0].isprintable() else ascii(found[0])[1:-1]}`"

    def unexpected(self, at: int, wanted: str) -> DocumentError:
        message = f"expected {wanted}, found {self.shown(at)}"
        opener = self.text[self.open[-1]]
        other_closer = "]" if opener == "{" else "}"
        if at == len(self.text) or self.text[at] == other_closer:
            hint = f"the {opener} of line {self.line(self.open[-1])} is still open: close it with {_CLOSER[opener]}"
        else:
            hint = find_hint(_JSON_HINTS, message)
        return self.fail(at, message, hint)
