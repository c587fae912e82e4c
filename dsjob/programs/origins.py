"""Where a program's DeepSpeed config comes from: a file that a library reads, or a line of the program.

transformers and accelerate read the config into an `HfDeepSpeedConfig`. Its constructor tells this module, and a file
is checked there at once, with the place of each key. `initialize` later receives the very dict of that object.
"""

from __future__ import annotations

import inspect
import json
import os
import sysconfig
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from dsjob import document as documents
from dsjob import storage
from dsjob.contract import schema as contract
from dsjob.contract.check import check_config
from dsjob.contract.paths import Path, get_at
from dsjob.document.bare import leave_unknown_out
from dsjob.document.places import place_problems
from dsjob.engine import configs
from dsjob.engine.configs import Origin
from dsjob.errors import ConfigError, ConfigWarning, DocumentError, Problem, UsageError
from dsjob.programs.alias import STAND_IN
from dsjob.terminal import quote_path

# Problems that no value which a library fills in later can mend. Libraries fill in "auto" for keys that they know.
_LASTING = {"unknown-key", "type", "enum", "range", "length", "unsupported"}
_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_LIBRARY = sysconfig.get_path("stdlib")
_INSTALLED = "-packages" + os.sep
_PASSING_ON = ("accelerate", "deepspeed", "peft", "torch", "transformers", "trl")  # they pass on the program's config


@dataclass(frozen=True)
class Told:
    """The origin of an HfDeepSpeedConfig, and the line of the program that made it."""

    origin: Origin
    line: tuple[str, int]


_known: WeakKeyDictionary[Any, Told] = WeakKeyDictionary()
_shown: set[str] = set()  # warnings that were printed


def find_line() -> tuple[str, int]:
    """The program's own line that is running: file and line number; else that of the innermost other library."""
    frame: FrameType | None = inspect.currentframe()
    other = ("config", 0)
    while frame is not None:
        file = frame.f_code.co_filename
        package = file.rpartition(_INSTALLED)[2].partition(os.sep)[0]
        if not file.startswith((_OURS, "<")):
            if _INSTALLED not in file and not file.startswith(_LIBRARY):
                return _shorten(file), frame.f_lineno
            if not other[1] and _INSTALLED in file and package not in _PASSING_ON:
                other = file, frame.f_lineno
        frame = frame.f_back
    return other


def _shorten(file: str) -> str:
    """`file`, relative to the current folder if it is below it."""
    below = os.path.relpath(file)
    return file if below.startswith(os.pardir) else below


def tell_origin(made: Any) -> Told | None:
    """The origin of an HfDeepSpeedConfig; None if it was made before `install`."""
    return _known.get(made)


def find_origin(config: Mapping[str, Any]) -> Origin:
    """The origin of a dict that `initialize` receives."""
    for made, told in _known.items():
        if made.config is config:
            return told.origin
    return _originate(config, find_line())


def _originate(config: Mapping[str, Any], line: tuple[str, int]) -> Origin:
    return Origin(config, lambda path: (*line, 0))


def read_file(source: str) -> Origin:
    """Reads and checks a config file. Raises ConfigError with the problems that can be known before `initialize`."""
    try:
        document = documents.require_few(documents.parse(storage.read_text(source), source))
    except DocumentError as error:
        raise ConfigError(error.problems, error.warnings) from None
    origin = Origin(document.value, document.locate)
    _require_sound(origin, _lasts)
    return origin


def _require_sound(origin: Origin, counts: Callable[[Problem, bool], bool]) -> None:
    """Raises ConfigError with the problems for which `counts` is true.

    counts: of a problem, and of whether the value at its path is "auto".
    """
    written, lenient = dict(origin.written), bool(os.environ.get(configs.LENIENT))
    found = [each for each in check_config(written) if counts(each, get_at(written, each.path, None) == "auto")]
    if lenient:
        found = [each for each in found if each.rule != "unknown-key"]  # a warning
    if found:
        raise ConfigError(place_problems(found, origin.locate))


def _lasts(problem: Problem, is_auto: bool) -> bool:
    filled = is_auto and problem.rule != "unknown-key"
    return problem.severity == "error" and problem.rule in _LASTING and not filled


def _stays_auto(problem: Problem, is_auto: bool) -> bool:
    """Whether accelerate would end with an error of its own, because it has no value for the key."""
    return is_auto and problem.rule == "unknown-key"


def describe_warnings(problems: Sequence[Problem], origin: Origin) -> list[str]:
    """The texts of warnings about a config. Keys without effect are on one line; those that a library has set, or that
    have their default, are not mentioned."""
    idle = [problem for problem in problems if problem.rule == "no-effect"]
    notable = [problem.dotted for problem in idle if _is_chosen(problem.path, origin.written)]
    source, line, _ = origin.locate(())
    texts = configs.list_warnings([problem for problem in problems if problem not in idle], origin)
    if notable:
        place = source if _is_file(origin) else f"{source}:{line}"
        why = f" (why: dsjob validate {quote_path(source)})" if _is_file(origin) else ""
        texts.insert(0, f"{place}: these keys have no effect in dsjob: {', '.join(notable)}{why}")
    return texts


def _is_file(origin: Origin) -> bool:
    return origin.locate(())[2] > 0  # a line of Python has no column


def _is_chosen(path: Path, written: Mapping[str, Any]) -> bool:
    value = get_at(written, path, None)
    default = contract.find_at(contract.deepspeed_schema(), path, dict(written)).get("default")
    return value not in (None, "auto", default)


def begin() -> None:
    """Makes `initialize` find origins, and prints its warnings without the line of the library that called it."""
    if configs.find_origin is find_origin:
        return
    configs.find_origin, configs.describe_warnings = find_origin, describe_warnings
    usual = warnings.formatwarning

    def form(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        text = str(message)
        if not issubclass(category, ConfigWarning):
            return usual(message, category, filename, lineno, line)
        known = text in _shown
        _shown.add(text)
        return "" if known else f"dsjob: {text}\n"

    warnings.formatwarning = form


def install() -> None:
    """Makes every HfDeepSpeedConfig from now on tell its origin. Called when accelerate.utils.deepspeed has been
    imported."""
    if STAND_IN not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        return  # --engine deepspeed: DeepSpeed itself judges the config
    begin()
    from accelerate.utils.dataclasses import DeepSpeedPlugin
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    make, set_precision = HfDeepSpeedConfig.__init__, DeepSpeedPlugin.set_mixed_precision

    def make_and_tell(self: Any, config_file_or_dict: Any) -> None:
        line, given = find_line(), config_file_or_dict
        named = os.fspath(given) if isinstance(given, (str, os.PathLike)) else ""
        is_file = os.path.exists(named)
        if named.endswith(".json") and not is_file:  # other strings may be the config itself, as JSON or in base64
            raise UsageError(
                f"{line[0]}:{line[1]}: the DeepSpeed config {named} does not exist",
                hint=f"give the path of a JSON file; a relative path starts at {os.getcwd()}",
            )
        origin = read_file(named) if is_file else None
        try:
            make(self, given)
        except json.JSONDecodeError:
            raise UsageError(
                f"{line[0]}:{line[1]}: the DeepSpeed config {named} is not JSON, which accelerate reads",
                hint="write it as JSON, or pass a dict",
            ) from None
        if origin is None:
            # Libraries change the config later, and pass on the one of another HfDeepSpeedConfig.
            origin = find_origin(given) if isinstance(given, Mapping) else _originate(deepcopy(self.config), line)
            _require_sound(origin, _stays_auto)
        if os.environ.get(configs.LENIENT):
            # Before accelerate looks for the values of unknown keys that are "auto".
            self.config, problems = leave_unknown_out(self.config, locate=origin.locate)
            configs.warn_of_unknown(problems)
        _known[self] = Told(origin, line)

    def set_precision_and_tell(self: Any, mixed_precision: str) -> None:
        try:
            set_precision(self, mixed_precision)
        except ValueError as error:
            other = "bf16" if mixed_precision == "fp16" else "fp16"
            told = tell_origin(self.hf_ds_config)
            if told is None or f"`{other}` is set" not in str(error):
                raise
            message = f"true, but the program asks for {mixed_precision}"
            who = f"mixed_precision of Accelerator or of accelerate launch, or {mixed_precision} of TrainingArguments"
            hint = f"{who}, which is on in TRL's configs" if mixed_precision == "bf16" else who
            problem = Problem(message, (other, "enabled"), "contradiction", f"make both equal: {hint}")
            raise ConfigError(place_problems([problem], told.origin.locate)) from None

    HfDeepSpeedConfig.__init__ = make_and_tell
    DeepSpeedPlugin.set_mixed_precision = set_precision_and_tell
