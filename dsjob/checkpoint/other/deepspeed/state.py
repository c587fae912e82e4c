"""What DeepSpeed keeps of a run beside tensors, in dsjob's own words: counters, schedule, loss scale, client state."""

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

# All that `_common_checkpoint_state` of DeepSpeed's engine writes: what else is there is the program's client_state.
_OWN = re.compile(
    "module|buffer_names|optimizer|param_shapes|frozen_param_(shapes|fragments)|shared_params|lr_scheduler|data_sampler"
    "|random_ltd|(sparse|csr)_tensor_module_names|(skipped|global)_steps|global_samples|[dm]p_world_size"
    "|checkpoint_parallel_dimensions|ds_config|ds_version|universal_checkpoint_info|num_experts|(ds_)?autoep_layers"
)


def read_run(file: TorchFile, optims: Sequence[Mapping[str, Any]], found: Collected) -> RunState:
    """The state of a run. `file`: of model states; `optims`: contents of those of optimizer states.

    Raises ValueError, KeyError or TypeError for what DeepSpeed does not write.
    """
    main, notes = file.content, found.notes
    steps, skipped = _count(main, "global_steps"), _count(main, "skipped_steps")
    counters = {"global_steps": steps, "global_samples": _count(main, "global_samples"), "skipped_steps": skipped}
    for key in ("data_sampler", "random_ltd"):
        if main.get(key):
            notes.append(f"{key} begins anew")
    inner = optims[0]["optimizer_state_dict"] if optims else main.get("optimizer")
    return RunState(
        counters={**counters, "micro_steps": 0},
        scalars=found.scalars,
        trained=frozenset(found.trained),
        scheduler=_read_scheduler(main.get("lr_scheduler"), steps - skipped, notes),
        scaler=_read_scaler(inner or {}),
        client_state=_read_client_state(main, file, notes),
    )


def _count(main: Mapping[str, Any], key: str) -> int:
    value = main[key]
    if type(value) is not int or value < 0:
        raise ValueError(f"{key} is {shorten(value)}")
    return value


def _read_scheduler(saved: Any, steps: int, notes: list[str]) -> dict[str, Any]:
    """DeepSpeed's schedules count from -1 and begin with a step less than torch's; torch's come as they are."""
    if not saved:
        notes.append(f"it holds no schedule: one goes on after {steps} steps")
        return {"last_epoch": steps}
    plain: dict[str, Any] = copy_plain({key: value for key, value in saved.items() if key != "lr_lambdas"}, [10_000])
    if "last_batch_iteration" in plain:
        return {"last_epoch": plain["last_batch_iteration"] + 1}
    return plain


def _read_scaler(inner: Mapping[str, Any]) -> dict[str, Any] | None:
    """The loss scale: of ZeRO an object, of stage 0 among the optimizer's own values."""
    scaler = inner.get("loss_scaler")
    if isinstance(scaler, (LossScaler, DynamicLossScaler)):
        values = vars(scaler)
        dynamic = isinstance(scaler, DynamicLossScaler)
        borne = values.get("cur_hysteresis", 1)
    elif "cur_scale" in inner:
        values, dynamic = dict(inner), bool(inner["dynamic_loss_scale"])
        borne = 1  # DeepSpeed's stage 0 knows no hysteresis
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
            notes.append(f"{file.name}: {key[:80]!r} of the client state is left out: {what}")
    return found
