"""Reads YAML with the core schema of YAML 1.2, from the events of PyYAML's parser.

Two traps: PyYAML follows YAML 1.1, where `5e-5` is a string, `on` is a boolean and `12:30:45` is a number. So this
module resolves plain scalars itself. And `yaml.compose` recurses in C, so a text of some hundred thousand brackets
crashes the process. So this module builds the tree from events instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from dsjob.contract.paths import is_comment
from dsjob.document.json_text import JSON_CONSTANTS
from dsjob.document.positions import MAX_EXPANSION, Document, KeyPath, Reader, find_hint
from dsjob.errors import DocumentError

_UNPRINTABLE: Final = "[^\t\n\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"  # compiling it takes 4 ms
_YAML_CONSTANTS: Final = {"": None, "~": None} | {
    spelling: value for word, value in JSON_CONSTANTS.items() for spelling in (word, word.capitalize(), word.upper())
}
_YAML_NUMBERS: Final[tuple[tuple[re.Pattern[str], Callable[[str], int | float]], ...]] = (
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+"), lambda text: int(text, 0)),
    (re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"), lambda _: math.nan),
)
_KINDS = {"ScalarEvent": "scalar", "AliasEvent": "alias", "MappingStartEvent": "mapping", "SequenceStartEvent": "list"}
_TAG: Final = "tag:yaml.org,2002:"
_TAGS: Final = {"scalar": "str", "mapping": "map", "list": "seq"}  # the only tag allowed for each kind of node
_YAML_HINTS: Final = (  # a pattern for the parser's message and the line, and the most likely cause
    (r"\n *\t", "YAML indents with spaces: a tab is not allowed here"),
    (
        r"mapping values",
        'put a space after each key\'s colon, quote values that contain ": ", and indent keys alike',
    ),
    (r"\n[^#]*[\[{,] *[^\"']*\$\{", 'inside [ ] and { }, quote values with braces: "${...}"'),
    (r"cannot start any token|alphabetic or numeric", "a value that starts with @ ` % & or * needs quotes"),
    (r"escape", r"between double quotes write \\ for a backslash, or use single quotes"),
    (r"quoted scalar", "a quote is not closed"),
    (r"block (mapping|collection|end)", "check the indentation of this line and the one before"),
)


@dataclass(slots=True)
class _Node:
    kind: str  # a value of _KINDS
    at: int  # offset of its first character
    text: str = ""  # the text of a scalar
    plain: bool = False  # a scalar without quotes and tag, whose type is resolved from its text
    weight: int = 0  # values and characters in it, with aliases expanded; 0 until the node is complete
    children: list[_Node] = field(default_factory=list)  # map: key, value, key, value, ...; alias: the anchored node


class YamlReader(Reader):
    """First `nodes` builds the tree as written, then `value` walks it and follows each alias to its anchored node."""

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
        """The root of the tree, or None for an empty text. Rejects alias bombs before anything is expanded."""
        import yaml  # imported here, because it is slow to import and JSON documents do not need it

        root: _Node | None = None
        open_nodes: list[tuple[_Node, int]] = []  # each with the total weight before it
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
                        raise self.fail(at, message, "use fewer aliases", "alias")
        except (yaml.YAMLError, ValueError, OverflowError) as error:  # SafeLoader lets "\U99999999" overflow
            raise self.broken(error) from None
        return root

    def node(self, event: Any, at: int, anchors: dict[str, _Node]) -> _Node:
        kind = _KINDS[type(event).__name__]
        if kind == "alias":
            anchored = anchors.get(event.anchor)
            if anchored is None:
                hint = f"define the anchor &{event.anchor} before the alias"
                raise self.fail(at, f"the alias *{event.anchor} has no anchor above it", hint, "alias")
            if not anchored.weight:
                raise self.fail(at, f"the alias *{event.anchor} is inside its own anchor", rule="alias")
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
        """Key and value nodes by name. Merged keys (`<<`) come first; the mapping's own keys override them."""
        self.require_depth(node.at, depth)
        own: dict[str, tuple[_Node, _Node]] = {}
        for key, child in zip(node.children[::2], node.children[1::2], strict=True):
            name = self.key(key)
            if is_comment(name):
                continue
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
            raise self.fail(node.at, "no key before this colon", rule="key")
        return node.text

    def scalar(self, node: _Node) -> Any:
        """The value of a scalar. YAML 1.2's core schema determines the type of a plain one."""
        if not node.plain:
            return node.text
        if node.text in _YAML_CONSTANTS:
            return _YAML_CONSTANTS[node.text]
        for pattern, convert in _YAML_NUMBERS:
            if pattern.fullmatch(node.text):
                return self.number(node.at, node.text, convert)
        return node.text

    def broken(self, error: Any) -> DocumentError:
        """The error for a syntax error of the YAML parser. Its hint is the most likely cause."""
        context = getattr(error, "context_mark", None)
        mark = getattr(error, "problem_mark", None) or context
        at = mark.index if mark else 0
        message = f"{error.problem} {error.context or ''}".strip() if mark else str(error)
        if "nesting depth" in message:  # libyaml has a limit of its own, and reads ahead
            return self.too_deep(at)
        if context and self.line(context.index) != self.line(at):
            message += f" that starts on line {self.line(context.index)}"
        line_start = self.line_starts[self.line(at) - 1]
        line = self.text[line_start : line_start + 200].split("\n")[0]  # bounds the time of the patterns
        return self.fail(at, f"this is not YAML: {message}", find_hint(_YAML_HINTS, f"{message}\n{line}"))


def _anchored(node: _Node) -> _Node:
    return node.children[0] if node.kind == "alias" else node
