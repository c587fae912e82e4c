"""Reads the source of a job: a job file, a run's folder or a program's dict, and the overrides that it implies."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from dsjob import document as documents
from dsjob import storage
from dsjob.contract import locations
from dsjob.contract.paths import Path
from dsjob.document import Document
from dsjob.document.origins import PROGRAM, Composed, is_deepspeed, read_document
from dsjob.errors import DocumentError, Problem, UsageError
from dsjob.front.refused import refuse_missing, require_own
from dsjob.run_folder import RESOLVED_NAME
from dsjob.terminal import quote_path, quote_word
from dsjob.trust.user import Flags, grant, read_environment

Given = str | os.PathLike[str] | Mapping[str, Any] | None


@dataclass(frozen=True)
class Source:
    """What to compose: the parsed job file or dict (None if there is only a recipe), and all overrides. derived: the
    paths of values that overrides take from the document, so that the user has not named them."""

    file: Document | None
    overrides: list[str]
    derived: tuple[Path, ...] = ()

    def compose(self, config_dir: str | None = None) -> Composed:
        """The composed document. Raises UsageError, DocumentError."""
        from dsjob.document.compose import compose

        environment = read_environment()
        composed = compose(self.overrides, file=self.file, config_dir=config_dir, environment=environment)
        derived = (path for path in composed.named if any(path[: len(own)] == own for own in self.derived))
        return replace(composed, named=composed.named.difference(derived))

    def compose_known(self, config_dir: str | None = None) -> Composed:
        """Like `compose`, for a document that is checked next: leaves overrides of unknown keys to the check."""
        from dsjob.document.compose import compose_known

        return compose_known(self.overrides, file=self.file, config_dir=config_dir, environment=read_environment())


def read_given(given: Given, recipe: str | None, overrides: Sequence[str], *, bare: bool = False) -> Source:
    """Reads what a program passes: a path, a dict, or the name of a recipe. Raises UsageError."""
    words = list_words(recipe, overrides)
    if given is None:
        if not words:
            raise UsageError("no document was given", hint='give a path, a dict, or recipe="quickstart"')
        return Source(None, words)
    if isinstance(given, Mapping):
        return Source(read_mapping(given), words)
    return Source(*read_source(require_path(given, "a document"), words, bare=bare))


def list_words(recipe: str | None, overrides: Sequence[str]) -> list[str]:
    """The overrides of a job, with the recipe as the first. Raises UsageError unless they are a list of texts."""
    if isinstance(overrides, str):
        raise UsageError(
            f"overrides are a list of texts, not the text {overrides!r}", hint=f"overrides=[{overrides!r}]"
        )
    if not isinstance(overrides, Sequence) or not all(isinstance(word, str) for word in overrides):
        pairs = overrides.items() if isinstance(overrides, Mapping) else ()
        meant = [f"{key}={value}" for key, value in pairs] or ["trainer.max_steps=2"]
        raise UsageError(
            f'overrides are a list of "key=value" texts, not {str(overrides)[:200]}', hint=f"overrides={meant}"
        )
    return [*([f"+recipe={recipe}"] if recipe else []), *overrides]


def require_path(given: object, what: str) -> str:
    """The path or URL that a program passes as `what`. Raises UsageError if it is none."""
    if not isinstance(given, (str, os.PathLike)):
        accepted = "a path, a URL or a dict" if what == "a document" else "a path or a URL"
        raise UsageError(f"{what} is {accepted}, not {str(given)[:200]}")
    return os.fspath(given)


def make_flags(trust: Sequence[str], remote_code: bool, unpinned: bool) -> Flags:
    """The trust that a program grants to one job. Raises UsageError."""
    if isinstance(trust, str):
        raise UsageError(f"trust is a list of names, not the text {trust!r}", hint=f"trust=[{trust!r}]")
    return Flags(tuple(trust), remote_code=remote_code, unpinned=unpinned)


@contextmanager
def allowing(flags: Flags) -> Iterator[None]:
    """Allows the block to open URLs with the protocols that the user trusts."""
    with locations.allowing(lambda: grant(None, flags).prefixes):
        yield


def read_mapping(given: Mapping[str, Any]) -> Document:
    """A program's dict as a document. Raises DocumentError for values that JSON cannot represent."""
    problems: list[Problem] = []
    text = json.dumps(_to_plain(given, (), problems), indent=2)
    if problems:
        raise DocumentError(problems)
    document = documents.require_few(documents.parse(text, PROGRAM, format="json"))
    require_own(document)
    return document


def _to_plain(value: Any, path: Path, problems: list[Problem]) -> Any:
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                problems.append(_refuse(f"the key {key!r} is not a text", path))
        return {str(key): _to_plain(item, (*path, str(key)), problems) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item, (*path, index), problems) for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, float) and not math.isfinite(value):
        problems.append(_refuse(f"{value} is not a JSON number", path))
    elif value is not None and not isinstance(value, (str, bool, int, float)):
        what = f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else type(value).__name__
        hint = "refer to a class or function by its dotted path: {'_target_': 'my_model.Net'}"
        problems.append(_refuse(f"a document holds texts, numbers, lists and dicts, not {what}", path, hint))
    else:
        return value
    return None


def _refuse(message: str, path: Path, hint: str = "") -> Problem:
    return Problem(message, path, "not-json", hint, PROGRAM)


@contextmanager
def telling_places() -> Iterator[None]:
    """Removes lines and columns from errors about a program's dict: they refer to a JSON text that no user sees."""
    try:
        yield
    except DocumentError as error:
        problems, warnings = (drop_lines(found) for found in (error.problems, error.warnings))
        raise type(error)(problems, warnings) from error.__cause__


def drop_lines(problems: Sequence[Problem]) -> list[Problem]:
    """Problems without the lines and columns of a program's dict."""
    return [replace(each, line=0, column=0) if each.source == PROGRAM else each for each in problems]


def read_source(source: str, overrides: Sequence[str], *, bare: bool = False) -> tuple[Document | None, list[str]]:
    """Reads a job file, and adds the overrides that it implies. For a run's folder, reads its resolved document.

    `bare`: accept a bare DeepSpeed config, as the base of an otherwise empty job.
    """
    rest = list(overrides)
    if "://" not in source and os.path.isdir(source):
        resolved = os.path.join(source, RESOLVED_NAME)
        if not os.path.exists(resolved):
            above = os.path.dirname(source.rstrip("/"))
            hint = f"dsjob run {quote_path(above)}" if os.path.exists(os.path.join(above, RESOLVED_NAME)) else ""
            raise UsageError(f"{source} is not a run folder: there is no {RESOLVED_NAME} in it", hint=hint)
        document = read_document(resolved)
        _require_same_places(source.rstrip("/") or "/", document.value, rest)
        here = f"output.dir={quote(source.rstrip('/') or '/')}"
        return document, ["checkpoint.resume=auto", *rest, here]
    if not ("://" in source or source == "-" or os.path.exists(source)):
        raise refuse_missing(source)
    document = read_document(source)
    if is_deepspeed(document.value):
        if bare and source != "-":
            return None, [f"deepspeed={quote(source)}", *rest]
        raise UsageError(
            f"{source} is a DeepSpeed config: it says how to train, but not what",
            hint=f"build a job on it: dsjob +recipe=quickstart {name_change('deepspeed', source)}",
        )
    require_own(document)
    if os.path.basename(source) == RESOLVED_NAME and "://" not in source:
        folder = os.path.dirname(source) or "."
        section = document.value.get("output")
        output = section.get("dir") if isinstance(section, dict) else None
        if isinstance(output, str) and os.path.abspath(os.path.expanduser(output)) == os.path.abspath(
            folder
        ):  # a new run, not more of that one
            rest = [f"output.dir={quote(output.rstrip('/') + '-%time')}", *rest]
    return document, rest


def _require_same_places(folder: str, document: Any, overrides: Sequence[str]) -> None:
    """Raises UsageError for overrides that would keep a run from resuming in its own folder."""
    pairs = (word.lstrip("+").partition("=") for word in overrides)
    given = {key: value.strip("'\"") for key, _, value in pairs if key in ("output.dir", "checkpoint.dir")}
    out = given.get("output.dir")
    if out is not None and os.path.abspath(out) != os.path.abspath(folder):
        raise UsageError(
            f"output.dir={out}: dsjob run {quote_path(folder)} resumes the run in that folder, and writes nowhere else",
            hint=f"start another run with dsjob run {quote_path(f'{folder}/{RESOLVED_NAME}')}"
            f" {name_change('output.dir', out)}",
        )
    section = document.get("checkpoint") if isinstance(document, dict) else None
    before = (section.get("dir") if isinstance(section, dict) else None) or f"{folder}/checkpoints"
    after = given.get("checkpoint.dir", before)
    if after != before and not storage.list_names(storage.join(after, "commits")):
        raise UsageError(
            f"checkpoint.dir={after} holds no checkpoint: the run in {folder} keeps its checkpoints in {before}",
            hint=f"copy them first with dsjob ckpt copy {quote_path(before)} {quote_path(after)}",
        )


def name_change(key: str, text: str) -> str:
    """The override that sets a key to a text, for a shell."""
    return quote_word(f"{key}={text if re.fullmatch(r'[A-Za-z.][A-Za-z0-9./_-]*', text) else quote(text)}")


def quote(text: str) -> str:
    """A text as the value of an override."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
