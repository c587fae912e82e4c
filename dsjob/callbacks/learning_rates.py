"""Logs the learning rate of each parameter group."""

from __future__ import annotations

from collections.abc import Mapping

from dsjob.callbacks.callback import Callback, RunView, name_model
from dsjob.engine.engine import Engine


class LearningRates(Callback):
    """Adds the learning rate of each parameter group to log records, as `lr/GROUP`; with `models`, as
    `lr/MODEL/GROUP`.

    A group has the name of its rule in `optimizer.param_groups`; `rest` is the group without a rule.
    """

    def on_record(self, run: RunView, record: Mapping[str, float]) -> dict[str, float]:
        return {
            f"lr/{name_model(run, model)}{group}": rate
            for model, engine in run.engines.items()
            for group, rate in zip(_name_groups(engine), engine.last_lr, strict=False)  # no rates before a first step
        }


def _name_groups(engine: Engine) -> list[str]:
    groups = engine.optimizer.param_groups if engine.optimizer is not None else []
    names = [str(group.get("name", "rest")) for group in groups]
    # A program's own optimizer may have several groups without names.
    return names if len(set(names)) == len(names) else [str(number) for number in range(len(names))]
