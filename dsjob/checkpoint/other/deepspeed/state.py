"""Translates the plain state in DeepSpeed's checkpoints to dsjob's: counters, schedule, loss scale, client state."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dsjob.checkpoint.other.deepspeed.layout import Collected
from dsjob.checkpoint.other.foreign import MAX_NODES, RunState, copy_plain
from dsjob.checkpoint.other.torch_files import DynamicLossScaler, LossScaler, TorchFile
from dsjob.contract.shown import shorten

Groups = Sequence[Sequence[str]]

# The keys that `_common_checkpoint_state` of DeepSpeed's engine writes. All others are the program's client_state.
_OWN = re.compile(
    "module|buffer_names|optimizer|param_shapes|frozen_param_(shapes|fragments)|shared_params|lr_scheduler|data_sampler"
    "|random_ltd|(sparse|csr)_tensor_module_names|(skipped|global)_steps|global_samples|[dm]p_world_size"
    "|checkpoint_parallel_dimensions|ds_config|ds_version|universal_checkpoint_info|num_experts|(ds_)?autoep_layers"
)


def read_run(file: TorchFile, optims: Sequence[Mapping[str, Any]], found: Collected) -> RunState:
    """The plain state of a run. file: the model states. optims: the contents of the files of optimizer states.

    Raises ValueError, KeyError or TypeError for malformed content.
    """
    main, notes = file.content, found.notes
    steps, skipped = _count(main, "global_steps"), _count(main, "skipped_steps")
    counters = {"global_steps": steps, "global_samples": _count(main, "global_samples"), "skipped_steps": skipped}
    for key in ("data_sampler", "random_ltd"):
        if main.get(key):
            notes.append(f"the state of {key} was not restored")
    inner = optims[0]["optimizer_state_dict"] if optims else main.get("optimizer")
    return RunState(
        counters={**counters, "micro_steps": 0},
        scalars=found.scalars,
        trained=frozenset(found.trained),
        rates=_read_rates(inner or {}),
        scheduler=_read_scheduler(main.get("lr_scheduler")),
        scaler=_read_scaler(inner or {}),
        client_state=_read_client_state(main, file, notes),
    )


def _count(main: Mapping[str, Any], key: str) -> int:
    value = main[key]
    if type(value) is not int or value < 0:
        raise ValueError(f"{key} is {shorten(value)}")
    return value


def _read_rates(inner: Mapping[str, Any]) -> tuple[float, ...]:
    """The learning rate of each group of the optimizer; none if a group has no number there."""
    own = next((inner[key] for key in ("base_optimizer_state", "optimizer_state_dict") if key in inner), inner)
    groups = own.get("param_groups", ()) if isinstance(own, Mapping) else ()  # elastic_checkpoint: a list of states
    rates = [group.get("lr") for group in groups]
    return tuple(map(float, rates)) if all(type(rate) in (int, float) for rate in rates) else ()


def _read_scheduler(saved: Any) -> dict[str, Any] | None:
    """The schedule's state. DeepSpeed's own schedules count from -1, one step less than torch's, whose state is taken
    unchanged."""
    if not saved:
        return None
    plain: dict[str, Any] = copy_plain({key: value for key, value in saved.items() if key != "lr_lambdas"}, [10_000])
    if "last_batch_iteration" in plain:
        return {"last_epoch": plain["last_batch_iteration"] + 1}
    return plain


def _read_scaler(inner: Mapping[str, Any]) -> dict[str, Any] | None:
    """The loss scale. With ZeRO it is an object; at stage 0 it is among the optimizer's own values."""
    scaler = inner.get("loss_scaler")
    if isinstance(scaler, (LossScaler, DynamicLossScaler)):
        values = vars(scaler)
        dynamic = isinstance(scaler, DynamicLossScaler)
        borne = values.get("cur_hysteresis", 1)
    elif "cur_scale" in inner:
        values, dynamic = dict(inner), bool(inner["dynamic_loss_scale"])
        borne = 1  # DeepSpeed's stage 0 has no hysteresis
    else:
        return None
    return {
        "scale": float(values["cur_scale"]),
        "dynamic": dynamic,
        "step": int(values.get("cur_iter", 0)),
        "last_overflow": int(values.get("last_overflow_iter", -1)),
        "borne": int(borne),
    }


def _read_client_state(main: Mapping[str, Any], file: TorchFile, notes: list[str]) -> dict[str, Any]:
    found, budget = {}, [MAX_NODES]
    for key, value in main.items():
        if not isinstance(key, str) or _OWN.fullmatch(key):
            continue
        try:
            found[key] = copy_plain(value, budget)
        except ValueError as error:
            what = "it is a tensor" if isinstance(value, Tensor) else str(error)
            notes.append(f"{file.name}: {key[:80]!r} of the client state was not restored: {what}")
    return found
