"""Which files, folders and stores a document may read and write: the one policy, for everything that a document names.

- Private places are closed to every document: hidden files and folders, keys, files that the environment names as
  credentials, and folders of the system. Files of the kernel are always closed.
- A document of the user's own may use all other places.
- A document from elsewhere (see `comes_from_elsewhere`) reads below its own folder and the current folder, and writes
  below the current folder.
- The user can open more by naming it: on the command line, with `--trust folder:PLACE`, or in their config file.

Links are followed before a place is judged. `Access.explain` decides. It is asked when a document is checked
(`check_keys`, and `dsjob.trust.places` for arguments of targets), when a target is called, and where dsjob's own
readers open a file (`restricting`).
"""

from __future__ import annotations

import os
import pwd
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dsjob.contract import schema as contract
from dsjob.contract.locations import (
    GRANT,
    GRANT_FOLDER,
    Refusal,
    explain_url,
    find_protocol,
    list_caches,
    list_granted,
    shorten,
)
from dsjob.contract.paths import Path, get_at
from dsjob.contract.secrets import is_secret
from dsjob.errors import Problem
from dsjob.terminal import quote_word

RESOLVED_NAME = "resolved.json"  # the document in a run's folder
PLACE_RULES = ("private-file", "outside-folder", "kernel-file")
ALLOWED: Refusal = ("", "", "")
_LOCAL = re.compile(r"(?i)^\s*(file|local):(//)?")  # as fsspec reads it
_KERNEL = ("/proc", "/dev", "/sys")
_SYSTEM = ("/etc", "/run", "/var/mail", "/var/spool", "/boot", "/Library", os.path.expanduser("~/Library"))
_PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib64")  # which documents may read
_OPEN = ("/dev/shm", "/run/media")
# Hidden folders in which tools keep data, and nothing else: what is in them is not hidden.
_DATA_FOLDERS = (".shortcut-targets-by-id", ".snapshot", ".snapshots", ".zfs")
_DATA_STORES = (
    *((".dvc", "cache"), (".git", "annex"), (".keras", "datasets")),
    *((".cache", name) for name in ("kagglehub", "modelscope", "torch")),
)
# Names of files of keys and credentials. No regular expression: compiling one takes a millisecond of each start.
_KEYS = ("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_ecdsa_sk", "id_ed25519_sk", "_netrc", "kubeconfig")
_KEY_ENDINGS = (".pem", ".key", ".p12", ".pfx", ".jks", ".keystore", ".kdb", ".kdbx", ".keytab", ".ppk")
_KEY_PARTS = ("krb5cc_", "service_account", "service-account", "client_secret")
_CREDENTIALS = tuple(f"credentials{ending}" for ending in ("", ".json", ".csv", ".db"))
_HUB_TOKENS = ("token", "stored_tokens")  # in the folder of Hugging Face
_CREDENTIAL_FILES = ("AWS_CONFIG_FILE", "KUBECONFIG", "NETRC", "KRB5CCNAME", "PGPASSFILE")
# The machine or the cluster has chosen these folders. Their own paths may be hidden.
_GIVEN_FOLDERS = ("TMPDIR", "SCRATCH", "SLURM_TMPDIR", "SLURM_SUBMIT_DIR")
_ELSEWHERE = "this document comes from elsewhere (a URL, a checkpoint, another user)"


@dataclass(frozen=True)
class Access:
    """What a document may use. Without arguments: that of a document of the user's own.

    own: whether it is one. folders: the one in which the command was started (if unset: the current one), then that of
    the document. reads, writes: places and keys that the user has named; what may be written may be read. protocols:
    those that the user has granted.
    """

    own: bool = True
    folders: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    protocols: frozenset[str] = frozenset()

    @classmethod
    def of_source(cls, source: str) -> Access:
        """That of the document at a path or URL, with what is granted to this process."""
        own = not (comes_from_elsewhere(source) or is_foreign(source))
        return cls(own, list_folders(source), (), tuple(list_granted(GRANT_FOLDER)), list_granted(GRANT))

    def explain(self, place: str, *, write: bool = False) -> Refusal:
        """Why a path or URL may not be read, or written: the rule, a message and a hint; all empty if it may."""
        refusal = explain_url(place, write=write, granted=self.protocols)
        protocol = find_protocol(place)
        if refusal[0] or protocol == "memory":
            return refusal
        if protocol not in ("file", "local"):
            return ALLOWED if self.own or not write or self._is_named(place) else _refuse_elsewhere(place, write)
        found = (self._explain_path(place, real, write) for real in list_real_paths(place))
        return next(filter(None, found), ALLOWED)

    def is_cache(self, place: str) -> bool:
        """Whether a local path is in a cache of Hugging Face."""
        return _are_below(place, self._caches)

    def may_fill(self, place: str) -> bool:
        """Whether a local path is below the current folder, in a cache of Hugging Face, or below what the user has
        named to be written: a library may write any files there."""
        return _are_below(place, (*self._folders[:1], *self._caches, *self._named_to_write))

    def names(self, key: str) -> bool:
        """Whether the user has set a key of the document, such as `monitor.wandb`, on the command line."""
        return key in self.writes

    def _is_named(self, url: str) -> bool:
        return any(url == one or url.startswith(one.rstrip("/") + "/") for one in self.writes if "://" in one)

    def _explain_path(self, place: str, real: str, write: bool) -> Refusal | None:
        if is_kernel_file(real):
            return "kernel-file", "may name files in /proc, /dev or /sys", "use a file or folder with data"
        if why := self._describe_private(real, write):
            shown = "" if real == os.path.abspath(os.path.expanduser(place)) else f"leads to {real}: "
            hint = "name another place; if you mean this one, write it on the command line (KEY=PLACE)"
            return "private-file", f"{shown}{why}", f"{hint}, or run with --trust {quote_word(GRANT_FOLDER + real)}"
        if self.own:
            return None
        usual = self._folders[:1] if write else (*self._folders, *self._public)
        inside = any(is_below(real, root) for root in (*usual, *self._list_named(write)))
        return None if inside else _refuse_elsewhere(place, write)

    def _describe_private(self, real: str, write: bool) -> str:
        """Why a real path is private; empty if it is not."""
        named = self._list_named(write)
        if not write and any(is_below(real, folder) for folder in self._public):
            token = os.path.basename(real) in _HUB_TOKENS and os.path.dirname(real) in self._caches
            return "the token of a hub is private" if token and real not in named else ""
        roots = [root for root in (*named, *self._folders, *self._given_folders) if is_below(real, root)]
        parts = os.path.relpath(real, max(roots, key=len, default="/")).split("/")
        for index, part in enumerate(parts):
            kept = part in _DATA_FOLDERS or tuple(parts[index : index + 2]) in _DATA_STORES
            if is_hidden(part) and not (kept or (write and part == ".cache")):
                return f"hidden files and folders, such as {part}, are private"
        if real not in named and (is_key_file(os.path.basename(real)) or real in self._credentials):
            return "files of keys and credentials are private"
        for folder in (*_SYSTEM, *(_PROGRAMS if write else ())):
            closed = os.path.realpath(folder)
            inside = is_below(real, closed) and not any(is_below(real, one) for one in _OPEN)
            if inside and not any(is_below(root, closed) for root in roots):
                return f"{folder} is a folder of the system"
        return ""

    def _list_named(self, write: bool) -> tuple[str, ...]:
        return self._named_to_write if write else self._named_to_write + self._named_to_read

    # Real paths. All are found once: a folder of data may have many files.

    @cached_property
    def _folders(self) -> tuple[str, ...]:
        return _list_paths(self.folders or (os.getcwd(),))

    @cached_property
    def _given_folders(self) -> tuple[str, ...]:
        return _list_paths(os.environ.get(name, "") for name in _GIVEN_FOLDERS)

    @cached_property
    def _named_to_write(self) -> tuple[str, ...]:
        return _list_paths(self.writes)

    @cached_property
    def _named_to_read(self) -> tuple[str, ...]:
        return _list_paths(self.reads)

    @cached_property
    def _caches(self) -> tuple[str, ...]:
        return _list_paths(list_caches())

    @cached_property
    def _public(self) -> tuple[str, ...]:
        """What everybody has: models of a hub, and Python's own files."""
        return (*self._caches, *_list_paths([sysconfig.get_path("stdlib")]))

    @cached_property
    def _credentials(self) -> frozenset[str]:
        return frozenset(_list_paths(_list_credentials()))


def _are_below(place: str, folders: Iterable[str]) -> bool:
    roots = tuple(folders)
    return all(any(is_below(real, root) for root in roots) for real in list_real_paths(place))


def _list_paths(places: Iterable[str]) -> tuple[str, ...]:
    paths = map(os.path.expanduser, places)
    return tuple(dict.fromkeys(_resolve(path) for path in paths if path.startswith("/")))


def _list_credentials() -> Iterator[str]:
    """The files that the environment names as credentials."""
    for name, value in os.environ.items():
        if name in _CREDENTIAL_FILES or is_secret(re.sub(r"_(FILE|PATH)$", "", name)):
            yield from filter(os.path.isfile, value.removeprefix("FILE:").split(":"))


def _refuse_elsewhere(place: str, write: bool) -> Refusal:
    granted = GRANT_FOLDER + (place if "://" in place else os.path.abspath(os.path.expanduser(place)))
    does = "writes only below the current folder" if write else "reads only below its own folder and the current folder"
    hint = f"if you trust it, write this on the command line (KEY=PLACE), or run with --trust {quote_word(granted)}"
    return "outside-folder", f"{_ELSEWHERE}, so it {does}", hint


def list_real_paths(place: str) -> list[str]:
    """The real paths that a local path or URL may mean: libraries may resolve `..` before they follow links, and a
    path may begin like a URL."""
    paths = (os.path.expanduser(text) for text in dict.fromkeys((place, _LOCAL.sub("", place))))
    found = (_resolve(spelled) for path in paths for spelled in (path, os.path.normpath(path)))
    return list(dict.fromkeys(found))


def _resolve(path: str) -> str:
    try:
        return "/" + os.path.realpath(path).lstrip("/")
    except (OSError, ValueError):  # not a valid file name
        return path


def is_below(path: str, folder: str) -> bool:
    """Whether a real path is a folder, or below it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def is_kernel_file(real: str) -> bool:
    """Whether a real path is a file of the kernel, or a folder of such files."""
    return any(is_below(real, folder) for folder in _KERNEL) and not is_below(real, "/dev/shm")


def is_hidden(name: str) -> bool:
    """Whether a part of a path is hidden."""
    return name.startswith(".") and name.strip(".") != ""


def is_key_file(name: str) -> bool:
    """Whether a file's name is one of keys or credentials."""
    name = name.lower()
    found = name in (*_KEYS, *_CREDENTIALS) or name.endswith(_KEY_ENDINGS)
    listed = name.endswith(tuple(f"{mark}{known}" for mark in "._-" for known in _CREDENTIALS))
    return found or listed or any(part in name for part in _KEY_PARTS)


# ---- the access in force

_in_force: ContextVar[Access | None] = ContextVar("access", default=None)


@contextmanager
def restricting(access: Access | None) -> Iterator[None]:
    """While the block runs, what dsjob opens on this thread must be open to a document with this access. None: no
    document has named it."""
    token = _in_force.set(access)
    try:
        yield
    finally:
        _in_force.reset(token)


def explain_place(place: str, *, write: bool) -> Refusal:
    """Why dsjob may not open a path or URL: it has a protocol that is not allowed, or a document has named it and may
    not use it. All empty if it may."""
    access = _in_force.get()
    return explain_url(place, write=write) if access is None else access.explain(place, write=write)


def find_access() -> Access | None:
    """The access in force; None if what is opened was not named by a document."""
    return _in_force.get()


# ---- documents


def list_folders(source: str) -> tuple[str, ...]:
    """The current folder, and that of the document at a path or URL if it is a local file."""
    path = source.removeprefix("file://")
    return (os.getcwd(), *([os.path.dirname(os.path.abspath(path))] if os.path.isfile(path) else []))


def comes_from_elsewhere(source: str) -> bool:
    """Whether a document is not the user's own, because it is read from a URL, is in a checkpoint's folder, or is a
    run's `resolved.json` that belongs to another user."""
    if "://" in source:
        return True
    path = os.path.realpath(source)
    folder = os.path.dirname(path)
    if re.fullmatch(r".+-a\d{4,}", os.path.basename(folder)):
        return True
    if all(os.path.lexists(os.path.join(folder, name)) for name in ("manifest.json", "state.json")):
        return True
    return os.path.basename(path) == RESOLVED_NAME and bool(find_other_owner(path))


def is_foreign(source: str) -> bool:
    """Whether a document is a file of another user outside the current folder. Its modules have rules of their own."""
    if not os.path.isfile(source) or os.stat(source).st_uid in (0, os.geteuid()):
        return False
    return not is_below(os.path.realpath(source), os.path.realpath(os.getcwd()))


def find_other_owner(path: str) -> str:
    """The owner of a file, if that is another user; otherwise empty."""
    owner = os.stat(path).st_uid if os.path.exists(path) else os.geteuid()
    if owner == os.geteuid():
        return ""
    try:
        return f"the user {pwd.getpwuid(owner).pw_name}"
    except KeyError:
        return f"the user with the id {owner}"


def check_keys(document: Mapping[str, Any], access: Access) -> Iterator[Problem]:
    """Problems with the places that a document's own keys name: those that the schemas mark with `x-place`."""
    for path, value, mark in list_places(document):
        if not isinstance(value, str) or not _is_used(document, path, value):
            continue
        place = fill_pattern(value, document)
        if path[-1] == "output_path":
            job_name = str(get_at(document, (*path[:-1], "job_name"), ""))
            if ".." in job_name.split("/") or job_name.startswith("/"):
                message = f"{shorten(job_name)}: leads out of output_path"
                yield Problem(message, (*path[:-1], "job_name"), "outside-folder", "name a folder below it")
            place = os.path.join(place, job_name)
        rule, message, hint = access.explain(place, write=mark == "write")
        if path == ("checkpoint", "dir") and not has_task(document, "train"):  # an evaluation only reads it
            rule = rule and access.explain(place)[0]
        if rule:
            yield Problem(f"{shorten(place)}: {message}", path, rule, hint)


def fill_pattern(place: str, document: Mapping[str, Any]) -> str:
    """A place with a name and a time for those of the run (`output.dir`)."""
    return place.replace("%name", str(document.get("name"))).replace("%time", "time")


def list_places(document: Mapping[str, Any]) -> Iterator[tuple[Path, Any, str]]:
    """The places that a document's own keys name: path, value, and whether to `read` or to `write`."""
    yield from _find_places(document, contract.job_schema(), ())


def _find_places(value: Mapping[str, Any], schema: contract.Schema, path: Path) -> Iterator[tuple[Path, Any, str]]:
    for key, item in value.items():
        below = contract.child(schema, key, value) or {}
        if mark := below.get("x-place"):
            yield (*path, key), item, mark
        if isinstance(item, Mapping):
            yield from _find_places(item, below, (*path, key))


def has_task(document: Mapping[str, Any], task: str) -> bool:
    """Whether a task is one of a document, which may be malformed."""
    tasks = document.get("tasks") or ["train"]
    return isinstance(tasks, list) and task in tasks


def _is_used(document: Mapping[str, Any], path: Path, value: str) -> bool:
    """Whether a run of the document opens the place at `path`."""
    if path[-1] == "resume":
        return not re.fullmatch(r"[\w.-]+", value)  # otherwise a word, or a tag
    if path[-1] == "nvme_path":
        return bool(get_at(document, (*path[:-1], "device")) == "nvme")
    if path == ("predict", "dir"):
        return has_task(document, "predict")
    if path[-1] == "output_path":
        return has_task(document, "train") and value != "" and get_at(document, (*path[:-1], "enabled")) is True
    return True
