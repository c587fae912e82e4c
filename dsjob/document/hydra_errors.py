"""Translates errors of Hydra and OmegaConf into the project's own: what is wrong with a recipe or an override."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from dsjob.contract.hints import suggest
from dsjob.contract.paths import Path
from dsjob.contract.secrets import hide_value
from dsjob.document.overrides import GROUPS, explain_no_key, explain_unreadable, split_key
from dsjob.errors import DocumentError, Problem, UsageError


class NoKeyError(DocumentError):
    """An override sets a key that the document does not have."""

    def __init__(self, key: str, problem: Problem) -> None:
        super().__init__([problem])
        self.key = key


@contextmanager
def translating(overrides: Sequence[str] = ()) -> Iterator[None]:
    """Translates errors of Hydra and OmegaConf into the project's own. `overrides`: those that may have caused them."""
    try:
        yield
    except MissingConfigException as error:
        missing = str(error.missing_cfg_file or "")
        group, _, name = missing.rpartition("/")
        options = sorted(error.options or [])
        meant, known = suggest(name, options), f"available: {', '.join(options)}" if options else ""
        hint = f"{meant} ({known})" if meant and known else meant or known
        raise UsageError(f"unknown {group or 'config'} {name or missing!r}", hint=hint) from error
    except OverrideParseException as error:
        raise explain_unreadable(error.override or "") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise _explain(error, overrides) from error
    except MarkedYAMLError as error:
        mark = error.problem_mark
        place = (mark.name, mark.line + 1, mark.column + 1) if mark else ("", 0, 0)
        raise DocumentError([Problem(error.problem or str(error), (), "syntax", "", *place)]) from error
    except RecursionError as error:
        raise UsageError(
            "the configs are nested too deeply to be composed", hint="write interpolations flat"
        ) from error
    except ValueError as error:  # Hydra raises it for a defaults list that it cannot read
        if not str(error).startswith("Config group override must be a string"):
            raise UsageError(f"the configs cannot be composed: {error}") from error
        raise _explain_group(overrides) from error


def _explain_group(overrides: Sequence[str]) -> UsageError:
    """The error for a group that is given a number, a list or null instead of the name of a config."""
    given = [override.partition("=")[::2] for override in overrides]
    group, value = next(((key, value) for key, value in given if key in GROUPS), ("a group", ""))
    advice = (
        f"to remove it: ~{group}" if value in ("null", "") else f"to set a value: {_dot(GROUPS.get(group, ()))}=..."
    )
    return UsageError(f"{group} takes the name of a config, not {value or 'a value'}", hint=advice)


def _dot(path: Path) -> str:
    return ".".join(map(str, path))


def _explain(error: Exception, overrides: Sequence[str]) -> UsageError | DocumentError:
    text = say_error(error)
    if text.startswith("Ambiguous value for argument"):
        hint = "to run once per value, add -m; a list is 'key=[1,2]'; text with commas needs quotes: 'key=\"1,2\"'"
        return UsageError(f"{text.replace('Ambiguous value for argument', 'several values are given by')}", hint=hint)
    found = re.match(r"Could not (override|append|delete)[^']*'([^']+)'", text)
    act, key = (found[1], found[2]) if found else ("", "")
    cause = error.__cause__
    if act == "override" and not key.startswith("hydra."):
        parent = getattr(cause, "parent_node", None)
        siblings = [str(name) for name in parent] if isinstance(parent, DictConfig) else []
        return NoKeyError(key, explain_no_key(key, str(getattr(cause, "key", "")), siblings))
    words = [hide_value(word) for word in overrides if word.partition("=")[0].lstrip("+~") == key]
    if act == "append" and "already at" in text:
        hint = f"to change it, leave out the +: {words[-1].lstrip('+') if words else f'{key}=...'}"
        return UsageError(f"{words[-1] if words else f'+{key}'} adds a key, but {key} is already set", hint=hint)
    if act == "delete":
        return _explain_removal(key, words[-1] if words else f"~{key}", text)
    if text.startswith("Multiple values for "):
        group = text.split()[3].rstrip(".")
        return UsageError(f"{group} is chosen twice", hint=f"choose it once, without a +: {group}=NAME")
    if isinstance(error, OmegaConfBaseException) and getattr(error, "full_key", None):
        return DocumentError([Problem(text, split_key(str(error.full_key)), "interpolation")])
    detail = str(cause).splitlines()[0] if isinstance(cause, OmegaConfBaseException) else ""
    found = re.match(r"Error merging override ([^=\s]+)=", text)
    if found and detail == "Cannot merge DictConfig with ListConfig":
        hint = f"set its keys: {found[1]}.KEY=..."
        return UsageError(f"{found[1]} is a section with keys of its own, and cannot be a list", hint=hint)
    return UsageError(f"{text}: {detail}" if detail and detail not in text else text)


def _explain_removal(key: str, word: str, text: str) -> UsageError:
    """The error for an override `~key` or `~key=value` (`word`) that removes nothing. `text`: Hydra's message."""
    if " and not " in text:
        message = f"{word} removes {key} only if it has this value, but it has another one"
        return UsageError(message, hint=f"to remove it in any case: ~{key}")
    unknown = explain_no_key(key)
    hint = unknown.hint if unknown.rule == "unknown-key" else "leave out this override"
    return UsageError(f"{word} removes a key, but the document does not set {key}", hint=hint)


def say_error(error: Exception) -> str:
    """The first line of an error's message, in plain words and without values that may be secrets."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if found := re.fullmatch(r"Interpolation key '(.*)' not found", text):
        return f"${{{found[1]}}} names a key that the document does not set"
    if text == "Recursive interpolation detected":
        return "the interpolation refers to itself"
    return re.sub(r"\S+=\S+", lambda found: hide_value(found[0]), text)
