"""Resolves "auto", as in HF Trainer's DeepSpeed configs, and records how each value was derived.

`batch` resolves the batch sizes of `trainer`. If "auto" means the default, the key is removed and the schema fills it
in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dsjob.contract.paths import Path, get_at

Derived = tuple[Any, str]  # the value (None: remove the key), and how it was derived

_HIDDEN_NAMES = ("hidden_size", "hidden_sizes", "d_model", "n_embd", "model_dim", "dim", "width", "hidden")
_ZERO = ("zero_optimization",)
RATE_FROM_NOTHING = "auto: the default learning_rate of TrainingArguments"


def resolve_auto(job: dict[str, Any]) -> tuple[dict[str, Any], dict[Path, str]]:
    """`job` with every "auto" in the table replaced, and how each value was derived, by path.

    The three sizes that HF derives from the hidden size also accept 0 for "auto", as old configs have it.
    """
    told: dict[Path, str] = {}
    result = job
    for path, derive in _TABLE.items():
        given = get_at(result, path)
        if given == "auto" or (given == 0 and not isinstance(given, bool) and path in _FROM_HIDDEN_SIZE):
            value, how = derive(result)
            result = _put(result, path, value)
            told[path] = how
    return result, told


def find_hidden_size(model: Any) -> int | None:
    """The hidden size among a model's arguments, under its usual names; the largest of a list."""
    if not isinstance(model, Mapping):
        return None
    for name in _HIDDEN_NAMES:
        value = model.get(name)
        if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
            return int(max(value))
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    for name in ("config", "text_config"):
        if (inner := find_hidden_size(model.get(name))) is not None:
            return inner
    return None


def _from_hidden_size(formula: str, compute: Callable[[int], float]) -> Callable[[dict[str, Any]], Derived]:
    def derive(job: dict[str, Any]) -> Derived:
        size = find_hidden_size(job.get("model"))
        if size is None:
            return None, f"auto: the default; {formula} needs one of {', '.join(_HIDDEN_NAMES[:4])}, ... in model"
        return int(compute(size)), f"auto: {formula}"

    return derive


def _default(job: dict[str, Any]) -> Derived:
    return None, "auto: the default"


def _off(job: dict[str, Any]) -> Derived:
    return False, "auto: off, the default"


def _rate(job: dict[str, Any]) -> Derived:
    return 5e-5, RATE_FROM_NOTHING


def _rate_of_optimizer(job: dict[str, Any]) -> Derived:
    rate = get_at(job, ("optimizer", "params", "lr"))
    if isinstance(rate, (int, float)):
        return rate, "auto: optimizer.params.lr"
    return None, "auto: the default"


def _warm_up(job: dict[str, Any]) -> Derived:
    return 1, "auto: the default warmup_steps of TrainingArguments, but at least 1"


def _length(job: dict[str, Any]) -> Derived:
    return None, "auto: the steps of the run"


_FROM_HIDDEN_SIZE: dict[Path, Callable[[dict[str, Any]], Derived]] = {
    (*_ZERO, "reduce_bucket_size"): _from_hidden_size("hidden_size^2", lambda size: size * size),
    (*_ZERO, "stage3_prefetch_bucket_size"): _from_hidden_size("0.9*hidden_size^2", lambda size: 0.9 * size * size),
    (*_ZERO, "stage3_param_persistence_threshold"): _from_hidden_size("10*hidden_size", lambda size: 10 * size),
}
# What programs set to auto without a library that fills it in, such as OpenRLHF. DeepSpeed then uses the default.
_TUNING = (
    *("sub_group_size", "allgather_bucket_size", "overlap_comm", "contiguous_gradients", "reduce_scatter"),
    *("allgather_partitions", "round_robin_gradients", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
    *("stage3_model_persistence_threshold", "stage3_module_granularity_threshold"),
)
_TABLE: dict[Path, Callable[[dict[str, Any]], Derived]] = {
    **_FROM_HIDDEN_SIZE,
    **{(*_ZERO, key): _default for key in _TUNING},
    (*_ZERO, "stage3_gather_16bit_weights_on_model_save"): _default,
    ("gradient_clipping",): _default,
    ("bf16", "enabled"): _default,
    ("fp16", "enabled"): _off,
    ("amp", "enabled"): _off,
    ("amp", "opt_level"): _default,
    ("optimizer", "params", "lr"): _rate,
    ("optimizer", "params", "betas"): _default,
    ("optimizer", "params", "eps"): _default,
    ("optimizer", "params", "weight_decay"): _default,
    ("scheduler", "params", "warmup_min_lr"): _default,
    ("scheduler", "params", "warmup_max_lr"): _rate_of_optimizer,
    ("scheduler", "params", "warmup_num_steps"): _warm_up,
    ("scheduler", "params", "total_num_steps"): _length,
    ("scheduler", "params", "num_warmup_steps"): _default,
    ("scheduler", "params", "num_training_steps"): _length,
}


def _put(value: dict[str, Any], path: Path, new: Any) -> dict[str, Any]:
    """A copy of `value` with `new` at `path`; None removes the key."""
    if len(path) > 1:
        return {**value, str(path[0]): _put(value[str(path[0])], path[1:], new)}
    rest = {key: item for key, item in value.items() if key != path[0]}
    return rest if new is None else {key: new if key == path[0] else item for key, item in value.items()}
