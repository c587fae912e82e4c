"""Optimizers by name: DeepSpeed's names with DeepSpeed's defaults, every class of torch.optim, or a target."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dsjob.errors import TargetError
from dsjob.optim.lamb import Lamb
from dsjob.optim.lion import Lion
from dsjob.spec import Method
from dsjob.targets import call_target, describe_call_error
from dsjob.trust import Trust

Groups = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


def build_optimizer(method: Method, parameters: Groups, trust: Trust = Trust()) -> Optimizer:  # noqa: B008 (frozen)
    """The optimizer that the document names, over `parameters` (or groups of them).

    Raises TargetError for a name that torch.optim does not have, or arguments that it does not take.
    """
    groups = list(parameters)
    if method.target is not None:
        made = call_target(method.target, groups, trust=trust)
        if not isinstance(made, Optimizer):
            raise TargetError(
                f"optimizer: {method.target.path} returned {type(made).__name__}, not a torch.optim.Optimizer"
            )
        return made
    name = method.type or ""
    build = _NAMED.get(name.lower()) or _find(name)
    try:
        return build(groups, method.params)
    except (TypeError, ValueError) as error:
        raise TargetError(f"optimizer {name}: {error}", hint="see optimizer.params in the document") from error


def _build_adam(groups: list[Any], params: Mapping[str, Any], *, decoupled: bool) -> Optimizer:
    arguments = {key: params[key] for key in ("lr", "betas", "eps", "weight_decay", "amsgrad", "fused")}
    arguments["betas"] = tuple(arguments["betas"])
    return (torch.optim.AdamW if decoupled else torch.optim.Adam)(groups, **arguments)


def _adam(groups: list[Any], params: Mapping[str, Any]) -> Optimizer:
    return _build_adam(groups, params, decoupled=params["adam_w_mode"])


def _adamw(groups: list[Any], params: Mapping[str, Any]) -> Optimizer:
    return _build_adam(groups, params, decoupled=True)


def _sgd(groups: list[Any], params: Mapping[str, Any]) -> Optimizer:
    return torch.optim.SGD(groups, **params)


def _adagrad(groups: list[Any], params: Mapping[str, Any]) -> Optimizer:
    return torch.optim.Adagrad(groups, **params)


def _lamb(groups: list[Any], params: Mapping[str, Any]) -> Optimizer:
    arguments = {key: value for key, value in params.items() if key != "amsgrad"}  # false: the schema allows no other
    return Lamb(groups, **{**arguments, "betas": tuple(params["betas"])})


def _lion(groups: list[Any], params: Mapping[str, Any]) -> Optimizer:
    return Lion(groups, **{**params, "betas": tuple(params["betas"])})


_NAMED: dict[str, Callable[[list[Any], Mapping[str, Any]], Optimizer]] = {
    "adam": _adam,
    "adamw": _adamw,
    "sgd": _sgd,
    "adagrad": _adagrad,
    "lamb": _lamb,
    "lion": _lion,
}


def _find(name: str) -> Callable[[list[Any], Mapping[str, Any]], Optimizer]:
    found = getattr(torch.optim, name, None)
    if not (inspect.isclass(found) and issubclass(found, Optimizer) and found is not Optimizer):
        known = [n for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, Optimizer)]
        known.remove("Optimizer")
        raise TargetError(f"there is no optimizer {name!r}", hint=f"known: {', '.join(sorted(known))}, or a _target_")
    kind: type[Optimizer] = found

    def build(groups: list[Any], params: Mapping[str, Any]) -> Optimizer:
        try:
            inspect.signature(kind).bind(groups, **params)
        except TypeError as error:
            raise TargetError(describe_call_error(f"optimizer {name}", kind, error)) from error
        return kind(groups, **params)

    return build
