"""Checks what a document's arguments would load from a hub: code, pickles, and names that are not pinned to a commit.

These rules for arguments also apply to the files of a model, which `model_files` reads. `grant` decides which callables
may be named at all. No connection is opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from dsjob.contract.access import ALLOWED, Access
from dsjob.contract.paths import Path
from dsjob.errors import Problem, TargetError
from dsjob.trust import model_files
from dsjob.trust.data_folders import check_links

_LOADERS = {"from_pretrained": "pretrained_model_name_or_path", "load_dataset": "path"}
_READERS = (*_LOADERS, "load_from_disk", "from_csv", "from_json", "from_parquet", "from_text")
_FORMATS = ("json", "csv", "parquet", "text", "arrow", "imagefolder", "audiofolder", "videofolder", "xml", "lance")
_UNPICKLING = ("pandas", "webdataset")  # formats of `datasets` that are read with pickle
_PIN = "add {}: <the 40 hex digits of a commit>, {}, or run with --unpinned"
_FOLDER = "name a local folder"
_UNPINNED = "{!r} is a name on a hub, or a folder that does not exist"
_IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal)?")
# timm: types of models, arguments of its own loader, and prefixes of names on its hub.
_DEPTH = 2  # of the files in a model's folder that a loader may read
_KINDS = ("timm_backbone", "timm_wrapper", "rag")
_TIMM_ARGUMENTS = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict")
_TIMM_NAME = re.compile(r"(hf[-_]hub|local-dir|timm):.*", re.DOTALL)


def check_arguments(value: Mapping[str, Any], path: Path, *, remote_code: bool, unpinned: bool) -> Iterator[Problem]:
    """Problems with what the arguments in one object of a document would load.

    Code from a hub and weights in pickles need --trust-remote-code, whether the arguments ask for them or the files in
    a local folder that they name. Names on a hub that are not pinned to a commit need --unpinned, because their content
    can change.
    """
    names = list(_find_names(value))
    folders = [(place, _find_folders(name, value)) for place, name in names if _is_local(name)]
    if not remote_code:
        for key, what in _find_remote_code(value):
            yield Problem(what, (*path, key), "remote-code", "leave it out, or run with --trust-remote-code")
        for place, below in folders:
            yield from check_files((found for one in below for found in model_files.read_folder(one)), (*path, *place))
    if unpinned:
        return
    for place, name in names:
        of_texts = place == ("dataset",)  # of dsjob.text.Text
        key, instead = ("dataset_revision", "name local files with source") if of_texts else ("revision", _FOLDER)
        if not _is_commit(value.get(key)) and not _is_local(name):
            message = _UNPINNED.format(name) if name else "must be a string"
            yield Problem(message, (*path, *place), "unpinned", _PIN.format(key, instead))
    advice = _PIN.format("revision", _FOLDER)
    for place, below in folders if not _is_commit(value.get("revision")) else ():
        for what in _find_unpinned(below) if _loads_a_model(value) else ():
            yield Problem(what, (*path, *place), "unpinned", advice)


def check_folders_of_models(value: Mapping[str, Any], path: Path, access: Access) -> Iterator[Problem]:
    """Problems with what the local folders of models that the arguments name, and those that these name, lead to."""
    for place, name in _find_names(value):
        for folder in _find_folders(name, value) if _is_local(name) else ():
            files = (model_files.list_named(found.value, found.file) for found in model_files.read_folder(folder))
            others = dict.fromkeys(base for named in files for _, base in named if os.path.isdir(base))
            for stray in model_files.find_strays(folder):
                hint = "correct the file: weights lie in the model's folder"
                yield Problem(f"{stray}, which is outside of its folder", (*path, *place), "outside-folder", hint)
            for one in (folder, *others):
                rule, message, hint = access.explain(one) if one in others else ALLOWED
                found = [Problem(f"{folder} names {one}: {message}", (), rule, hint)] if rule else []
                for problem in found or check_links(one, access, _DEPTH):
                    yield replace(problem, path=(*path, *place))


def needs_hub(value: Mapping[str, Any]) -> bool:
    """Whether the arguments in one object of a document name something on a hub, or ask for a download."""
    asks = (value.get(key) for key in ("download", "pretrained", "weights"))
    return any(each is True or isinstance(each, str) for each in asks) or not all(
        _is_local(name) for _, name in _find_names(value)
    )


def name_tokenizer(name: str) -> dict[str, str]:
    """The target that loads a tokenizer named by a string alone, so that what documents may load applies to it."""
    return {"_target_": "transformers.AutoTokenizer.from_pretrained", "pretrained_model_name_or_path": name}


def check_files(files: Iterable[model_files.Found], path: Path) -> Iterator[Problem]:
    """Problems with a model's files that would run code when it is loaded. `path`: where the document names the
    model."""
    advice = "correct the file, or run with --trust-remote-code"
    for file, place, value, unread in files:
        if unread:
            yield Problem(f"{file}: {unread}", path, "remote-code", advice)
        for key, what in _find_remote_code(value):
            yield Problem(f"{file}: {f'{place}.' if place else ''}{key}: {what}", path, "remote-code", advice)


def check_models(value: Mapping[str, Any]) -> tuple[list[Problem], str | None]:
    """Problems with the files of a model that is about to be loaded (see `model_files.fetch`), and their commit on the
    hub. The model must be loaded from the same commit, so that a push in the meantime changes nothing. The commit is
    None if the files are from several repositories, or in a local folder.

    `value`: the target with its final arguments. Raises TargetError for a local folder that does not exist.
    """
    problems: list[Problem] = []
    commits: set[tuple[str, str]] = set()
    names = list(_find_names(value))
    for place, name in names:
        if name.startswith((".", "/", "~")) and not os.path.exists(os.path.expanduser(name)):
            raise TargetError(f"there is no model folder {name}", hint="correct the path, or give a name on the hub")
        found = list(model_files.fetch(name, value)) if name else []
        problems += check_files(found, place)
        commits |= {model_files.find_commit(one.file) for one in found}
    (_, commit), *more = commits or {("", "")}
    return problems, commit if commit and len(names) == 1 and not more else None


def _find_remote_code(value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in ("trust_remote_code", "use_kernels", "allow_all_kernels", "allow_pickle"):
        if value.get(key) not in (None, False):
            yield key, "runs third-party code"
    for key in ("weights_only", "use_safetensors"):
        if value.get(key) not in (None, True):
            yield key, "allows weights to be unpickled, which can run code"
    for key, item in value.items():
        if _IMPLEMENTATION.fullmatch(str(key)) and "/" in str(item):
            yield key, "names a kernel on a hub, whose code would be run"
        elif key in ("architecture", "backbone") and isinstance(item, str) and _TIMM_NAME.fullmatch(item):
            yield key, "names a timm model, whose weights may be unpickled"
        elif key in ("model_args", "backbone_kwargs") and isinstance(item, Mapping):
            for name in sorted(item.keys() & set(_TIMM_ARGUMENTS)):
                yield key, f"has {name}, which allows weights to be unpickled, which can run code"
    if value.get("_configuration_file") is not None:
        yield "_configuration_file", "loads another file instead of config.json"
    if value.get("model_type") in _KINDS:
        yield "model_type", "is loaded by another library, which may unpickle weights"
    if value.get("megatron_core") not in (None, "megatron.core"):
        yield "megatron_core", "names a module that would be imported"
    loader = str(value.get("_target_")).rpartition(".")[2]
    if loader == "load_dataset" and _first(value, "path")[1] in _UNPICKLING:
        yield _first(value, "path")[0][0], "names a format that is read with pickle, which can run code"
    if loader in _READERS and len(_listed(value)) > 1:
        yield "_args_", "hides the names of arguments: pass all except the first by name"


def _find_names(value: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Names on a hub and of local folders, with their places; "" for a value that is not a string."""
    target = str(value.get("_target_"))
    loader = target.rpartition(".")[2]
    keys = {"pretrained", "pretrained_model_name_or_path", "_adapter_model_path"}
    if target.startswith(("dsjob.recipes.", "dsjob.text.")) and value.get("tokenizer") != "bytes":
        keys.add("tokenizer")
    if target.startswith("dsjob.text."):
        keys.add("dataset")
    if value.get("use_pretrained_backbone"):
        keys.add("backbone")
    if loader == "from_pretrained":
        keys.add("config")
    if loader in _LOADERS:
        keys.discard(_LOADERS[loader])
        place, name = _first(value, _LOADERS[loader])
        if not isinstance(name, str):
            yield place, ""
        elif not (loader == "load_dataset" and name in (*_FORMATS, *_UNPICKLING)):
            yield place, name
    for key in sorted(keys):
        name = value.get(key)
        if isinstance(name, str):
            yield (key,), name


def _find_folders(name: str, value: Mapping[str, Any]) -> list[str]:
    inside = value.get("subfolder")
    return [name, *([os.path.join(name, inside)] if isinstance(inside, str) and inside else ())]


def _loads_a_model(value: Mapping[str, Any]) -> bool:
    return not re.search(r"Tokenizer|Processor|Extractor|datasets\.", str(value.get("_target_")))


def _find_unpinned(folders: list[str]) -> Iterator[str]:
    """Messages on files of local models that name, or may name, a model on a hub."""
    for folder in folders:
        for file, _, value, unread in model_files.read_folder(folder):
            if unread:
                yield f"{file}: {unread}"
            for key, name in model_files.list_named(value, file):
                if not _is_local(name):
                    yield f"{file}: {key}: {_UNPINNED.format(name)}"


def _is_commit(revision: Any) -> bool:
    return bool(re.fullmatch(r"[0-9a-f]{40}", str(revision)))


def _listed(value: Mapping[str, Any]) -> list[Any]:
    given = value.get("_args_")
    return given if isinstance(given, list) else []


def _first(value: Mapping[str, Any], key: str) -> tuple[tuple[str, ...], Any]:
    """The first argument of a loader, passed by name or by position, and its place; ((), None) if there is none."""
    if key in value:
        return (key,), value[key]
    listed = _listed(value)
    return (("_args_",), listed[0]) if listed else ((), None)


def _is_local(name: str) -> bool:
    return os.path.isdir(name) or name.startswith(("/", "./", "../"))
