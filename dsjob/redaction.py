"""Secrets in URLs: telling of them, and keeping them out of what is shown. Credentials come from where each store's own
tools look for them (environment, profile, machine), never from a document."""

from __future__ import annotations

import re

# Azure's own form `abfs://container@account.../path` names a container there, which is no secret.
# A password may hold slashes, as keys of AWS do; what has no colon ends at the first one.
_USER_INFO = re.compile(r"(?<=://)(?P<user>[^/:@\s]*:[^@\s]*|[^/@\s]*)@")
_SECRET = re.compile(
    r"(?i)(?P<key>[?&;#](?:(?:[\w.-]*[-_.])?key(?:[-_.][\w.-]*)?|[\w.-]*(?:accesskey|apikey|token|secret|passw|credential"
    r"|signature)[\w.-]*|sig|pwd))=[^&;#\s\"']*"
)
_AZURE = re.compile(r"(?i)\b(?:abfss?|az|wasbs?)://$")


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
