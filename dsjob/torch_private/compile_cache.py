"""Where torch.compile keeps what it compiles, which it loads again as code.

torch uses one folder of the temporary directory for each user's name, whoever has created it. TORCHINDUCTOR_CACHE_DIR
moves only a part of that: precompiled headers and some pickles stay in the default folder, so that is moved too.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import tempfile
from contextlib import suppress
from typing import Any

from dsjob.after_import import call_after_import
from dsjob.files import open_cache

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_NAMES = "torch._inductor.runtime.cache_dir_utils"
_DEFAULT = "torchinductor_"  # begins the name of torch's default folder
_chosen = ""  # stays after the run, whose environment does not


def use_private_cache() -> None:
    """Makes torch.compile use a folder of this user's: the one that TORCHINDUCTOR_CACHE_DIR names, or one in the user's
    cache folder, which later runs use again. Raises StorageError if other users can write to that."""
    global _chosen
    chosen = os.environ.get(_VARIABLE)
    if chosen is None or _is_default(chosen):
        chosen = open_cache(f"compiled/{_name_processor()}", "compiled code", None, _VARIABLE)
    os.environ[_VARIABLE] = _chosen = chosen
    call_after_import(_NAMES, _move_default)


def _name_processor() -> str:
    """Names the kind of this machine's processor. A home folder may be shared by machines with others, for which code
    that was compiled with -march=native is wrong, and torch's own names do not tell them apart."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        kept = [line for line in iter(file.readline, "\n") if line.startswith(("model name", "flags", "Features"))]
        return hashlib.sha256("".join(kept).encode()).hexdigest()[:16]
    return platform.machine()


def _is_default(folder: str) -> bool:
    """Whether torch itself, and not the user, has set the variable."""
    above, name = os.path.split(folder)
    return above == os.path.abspath(tempfile.gettempdir()) and name.startswith(_DEFAULT)


def _get_chosen() -> str:
    return _chosen


def _move_default() -> None:
    replaced = sys.modules[_NAMES].default_cache_dir
    for name, module in list(sys.modules.items()):
        if name.startswith("torch._inductor.") and getattr(module, "default_cache_dir", None) is replaced:
            module.default_cache_dir = _get_chosen  # type: ignore[attr-defined]
    codes: Any = sys.modules.get("torch._inductor.codecache")
    if codes is not None:  # it has read the folder when it was imported
        codes._HEADER_DIR = os.path.join(_chosen, "precompiled_headers")
        codes._HEADER_LOCK_DIR = os.path.join(codes._HEADER_DIR, "locks")
