"""Builds transformers models and peft adapters on the meta device, to find the names and shapes that they load.

The configuration comes from a checkpoint, and is not trusted. `apart` runs this module in a process of its own, without
network and with limits; `hub` and `adapter_config` have validated the configuration before.

Names and shapes are compared before anything is written, because `from_pretrained` silently fills missing tensors with
random values. If a library is not installed, a warning says what was not checked.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registration

from dsjob.checkpoint.pretrained.adapters import PREFIX, Adapter, Shapes, find_alphas
from dsjob.contract.shown import shorten
from dsjob.errors import UsageError, how_to_install

# Keys that do not change names or shapes, and may need libraries that are not installed here.
_DROPPED = {
    *("auto_map", "quantization_config", "trust_remote_code", "use_kernels", "use_pretrained_backbone", "name_or_path"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "_name_or_path"),
    *("experts_implementation", "_experts_implementation", "_experts_implementation_internal", "dtype", "torch_dtype"),
}
_READS_MORE = re.compile("Rag|Timm")  # architectures that load pickled indexes, or use a hub of their own
_LEAST_PARTS, _PARTS_EACH = 10_000, 64  # the limit on modules and parameters: a base, plus so many per tensor
_MOST_TOLD = 3


class CannotBuildError(Exception):
    """The model cannot be built from its configuration. `str` says why."""


def import_libraries() -> None:
    """Imports the libraries in advance, so that the limits of `apart` do not apply to the imports."""
    for name in ("transformers", "peft"):
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Computes the fields of `apart.Answer` from those of `apart.Question`. Raises UsageError."""
    shapes = {name: tuple(shape) for name, shape in question["shapes"].items()}
    adapter, *others = (Adapter(*each) for each in question["adapters"]) if question["adapters"] else (None,)
    found: dict[str, Any] = {"names": None, "transposed": {}, "alphas": {}, "notes": []}
    if question["modules"] and adapter is not None:
        found["alphas"] = find_alphas(adapter, question["modules"])
    try:
        with _bounded(len(shapes)):
            base = build_skeleton(question["config"])
            if adapter is not None and not question["modules"]:
                found["names"] = name_adapter(base, adapter, others, shapes)
            else:
                require_names(base, shapes)
                known = ((name, is_transposed(base, name)) for name in question["modules"])
                found["transposed"] = {name: value for name, value in known if value is not None}
    except CannotBuildError as error:
        found["notes"] = [f"the tensor names were not checked against the architecture: {str(error)[:500]}"]
    return found


@contextmanager
def _bounded(tensors: int) -> Iterator[None]:
    """Raises UsageError if the model gets many times more modules and parameters than the checkpoint has tensors."""
    most = _LEAST_PARTS + _PARTS_EACH * tensors
    count = 0

    def add(*_: object) -> None:
        nonlocal count
        count += 1
        if count > most:
            raise UsageError(
                f"the checkpoint's configuration describes a model with more than {most:,} modules and parameters, "
                f"but the checkpoint has {tensors:,} tensors",
                hint="--to fp32 writes only the weights",
            )

    handles = [
        registration.register_module_module_registration_hook(add),
        registration.register_module_parameter_registration_hook(add),
        registration.register_module_buffer_registration_hook(add),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def build_skeleton(config: Mapping[str, Any]) -> nn.Module:
    """Builds the model of a config.json on the meta device. Raises CannotBuildError."""
    if importlib.util.find_spec("transformers") is None:
        raise CannotBuildError("transformers is not installed")
    import transformers

    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    safe = isinstance(name, str) and not _READS_MORE.match(name)
    if not (safe and isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise CannotBuildError(f"transformers {transformers.__version__} has no architecture {shorten(name)}")
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made: Any = kind.config_class
            model: nn.Module = kind(made.from_dict(_strip(config)))
            model.tie_weights()  # type: ignore[operator]
    except (MemoryError, UsageError):
        raise
    except Exception as error:  # the architecture may raise anything for an invalid configuration
        raise CannotBuildError(f"{name} cannot be built on the meta device: {type(error).__name__}: {error}") from error
    return model


def _strip(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _strip(item) for key, item in value.items() if key not in _DROPPED}
    return [_strip(item) for item in value] if isinstance(value, list) else value


def is_transposed(model: nn.Module, name: str) -> bool | None:
    """Whether a module's weight is [in, out], like that of transformers' Conv1D. None if there is no such module."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return None
    return type(module).__name__ in ("Conv1D", "Embedding")


def require_names(model: nn.Module, found: Shapes) -> None:
    """Raises UsageError if the model's names or shapes differ from `found`. Otherwise `from_pretrained` would fill
    missing tensors with random values, and ignore the others."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    problems = [
        *_list_first("unexpected tensors", _drop(model, "unexpected", found.keys() - expected.keys())),
        *_list_first("missing tensors", _drop(model, "missing", _find_missing(model, found, expected))),
        *_list_first(
            "different shapes", {name for name, shape in found.items() if expected.get(name, shape) != tuple(shape)}
        ),
    ]
    if problems:
        raise UsageError(
            f"the checkpoint does not match {type(model).__name__}: {'; '.join(problems)}",
            hint="--to fp32 writes only the weights, for the job's own model class",
        )


def _list_first(what: str, names: set[str]) -> Iterator[str]:
    if names:
        first = ", ".join(sorted(names)[:_MOST_TOLD])
        more = f" and {len(names) - _MOST_TOLD} more" if len(names) > _MOST_TOLD else ""
        yield f"{what}: {first}{more}"


def _drop(model: nn.Module, what: str, names: set[str]) -> set[str]:
    """`names` without those that the model class tells `from_pretrained` to ignore."""
    patterns = getattr(model, f"_keys_to_ignore_on_load_{what}", None) or ()
    return {name for name in names if not any(re.search(pattern, name) for pattern in patterns)}


def _find_missing(model: nn.Module, found: Shapes, expected: Shapes) -> set[str]:
    """Expected names that are missing. A tied name is not missing if another name of the same tensor exists."""
    tied: dict[int, set[str]] = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            tied.setdefault(id(tensor), set()).add(name)
    here = {other for names in tied.values() if names & found.keys() for other in names}
    return set(expected) - set(found) - here


def name_adapter(base: nn.Module, adapter: Adapter, others: Sequence[Adapter], found: Shapes) -> dict[str, str]:
    """Maps names in the model with adapters to the names that peft saves for one adapter. Checks all names and shapes.

    base: the skeleton of the base model, which this changes. others: the model's other adapters. Raises
    CannotBuildError, UsageError.
    """
    if importlib.util.find_spec("peft") is None:
        raise CannotBuildError(f"peft is not installed ({how_to_install('peft')})")
    import peft
    from peft.utils import get_peft_model_state_dict

    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = _make_config(adapter)
            model = peft.get_peft_model(base, config, adapter_name=adapter.name)
            for other in others:
                model.add_adapter(other.name, _make_config(other))
    except (MemoryError, UsageError):
        raise
    except Exception as error:  # peft may raise anything for an invalid configuration
        raise CannotBuildError(f"peft cannot build the adapter: {type(error).__name__}: {error}") from error
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


def _make_config(adapter: Adapter) -> Any:
    """A peft configuration that neither initialises from weights (there are none here) nor uses the hub."""
    import peft

    make: Any = peft.PeftConfig.from_peft_type
    neutral: dict[str, Any] = {"base_model_name_or_path": None, "inference_mode": False, "auto_mapping": None}
    if "LORA" in adapter.kind:
        neutral |= {"init_lora_weights": True, "loftq_config": {}}
    kept = {key: value for key, value in adapter.config.items() if not key.endswith("_config")}
    return make(**{**kept, **neutral})
