"""Secrets in URLs and in arguments: telling of them, and keeping them out of what is shown and saved.

Credentials of stores come from where each store's own tools look for them (environment, profile, machine), never from
a document. An argument whose name is that of a secret may be `${oc.env:NAME}` alone: it stays that text in every
document that is printed or saved, until a target is called with it.

Secrets are recognised by their names alone: under another name a literal secret is not found. In sections of a
DeepSpeed config that have no effect a secret is only a warning, because nothing of them is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dsjob.contract.environment import CONFIG, parse_reference
from dsjob.contract.paths import Path, get_at
from dsjob.errors import Problem

# Azure's own form `abfs://container@account.../path` names a container there, which is no secret.
# A password may hold slashes, as keys of AWS do; what has no colon ends at the first one.
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
# The names that tokenizers and models have for theirs, and numbers of them.
_VOCABULARY = re.compile(
    r"(?:.*_)?(?:audio|begin|blank|bo[isv]|class|cls|end|eo[dimstv]|fill|first|image|last|mask|max|middle|min|new|next|num"
    r"|pad|patch|per|prefix|sep|separator|sos|special|speech|start|stop|suffix|unk|video|word)_token"
)


def is_secret(key: object) -> bool:
    """Whether an argument of this name is a secret."""
    words = _split_words(key) if isinstance(key, str) else ""
    return bool(_SECRET_NAME.fullmatch(words)) and not _VOCABULARY.fullmatch(words)


def _split_words(key: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-.]", "_", key).lower()


def list_texts(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The texts and numbers in a document, with their places; empty texts are none."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, (str, int, float)) and not isinstance(item, bool) and item != "":
            yield (*path, key), item
        yield from list_texts(item, (*path, key))


def find_secrets(value: Any) -> Iterator[tuple[Path, Any]]:
    """Those that are named as secrets, alone or in a list."""
    for path, item in list_texts(value):
        if is_secret(next((part for part in reversed(path) if isinstance(part, str)), None)):
            yield path, item


def hide_secrets(value: Any) -> Any:
    """A document with *** for what it holds of secrets; references stay."""
    if isinstance(value, list):
        return [hide_secrets(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = [path for path, item in find_secrets(value) if not is_reference(item)]
    secret = {path[0] for path in found if not any(isinstance(part, str) for part in path[1:])}
    return {key: "***" if key in secret else hide_secrets(item) for key, item in value.items()}


def is_argument(document: Any, path: Path) -> bool:
    """Whether a target is called with what is at `path`."""
    above = (get_at(document, path[:length]) for length in range(1, len(path)))
    return any(isinstance(value, dict) and value.get("_target_") for value in above)


def check_references(target: Mapping[str, Any], path: Path) -> Iterator[Problem]:
    """References among the arguments of a target that is not the user's own, and what it does with them is not known.

    One may be a secret by its name, as in `token: ${oc.env:HF_TOKEN}`, where nothing beside it is a URL: from other
    arguments it could get into paths and requests. `path`: that of the target.
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
        hint = f"pass it to a function of your own; if anybody may see it: environment: {names} in {CONFIG}"
        yield Problem(message, (*path, *place), "environment", hint)


def _list_own_texts(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """`list_texts` without those of targets further down."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, str):
            yield (*path, key), item
        elif not (isinstance(item, dict) and item.get("_target_")):
            yield from _list_own_texts(item, (*path, key))


def is_reference(value: object) -> bool:
    """Whether a value is read from the environment, and nothing of it stands here."""
    reference = parse_reference(value)
    return reference is not None and not reference.has_literal


def hide_value(override: str) -> str:
    """A `key=value` with *** for the value where it is a secret, or has one in it."""
    key, equals, _ = override.partition("=")
    hidden = f"{key}=***" if equals else "***"
    return hidden if any(is_secret(word) for word in re.findall(r"[\w-]+", override)) else redact(override)


def describe_secret(url: str) -> str:
    """What of a URL may not be there, in words that do not repeat it; empty where nothing is."""
    found = _USER_INFO.search(url)
    if found and (":" in found["user"] or not _AZURE.search(url[: found.start()])):
        return "it holds a user name or password"
    secret = _SECRET.search(url) if "://" in url else None
    return f"it holds a secret, {secret['key'][1:]}" if secret else ""


def redact(text: str) -> str:
    """`text` with `***` in the place of what URLs in it would give away."""

    def hide(found: re.Match[str]) -> str:
        named = ":" not in found["user"] and _AZURE.search(text[: found.start()])
        return found[0] if named else "***@"

    return _SECRET.sub(lambda found: f"{found['key']}=***", _USER_INFO.sub(hide, text))
