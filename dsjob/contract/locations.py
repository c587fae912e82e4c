"""Which URLs dsjob opens, and which folders a document may write to. There is one policy for documents, for arguments
of commands, and for what constructors pass on.

fsspec opens everything in its registry, and some of that runs code: `reference::data:...` renders the templates in its
own text. So a URL must have a protocol on this list, or one that the user has granted (`--trust protocol:sftp`, or the
same under `trust:` in their config file); chains (`a::b`) are refused. `storage` asks this module before it opens
anything. The check of documents asks about the same texts beforehand, to report their places. Listed constructors may
write files (`cache_dir`) below the current folder, in Hugging Face's cache, and in folders that the user has granted
(`--trust folder:/data`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dsjob.contract.paths import Path, get_at
from dsjob.contract.secrets import redact
from dsjob.errors import Problem
from dsjob.terminal import quote_word

WRITABLE = ("file", "local", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
READABLE = (*WRITABLE, "http", "https")
NEVER_GRANTED = ("chained-url", "read-only-url")  # rules that no flag disables
GRANT = "protocol:"  # the prefix of a protocol among the names that a user trusts
GRANT_FOLDER = "folder:"
# Names of arguments that tell libraries where to write.
_WRITTEN = re.compile(
    r"(?:\w+_)?(?:cache|download|dump|export|local|log|logging|offload|out|output|save|storage|temp|tmp)s?"
    r"_(?:dir|directory|folder|path|root|file|filename|file_name|storage)|dirpath|logdir|outdir|savedir|storage"
)
_CACHES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ASSETS_CACHE", "XDG_CACHE_HOME")
_SHOWN = 80  # characters of a URL in a message
_PROTOCOL = re.compile(r"[A-Za-z0-9][A-Za-z0-9+.-]*")
# File systems of fsspec (and one of datasets) that wrap another one. With any other name, `a::b` is plain text.
_WRAPPERS = (
    "asyncwrapper", "async_wrapper", "blockcache", "bz2", "cached", "chained", "dask", "data", "dir", "filecache",
    "generic", "gzip", "libarchive", "lz4", "reference", "simplecache", "tar", "xz", "zip", "zstd",
)  # fmt: skip
# The document's own keys that name files or folders, and whether dsjob writes there.
_KEYS = {
    ("checkpoint", "dir"): True,
    ("checkpoint", "resume"): False,
    ("output", "dir"): True,
    ("deepspeed",): False,
}
_granted: list[Callable[[], Iterable[str]]] = []


def allow(find_protocols: Callable[[], Iterable[str]]) -> None:
    """Lets this process open the protocols that `find_protocols` returns. It is called for each unlisted protocol."""
    _granted.append(find_protocols)


@contextmanager
def allowing(find_protocols: Callable[[], Iterable[str]]) -> Iterator[None]:
    """Like `allow`, but only while the block runs. Everything else that is allowed in the block ends with it too."""
    before = list(_granted)
    allow(find_protocols)
    try:
        yield
    finally:
        _granted[:] = before


def explain_url(url: str, *, write: bool = False, granted: Collection[str] | None = None) -> tuple[str, str, str]:
    """Why a URL may not be opened: the rule, a message and a hint; all empty if it may.

    `granted`: protocols allowed in addition to the list; None: those allowed in this process (see `allow`).
    """
    if "::" in url:
        hint = "use the URL of the file or folder itself"
        return "chained-url", "'::' chains file systems, and a chain can run code", hint
    protocol = find_protocol(url)
    if protocol in (WRITABLE if write else READABLE):
        return "", "", ""
    if protocol in READABLE:
        return "read-only-url", f"dsjob only reads from {protocol}", "use a local folder or the URL of an object store"
    if protocol in (granted if granted is not None else {name for find in _granted for name in find()}):
        return "", "", ""
    if protocol.lower() in READABLE:
        return "untrusted-protocol", f"unknown protocol {protocol!r}", f"write {protocol.lower()}://"
    return (
        "untrusted-protocol",
        f"the protocol {shorten(protocol)!r} is not trusted",
        f"{_how_to_grant(protocol)}; paths and {', '.join(READABLE)} need no trust",
    )


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


def check_keys(document: Mapping[str, Any], granted: Collection[str]) -> Iterator[Problem]:
    """Problems with the places that a document's own keys tell dsjob to read or write."""
    for path, write in _KEYS.items():
        value = get_at(document, path)
        if isinstance(value, str):
            yield from _explain(value, path, explain_url(value, write=write, granted=granted))


def _explain(url: str, path: Path, found: tuple[str, str, str]) -> Iterator[Problem]:
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


def _explain_text(key: object, text: str, granted: Collection[str], listed: bool) -> tuple[str, str, str]:
    if "::" in text:
        return _explain_chain(text, granted, listed)
    protocol = find_protocol(text).strip()
    if not listed or not (protocol := protocol if _PROTOCOL.fullmatch(protocol) else ""):
        return "", "", ""
    if isinstance(key, str) and key.endswith("protocol"):  # an option of fsspec that selects another file system
        return explain_url(f"{text}://", granted=granted)
    return explain_url(text.strip(), granted=granted)


def _explain_chain(text: str, granted: Collection[str], listed: bool) -> tuple[str, str, str]:
    parts = [part.strip() for part in text.split("::")]
    named = [find_protocol(part) if "://" in part else part.split(":")[0] for part in parts]
    if listed:
        # In a template such as `{{ a[::-1] }}` no part can be a protocol, so it is no URL.
        return explain_url(text) if any(_PROTOCOL.fullmatch(name) or not name for name in named) else ("", "", "")
    for name in named:
        if name.lower() in _WRAPPERS and name not in granted:
            return "untrusted-protocol", f"the protocol {shorten(name)!r} is not trusted", _how_to_grant(name)
    return "", "", ""


def check_folders(value: Any, path: Path, granted: Iterable[str]) -> Iterator[Problem]:
    """Problems with folders that a listed constructor's arguments tell it to write to, not including nested targets.

    `granted`: folders allowed in addition to the current one and Hugging Face's cache.
    """
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(key, str) and isinstance(item, str) and _WRITTEN.fullmatch(key.lower()):
            if not any(_is_inside(item, folder) for folder in (os.getcwd(), *_list_caches(), *granted)):
                folder = os.path.abspath(os.path.expanduser(item))
                granting = quote_word(GRANT_FOLDER + folder)
                advice = f"leave it out, use a folder below the current one, or run with --trust {granting}"
                message = f"{shorten(item)} is outside the current folder, and the target would write there"
                yield Problem(message, (*path, key), "outside-folder", advice)
        elif not (isinstance(item, Mapping) and "_target_" in item):
            yield from check_folders(item, (*path, key), granted)


def _is_inside(path: str, folder: str) -> bool:
    """Whether a path is in a folder after following symbolic links; a URL is not."""
    if find_protocol(path) != "file" or "\0" in path:
        return False
    real, top = os.path.realpath(os.path.expanduser(path)), os.path.realpath(folder)
    return real == top or real.startswith(top.rstrip(os.sep) + os.sep)


def _list_caches() -> Iterator[str]:
    for name in _CACHES:
        if place := os.environ.get(name):
            yield os.path.join(place, "huggingface") if name == "XDG_CACHE_HOME" else place
    yield os.path.expanduser("~/.cache/huggingface")
