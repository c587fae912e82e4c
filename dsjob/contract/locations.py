"""Which URLs dsjob opens. There is one policy for documents, for arguments of commands, and for what constructors pass
on. Which places a document may name is decided by `access`.

fsspec opens everything in its registry, and some of that runs code: `reference::data:...` renders the templates in its
own text. So a URL must have a protocol on this list, or one that the user has granted (`--trust protocol:sftp`, or the
same under `trust:` in their config file); chains (`a::b`) are refused. `storage` asks this module before it opens
anything. The check of documents asks about the same texts beforehand, to report their places.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from dsjob.contract.paths import Path
from dsjob.contract.secrets import redact
from dsjob.errors import Problem
from dsjob.terminal import quote_word

WRITABLE = ("file", "local", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
READABLE = (*WRITABLE, "http", "https")
GRANT = "protocol:"  # the prefix of a protocol among the names that a user trusts
GRANT_FOLDER = "folder:"
# Names of arguments that tell libraries where to write.
_WRITTEN = re.compile(
    r"(?:\w+_)?(?:cache|download|dump|export|local|log|logging|offload|out|output|save|storage|temp|tmp)s?"
    r"_(?:dir|directory|folder|path|root|file|filename|file_name|storage)|dirpath|logdir|outdir|savedir|storage"
)
_CACHES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ASSETS_CACHE", "XDG_CACHE_HOME")
_METADATA = ("metadata", "metadata.google.internal", "instance-data", "100.100.100.200")
_SHOWN = 80  # characters of a URL in a message
_PROTOCOL = re.compile(r"[A-Za-z0-9][A-Za-z0-9+.-]*")
# File systems of fsspec (and one of datasets) that wrap another one. With any other name, `a::b` is plain text.
_WRAPPERS = (
    "asyncwrapper", "async_wrapper", "blockcache", "bz2", "cached", "chained", "dask", "data", "dir", "filecache",
    "generic", "gzip", "libarchive", "lz4", "reference", "simplecache", "tar", "xz", "zip", "zstd",
)  # fmt: skip
Refusal = tuple[str, str, str]  # a rule, a message and a hint; all empty if nothing is refused
_granted: list[Callable[[], Iterable[str]]] = []


def allow(find_granted: Callable[[], Iterable[str]]) -> None:
    """Grants this process what `find_granted` returns: `protocol:NAME` and `folder:PLACE`. It is called when a grant is
    needed."""
    _granted.append(find_granted)


@contextmanager
def allowing(find_granted: Callable[[], Iterable[str]]) -> Iterator[None]:
    """Like `allow`, but only while the block runs. Everything else that is allowed in the block ends with it too."""
    before = list(_granted)
    allow(find_granted)
    try:
        yield
    finally:
        _granted[:] = before


def list_granted(kind: str, granted: Iterable[str] | None = None) -> frozenset[str]:
    """What is granted of a kind, GRANT or GRANT_FOLDER, without its prefix. granted: what the user trusts; None: what
    is granted to this process."""
    given = [one for find in _granted for one in find()] if granted is None else granted
    return frozenset(one.removeprefix(kind) for one in given if one.startswith(kind))


def explain_url(url: str, *, write: bool = False, granted: Collection[str] | None = None) -> Refusal:
    """Why a URL may not be opened: the rule, a message and a hint; all empty if it may.

    `granted`: protocols allowed in addition to the list; None: those allowed in this process (see `allow`).
    """
    if "::" in url:
        hint = "use the URL of the file or folder itself"
        return "chained-url", "'::' chains file systems, and a chain can run code", hint
    protocol = find_protocol(url)
    if protocol in ("http", "https") and _serves_credentials(url):
        return "metadata-server", "this server gives the credentials of a cloud machine to whoever asks", "correct it"
    if protocol in (WRITABLE if write else READABLE):
        return "", "", ""
    if protocol in READABLE:
        return "read-only-url", f"dsjob only reads from {protocol}", "use a local folder or the URL of an object store"
    if protocol in (granted if granted is not None else list_granted(GRANT)):
        return "", "", ""
    if protocol.lower() in READABLE:
        return "untrusted-protocol", f"unknown protocol {protocol!r}", f"write {protocol.lower()}://"
    return (
        "untrusted-protocol",
        f"the protocol {shorten(protocol)!r} is not trusted",
        f"{_how_to_grant(protocol)}; paths and {', '.join(READABLE)} need no trust",
    )


def _serves_credentials(url: str) -> bool:
    """Whether a web server is the one in each machine of a cloud that serves its credentials."""
    import ipaddress  # only documents that name a web server need these
    import socket

    try:
        host = (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:  # not a URL
        return False
    try:
        address = ipaddress.ip_address(socket.inet_aton(host))  # also 2852039166 and 0xa9.254.169.254
    except OSError:
        return host in _METADATA
    return address.is_link_local or str(address) in _METADATA


def _how_to_grant(protocol: str) -> str:
    if not _PROTOCOL.fullmatch(protocol):
        return "correct the URL"
    return f"if you know what it opens, run with --trust {quote_word(GRANT + protocol)} or list it in your config file"


def find_protocol(url: str) -> str:
    """The protocol of a URL as fsspec sees it; "file" for a path."""
    before, mark, _ = url.partition("://")
    if mark:
        return before
    return "data" if url[:5].lower() == "data:" else "file"


def shorten(url: str) -> str:
    """A URL for a message: without secrets, and shortened."""
    return redact(url[:_SHOWN]) + ("..." if url[_SHOWN:] else "")


def _explain(url: str, path: Path, found: Refusal) -> Iterator[Problem]:
    rule, message, hint = found
    if rule:
        yield Problem(f"{shorten(url)}: {message}", path, rule, hint)


def check_texts(value: Any, path: Path, granted: Collection[str], *, listed: bool) -> Iterator[Problem]:
    """Problems with URLs among the arguments of a target, not including nested targets.

    `listed`: the target is a library's constructor, which would open any URL. Other code may use its texts for
    anything, so only texts that can be nothing but a chain of file systems are refused there.
    """
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        here: Path = (*path, key)
        if isinstance(item, str):
            yield from _explain(item, here, _explain_text(key, item, granted, listed))
        elif not (isinstance(item, Mapping) and "_target_" in item):
            yield from check_texts(item, here, granted, listed=listed)
        if listed and isinstance(key, str):  # keys can be URLs too, in maps of data files
            yield from _explain(key, here, _explain_text("", key, granted, listed))


def _explain_text(key: object, text: str, granted: Collection[str], listed: bool) -> Refusal:
    if "::" in text:
        return _explain_chain(text, granted, listed)
    protocol = find_protocol(text).strip()
    if not listed or not (protocol := protocol if _PROTOCOL.fullmatch(protocol) else ""):
        return "", "", ""
    if isinstance(key, str) and key.endswith("protocol"):  # an option of fsspec that selects another file system
        return explain_url(f"{text}://", granted=granted)
    return explain_url(text.strip(), granted=granted)


def _explain_chain(text: str, granted: Collection[str], listed: bool) -> Refusal:
    parts = [part.strip() for part in text.split("::")]
    named = [find_protocol(part) if "://" in part else part.split(":")[0] for part in parts]
    if listed:
        # In a template such as `{{ a[::-1] }}` no part can be a protocol, so it is no URL.
        return explain_url(text) if any(_PROTOCOL.fullmatch(name) or not name for name in named) else ("", "", "")
    for name in named:
        if name.lower() in _WRAPPERS and name not in granted:
            return "untrusted-protocol", f"the protocol {shorten(name)!r} is not trusted", _how_to_grant(name)
    return "", "", ""


def is_written(key: object) -> bool:
    """Whether an argument with this name tells a library where to write."""
    return isinstance(key, str) and bool(_WRITTEN.fullmatch(key.lower()))


def list_caches() -> Iterator[str]:
    """The folders of Hugging Face's caches."""
    for name in _CACHES:
        if place := os.environ.get(name):
            yield os.path.abspath(os.path.join(place, "huggingface") if name == "XDG_CACHE_HOME" else place)
    yield os.path.expanduser("~/.cache/huggingface")
