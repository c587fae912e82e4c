"""The options of DeepSpeed's transformer layer."""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dsjob.errors import UsageError

T = TypeVar("T")
_EARLIER = (  # the arguments after initializer_range until DeepSpeed put layer_norm_eps before them
    "local_rank", "seed", "fp16", "pre_layer_norm", "normalize_invertible", "gelu_checkpoint", "adjust_init_range",
    "attn_dropout_checkpoint", "stochastic_mode", "huggingface", "training",
)  # fmt: skip


def _take_either_order(kind: type[T]) -> type[T]:
    """Makes a class take positional arguments in the order of earlier versions of DeepSpeed, too. Their ninth is a
    rank, an integer; since then, it is layer_norm_eps, a float."""
    init = kind.__init__

    @functools.wraps(init)
    def take(self: T, *values: Any, **named: Any) -> None:
        if len(values) > 8 and isinstance(values[8], int):
            if len(values) > 8 + len(_EARLIER):
                raise TypeError(f"{kind.__name__} got {len(values)} positional arguments, of which the ninth is a rank")
            init(self, *values[:8], **dict(zip(_EARLIER, values[8:], strict=False)), **named)
        else:
            init(self, *values, **named)

    kind.__init__ = take  # type: ignore[assignment, method-assign]
    return kind


@_take_either_order
@dataclass
class DeepSpeedTransformerConfig:
    """The options of a `DeepSpeedTransformerLayer`, by name, or by position in the order of DeepSpeed, also of its
    versions without layer_norm_eps.

    hidden_size, heads: the width and its number of attention heads, which divides it. intermediate_size: the width of
    the feed-forward part, by default four times as wide. attn_dropout_ratio, hidden_dropout_ratio: of the attention's
    probabilities, and of what each part adds; 0 or less: no dropout.

    initializer_range: the standard deviation of new weights. adjust_init_range: divide it by
    sqrt(2 * num_hidden_layers) for the weights that write into the residual stream. DeepSpeed's layer does so only if
    local_rank is 0; this one always.

    local_rank: the GPU to make current, where it is 0 or more and there are GPUs. fp16: compute in fp16 even if the
    parameters are fp32. Otherwise the layer computes in the dtype of autocast, or of its parameters.
    return_tuple, huggingface (its older name): return a tuple. training: whether the layer begins in training mode.

    Three options save memory in exchange for time: normalize_invertible rebuilds the inputs of LayerNorm from its
    outputs, gelu_checkpoint computes the output of GELU again, and attn_dropout_checkpoint the dropout of attention
    probabilities. The last one matters on CPUs, and on GPUs for heads whose width is no multiple of 16 bytes; for
    others, SDPA's kernels never store the probabilities.

    No effect: batch_size and max_seq_length, since any size works; seed, since dropout draws from torch's generators;
    and stochastic_mode, since this layer has no faster, less deterministic version of its operators.
    """

    batch_size: int = -1
    hidden_size: int = -1
    intermediate_size: int = -1
    heads: int = -1
    attn_dropout_ratio: float = -1
    hidden_dropout_ratio: float = -1
    num_hidden_layers: int = -1
    initializer_range: float = -1
    layer_norm_eps: float = 1e-12
    local_rank: int = -1
    seed: int = -1
    fp16: bool = False
    pre_layer_norm: bool = True
    normalize_invertible: bool = False
    gelu_checkpoint: bool = False
    adjust_init_range: bool = True
    attn_dropout_checkpoint: bool = False
    stochastic_mode: bool = False
    return_tuple: bool = False
    training: bool = True
    max_seq_length: int = -1
    huggingface: bool = False
    layer_id: int = dataclasses.field(default=-1, init=False)  # of the newest layer with this config

    def __post_init__(self) -> None:
        if self.intermediate_size <= 0:
            self.intermediate_size = 4 * self.hidden_size

    @classmethod
    def from_dict(cls, json_object: dict[str, Any]) -> DeepSpeedTransformerConfig:
        """A config with the options in `json_object`. Its other keys become attributes."""
        options = {field.name for field in dataclasses.fields(cls) if field.init}
        config = cls(**{key: value for key, value in json_object.items() if key in options})
        for key in json_object.keys() - options:
            setattr(config, key, json_object[key])
        return config

    @classmethod
    def from_json_file(cls, json_file: str | Path) -> DeepSpeedTransformerConfig:
        """A config with the options in a JSON file, in UTF-8 or, as DeepSpeed expects, in UTF-16."""
        loaded: dict[str, Any] = json.loads(Path(json_file).read_bytes())
        return cls.from_dict(loaded)

    def check(self) -> None:
        """Raises UsageError for a value that a layer cannot be built with."""
        for name in ("hidden_size", "heads"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.hidden_size % self.heads:
            raise UsageError(f"hidden_size {self.hidden_size} does not divide into {self.heads} heads")
        for name in ("attn_dropout_ratio", "hidden_dropout_ratio"):
            if getattr(self, name) >= 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be below 1")
