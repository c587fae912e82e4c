"""DeepSpeed's ways to say which layers are divided: `tensor_parallel.partition_config` and `preset_model`.

An entry of `layer_specs` has regular expressions for names of parameters, and what happens to the layers that they
match; the first entry counts. Layers that no entry matches stay whole. A preset has the entries for a family of models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from dsjob.contract.divided import TensorParallel
from dsjob.errors import UsageError
from dsjob.parallel.pipeline.walk import Absent
from dsjob.parallel.tensor.heads import add_counts
from dsjob.parallel.tensor.plans import Choice
from dsjob.parallel.tensor.styles import read_features

Spec = Mapping[str, Any]

_HEADS = ("lm_head", "embed_out")


def _row(*patterns: str) -> Spec:
    return {"patterns": patterns, "partition_type": "row"}


def _column(*patterns: str, shape: Sequence[int] | None = None) -> Spec:
    return {"patterns": patterns, "partition_type": "column", "shape": shape}


def _skip(*patterns: str) -> Spec:
    return {"patterns": patterns, "partition_type": "skip"}


_ATTENTION = (_row(r".*\.self_attn\.o_proj\.weight$"), _column(r".*\.self_attn\.[qkv]_proj\.weight$"))
_GATED = (_row(r".*\.mlp\.down_proj\.weight$"), _column(r".*\.mlp\.(up|gate)_proj\.weight$"))
_DENSE = _row(r".*\.self_attention\.dense\.weight$", r".*\.mlp\.dense_4h_to_h\.weight$")
_PRESETS: dict[str, Sequence[Spec]] = {
    "llama": (*_ATTENTION, *_GATED),
    "qwen2": (*_ATTENTION, *_GATED),
    "bloom": (
        _DENSE,
        _column(r".*\.self_attention\.query_key_value\.weight$", r".*\.mlp\.dense_h_to_4h\.weight$"),
    ),
    "chatglm": (
        _DENSE,
        _column(r".*\.self_attention\.query_key_value\.weight$", shape=(3, -1)),
        _column(r".*\.mlp\.dense_h_to_4h\.weight$", shape=(2, -1)),
    ),
    "mixtral": (
        *_ATTENTION,
        _row(r".*\.block_sparse_moe\.experts\.\d+\.w2\.weight$"),
        _column(r".*\.block_sparse_moe\.experts\.\d+\.w[13]\.weight$"),
        _skip(r".*\.block_sparse_moe\.gate\.weight$"),
    ),
    "deepseek_v2": (
        _row(r".*\.self_attn\.o_proj\.weight$"),
        _skip(r".*\.self_attn\.(q_a_proj|kv_a_proj_with_mqa)\.weight$", r".*\.mlp\.gate\.weight$"),
        _column(r".*\.self_attn\.(q_b_proj|kv_b_proj)\.weight$"),
        _row(r".*\.mlp\.(experts\.\d+|shared_experts)\.down_proj\.weight$"),
        _column(r".*\.mlp\.(experts\.\d+|shared_experts)\.(up|gate)_proj\.weight$"),
    ),
    "phi3": (
        _row(r".*\.self_attn\.o_proj\.weight$", r".*\.mlp\.down_proj\.weight$"),
        _column(r".*\.self_attn\.qkv_proj\.weight$", shape=(3, -1)),
        _column(r".*\.mlp\.gate_up_proj\.weight$", shape=(2, -1)),
    ),
}


def choose(model: nn.Module, section: TensorParallel) -> dict[str, Choice] | None:
    """The choice for each module, by its name; None if the section has neither key. Raises UsageError."""
    config, preset = section.partition_config, section.preset_model
    if config is None and preset is None:
        return None
    own: Sequence[Spec] = config.layer_specs if config is not None else ()
    specs = [*own, *(_PRESETS[preset] if preset and (config is None or config.use_default_specs) else ())]
    heads = config.lm_head_patterns if config is not None else _HEADS
    kind = str(getattr(getattr(model, "config", None), "model_type", "")).lower()
    found, unmatched = {}, []
    for name, module in model.named_modules():
        if not name or isinstance(module, Absent):
            continue
        spec = _find(specs, f"{name}.weight", kind)
        if isinstance(module, nn.Embedding):
            if spec is not None:
                found[name] = Choice("replicate" if spec.get("partition_type") == "skip" else "colwise")
        elif spec is not None and (read_features(module) is not None or spec.get("grad_allreduce")):
            found[name] = _read(spec, is_head=name.rpartition(".")[2] in heads)
        elif read_features(module) is not None:
            unmatched.append(name)
    if unmatched and config is not None and config.strict_mode:
        raise UsageError(
            f"tensor_parallel.partition_config: strict_mode is true, but no pattern matches {unmatched[0]}.weight",
            hint="add it to a layer_specs entry, with partition_type skip to keep it whole",
        )
    return add_counts(model, _fit_tied(model, found))


def _find(specs: Sequence[Spec], parameter: str, kind: str) -> Spec | None:
    for spec in specs:
        kinds = [str(each).lower() for each in spec.get("model_types") or ()]
        if (not kinds or kind in kinds) and any(re.match(pattern, parameter) for pattern in spec.get("patterns", ())):
            return spec
    return None


def _read(spec: Spec, *, is_head: bool) -> Choice:
    kind = spec.get("partition_type", "column")
    if kind == "skip":
        return Choice("partial" if spec.get("grad_allreduce") else "replicate")
    if kind == "row":
        return Choice("rowwise_split" if is_head else "rowwise")
    first = (spec.get("shape") or [1])[0]
    sections = tuple(map(int, first)) if isinstance(first, Sequence) else int(first)
    return Choice("colwise_gather" if spec.get("gather_output") else "colwise", sections)


def _fit_tied(model: nn.Module, chosen: dict[str, Choice]) -> dict[str, Choice]:
    """`chosen`, changed where an embedding shares its weight with an output layer, as DeepSpeed does: both stay whole
    if the layer's outputs are gathered. If its inputs are divided, so are the embedding's columns."""
    modules = dict(model.named_modules())
    embeddings = {name: module for name, module in modules.items() if isinstance(module, nn.Embedding)}
    changed: dict[str, Choice] = {}
    for name, choice in chosen.items():
        tied = [each for each, module in embeddings.items() if module.weight is modules[name].weight and each != name]
        if tied and choice.style == "colwise_gather":
            changed |= dict.fromkeys((name, *tied), Choice())
        elif choice.style == "rowwise_split":
            changed |= dict.fromkeys(tied, Choice("colwise_gather"))
    return {**chosen, **changed}
