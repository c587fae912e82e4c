"""Resolves the interpolations of a composed config, within a budget and without revealing secrets of the environment.

OmegaConf gets the values of harmless environment variables only. For any other variable it gets a mark, a random
placeholder that takes part in the resolution in place of the value. A mark that ends up as a whole argument of a target
is written back as `${oc.env:NAME}`; anywhere else it is an error. So dsjob need not recognise every spelling of an
interpolation, and no secret value ever enters the document.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from omegaconf import Container, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dsjob.contract.bounds import MAX_DEPTH
from dsjob.contract.environment import CONFIG, HARMLESS, Reference, parse_reference
from dsjob.contract.paths import Path
from dsjob.contract.secrets import is_argument, list_texts
from dsjob.document.positions import MAX_EXPANSION
from dsjob.errors import DocumentError, Problem

MAX_TEXT = 100_000  # characters of all texts with interpolations, which are slow to parse
MAX_NESTED = 20  # nested brackets in such a text
_EVALUATION = 100  # the cost of one interpolation in units of MAX_EXPANSION: each one is parsed again
_OWN_KEYS = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_")
_PLAIN = re.compile(r"[^'\"\\${}\n]*")


class _Refused(BaseException):
    """Ends the resolution of a value. A BaseException, because OmegaConf catches and renames every Exception."""

    def __init__(self, message: str, hint: str = "", rule: str = "environment") -> None:
        super().__init__(message)
        self.problem = Problem(message, (), rule, hint)


class _OverBudget(_Refused):
    """Ends the resolution of the whole document."""


def check_texts(document: Any) -> list[Problem]:
    """Problems for interpolations that would take too long to parse."""
    # This must run before OmegaConf: its parser is slow on long texts and recurses with the depth.
    texts = [(path, text) for path, text in list_texts(document) if isinstance(text, str) and "${" in text]
    for path, text in texts:
        if _count_depth(text) > MAX_NESTED:
            return [Problem(f"interpolations and brackets are nested deeper than {MAX_NESTED}", path, "too-deep")]
    if sum(len(text) for _, text in texts) > MAX_TEXT:
        message = f"texts with interpolations of more than {MAX_TEXT:,} characters"
        return [Problem(message, texts[-1][0], "interpolation", "move data into files that the document names")]
    return []


def _count_depth(text: str) -> int:
    depth = deepest = 0
    for bracket in re.finditer(r"[\[{]|[\]}]", text[text.find("${") :]):
        depth = depth + 1 if bracket[0] in "[{" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


def resolve(config: DictConfig, explain: Callable[[Exception], str], more: Collection[str] = ()) -> dict[str, Any]:
    """Resolves a config into a plain document.

    `explain`: turns an error of OmegaConf into a message. `more`: further harmless variables. Raises DocumentError with
    the path of each value that cannot be resolved.
    """
    return _Resolution(explain, HARMLESS | set(more)).run(config)


class _Resolution:
    def __init__(self, explain: Callable[[Exception], str], harmless: Collection[str]) -> None:
        self.explain, self.harmless = explain, harmless
        self.left = MAX_EXPANSION
        self.references: list[Reference] = []
        self.stem = f"env{secrets.token_hex(8)}"  # a document cannot write it
        self.mark = re.compile(self.stem + r"n(\d+)n")
        self.marked: list[Path] = []
        self.problems: list[Problem] = []

    def run(self, config: DictConfig) -> dict[str, Any]:
        if problems := check_texts(OmegaConf.to_container(config, resolve=False)):
            raise DocumentError(problems)
        with self._watched():
            try:
                document = self._expand(config, ())
            except _OverBudget as error:
                raise DocumentError([error.problem]) from None
        # Only the finished document shows whether a mark is a whole argument of a target.
        for path in dict.fromkeys(self.marked):
            self._settle(document, path)
        if self.problems:
            raise DocumentError(self.problems)
        plain: dict[str, Any] = document
        return plain

    # ---- the walk

    def _expand(self, container: Any, path: Path) -> Any:
        if len(path) > MAX_DEPTH:
            message = f"interpolations nest the document deeper than {MAX_DEPTH} levels"
            raise _at(_OverBudget(message, rule="too-deep"), path[:3])
        plain: Any = OmegaConf.to_container(container, resolve=False)
        # Values without an interpolation are copied unchanged. OmegaConf resolves each of the others in its place.
        for place, text in list(list_texts(plain)):
            if not (isinstance(text, str) and "${" in text):
                continue
            parent, above = container, plain
            for part in place[:-1]:
                parent, above = parent[part], above[part]
            above[place[-1]] = self._evaluate(parent, place[-1], (*path, *place))
        return plain

    def _evaluate(self, parent: Any, key: Any, path: Path) -> Any:
        try:
            value = parent[key]
        except _OverBudget as error:
            raise _at(error, path) from None
        except _Refused as error:
            self.problems.append(_at(error, path).problem)
        except RecursionError:
            self.problems.append(Problem("interpolations are nested too deeply", path, "too-deep"))
        except OmegaConfBaseException as error:
            self.problems.append(Problem(self._name_marks(self.explain(error)), path, "interpolation"))
        else:
            found = self._expand(value, path) if isinstance(value, Container) else value
            for place, text in list_texts({"": found}):
                if any(isinstance(part, str) and self.mark.search(part) for part in (*place, text)):
                    self.marked.append((*path, *place[1:]))
            if not _has_text_keys(found):
                self.problems.append(Problem("has a key that is not text", path, "key", "quote it"))
            return found
        return None

    # ---- hooks into OmegaConf

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Intercepts each interpolation. OmegaConf evaluates them in these two methods only."""
        node, resolver = Container._resolve_node_interpolation, Container._evaluate_custom_resolver

        def find(container: Container, inter_key: str, memo: set[int] | None) -> Any:
            self._refuse_marks((inter_key,))
            return self._spend(node(container, inter_key, memo))

        def call(container: Container, key: Any, node: Any, inter_type: str, inter_args: Any, **others: Any) -> Any:
            self._spend(inter_args)
            if inter_type == "oc.env":
                return self._spend(self._read(*inter_args))
            # Arguments that a resolver interprets must not contain a mark. oc.create only passes on its value, and
            # oc.select its default, so marks are fine there.
            carried = {"oc.create": 0, "oc.select": 1}.get(inter_type, len(inter_args))
            self._refuse_marks(inter_args[:carried])
            for text in inter_args:
                self._check_text(inter_type, text)
            found = resolver(container, key=key, node=node, inter_type=inter_type, inter_args=inter_args, **others)
            return self._spend(found)

        Container._resolve_node_interpolation = find  # type: ignore[assignment,method-assign]
        Container._evaluate_custom_resolver = call  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            Container._resolve_node_interpolation = node  # type: ignore[method-assign]
            Container._evaluate_custom_resolver = resolver  # type: ignore[method-assign]

    def _check_text(self, name: str, text: Any) -> None:
        """Applies the limits of `check_texts` to text that a resolver parses as a document of its own."""
        if not isinstance(text, str):
            return
        if name == "oc.create":
            raise _Refused("oc.create takes a mapping or a list here, not text", rule="interpolation")
        if name == "oc.decode" and (len(text) > MAX_TEXT // 10 or _count_depth("${" + text) > MAX_NESTED + 1):
            raise _Refused("oc.decode is given a text that is too long or nested too deeply", rule="too-deep")

    def _spend(self, value: Any) -> Any:
        """Returns `value` after charging its size to the budget, before anything is copied from it."""
        self.left -= _EVALUATION + _weigh(value, self.left)
        if self.left < 0:
            message = f"interpolations expand to more than {MAX_EXPANSION:,} values and characters"
            raise _OverBudget(message, "use fewer interpolations", "interpolation")
        return value

    def _read(self, name: Any = None, *default: Any) -> Any:
        """The value of a harmless variable; a mark for any other."""
        self._refuse_marks((name,))
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise _Refused("oc.env needs the name of a variable", "${oc.env:NAME}", "interpolation")
        if name in self.harmless:
            if name not in os.environ and not default:
                message = f"Environment variable '{name}' not found"
                raise _Refused(message, f"export {name}=..., or ${{oc.env:{name},null}}", "interpolation")
            value = os.environ.get(name, default[0] if default else None)
            return value if value is None else str(value)
        inner: Any = default[0] if default else None
        if isinstance(inner, str) and (marked := self.mark.fullmatch(inner)):
            inner = self.references[int(marked[1])]
        elif inner is not None and not _PLAIN.fullmatch(str(inner)):
            self._refuse(name)
        else:
            inner = inner if inner is None else str(inner)
        reference = Reference(name, bool(default), inner)
        # The text in the document must parse to the same reference when the target is called.
        if parse_reference(str(reference)) != reference:
            self._refuse(name)
        self.references.append(reference)
        return f"{self.stem}n{len(self.references) - 1}n"

    def _refuse(self, name: str) -> NoReturn:
        raise _Refused(f"the default of {name} must be plain text, null or another ${{oc.env:NAME}}")

    # ---- marks

    def _refuse_marks(self, texts: Collection[Any]) -> None:
        for _, text in list_texts({"": list(texts)}):
            if isinstance(text, str) and (found := self.mark.search(text)):
                name = self.references[int(found[1])].name
                raise _Refused(f"must not contain environment variable {name}", _advise(name))

    def _settle(self, document: Any, path: Path) -> None:
        """Replaces a mark by the reference `${oc.env:NAME}`, or adds a problem if none is allowed at `path`."""
        above = document
        for part in path[:-1]:
            above = above[part]
        text = above[path[-1]]
        # Three cases: the mark is part of a longer text (error), its place is saved and shown (error), or it is a whole
        # argument of a target (allowed).
        whole = self.mark.fullmatch(text) if isinstance(text, str) else None
        own = isinstance(path[-1], str) and path[-1] in _OWN_KEYS
        found = [mark for part in (*path, text) if isinstance(part, str) for mark in self.mark.finditer(part)]
        name = self.references[int(found[0][1])].name
        place = tuple(self._name_marks(part) if isinstance(part, str) else part for part in path)
        if not whole or len(found) > 1:
            message = f"must not combine environment variable {name} with other text"
            hint = (
                f"put all of it in one variable: ${{oc.env:{name}}}" if is_argument(document, path) else _advise(name)
            )
            self.problems.append(Problem(message, place, "environment", hint))
        elif own or not is_argument(document, path):
            message = f"environment variable {name} is not allowed here: this value is saved and shown"
            self.problems.append(Problem(message, place, "environment", _advise(name)))
        else:
            above[path[-1]] = str(self.references[int(whole[1])])

    def _name_marks(self, text: str) -> str:
        return self.mark.sub(lambda found: str(self.references[int(found[1])]), text)


def _at(error: _Refused, path: Path) -> _Refused:
    found = error.problem
    error.problem = Problem(found.message, path, found.rule, found.hint)
    return error


def _advise(name: str) -> str:
    return (
        "keep credentials in the storage library's own configuration or environment, or give them to a target as an "
        f"argument; if {name} holds no secret, allow it with `environment: [{name}]` in {CONFIG}"
    )


def _has_text_keys(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = not isinstance(value, dict) or all(isinstance(key, str) for key in value)
    return own and all(_has_text_keys(item) for item in items)


def _weigh(value: Any, limit: int) -> int:
    """The number of values and characters in the unresolved result of an interpolation. Stops early above `limit`."""
    total, places = 0, [value]
    while places and total <= limit:
        found = places.pop()
        if isinstance(found, (DictConfig, ListConfig)):
            found = OmegaConf.to_container(found, resolve=False)
        elif isinstance(found, Container) or hasattr(found, "_value"):
            found = found._value()
        total += 1 + (len(found) if isinstance(found, (str, bytes)) else 0)
        if isinstance(found, dict):
            places += [*found, *found.values()]
        elif isinstance(found, (list, tuple)):
            places += found
    return total
