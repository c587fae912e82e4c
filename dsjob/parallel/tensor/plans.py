"""Which layers of a model are divided, and how: the plan of the document, of the model, or one that dsjob knows.

A plan maps patterns of module names to styles (`parallel.tensor.styles`). A pattern matches a whole name, or its end
after a dot. `*` stands for one or more parts of a name; at the end of a pattern, for exactly one. Of several patterns
that match a module, the first counts.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from dsjob.errors import UsageError
from dsjob.parallel.pipeline.walk import Absent
from dsjob.parallel.tensor.styles import read_features
from dsjob.ranks.splits import Sections

STYLES = (
    "colwise",
    "colwise_gather",
    "rowwise",
    "rowwise_split",
    "vocabulary",
    "replicate",
    "partial",
    "loss_parallel",
)
# The names of the same styles in plans of transformers.
_ALSO = {
    "colwise_gather_output": "colwise_gather",
    "colwise_rep": "colwise_gather",
    "rowwise_split_input": "rowwise_split",
    "rowwise_rep": "rowwise_split",
    "embedding_rowwise": "vocabulary",
    "embedding_colwise": "colwise",
    "replicated_with_grad_allreduce": "partial",
}


class Choice(NamedTuple):
    """What happens to a module. sections: see `Split`. divide: attributes of it that count what a rank holds."""

    style: str = "replicate"
    sections: Sections = 1
    divide: tuple[str, ...] = ()


Plan = Mapping[str, Choice]  # by pattern

_T5 = {
    "*.q": "colwise",
    "*.k": "colwise",
    "*.v": "colwise",
    "*.o": "rowwise",
    "relative_attention_bias": "colwise",
    "*.wi": "colwise",
    "*.wi_0": "colwise",
    "*.wi_1": "colwise",
    "*.wo": "rowwise",
    "SelfAttention": {"divide": ["n_heads", "inner_dim"]},
    "EncDecAttention": {"divide": ["n_heads", "inner_dim"]},
}
# Of transformers, by `model_type`: those without plans of their own.
_KNOWN: dict[str, Mapping[str, Any]] = {
    "gpt2": {
        "h.*.attn.c_attn": {"style": "colwise", "sections": 3},
        "h.*.attn.c_proj": "rowwise",
        "h.*.attn": {"divide": ["num_heads", "split_size"]},
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    "t5": _T5,
    "mt5": _T5,
}


def read_plan(given: Mapping[str, Any]) -> dict[str, Choice]:
    """The choices of a plan as it is written. Raises UsageError for styles that dsjob does not have."""
    return {pattern: _read_choice(pattern, value) for pattern, value in given.items()}


def _read_choice(pattern: str, value: Any) -> Choice:
    value = {"style": value} if isinstance(value, str) else value
    style = str(value.get("style", "replicate"))
    sections = 2 if style == "packed_colwise" else value.get("sections", 1)
    sections = tuple(map(int, sections)) if isinstance(sections, Sequence) else int(sections)
    style = "colwise" if style == "packed_colwise" else _ALSO.get(style, style)
    if style not in STYLES:
        raise UsageError(
            f"tensor_parallel: the plan has the style {style} for {pattern}, which dsjob does not have",
            hint=f"write a plan of your own (tensor_parallel.plan) with {', '.join(STYLES)}",
        )
    return Choice(style, sections, tuple(value.get("divide", ())))


def find_plan(model: nn.Module, given: Mapping[str, Any] | None) -> dict[str, Choice] | None:
    """The plan for a model: `given`, or the model's own (`tp_plan`), or the one for its kind; None if there is none.
    Raises UsageError."""
    if given is not None:
        return read_plan(given)
    own = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    known = _KNOWN.get(str(getattr(getattr(model, "config", None), "model_type", "")))
    return _without_tied(model, read_plan(own or known or {})) if own or known else None


def _without_tied(model: nn.Module, plan: dict[str, Choice]) -> dict[str, Choice]:
    """A model's own plan without layers that share a weight with one that it does not divide, such as a tied head."""
    chosen = match(model, plan)
    users: dict[int, set[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), set()).add(name)
    shared = {name for names in users.values() if names - chosen.keys() for name in names & chosen.keys()}
    return {pattern: c for pattern, c in plan.items() if not any(_compile(pattern).search(name) for name in shared)}


def divide_vocabulary(model: nn.Module, chosen: Plan) -> dict[str, Choice]:
    """The choices for a model's output layer, and for the embedding that shares its weight. Raises UsageError."""
    names = {id(module): name for name, module in model.named_modules()}
    marked = [name for name, choice in chosen.items() if choice.style == "loss_parallel"]
    read = getattr(model, "get_output_embeddings", None)
    head = read() if callable(read) else None
    if marked:
        return {}
    if head is None or id(head) not in names:
        raise UsageError(
            f"tensor_parallel.loss_parallel: {type(model).__name__} does not say which layer computes its logits",
            hint="give it the style loss_parallel in tensor_parallel.plan",
        )
    shared = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.weight is head.weight]
    tied = {names[id(module)]: Choice("vocabulary") for module in shared}
    return {names[id(head)]: Choice("loss_parallel"), **tied}


def match(model: nn.Module, plan: Plan) -> dict[str, Choice]:
    """The choice for each module that a pattern matches, by its name. Leaves out those of other pipeline stages."""
    patterns = [(_compile(pattern), choice) for pattern, choice in plan.items()]
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Absent):
            continue
        choice = next((choice for pattern, choice in patterns if pattern.search(name)), None)
        if name and choice is not None:
            found[name] = choice
    return found


def find_unused(model: nn.Module, plan: Plan) -> list[str]:
    """Patterns that match no module."""
    names = [name for name, _ in model.named_modules()]
    return [pattern for pattern in plan if not any(_compile(pattern).search(name) for name in names)]


def _compile(pattern: str) -> re.Pattern[str]:
    *parts, last = pattern.split(".")
    inner = [r"[^.]+(?:\.[^.]+)*" if part == "*" else re.escape(part) for part in parts]
    whole = r"\.".join([*inner, "[^.]+" if last == "*" else re.escape(last)])
    return re.compile(rf"(?:^|\.){whole}$")


def refuse_without_plan(model: nn.Module, size: int) -> UsageError:
    """The error for a model without a plan: how to write one, with the layers that can be divided."""
    name = type(model).__name__
    return UsageError(f"tensor_parallel.size is {size}, but {name} has no plan for it", hint=_suggest(model, size))


def _suggest(model: nn.Module, size: int) -> str:
    layers = list(_list_layers(model, size))
    pairs = [
        (first, second)
        for (first, _, outputs), (second, inputs, _) in itertools.pairwise(layers)
        if outputs == inputs and first.rpartition(".")[0] == second.rpartition(".")[0]
    ]
    if not layers:
        return f"none of its linear layers divides by {size}; use the ZeRO stages"
    first, second = pairs[-1] if pairs else (layers[0][0], layers[-1][0])
    shown = ", ".join(f"{name} ({inputs} -> {outputs})" for name, inputs, outputs in layers[:8])
    more = f" and {len(layers) - 8} more" if len(layers) > 8 else ""
    return (
        f"write one: tensor_parallel: {{plan: {{{first}: colwise, {second}: rowwise}}}}, for layers that follow each"
        f" other; these divide by {size}: {shown}{more}"
    )


def _list_layers(model: nn.Module, size: int) -> Iterator[tuple[str, int, int]]:
    """The linear layers whose outputs or inputs divide by `size`: pattern, inputs, outputs; each pattern once."""
    seen = set()
    for name, module in model.named_modules():
        features = read_features(module)
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        if features is None or pattern in seen:
            continue
        seen.add(pattern)
        if features.inputs % size == 0 or features.outputs % size == 0:
            yield pattern, features.inputs, features.outputs
