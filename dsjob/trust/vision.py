"""Arguments of the listed constructors of torchvision and timm that would load weights: they are downloaded from
addresses that no document pins, and may be unpickled. With random weights, both libraries only build a module."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dsjob.contract.paths import Path
from dsjob.errors import Problem
from dsjob.terminal import quote_word

_TORCHVISION, _TIMM = re.compile(r"torchvision\.models\..+"), re.compile(r"timm\..*create_model")
_LOADING = re.compile(r"(weights|pretrained|checkpoint)(_\w+)?")
_NAME = re.compile(r"[\w.]+")  # of a model in timm's registry; others have a source: hf-hub:owner/name


def check_weights(value: Mapping[str, Any], path: Path, found: Any = None) -> Iterator[Problem]:
    """Problems with what a constructor would load. `value`: the target with its arguments; `path`: its place; `found`:
    the callable, which may have another name in the document."""
    target = str(value.get("_target_"))
    names = (target, f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}")
    timm = any(map(_TIMM.fullmatch, names))
    if not timm and not any(map(_TORCHVISION.fullmatch, names)):
        return
    hint = f"leave it out, or, if you trust the weights, run with --trust {quote_word(target)}"
    for key, item in value.items():
        if _LOADING.fullmatch(str(key)) and item not in (None, False):
            yield Problem("downloads or unpickles weights, which can run code", (*path, key), "remote-code", hint)
    listed = value.get("_args_") or []
    if len(listed) > int(timm):
        hidden = "hides the names of arguments: pass " + ("all except the first" if timm else "them") + " by name"
        yield Problem(hidden, (*path, "_args_"), "remote-code")
    for place, name in ((("model_name",), value.get("model_name")), (("_args_",), next(iter(listed), None))):
        if timm and name is not None and not _NAME.fullmatch(str(name)):
            yield Problem(f"{name!r} loads weights from a hub or a folder", (*path, *place), "remote-code", hint)
