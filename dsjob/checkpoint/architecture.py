"""Models of transformers, and adapters of peft over them, on the meta device: the names and shapes that they load.

A configuration comes out of a checkpoint, which may come from anywhere: nothing is looked up, no code but that of the
installed transformers and peft is imported, and no kernel is fetched.
"""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsjob.checkpoint.adapters import PREFIX, Adapter, Shapes
from dsjob.errors import UsageError

# What makes transformers import or fetch more than the architecture's own code.
_DROPPED = {
    *("auto_map", "quantization_config", "trust_remote_code", "use_kernels", "use_pretrained_backbone", "name_or_path"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "_name_or_path"),
    *("experts_implementation", "_experts_implementation", "_experts_implementation_internal", "dtype", "torch_dtype"),
}
_READS_MORE = re.compile("Rag|Timm")  # architectures that read pickled indexes, or have a hub of their own
_MOST_LAYERS = 10_000
_KINDS = ("ADALORA", "FOURIERFT", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "LORA", "OFT", "VERA")
_BY_PATTERN = ("rank_pattern", "alpha_pattern")
_PLAIN = r"(?:[\w|^$)-]|\((?:\?:)?|\\\.|\\d\+?|\.\*?)*"  # no quantifier of a group: matching takes little time
_MOST_TOLD = 3


class CannotBuildError(Exception):
    """A model could not be made of its configuration; `str` says why."""


def build_skeleton(config: Mapping[str, Any]) -> nn.Module:
    """The model of a config.json on the meta device. Raises CannotBuildError."""
    if importlib.util.find_spec("transformers") is None:
        raise CannotBuildError("transformers is not installed")
    import transformers

    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    safe = isinstance(name, str) and not _READS_MORE.match(name)
    if not (safe and isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise CannotBuildError(f"transformers {transformers.__version__} has no architecture {name!r}")
    if any(_find_large(config)):
        raise CannotBuildError(f"its configuration has more than {_MOST_LAYERS:,} layers or experts")
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made: Any = kind.config_class
            model: nn.Module = kind(made.from_dict(_strip(config)))
            model.tie_weights()  # type: ignore[operator]
    except Exception as error:  # whatever the architecture makes of a configuration
        raise CannotBuildError(f"{name} cannot be built on the meta device: {type(error).__name__}: {error}") from error
    return model


def _strip(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _strip(item) for key, item in value.items() if key not in _DROPPED}
    return [_strip(item) for item in value] if isinstance(value, list) else value


def _find_large(value: Any) -> Iterator[bool]:
    for key, item in value.items() if isinstance(value, Mapping) else ():
        yield isinstance(item, int) and item > _MOST_LAYERS and ("layer" in key or "expert" in key)
        yield from _find_large(item)


def is_transposed(model: nn.Module, name: str) -> bool | None:
    """Whether a module's weight is [in, out], as that of transformers' Conv1D; None where there is no such module."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return None
    return type(module).__name__ in ("Conv1D", "Embedding")


def require_names(model: nn.Module, found: Shapes) -> None:
    """Raises UsageError where the model has other names or shapes than `found`: `from_pretrained` would fill in those
    that are missing with random values, and pass over the rest."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    problems = [
        *_tell("names that it does not have", _drop(model, "unexpected", found.keys() - expected.keys())),
        *_tell("no tensors for", _drop(model, "missing", _find_missing(model, found, expected))),
        *_tell("other shapes", {name for name, shape in found.items() if expected.get(name, shape) != tuple(shape)}),
    ]
    if problems:
        raise UsageError(
            f"the checkpoint does not fit {type(model).__name__}: {'; '.join(problems)}",
            hint="--to fp32 writes the weights alone, for the job's own model class",
        )


def _tell(what: str, names: set[str]) -> Iterator[str]:
    if names:
        first = ", ".join(sorted(names)[:_MOST_TOLD])
        more = f" and {len(names) - _MOST_TOLD} more" if len(names) > _MOST_TOLD else ""
        yield f"{what}: {first}{more}"


def _drop(model: nn.Module, what: str, names: set[str]) -> set[str]:
    patterns = getattr(model, f"_keys_to_ignore_on_load_{what}", None) or ()
    return {name for name in names if not any(re.search(pattern, name) for pattern in patterns)}


def _find_missing(model: nn.Module, found: Shapes, expected: Shapes) -> set[str]:
    """Names without a tensor, unless another name of the same tensor has one."""
    tied: dict[int, set[str]] = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            tied.setdefault(id(tensor), set()).add(name)
    here = {other for names in tied.values() if names & found.keys() for other in names}
    return set(expected) - set(found) - here


def name_adapter(base: nn.Module, adapter: Adapter, others: Sequence[Adapter], found: Shapes) -> dict[str, str]:
    """The names of an adapter's tensors as peft saves them, by those in the model with adapters, which are checked.

    base: the skeleton of the base model, which is changed; others: the model's other adapters. Raises CannotBuildError,
    UsageError.
    """
    if importlib.util.find_spec("peft") is None:
        raise CannotBuildError("peft is not installed (pip install 'dsjob[peft]')")
    import peft
    from peft.utils import get_peft_model_state_dict

    for each in (adapter, *others):
        _require_plain(each)
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = _make_config(adapter)
            model = peft.get_peft_model(base, config, adapter_name=adapter.name)
            for other in others:
                model.add_adapter(other.name, _make_config(other))
    except Exception as error:  # whatever peft makes of a configuration
        raise CannotBuildError(f"peft cannot make the adapter: {type(error).__name__}: {error}") from error
    state: dict[str, Tensor] = dict(model.state_dict())
    full = {name if name.startswith(PREFIX) else PREFIX + name: name for name in found}
    require_names(model, {name: found[short] for name, short in full.items()})
    names = {id(tensor): name for name, tensor in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter.name)
    if any(id(tensor) not in names for tensor in saved.values()):
        raise CannotBuildError(f"peft changes the tensors of an adapter of type {adapter.kind} when it saves them")
    return {full[names[id(tensor)]]: name for name, tensor in saved.items()}


def _require_plain(adapter: Adapter) -> None:
    """Raises UsageError for an adapter whose making would load a tokenizer, another model or a module, or whose
    patterns may take for ever to match: a checkpoint may come from anybody."""
    if adapter.kind not in _KINDS:
        raise UsageError(
            f"an adapter of type {adapter.kind[:40]!r} is not written for peft; dsjob knows {', '.join(_KINDS)}",
            hint="--to fp32 writes all tensors, which the job's own model loads",
        )
    if adapter.config.get("megatron_config") is not None:
        raise UsageError("the adapter's megatron_config would have a module imported", hint="take it out")
    for key in ("target_modules", "exclude_modules", "feedforward_modules", "layers_pattern", *_BY_PATTERN):
        given = adapter.config.get(key)
        for pattern in [given] if isinstance(given, str) else list(given) if isinstance(given, (list, dict)) else []:
            text = str(pattern)
            try:
                plain = re.fullmatch(_PLAIN, text) and len(re.findall(r"[*+]", text)) <= 3 and re.compile(text)
            except re.error:
                plain = None
            if not plain:
                told = f"the adapter's {key} has a pattern that is not matched: {text[:80]!r}"
                raise UsageError(told, hint="names, and patterns of | . .* \\d+ and groups without a quantifier")


def _make_config(adapter: Adapter) -> Any:
    """A peft configuration that looks at no weights, which are not there, and at no hub."""
    import peft

    make: Any = peft.PeftConfig.from_peft_type
    neutral = {"base_model_name_or_path": None, "inference_mode": False, "auto_mapping": None}
    return make(**{**adapter.config, **neutral, **({"init_lora_weights": True} if adapter.kind == "LORA" else {})})
