"""Builds optimizers: DeepSpeed's names with DeepSpeed's defaults, any class of torch.optim, or a `_target_`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dsjob.contract.spec import Method
from dsjob.errors import TargetError
from dsjob.optim.adam import DeepSpeedAdam
from dsjob.optim.groups import check_overrides, split_groups
from dsjob.optim.lamb import Lamb
from dsjob.optim.lion import Lion
from dsjob.optim.muon import MuonWithAuxAdam, split_matrices
from dsjob.optim.onebit.onebit_adam import OneBitAdam
from dsjob.optim.onebit.onebit_lamb import OneBitLamb
from dsjob.optim.onebit.zero_one_adam import ZeroOneAdam
from dsjob.trust.grant import Trust
from dsjob.trust.signatures import find_misfits
from dsjob.trust.targets import call_target, placing_target

Groups = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


def build_optimizer(
    method: Method,
    parameters: Groups,
    trust: Trust = Trust(),  # noqa: B008 (frozen)
    names: Mapping[int, str] | None = None,
) -> Optimizer:
    """Builds the document's optimizer for `parameters` (or groups of them). names: of parameters, by id.

    Raises TargetError for an unknown name, for invalid arguments, and for rules in `param_groups` that do not match the
    parameters.
    """
    groups: list[Any] = list(parameters)
    if method.param_groups and names is not None:
        if len(groups) == 1 and isinstance(groups[0], dict) and set(groups[0]) == {"params"}:
            groups = groups[0]["params"]
        if groups and isinstance(groups[0], dict):
            raise TargetError(
                "optimizer.param_groups: the program already passes parameter groups", hint="keep only one of the two"
            )
        groups = split_groups(groups, method.param_groups, names)
    built = _build(method, groups, trust, names or {})
    check_overrides(method.param_groups, built.defaults)
    return built


def _build(method: Method, groups: list[Any], trust: Trust, names: Mapping[int, str]) -> Optimizer:
    if method.target is not None:
        with placing_target(("optimizer",)):
            made = call_target(method.target, groups, trust=trust, where=("optimizer",))
            if not isinstance(made, Optimizer):
                found = f"{method.target.path} returned {type(made).__name__}, not a torch.optim.Optimizer"
                raise TargetError(f"optimizer: {found}")
            return made
    name = method.type or ""
    build = _NAMED.get(name.lower()) or (
        functools.partial(_muon, names=names) if name.lower() == "muon" else _find(name)
    )
    try:
        return build(groups, method.params)
    except (TypeError, ValueError) as error:
        failed = TargetError(f"{name}: {error}", hint="see optimizer.params in the document")
        failed.put_at(("optimizer", "params"))
        raise failed from error


def _build_adam(groups: list[Any], params: Mapping[str, Any], *, decoupled: bool) -> Optimizer:
    # torch's Adam always corrects the bias. Otherwise prefer it, since it can use a fused kernel.
    if not params["bias_correction"]:
        kept = {key: params[key] for key in ("lr", "bias_correction", "eps", "weight_decay", "amsgrad")}
        return DeepSpeedAdam(groups, betas=tuple(params["betas"]), adam_w_mode=decoupled, **kept)
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
    arguments = {key: value for key, value in params.items() if key != "amsgrad"}  # the schema only allows false
    return Lamb(groups, **{**arguments, "betas": tuple(params["betas"])})


def _lion(groups: list[Any], params: Mapping[str, Any]) -> Optimizer:
    return Lion(groups, **{**params, "betas": tuple(params["betas"])})


def _compressing(
    groups: list[Any], params: Mapping[str, Any], *, kind: type[OneBitAdam | OneBitLamb | ZeroOneAdam]
) -> Optimizer:
    without_effect = ("amsgrad", "cuda_aware", "comm_backend_name")  # accepted for DeepSpeed's configs
    arguments = {key: value for key, value in params.items() if key not in without_effect}
    return kind(groups, **{**arguments, "betas": tuple(params["betas"])})


def _muon(groups: list[Any], params: Mapping[str, Any], names: Mapping[int, str]) -> Optimizer:
    arguments = {key: params[key] for key in ("momentum", "ns_method", "eps", "weight_decay")}
    for ours, theirs in (("lr", "muon_lr"), ("adam_lr", "adam_lr")):
        # `lr` is the default for both rates.
        if theirs in params or "lr" in params:
            arguments[ours] = params.get(theirs, params.get("lr"))
    return MuonWithAuxAdam(split_matrices(groups, names), betas=tuple(params["betas"]), **arguments)


_NAMED: dict[str, Callable[[list[Any], Mapping[str, Any]], Optimizer]] = {
    "adam": _adam,
    "adamw": _adamw,
    "sgd": _sgd,
    "adagrad": _adagrad,
    "lamb": _lamb,
    "lion": _lion,
    "onebitadam": functools.partial(_compressing, kind=OneBitAdam),
    "onebitlamb": functools.partial(_compressing, kind=OneBitLamb),
    "zerooneadam": functools.partial(_compressing, kind=ZeroOneAdam),
}


def _find(name: str) -> Callable[[list[Any], Mapping[str, Any]], Optimizer]:
    found = getattr(torch.optim, name, None)
    if not (inspect.isclass(found) and issubclass(found, Optimizer) and found is not Optimizer):
        known = [n for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, Optimizer)]
        known.remove("Optimizer")
        error = TargetError(
            f"unknown optimizer {name!r}", hint=f"available: {', '.join(sorted(known))}; or use a _target_"
        )
        error.put_at(("optimizer", "type"))
        raise error
    kind: type[Optimizer] = found

    def build(groups: list[Any], params: Mapping[str, Any]) -> Optimizer:
        for misfit in find_misfits(f"optimizer {name}", kind, 1, params):
            failed = TargetError(misfit.message, hint=misfit.hint)
            failed.put_at(("optimizer", "params", *([misfit.argument] if misfit.argument else [])))
            raise failed
        return kind(groups, **params)

    return build
