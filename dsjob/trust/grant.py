"""Trust: which code a document may name. Decides by name, and by where Python would find a module, before any import.

Trusted are `LISTED` (constructors of dsjob, torch, torchmetrics, torchvision, timm, transformers and datasets), modules
in the job's own folders, and what the user names with --trust. A document adds nothing. `targets` imports; `user`
collects grants.

The list contains no functions that unpickle, compile or download. A run folder's resolved.json may name modules in the
current folder if the file belongs to the user. Names in a checkpoint always need the flag, because checkpoints are
passed on to others. A prefix grants everything that is defined below it, and what its modules export with `__all__`.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import inspect
import json
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.machinery import ModuleSpec, PathFinder
from operator import attrgetter
from types import ModuleType
from typing import Any

from dsjob.contract.access import PLACE_RULES, Access, check_keys, has_task
from dsjob.contract.locations import GRANT, GRANT_FOLDER, check_texts, list_granted
from dsjob.contract.paths import Path
from dsjob.contract.secrets import check_references
from dsjob.errors import Problem, UsageError
from dsjob.terminal import quote_word
from dsjob.trust.data_folders import check_contents
from dsjob.trust.hub import check_arguments, check_folders_of_models, name_tokenizer
from dsjob.trust.listed import LISTED, is_listed, matches
from dsjob.trust.literals import LOADERS, check_literals, check_options, is_reader
from dsjob.trust.places import check_places, check_written
from dsjob.trust.services import check_services
from dsjob.trust.vision import check_weights


@dataclasses.dataclass(frozen=True)
class Trust:
    """What the user has granted. Without arguments: only `LISTED`."""

    prefixes: tuple[str, ...] = ()  # --trust: dotted names, protocol:NAME, folder:PLACE
    folders: tuple[str, ...] = ()  # searched for modules after all installed packages
    rejected: tuple[tuple[str, str], ...] = ()  # folders that are not searched, each with the reason, for messages
    local: bool = True  # whether modules in `folders` are trusted; False for documents from elsewhere
    remote_code: bool = False  # --trust-remote-code
    unpinned: bool = False  # --unpinned
    places: tuple[str, ...] = ()  # the current folder, then the document's own
    foreign: bool = False  # whether the document is another user's file
    reads: tuple[str, ...] = ()  # what the user has named on the command line, to be read
    writes: tuple[str, ...] = ()  # the same, to be written

    def __post_init__(self) -> None:
        for prefix in self.prefixes:
            if not re.fullmatch(
                rf"[^\W\d]\w*(\.[^\W\d]\w*)*|{GRANT}[A-Za-z0-9][A-Za-z0-9+.-]*|{GRANT_FOLDER}([/~]|\w+://).*", prefix
            ):
                hint = f"for example --trust my_package.models, --trust {GRANT}sftp or --trust {GRANT_FOLDER}/data"
                raise UsageError(f"--trust {prefix}: not a dotted name", hint=hint)

    def to_text(self) -> str:
        """This trust as JSON for another process; `from_text` reads it."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Trust:
        """The trust that `to_text` wrote."""
        given: dict[str, Any] = json.loads(text)
        given |= {key: tuple(value) for key, value in given.items() if isinstance(value, list)}
        given["rejected"] = tuple((folder, why) for folder, why in given["rejected"])
        return cls(**given)

    @property
    def protocols(self) -> frozenset[str]:
        """The URL protocols that the user has granted in addition to those of `locations`."""
        return list_granted(GRANT, self.prefixes)

    @property
    def importable(self) -> tuple[str, ...]:
        """The folders to add to `sys.path`. Installed packages would find optional imports there too, so for a document
        from elsewhere these are only folders with a module that the user has named."""
        if self.local:
            return self.folders
        tops = dict.fromkeys(prefix.split(".")[0] for prefix in self.prefixes if ":" not in prefix)
        found = [spec for top in tops if (spec := find_top(top, self.folders)) is not None]
        return tuple(dict.fromkeys(folder for spec in found if (folder := locate_local(spec, self.folders))))

    @property
    def access(self) -> Access:
        """The places that the document may use."""
        writes = (*self.writes, *sorted(list_granted(GRANT_FOLDER, self.prefixes)))
        return Access(self.local and not self.foreign, self.places, self.reads, writes, self.protocols)

    def names(self, path: str) -> bool:
        """Whether the user has granted `path` or a prefix of it."""
        return any(path == prefix or path.startswith(prefix + ".") for prefix in self.prefixes)


SHARED = "anyone can write to it"  # the reason for rejecting a folder
_BUILDERS = ("from_pretrained", "from_config")  # alternative constructors, which a class may inherit


# ---- decisions by name and location, before anything is imported


def explain_distrust(path: str, trust: Trust) -> str:
    """Why `path` may not be imported; empty if it may, or if there is no such module.

    Nothing is imported. The decision depends on where Python would find the top-level module.
    """
    top = path.split(".")[0]
    if trust.names(path):
        return ""
    if (spec := find_top(top, trust.folders)) is None:
        return explain_rejected(path, trust)
    if place := locate_local(spec, trust.folders):
        elsewhere = "the document comes from elsewhere (a URL, a checkpoint, another user's run)"
        return "" if trust.local else f"{elsewhere}, and {top} is in {place}"
    if is_listed(path):
        return ""
    if top in sys.stdlib_module_names:
        return f"{top} belongs to Python's standard library"
    if top == "__main__":
        return "ranks and checkpoints cannot import what a script or notebook defines"
    if top in {row.module.split(".")[0] for row in LISTED}:
        return f"it is not on dsjob's list of harmless constructors of {top}"
    found = _real_file(spec)
    if linked := _is_link(spec, trust.folders):
        return f"{linked} is a link to {found}"
    return f"{top} is an installed package{f' ({found})' if found else ''}, not a module in this job's folder"


def explain_rejected(path: str, trust: Trust) -> str:
    """For a module in a rejected folder: the folder, and why it is not searched; otherwise empty."""
    top = path.split(".")[0]
    found = (entry for entry in trust.rejected if PathFinder.find_spec(top, [entry[0]]) is not None)
    return next((f"{top} is in {folder}, which is not searched: {why}" for folder, why in found), "")


def is_own(path: str, trust: Trust) -> bool:
    """Whether `path` is the user's own code, or granted with --trust."""
    spec = None if trust.names(path) else find_top(path.split(".")[0], trust.folders)
    return trust.names(path) or (spec is not None and trust.local and bool(locate_local(spec, trust.folders)))


def find_top(name: str, folders: Sequence[str]) -> ModuleSpec | None:
    """The spec of the module that `import name` would load, with `folders` at the end of sys.path."""
    if name in sys.modules:
        return sys.modules[name].__spec__ or ModuleSpec(name, None)
    for finder in sys.meta_path:
        if getattr(finder, "__module__", "") == "_distutils_hack":
            continue  # this finder would import setuptools
        if finder is PathFinder:
            spec = PathFinder.find_spec(name, [*sys.path, *(folder for folder in folders if folder not in sys.path)])
        else:
            spec = finder.find_spec(name, None)
        if spec is not None:
            return spec
    return None


def locate_local(spec: ModuleSpec, folders: Sequence[str]) -> str:
    """The folder in `folders` that a module comes from; "" if it comes from none of them.

    Its file must be where its dotted name says, and must not be a link to another place. Folders of installed packages
    do not count, not even inside a job's folder (.venv).
    """
    if spec.name.split(".")[0] == "dsjob":
        return ""  # in a clone of dsjob, the current folder contains dsjob itself, for which only the list counts
    if spec.origin is None and spec.submodule_search_locations is not None:  # a folder without __init__.py
        places = [os.path.realpath(place) for place in spec.submodule_search_locations]
        return next((f for f in folders if _is_own(f) and _expect(f, spec.name) in places), "")
    if not spec.has_location or spec.origin is None:  # built in, frozen
        return ""
    file = os.path.realpath(spec.origin)
    stem = os.path.dirname(file) if spec.submodule_search_locations is not None else _strip_suffix(file)
    return next((f for f in folders if _is_own(f) and _expect(f, spec.name) == stem), "")


def _expect(folder: str, name: str) -> str:
    return os.path.join(os.path.realpath(folder), *name.split("."))


def _strip_suffix(file: str) -> str:
    suffixes = sorted(importlib.machinery.all_suffixes(), key=len, reverse=True)
    return next((file[: -len(suffix)] for suffix in suffixes if file.endswith(suffix)), file)


@cache
def _installations() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [sysconfig.get_path(name) for name in names] + site.getsitepackages() + [site.getusersitepackages()]
    return tuple({os.path.realpath(folder) for folder in folders if folder})


def _is_own(folder: str) -> bool:
    real = os.path.realpath(folder)
    if {"site-packages", "dist-packages"} & set(real.split(os.sep)):
        return False
    return not any(real == place or real.startswith(place + os.sep) for place in _installations())


def _real_file(spec: ModuleSpec) -> str:
    return os.path.realpath(spec.origin) if spec.has_location and spec.origin else ""


def _is_link(spec: ModuleSpec, folders: Sequence[str]) -> str:
    """The file in `folders` that a module seems to come from, if that is a link to another place; otherwise empty."""
    if not spec.has_location or spec.origin is None:
        return ""
    inside = any(os.path.abspath(spec.origin).startswith(os.path.abspath(f) + os.sep) for f in folders if _is_own(f))
    return spec.origin if inside and os.path.realpath(spec.origin) != os.path.abspath(spec.origin) else ""


# ---- decisions about modules and objects after an import


def explain_module(spec: ModuleSpec, path: str, trust: Trust) -> str:
    """Why a module on the way to `path` may not be imported, although its parent was; empty if it may."""
    if trust.names(path) or locate_local(spec, trust.folders) or is_listed(path):
        return ""
    file = _real_file(spec)
    return f"{spec.name} is not in the job's folder{f', but in {file}' if file else ''}"


def explain_found(path: str, owner: Any, found: Any, trust: Trust) -> str:
    """Why the callable `found`, an attribute of `owner` at `path`, may not be called; empty if it may.

    However it was found, it must be defined in a trusted module or be one of `LISTED` itself.
    """
    *_, name = path.split(".")
    if any((path + ".").startswith(prefix + ".") and prefix not in sys.modules for prefix in trust.prefixes):
        return ""  # the prefix is not a module, so it names this callable or its class
    if trust.names(path) and name in getattr(owner, "__all__", ()):  # re-exports, such as os.system, defined in posix
        return ""
    judged = owner if name in _BUILDERS and inspect.isclass(owner) else found
    home = find_home(judged)
    if is_trusted_module(home, trust) or _is_listed_object(judged) or _is_listed_object(found):
        return ""
    return f"it is defined in {home or 'no module'}"


def find_home(found: Any) -> str:
    """The name of the module that defines a callable."""
    if isinstance(found, partial):
        return find_home(found.func)
    if isinstance(found, ModuleType):
        return found.__name__
    has_own = inspect.isclass(found) or inspect.isroutine(found) or hasattr(found, "__wrapped__")
    home = getattr(found, "__module__", None) if has_own else type(found).__module__
    return home if isinstance(home, str) else ""


def is_trusted_module(name: str, trust: Trust) -> bool:
    """Whether a loaded module is granted by name, or is in a trusted folder."""
    if trust.names(name):
        return True
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return trust.local and spec is not None and spec.name == name and bool(locate_local(spec, trust.folders))


def _is_listed_object(found: Any) -> bool:
    home, name = find_home(found), getattr(found, "__qualname__", getattr(found, "__name__", ""))
    for row in LISTED:
        if not re.fullmatch(row.home, home):
            continue
        if matches(row, f"{home}.{name}"):
            return True
        for spelling in {
            name,
            name.rpartition(".")[2],
        }:  # built-in functions of torch have an owner in their qualified name
            if re.fullmatch(row.names, spelling) and _equals(row.module, spelling, found):
                return True
    return False


def loads_models(path: str, found: Any) -> bool:
    """Whether calling this makes transformers load a model by its name."""
    owner = getattr(found, "__self__", None)
    classes = inspect.getmro(owner) if inspect.isclass(owner) else ()
    ours = path.startswith(("dsjob.recipes.", "dsjob.text."))
    return ours or (
        getattr(found, "__name__", "") in _BUILDERS and any(c.__module__.startswith("transformers.") for c in classes)
    )


def refuse_remote_code(found: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that make transformers' Auto classes refuse a model's own code; by default they would ask the user."""
    owner = getattr(found, "__self__", None)
    auto = inspect.isclass(owner) and owner.__name__.startswith("Auto") and owner.__module__.startswith("transformers.")
    return {"trust_remote_code": False} if auto and "trust_remote_code" not in arguments else {}


def _equals(module: str, name: str, found: Any) -> bool:
    try:
        there = attrgetter(name)(sys.modules[module])
    except (KeyError, AttributeError):
        return False
    return there is found or (inspect.ismethod(there) and bool(there == found))


# ---- documents


def check_document(document: Mapping[str, Any], trust: Trust) -> list[Problem]:
    """Everything in a document that is not trusted, judged by its strings: targets, remote code, unpinned names,
    URLs."""
    own = (*check_keys(document, trust.access), *check_services(document, trust.access))
    found = [*own, *_check(document, (), trust), *_check_tokenizer(document, trust)]
    unread = () if has_task(document, "train") else ("data", "train")
    return [one for one in found if not unread or one.path[:2] != unread or one.rule not in PLACE_RULES]


def _check_tokenizer(document: Mapping[str, Any], trust: Trust) -> Iterator[Problem]:
    """Problems with `generation.tokenizer` if it is a name, which has no place for a revision."""
    section = document.get("generation")
    name = section.get("tokenizer") if isinstance(section, Mapping) else None
    if not isinstance(name, str) or name == "bytes":
        return
    target = name_tokenizer(name)
    advice = f"name a local folder, write {{_target_: {target['_target_']}, _args_: [{name}], revision: <commit>}}"
    for problem in _check(target, (), trust):
        shown = f"{advice}, or run with --unpinned" if problem.rule == "unpinned" else problem.hint
        yield dataclasses.replace(problem, path=("generation", "tokenizer"), hint=shown)


def check_target(value: Mapping[str, Any], trust: Trust, found: Any = None) -> list[Problem]:
    """Everything that is not trusted in one target and its arguments. `found`: the callable, which may be a listed one
    under another name."""
    return list(_check(value, (), trust, found))


def takes_literals(target: str, trust: Trust, found: Any = None) -> bool:
    """Whether a target, or the callable `found`, reads files or a hub, and is not granted by the user: see
    `literals`."""
    listed = (
        is_listed(target) or target.rpartition(".")[2] in LOADERS or (found is not None and _is_listed_object(found))
    )
    return listed and not trust.names(target) and is_reader(target, found)


def is_restricted(target: str, trust: Trust, found: Any = None) -> bool:
    """Whether the places in the arguments of a target, or of the callable `found`, are judged. The user's own code may
    open what it likes, unless a document from elsewhere passes it the places."""
    if not trust.access.own or not is_own(target, trust):
        return True
    return found is not None and _is_listed_object(found) and not trust.names(target)


def _check(value: Any, path: Path, trust: Trust, found: Any = None) -> Iterator[Problem]:
    listed = found is not None and _is_listed_object(found)
    if isinstance(value, Mapping):
        target = value.get("_target_")
        if isinstance(target, str):
            why = explain_distrust(target, trust)
            if why:
                yield Problem(
                    f"{target} is not trusted: {why}", (*path, "_target_"), "untrusted-target", hint(target, trust)
                )
            if not is_own(target, trust) or (listed and not trust.names(target)):
                yield from check_references(value, path)
            listed = listed or is_listed(target) or target.rpartition(".")[2] in LOADERS
            yield from check_literals(value, path) if takes_literals(target, trust, found) else ()
            if listed and not trust.names(target):
                yield from check_options(value, path)
                yield from check_weights(value, path, found)
            if is_restricted(target, trust, found):
                yield from check_places(value, path, trust.access)
                yield from check_contents(value, path, trust.access)
                yield from check_folders_of_models(value, path, trust.access)
            yield from check_texts(value, path, trust.protocols, listed=listed)
            yield from check_written(value, path, trust.access) if listed else ()
        yield from check_arguments(value, path, remote_code=trust.remote_code, unpinned=trust.unpinned)
        for key, item in value.items():
            yield from _check(item, (*path, key), trust)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _check(item, (*path, index), trust)


def hint(target: str, trust: Trust) -> str:
    """A hint with the exact flag that grants a target."""
    if target.startswith("__main__."):
        return "put it in a module beside the job, such as my_model.py"
    if trust.rejected and find_top(target.split(".")[0], trust.folders) is None:
        if any(why.startswith(SHARED) for _, why in trust.rejected):
            return "move the job to a folder that only you can write to"
        return "if you know what is in it, run dsjob in that folder, or copy the folder and run the copy"
    return f"if you know what it does, run with --trust {quote_word(target)}"
