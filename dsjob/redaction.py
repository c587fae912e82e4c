"""Secrets in URLs and in arguments: telling of them, and keeping them out of what is shown and saved.

Credentials of stores come from where each store's own tools look for them (environment, profile, machine), never from
a document. An argument whose name is that of a secret may be `${oc.env:NAME}` alone: it stays that text in every
document that is printed or saved, until a target is called with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dsjob.paths import Path

# Azure's own form `abfs://container@account.../path` names a container there, which is no secret.
# A password may hold slashes, as keys of AWS do; what has no colon ends at the first one.
_USER_INFO = re.compile(r"(?<=://)(?P<user>[^/:@\s]*:[^@\s]*|[^/@\s]*)@")
_SECRET = re.compile(
    r"(?i)(?P<key>[?&;#](?:(?:[\w.-]*[-_.])?key(?:[-_.][\w.-]*)?|[\w.-]*(?:accesskey|apikey|token|secret|passw|credential"
    r"|signature)[\w.-]*|sig|pwd))=[^&;#\s\"']*"
)
_AZURE = re.compile(r"(?i)\b(?:abfss?|az|wasbs?)://$")


# `token` by itself is one; `pad_token` and `eos_token` are not.
_SECRET_NAME = re.compile(
    r"(?:.*_)?(?:secret|password|passwd|passphrase|(?:api|access|account|secret|private)_?key"
    r"|(?:auth|access|api|bearer|hf|hub|refresh|sas|security|session)_?token)|token"
)
REFERENCE = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)\s*\}")


def is_secret(key: object) -> bool:
    """Whether an argument of this name is a secret."""
    return isinstance(key, str) and bool(_SECRET_NAME.fullmatch(_split_words(key)))


def _split_words(key: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-.]", "_", key).lower()


def find_secrets(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """The texts in a document that are named as secrets, with their places; empty ones are none."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, str) and item and is_secret(key):
            yield (*path, key), item
        yield from find_secrets(item, (*path, key))


def hide_value(override: str) -> str:
    """A `key=value` with *** for the value where it is a secret, or has one in it."""
    key, _, _ = override.partition("=")
    words = re.findall(r"[\w-]+", override)
    return f"{key}=***" if any(is_secret(word) for word in words) else override


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
