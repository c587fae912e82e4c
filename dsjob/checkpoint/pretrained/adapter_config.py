"""Validates the configuration of an adapter: the supported methods of peft, their keys, and the allowed values.

A checkpoint may come from anyone, and a configuration can make peft import modules, load other models and match regular
expressions. So everything not listed here is refused. Imports no torch and no peft.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dsjob.contract.shown import shorten
from dsjob.errors import UsageError

_MOST_RANK, _MOST_ITEMS, _MOST_TEXT, _MOST_NUMBER = 65_536, 10_000, 1_000, 1e9
# Regular expressions that cannot backtrack for long: no quantified groups, few quantifiers, few combinations of
# alternatives (ways).
_PLAIN = re.compile(r"(?:[\w|^$)-]|\((?:\?:)?|\\\.|\\d\+?|\.\*?)*")
_MOST_QUANTIFIERS, _MOST_WAYS = 3, 10_000
_LIBRARY = re.compile(r"transformers(\.\w+)*")


class _Rule(NamedTuple):
    fits: Callable[[Any], bool]
    description: str


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_TEXT


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _MOST_NUMBER  # false for NaN


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 63


def _is_rank(value: Any) -> bool:
    return _is_whole(value) and 0 <= value <= _MOST_RANK


def _is_pattern(value: Any) -> bool:
    """Whether a string is a name, or a regular expression that is cheap to match."""
    if not _is_text(value) or not _PLAIN.fullmatch(value) or len(re.findall(r"[*+]", value)) > _MOST_QUANTIFIERS:
        return False
    if math.prod(part.count("|") + 1 for part in re.split(r"[()]", value)) > _MOST_WAYS:  # (a|a)(a|a)(a|a)...
        return False
    try:
        re.compile(value)
    except (re.error, RecursionError):
        return False
    return True


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and len(value) <= _MOST_ITEMS and all(map(fits, value))


def _is_mapping(value: Any, key: Callable[[Any], bool], fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and len(value) <= _MOST_ITEMS and all(key(k) and fits(v) for k, v in value.items())


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, bool) or _is_number(value) or _is_text(value)


_FLAG = _Rule(lambda value: isinstance(value, bool), "true or false")
_TEXT = _Rule(_is_text, f"a string of at most {_MOST_TEXT:,} characters")
_NUMBER = _Rule(_is_number, f"a number from -{_MOST_NUMBER:,.0f} to {_MOST_NUMBER:,.0f}")
_WHOLE = _Rule(_is_whole, "a 64-bit integer")
_RANK = _Rule(_is_rank, f"an integer from 0 to {_MOST_RANK:,}")
_START = _Rule(lambda value: isinstance(value, bool) or _is_text(value), "true, false, or the name of a method")
_NAMES = _Rule(lambda value: _is_text(value) or _is_list(value, _is_text), "a list of names")
_PATTERNS = _Rule(
    lambda value: _is_pattern(value) or _is_list(value, _is_pattern),
    r"names, or patterns that use only | . .* \d+ and groups without quantifiers, with at most three quantifiers and "
    f"{_MOST_WAYS:,} combinations of alternatives",
)
_RANKS = _Rule(
    lambda value: _is_mapping(value, _is_pattern, _is_rank),
    f"{_RANK.description} per key; keys must be {_PATTERNS.description}",
)
_NUMBERS = _Rule(
    lambda value: _is_mapping(value, _is_pattern, _is_number),
    f"{_NUMBER.description} per key; keys must be {_PATTERNS.description}",
)
_INDICES = _Rule(
    lambda value: (
        _is_whole(value)
        or _is_list(value, _is_whole)
        or _is_mapping(value, _is_text, lambda item: _is_list(item, _is_whole))
    ),
    "an integer, a list of integers, or one such list per name",
)
_PAIRS = _Rule(
    lambda value: _is_list(value, lambda item: _is_list(item, _is_rank) and len(item) == 2),
    f"a list of pairs; each value is {_RANK.description}",
)
_SETTINGS = _Rule(
    lambda value: _is_mapping(value, _is_text, _is_scalar), "an object with numbers, booleans and short strings"
)
_NONE = _Rule(lambda value: not value, "omitted, because peft would import a module for it")

_ANY = {
    **dict.fromkeys(("peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision", "bias"), _TEXT),
    **dict.fromkeys(("target_modules", "exclude_modules", "layers_pattern"), _PATTERNS),
    **dict.fromkeys(("inference_mode", "fan_in_fan_out"), _FLAG),
    "auto_mapping": _SETTINGS,
    "modules_to_save": _NAMES,
    "layers_to_transform": _INDICES,
}
_LORA = {
    **dict.fromkeys(("use_rslora", "use_dora", "use_qalora", "lora_bias", "ensure_weight_tying"), _FLAG),
    **dict.fromkeys(("lora_alpha", "lora_dropout"), _NUMBER),
    **dict.fromkeys(("loftq_config", "eva_config", "corda_config", "lora_ga_config"), _SETTINGS),
    **dict.fromkeys(("trainable_token_indices", "alora_invocation_tokens"), _INDICES),
    "r": _RANK,
    "qalora_group_size": _RANK,
    "rank_pattern": _RANKS,
    "alpha_pattern": _NUMBERS,
    "init_lora_weights": _START,
    "layer_replication": _PAIRS,
    "target_parameters": _NAMES,
    "megatron_config": _NONE,
    "megatron_core": _TEXT,  # `hub` allows only one value
}
_ADALORA = {
    **dict.fromkeys(("target_r", "init_r"), _RANK),
    **dict.fromkeys(("tinit", "tfinal", "deltaT", "total_step"), _WHOLE),
    **dict.fromkeys(("beta1", "beta2", "orth_reg_weight"), _NUMBER),
}
_LYCORIS = {
    **dict.fromkeys(("alpha", "rank_dropout", "module_dropout"), _NUMBER),
    "r": _RANK,
    "rank_pattern": _RANKS,
    "alpha_pattern": _NUMBERS,
    "use_effective_conv2d": _FLAG,
    "init_weights": _START,
}
_FOURIER = {
    "n_frequency": _WHOLE,
    "scaling": _NUMBER,
    "random_loc_seed": _WHOLE,
    "init_weights": _FLAG,
    "n_frequency_pattern": _NUMBERS,
}
_OFT = {
    **dict.fromkeys(("r", "oft_block_size", "num_cayley_neumann_terms"), _RANK),
    **dict.fromkeys(("coft", "block_share", "use_cayley_neumann", "init_weights"), _FLAG),
    **dict.fromkeys(("module_dropout", "eps"), _NUMBER),
}
_VERA = {
    "r": _RANK,
    "projection_prng_key": _WHOLE,
    "save_projection": _FLAG,
    "init_weights": _FLAG,
    **dict.fromkeys(("vera_dropout", "d_initial"), _NUMBER),
}
_OF_KIND: dict[str, dict[str, _Rule]] = {
    "ADALORA": {**_LORA, **_ADALORA},
    "FOURIERFT": _FOURIER,
    "HRA": {"r": _RANK, "apply_GS": _FLAG, "init_weights": _FLAG},
    "IA3": {"feedforward_modules": _PATTERNS, "init_ia3_weights": _FLAG},
    "LN_TUNING": {},
    "LOHA": _LYCORIS,
    "LOKR": {**_LYCORIS, "decompose_both": _FLAG, "decompose_factor": _WHOLE, "rank_dropout_scale": _FLAG},
    "LORA": _LORA,
    "OFT": _OFT,
    "VERA": _VERA,
}


def require_known(config: Mapping[str, Any]) -> None:
    """Raises UsageError for a method, key or value that is not listed.

    An unlisted key without a value is allowed: newer versions of peft write keys that the adapter does not use.
    """
    kind = config.get("peft_type")
    if not isinstance(kind, str) or kind not in _OF_KIND:
        raise UsageError(
            f"adapters of type {shorten(kind)} are not supported; supported types: {', '.join(_OF_KIND)}",
            hint="--to fp32 writes all tensors, for the job's own model",
        )
    rules = {**_ANY, **_OF_KIND[kind]}
    for key, value in config.items():
        rule = rules.get(key)
        if rule is None and value:
            raise UsageError(
                f"the adapter's configuration has an unknown key for {kind}: {shorten(key)}",
                hint="remove it from a copy of adapter_config.json, and pass the copy with --adapter-config",
            )
        if rule is not None and value is not None and not rule.fits(value):
            raise UsageError(f"the adapter's {key} is {shorten(value)}", hint=f"{key} must be {rule.description}")


def describe_origin(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """`auto_mapping`, which names the class of the base model for peft's Auto classes; None unless it is one of
    transformers'. (peft imports the module that it names.)"""
    found = config.get("auto_mapping")
    if not isinstance(found, dict) or found.keys() != {"base_model_class", "parent_library"}:
        return None
    return found if _LIBRARY.fullmatch(str(found["parent_library"])) else None
