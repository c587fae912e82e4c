"""Secrets in URLs and arguments: finding them, and keeping them out of what is shown and saved.

Credentials for stores come from where each store's own tools look for them (environment, profile, machine), never from
a document. An argument that is named like a secret may only be `${oc.env:NAME}`. Every document that is printed or
saved keeps that text; the variable is read when the target is called.

Secrets are recognised by their names only: a literal secret under another name is not found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dsjob.contract.environment import CONFIG, parse_reference
from dsjob.contract.paths import Path, get_at
from dsjob.errors import Problem

# User info in a URL: `user:password@` or `user@`. In Azure's `abfs://container@account.../path`, the part before the @
# is a container, which is no secret (`_AZURE`). A password may contain slashes, as AWS keys do, so with a colon the
# match runs up to the @; without one it ends at the first slash.
_USER_INFO = re.compile(r"(?<=://)(?P<user>[^/:@\s]*:[^@\s]*|[^/@\s]*)@")
_SECRET = re.compile(
    r"(?i)(?P<key>[?&;#](?:(?:[\w.-]*[-_.])?key(?:[-_.][\w.-]*)?|[\w.-]*(?:accesskey|apikey|token|secret|passw|credential"
    r"|signature)[\w.-]*|sig|pwd))=[^&;#\s\"']*"
)
_AZURE = re.compile(r"(?i)\b(?:abfss?|az|wasbs?)://$")


_SECRET_NAME = re.compile(
    r"(?:.*_)?(?:secret|password|passwd|pwd|passphrase|(?:api|access|account|secret|private)_?key|authorization"
    r"|credentials?|connection_?string|dsn|token|(?:auth|access|api)token)"
)
# Names of tokenizers' and models' tokens, and of numbers of tokens: these are no secrets.
_VOCABULARY = re.compile(
    r"(?:.*_)?(?:audio|begin|blank|bo[isv]|class|cls|end|eo[dimstv]|fill|first|image|last|mask|max|middle|min|new|next|num"
    r"|pad|patch|per|prefix|sep|separator|sos|special|speech|start|stop|suffix|unk|video|word)_token"
)


def is_secret(key: object) -> bool:
    """Whether an argument with this name is a secret."""
    words = _split_words(key) if isinstance(key, str) else ""
    return bool(_SECRET_NAME.fullmatch(words)) and not _VOCABULARY.fullmatch(words)


def _split_words(key: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-.]", "_", key).lower()


def list_texts(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The non-empty texts and the numbers in a document, each with its path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, (str, int, float)) and not isinstance(item, bool) and item != "":
            yield (*path, key), item
        yield from list_texts(item, (*path, key))


def find_secrets(value: Any) -> Iterator[tuple[Path, Any]]:
    """The texts and numbers that are named like secrets, alone or in a list, each with its path."""
    for path, item in list_texts(value):
        if is_secret(next((part for part in reversed(path) if isinstance(part, str)), None)):
            yield path, item


def hide_secrets(value: Any) -> Any:
    """A copy of a document with *** in place of secrets; references to the environment stay."""
    if isinstance(value, list):
        return [hide_secrets(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = [path for path, item in find_secrets(value) if not is_reference(item)]
    secret = {path[0] for path in found if not any(isinstance(part, str) for part in path[1:])}
    return {key: "***" if key in secret else hide_secrets(item) for key, item in value.items()}


def is_argument(document: Any, path: Path) -> bool:
    """Whether the value at `path` is (part of) an argument of a target."""
    above = (get_at(document, path[:length]) for length in range(1, len(path)))
    return any(isinstance(value, dict) and value.get("_target_") for value in above)


def check_references(target: Mapping[str, Any], path: Path) -> Iterator[Problem]:
    """Problems with references to the environment among the arguments of a target that is not the user's own code.

    What such a target does with a value is unknown: it could put it into a path or a request. Only an argument that is
    named like a secret may be a reference, as in `token: ${oc.env:HF_TOKEN}`, and only if no other argument is a URL,
    to which the secret could be sent. `path`: that of the target.
    """
    own = {key: item for key, item in target.items() if key != "_target_"}
    remote = any(isinstance(text, str) and "://" in text for _, text in list_texts(own))
    for place, text in _list_own_texts(own):
        reference = parse_reference(text)
        if reference is None or (len(place) == 1 and is_secret(place[0]) and not remote):
            continue
        where = "beside a URL" if remote and is_secret(place[-1]) else "here"
        message = f"may not be read from the environment variable {reference.name} {where}"
        names = f"[{', '.join(reference.names)}]"
        hint = f"pass it to a function of your own; if it is not secret, add environment: {names} to {CONFIG}"
        yield Problem(message, (*path, *place), "environment", hint)


def _list_own_texts(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Like `list_texts`, without the arguments of nested targets, and without numbers."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, str):
            yield (*path, key), item
        elif not (isinstance(item, dict) and item.get("_target_")):
            yield from _list_own_texts(item, (*path, key))


def is_reference(value: object) -> bool:
    """Whether a value comes entirely from the environment, without a literal default in the document."""
    reference = parse_reference(value)
    return reference is not None and not reference.has_literal


def hide_value(override: str) -> str:
    """A `key=value` override for display: with *** for the value if it is a secret or contains one."""
    key, equals, _ = override.partition("=")
    hidden = f"{key}=***" if equals else "***"
    return hidden if any(is_secret(word) for word in re.findall(r"[\w-]+", override)) else redact(override)


def describe_secret(url: str) -> str:
    """Why a URL may not be in a document, without repeating the secret; empty if it may."""
    found = _USER_INFO.search(url)
    if found and (":" in found["user"] or not _AZURE.search(url[: found.start()])):
        return "it contains a user name or password"
    secret = _SECRET.search(url) if "://" in url else None
    return f"it contains a secret, {secret['key'][1:]}" if secret else ""


def redact(text: str) -> str:
    """`text` with `***` in place of user names, passwords and secrets in its URLs."""

    def hide(found: re.Match[str]) -> str:
        named = ":" not in found["user"] and _AZURE.search(text[: found.start()])
        return found[0] if named else "***@"

    return _SECRET.sub(lambda found: f"{found['key']}=***", _USER_INFO.sub(hide, text))
