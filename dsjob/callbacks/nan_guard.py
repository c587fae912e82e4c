"""Decides what happens when gradients are not finite, and names the first parameter with such gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

from dsjob.callbacks.callback import Callback, RunView
from dsjob.errors import ContractError, NonFiniteLossError


class NanGuard(Callback):
    """Checks the gradients of every step before the optimizer uses them, so that weights stay finite.

    action, if gradients of any rank are not finite: `raise` an error, `skip` the step, or `stop` the run with the
    weights before that step, which are evaluated and saved. Without this callback, the next log record finds a loss or
    norm that is not finite, and raises. Skipping many steps in a row is an error.

    The host waits for the device in every step. Models in fp16 are left out: their loss scale handles overflows.
    Raises ContractError for another action, and with `engine: deepspeed`.
    """

    def __init__(self, action: Literal["raise", "skip", "stop"] = "raise") -> None:
        if action not in ("raise", "skip", "stop"):
            raise ContractError(f"action is {action!r}", hint="write raise, skip or stop")
        self._action = action

    def on_start(self, run: RunView) -> None:
        for name, engine in run.engines.items():
            if engine.driver:
                raise ContractError("NanGuard needs dsjob's own engine", hint="set engine: dsjob")
            if engine.optimizer is not None and not engine.precision.needs_scale:
                engine.strategy.guard = partial(self._meet, run, name if len(run.engines) > 1 else "")

    def _meet(self, run: RunView, model: str, culprits: Sequence[str]) -> None:
        first = f"{model}.{culprits[0]}" if model else culprits[0]
        more = f" and {len(culprits) - 1} more" if len(culprits) > 1 else ""
        found = f"the gradients of {first}{more} are not finite in step {run.engine.global_steps + 1}"
        if self._action == "raise":
            raise NonFiniteLossError(found, hint="lower optimizer.params.lr, or inspect that batch")
        if self._action == "stop":
            run.request_stop(found)
        else:
            run.say("skipped", found)
