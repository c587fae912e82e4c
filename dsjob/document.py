"""The text of a job document as plain values, with the place of every key and value.

Reads JSON (also with `//`, `#` and `/* */` comments and trailing commas) and YAML, and gives JSON's kinds of values for
both: no dates, tags or infinities. Time is linear in the text. `storage` reads the bytes, `check` knows what keys mean.

Two traps shape the YAML half. PyYAML follows YAML 1.1, where `5e-5` is a string, `on` is a boolean and `12:30:45` is
a number; here plain scalars follow YAML 1.2's core schema. And `yaml.compose` recurses in C, so that a text of some
hundred thousand brackets kills the process: this module works on the parser's events instead.
"""

from __future__ import annotations

import json
import math
import posixpath
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from dsjob.errors import DocumentError, Problem

KeyPath = tuple[str | int, ...]

MAX_DEPTH: Final = 100  # levels of nesting; the root object is the first
MAX_NUMBER: Final = 250  # characters of a number: then every integer also fits a float
MAX_EXPANSION: Final = 200_000  # values and characters that YAML aliases may add to a document

_FORMATS: Final = {".json": "json", ".jsonc": "json", ".hjson": "json", ".yaml": "yaml", ".yml": "yaml"}


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in the text: 1-based, in characters, with lines ended by `\\n`."""

    line: int
    column: int


class _Marks(Mapping[KeyPath, Mark]):
    """Offsets by path, seen as marks: a mark is made when asked for, which few ever are."""

    def __init__(self, offsets: dict[KeyPath, int], line_starts: list[int]) -> None:
        self._offsets = offsets
        self._line_starts = line_starts

    def __getitem__(self, path: KeyPath) -> Mark:
        return _mark(self._line_starts, self._offsets[path])

    def __iter__(self) -> Iterator[KeyPath]:
        return iter(self._offsets)

    def __len__(self) -> int:
        return len(self._offsets)


@dataclass(frozen=True)
class Document:
    """A parsed document. What YAML aliases and merges bring in is marked where it is written, at the anchor."""

    source: str  # what to call it in messages: a path, a URL or "<stdin>"
    value: dict[str, Any]
    keys: Mapping[KeyPath, Mark]  # where each key or list item starts
    values: Mapping[KeyPath, Mark]  # where each value starts; () is the root
    text: str  # without a byte order mark, lines ended by "\n": text.split("\n")[mark.line - 1] is the marked line

    def mark(self, path: Sequence[str | int]) -> Mark:
        """The place of the key at `path`, or of its nearest ancestor that exists."""
        for length in range(len(path), 0, -1):
            if (found := self.keys.get(tuple(path[:length]))) is not None:
                return found
        return self.values[()]


def parse(text: str, source: str, *, format: Literal["json", "yaml"] | None = None) -> Document:  # noqa: A002
    """Parse a document; without `format` the suffix of `source` decides, and failing that the first character.

    Raises `DocumentError`: with the first syntax error, or else with all keys that are given twice.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    path = re.split("[?#]", source)[0] if "://" in source else source
    known = format or _FORMATS.get(posixpath.splitext(path)[1].lower())
    if known == "json" or (known is None and _JSON_START.match(text)):
        return _JsonReader(text, source).read()
    return _YamlReader(text, source).read()


def _hint(table: tuple[tuple[str, str], ...], text: str) -> str:
    return next((hint for pattern, hint in table if re.search(pattern, text)), "")


def _mark(line_starts: list[int], at: int) -> Mark:
    line = bisect_right(line_starts, at)
    return Mark(line, at - line_starts[line - 1] + 1)


class _Reader:
    """What both formats share: the text, the places found so far, and how to complain about one."""

    def __init__(self, text: str, source: str) -> None:
        self.text = text
        self.source = source
        self.line_starts = [0, *(newline.end() for newline in re.finditer("\n", text))]
        self.key_at: dict[KeyPath, int] = {}
        self.value_at: dict[KeyPath, int] = {}
        self.duplicates: dict[int, Problem] = {}  # by the offset of the second key

    def line(self, at: int) -> int:
        return _mark(self.line_starts, at).line

    def problem(self, at: int, message: str, hint: str, rule: str, path: KeyPath = ()) -> Problem:
        mark = _mark(self.line_starts, at)
        return Problem(message, path, rule, hint, self.source, mark.line, mark.column)

    def fail(self, at: int, message: str, hint: str = "", rule: str = "syntax") -> DocumentError:
        return DocumentError([self.problem(at, message, hint, rule)])

    def require_depth(self, at: int, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise self.fail(at, f"nested deeper than {MAX_DEPTH} levels", rule="too-deep")

    def add_duplicate(self, path: KeyPath, first: int, second: int) -> None:
        lines = f"first on line {self.line(first)}, again on line {self.line(second)}"
        message = f'the key "{path[-1]}" is given twice: {lines}'
        found = self.problem(second, message, "keep one of them", "duplicate-key", path)
        self.duplicates.setdefault(second, found)  # a YAML mapping is read again at each alias

    def not_an_object(self, at: int, but: str) -> DocumentError:
        hint = 'JSON looks like { "key": value }, YAML like key: value'
        return self.fail(at, f"a document must be one object, this one {but}", hint, "not-an-object")

    def number(self, at: int, text: str, convert: Callable[[str], int | float]) -> int | float:
        if len(text) > MAX_NUMBER:
            raise self.fail(at, f"a number of {len(text):,} characters is too long", rule="number")
        value = convert(text)
        if not math.isfinite(value):
            hint = "a document has JSON's numbers: write null, or leave the key out"
            raise self.fail(at, f"{text} is not a finite 64-bit float", hint, "number")
        return value

    def finish(self, value: dict[str, Any]) -> Document:
        if self.duplicates:
            raise DocumentError(list(self.duplicates.values()))
        keys, values = _Marks(self.key_at, self.line_starts), _Marks(self.value_at, self.line_starts)
        return Document(self.source, value, keys, values, self.text)


# ---- JSON

_SPACE: Final = re.compile(r"(?:[ \t\n]++|//[^\n]*+|#[^\n]*+|/\*.*?\*/)*+", re.DOTALL)
_JSON_START: Final = re.compile(_SPACE.pattern + r"\{", re.DOTALL)
_PLAIN_STRING: Final = re.compile(r'"([^"\\\x00-\x1f]*+)"')
_WORD: Final = re.compile(r"""[^\s,:\[\]{}"'/#]++""")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*+)(\.[0-9]++)?([eE][+-]?[0-9]++)?")
_SHOWN: Final = re.compile(r""""[^"\n]{0,40}"?|'[^'\n]{0,40}'?|[^\s,:\[\]{}"'/#]{1,40}|.""", re.DOTALL)
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_CONSTANTS: Final = {"true": True, "false": False, "null": None}
_DECODER: Final = json.JSONDecoder()
_CLOSER: Final = {"{": "}", "[": "]"}
_JSON_HINTS: Final = (  # what was expected and found; what to do about it
    (r"a (?:key|value), found `['`‘’“”]", 'strings take straight double quotes: "..."'),
    (r"a key, found `[\w$]", 'keys are written in double quotes: "..."'),
    (r"a value, found `(?i:true|false|null)`", "JSON writes true, false and null in small letters"),
    (r"a value, found `None`", "JSON writes null"),
    (r"a value, found `[+-]?(?i:nan|inf|infinity)`", "JSON has no such number: write null, or leave the key out"),
    (
        r"a value, found `[+\-.0-9]",
        "numbers look like -12, 0.5 or 1e-4: no leading + or 0, no 1. or .5, no _ and no hex",
    ),
    (r"a value, found `[\w$/]", 'strings are written in double quotes: "..."'),
)


class _JsonReader(_Reader):
    """Recursive descent; a method takes the offset where its part starts and returns the one after its end."""

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
        """The offset after the white space and comments at `at`."""
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
            if word[0] in _CONSTANTS:
                return _CONSTANTS[word[0]], word.end()
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
            else:
                self.key_at[child] = at
            at = self.skip(end)
            if not self.text.startswith(":", at):
                raise self.unexpected(at, f'a colon after the key "{key}"')
            result[key], at = self.value(self.skip(at + 1), child)
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
        """The offset of the next item, or of the closing bracket, given the end of an item."""
        at = self.skip(end)
        following = self.text[at : at + 1]
        if following == ",":
            return self.skip(at + 1)
        closer = _CLOSER[self.text[self.open[-1]]]
        if following == closer:
            return at
        if re.match(r"[\w$\-\"'{\[]", following):
            raise self.fail(end, f"a comma is missing before {self.shown(at)}", "put a comma between two items")
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
            hint = _hint(_JSON_HINTS, message)
        return self.fail(at, message, hint)


# ---- YAML

_UNPRINTABLE: Final = "[^\t\n\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"  # compiling it takes 4 ms
_YAML_CONSTANTS: Final = {"": None, "~": None} | {
    spelling: value for word, value in _CONSTANTS.items() for spelling in (word, word.capitalize(), word.upper())
}
_YAML_NUMBERS: Final[tuple[tuple[re.Pattern[str], Callable[[str], int | float]], ...]] = (
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+"), lambda text: int(text, 0)),
    (re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"), lambda _: math.nan),
)
_KINDS = {"ScalarEvent": "scalar", "AliasEvent": "alias", "MappingStartEvent": "mapping", "SequenceStartEvent": "list"}
_TAG: Final = "tag:yaml.org,2002:"
_TAGS: Final = {"scalar": "str", "mapping": "map", "list": "seq"}  # by kind of node, the one tag that may be written
_YAML_HINTS: Final = (  # what the parser says, and the line; what that mostly comes from
    (r"\n *\t", "YAML indents with spaces: a tab is not allowed here"),
    (
        r"mapping values",
        'a key\'s colon needs a space after it, a value that holds ": " quotes, and keys the same indent',
    ),
    (r"\n[^#]*[\[{,] *[^\"']*\$\{", 'inside [ ] and { } quote what holds braces: "${...}"'),
    (r"cannot start any token|alphabetic or numeric", "a value that starts with @ ` % & or * needs quotes"),
    (r"escape", r"between double quotes write \\ for a backslash, or use single quotes"),
    (r"quoted scalar", "a quote is not closed"),
    (r"block (mapping|collection|end)", "check how this line and the one before are indented"),
)


@dataclass(slots=True)
class _Node:
    kind: str  # as in _KINDS
    at: int  # offset of its first character
    text: str = ""  # of a scalar
    plain: bool = False  # a scalar to be resolved: no quotes and no tag
    weight: int = 0  # values and characters in it with aliases expanded; 0 while it is not closed
    children: list[_Node] = field(default_factory=list)  # of a map: key, value, key, value; of an alias: the anchored


class _YamlReader(_Reader):
    """First `nodes` draws the tree as it is written; then `value` walks it, going to the anchored node at an alias."""

    def read(self) -> Document:
        if bad := re.search(_UNPRINTABLE, self.text):
            raise self.fail(bad.start(), f"U+{ord(bad.group()):04X} is not allowed in YAML", "remove it")
        root = self.nodes()
        if root is None or (root.plain and not root.text):
            raise self.not_an_object(root.at if root else 0, "is empty")
        if root.kind != "mapping":
            raise self.not_an_object(root.at, f"is a {root.kind}")
        return self.finish(self.value(root, ()))

    def nodes(self) -> _Node | None:
        """The root of the tree, or None for a text without any; refuses alias bombs before anything is expanded."""
        import yaml  # here, because it is slow to import and JSON documents do without it

        root: _Node | None = None
        open_nodes: list[tuple[_Node, int]] = []  # each with the weight of all that came before it
        anchors: dict[str, _Node] = {}
        total = expansion = 0
        events: Iterator[Any] = yaml.parse(self.text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        try:
            for event in events:
                at = event.start_mark.index
                if isinstance(event, yaml.CollectionEndEvent):
                    node, before = open_nodes.pop()
                    node.weight = total - before
                elif isinstance(event, yaml.DocumentStartEvent) and root:
                    raise self.fail(at, "a second document starts here", "a job is one document: remove the ---")
                elif isinstance(event, yaml.NodeEvent):
                    node = self.node(event, at, anchors)
                    if open_nodes:
                        open_nodes[-1][0].children.append(node)
                    else:
                        root = node
                    if node.kind in {"mapping", "list"}:
                        open_nodes.append((node, total))
                        self.require_depth(at, len(open_nodes))
                    total += node.weight or 1
                    expansion += node.weight if node.kind == "alias" else 0
                    if expansion > MAX_EXPANSION:
                        message = f"up to here aliases add more than {MAX_EXPANSION:,} values and characters"
                        raise self.fail(at, message, "write less with aliases", "alias")
        except (yaml.YAMLError, ValueError, OverflowError) as error:  # SafeLoader lets "\U99999999" overflow
            raise self.broken(error) from None
        return root

    def node(self, event: Any, at: int, anchors: dict[str, _Node]) -> _Node:
        kind = _KINDS[type(event).__name__]
        if kind == "alias":
            anchored = anchors.get(event.anchor)
            if anchored is None:
                hint = f"write &{event.anchor} before the value that it repeats"
                raise self.fail(at, f"*{event.anchor} repeats nothing: no such anchor above", hint, "alias")
            if not anchored.weight:
                raise self.fail(at, f"*{event.anchor} stands inside the value that it repeats", rule="alias")
            return _Node(kind, at, weight=anchored.weight, children=[anchored])
        if event.tag not in {None, "!", _TAG + _TAGS[kind]}:
            hint = f"remove it: a document is plain data; the only tag for a {kind} is !!{_TAGS[kind]}"
            raise self.fail(at, f"the tag {event.tag.replace(_TAG, '!!')} is not allowed here", hint, "tag")
        node = _Node(kind, at)
        if kind == "scalar":
            node.text, node.weight = event.value, 1 + len(event.value)
            node.plain = not event.style and event.tag is None
        if event.anchor:
            anchors[event.anchor] = node
        return node

    def value(self, node: _Node, path: KeyPath) -> Any:
        self.value_at[path] = node.at
        node = _anchored(node)
        if node.kind == "scalar":
            return self.scalar(node)
        self.require_depth(node.at, len(path) + 1)
        if node.kind == "list":
            items: list[Any] = []
            for index, child in enumerate(node.children):
                self.key_at[(*path, index)] = child.at
                items.append(self.value(child, (*path, index)))
            return items
        result: dict[str, Any] = {}
        for name, (key, child) in self.pairs(node, path, 1).items():
            self.key_at[(*path, name)] = key.at
            result[name] = self.value(child, (*path, name))
        return result

    def pairs(self, node: _Node, path: KeyPath, depth: int) -> dict[str, tuple[_Node, _Node]]:
        """Key and value by name; what `<<` merges in comes first in order and last in precedence."""
        self.require_depth(node.at, depth)
        own: dict[str, tuple[_Node, _Node]] = {}
        for key, child in zip(node.children[::2], node.children[1::2], strict=True):
            name = self.key(key)
            if name in own:
                self.add_duplicate((*path, name), own[name][0].at, key.at)
            else:
                own[name] = (key, child)
        if "<<" not in own or not own["<<"][0].plain:
            return own
        child = own.pop("<<")[1]
        merged: dict[str, tuple[_Node, _Node]] = {}
        for source in _anchored(child).children if _anchored(child).kind == "list" else [child]:
            if _anchored(source).kind != "mapping":
                raise self.fail(source.at, "<< merges mappings", "write <<: *name or <<: [*name, *other]", "merge")
            for name, pair in self.pairs(_anchored(source), path, depth + 1).items():
                merged.setdefault(name, pair)
        return merged | own

    def key(self, node: _Node) -> str:
        node = _anchored(node)
        if node.kind != "scalar":
            raise self.fail(node.at, "a key must be text", "quote what starts with { or [", "key")
        if node.plain and not node.text:
            raise self.fail(node.at, "there is no key before this colon", rule="key")
        return node.text

    def scalar(self, node: _Node) -> Any:
        """The value of a scalar; a plain one is resolved by YAML 1.2's core schema."""
        if not node.plain:
            return node.text
        if node.text in _YAML_CONSTANTS:
            return _YAML_CONSTANTS[node.text]
        for pattern, convert in _YAML_NUMBERS:
            if pattern.fullmatch(node.text):
                return self.number(node.at, node.text, convert)
        return node.text

    def broken(self, error: Any) -> DocumentError:
        """A syntax error of the YAML parser, with what it mostly comes from."""
        context = getattr(error, "context_mark", None)
        mark = getattr(error, "problem_mark", None) or context
        at = mark.index if mark else 0
        message = f"{error.problem} {error.context or ''}".strip() if mark else str(error)
        if context and self.line(context.index) != self.line(at):
            message += f" that starts on line {self.line(context.index)}"
        line_start = self.line_starts[self.line(at) - 1]
        line = self.text[line_start : line_start + 200].split("\n")[0]  # bounds the time of the patterns
        return self.fail(at, f"this is not YAML: {message}", _hint(_YAML_HINTS, f"{message}\n{line}"))


def _anchored(node: _Node) -> _Node:
    return node.children[0] if node.kind == "alias" else node
