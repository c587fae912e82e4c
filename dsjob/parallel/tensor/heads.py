"""Attributes of modules that count what a rank holds, such as the number of heads, where no plan names them.

They are found by the names that models of transformers and DeepSpeed's rules use.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from dsjob.parallel.tensor.plans import Choice
from dsjob.parallel.tensor.styles import read_features

_HEADS = (
    *("num_heads", "n_heads", "n_head", "nhead", "heads", "num_kv", "num_attention_heads", "num_attn_heads"),
    *("num_key_value_heads", "num_kv_heads", "kv_n_heads", "num_attention_heads_per_partition"),
    "num_multi_query_groups_per_partition",
)
# These also name widths that stay whole, such as that of a block's activations.
_WIDTHS = (
    "inner_dim",
    "all_head_size",
    "embed_dim",
    "hidden_size",
    "d_model",
    "hidden_size_per_partition",
    "split_size",
)


def add_counts(model: nn.Module, chosen: Mapping[str, Choice]) -> dict[str, Choice]:
    """`chosen`, with the counts of the modules around divided layers: heads, and widths that these layers have."""
    modules = dict(model.named_modules())
    outputs: dict[str, set[int]] = {}
    for name, choice in chosen.items():
        features = read_features(modules[name])
        if choice.style == "colwise" and features is not None:
            parts = {features.outputs}
            parts |= {features.outputs // choice.sections} if isinstance(choice.sections, int) else set(choice.sections)
            outputs.setdefault(name.rpartition(".")[0], set()).update(parts)
    found = dict(chosen)
    for owner, widths in outputs.items():
        if not owner:  # the model itself: its attributes are the program's
            continue
        module, choice = modules[owner], found.get(owner, Choice())
        heads = [name for name in _HEADS if _count(module, name) is not None]
        counts = [*heads, *(name for name in _WIDTHS if _count(module, name) in widths)]
        if counts:
            found[owner] = choice._replace(divide=tuple(counts))
    return found


def _count(module: nn.Module, name: str) -> int | None:
    value = getattr(module, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
