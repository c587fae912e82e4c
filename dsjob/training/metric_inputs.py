"""Finds the arguments for a metric: by paths into the outputs and the batch, or by the names of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from dsjob.errors import ContractError
from dsjob.text.generation import Generated
from dsjob.torch_private import tree_map_only
from dsjob.training.objective import Objective
from dsjob.training.selection import Chosen, descend, describe_output, find_logits

T = TypeVar("T")
_LABELS = ("labels", "label", "targets", "target", "y")


class Seen(NamedTuple):
    """What a metric can read of a batch: the model's outputs, the batch, its loss (a scalar), the number of samples;
    and, by the objective, the predictions and targets that the document chooses."""

    outputs: Any
    batch: Any
    loss: Tensor | None
    samples: int
    objective: Objective | None = None

    @property
    def predictions(self) -> Chosen | None:
        """The predictions; None if the document chooses neither them nor the targets."""
        chooses = self.objective is not None and self.objective.chooses
        return self.objective.predict(self.outputs) if self.objective is not None and chooses else None

    @property
    def targets(self) -> Chosen | None:
        """The targets that the document chooses."""
        chosen = self.objective.targets if self.objective is not None else None
        return None if chosen is None else chosen.read(self.batch)


class Inputs:
    """The arguments of metrics.<name>. paths: by argument name. Without paths, the parameter names of `takes` decide.

    Without `takes` either, a metric receives what a loss would: (outputs, batch), or the predictions and targets that
    the document chooses. Raises ContractError for parameters with unknown names.
    """

    def __init__(self, name: str, paths: Mapping[str, str] | None, takes: Callable[..., Any] | None) -> None:
        self._name, self._paths = name, paths
        self._names = None if paths or takes is None else _read_names(name, takes)

    def read(self, seen: Seen) -> dict[str, Any]:
        """The arguments by name, detached. Raises ContractError for a path that does not exist."""
        if self._paths:
            given = {key: follow(path, seen, f"metrics.{self._name}.inputs.{key}") for key, path in self._paths.items()}
        else:
            given = {name: _KNOWN[name](self._name, seen) for name in self._names or ("outputs", "batch")}
        return _detach(given)

    def call(self, function: Callable[..., Any], seen: Seen) -> Any:
        """Calls `function` with the arguments."""
        predictions, targets = (None, None) if self._paths or self._names else (seen.predictions, seen.targets)
        if predictions is not None and targets is not None:
            predictions, targets = _detach(predictions), _detach(targets)
            return function(*predictions.args, *targets.args, **predictions.keywords, **targets.keywords)
        given = self.read(seen)
        if self._paths or self._names:
            return function(**given)
        return function(*given.values())


def compares(function: Callable[..., Any]) -> bool:
    """Whether a function takes `preds` and `target`, as metrics of torchmetrics do, instead of (outputs, batch)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return {each.name for each in parameters if each.default is inspect.Parameter.empty} == {"preds", "target"}


def follow(path: str, seen: Seen, where: str) -> Any:
    """The value at a path such as `outputs.logits`. where: the path's own place in the document, for messages.

    Raises ContractError if there is no such value.
    """
    root, *steps = path.split(".")
    found: Any = {"outputs": seen.outputs, "batch": seen.batch, "loss": seen.loss}[root]
    for number, step in enumerate(steps):
        if step == "argmax" and number == len(steps) - 1 and isinstance(found, Tensor):
            return found.argmax(-1)
        try:
            found = descend(found, step, ".".join([root, *steps[:number]]))
        except KeyError as error:
            raise ContractError(f"{where}: {error.args[0]}") from None
    return found


def _detach(given: T) -> T:
    """Metrics may keep their inputs, and with a graph, these would keep all activations of a batch in memory."""
    detached: T = tree_map_only(Tensor, Tensor.detach, given)
    return detached


def list_outputs(paths: Mapping[str, str] | None) -> set[str]:
    """The names directly below `outputs` in the paths of a metric."""
    split = [path.split(".") for path in (paths or {}).values()]
    return {steps[1] for steps in split if steps[0] == "outputs" and len(steps) > 1}


def _find_predictions(name: str, seen: Seen) -> Any:
    if isinstance(seen.outputs, Generated):
        return seen.outputs.predictions
    if (predictions := seen.predictions) is not None:
        return predictions.value
    found = find_logits(seen.outputs)
    if found is None:
        raise ContractError(
            f"metrics.{name} needs predictions, but the model's output ({describe_output(seen.outputs)}) has no logits",
            hint=f"metrics.{name}.inputs: {{preds: outputs.NAME, target: batch.NAME}}",
        )
    return found


def _find_classes(name: str, seen: Seen) -> Any:
    found = _find_predictions(name, seen)
    return found.argmax(-1) if isinstance(found, Tensor) and found.is_floating_point() and found.dim() > 1 else found


def _find_targets(name: str, seen: Seen) -> Any:
    if (targets := seen.targets) is not None:
        return targets.value
    batch = seen.batch
    if isinstance(seen.outputs, Generated) and "reference" in seen.outputs:
        return seen.outputs["reference"]
    if isinstance(batch, Mapping):
        key = next((key for key in _LABELS if key in batch), None)
        if key is not None:
            return batch[key]
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        return batch[-1]
    what = f"a dict of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
    raise ContractError(
        f"metrics.{name} needs targets, but the batch ({what}) has no labels",
        hint=f"metrics.{name}.inputs: {{preds: outputs.NAME, target: batch.NAME}}",
    )


_KNOWN: dict[str, Callable[[str, Seen], Any]] = {
    "outputs": lambda name, seen: seen.outputs,
    "batch": lambda name, seen: seen.batch,
    "loss": lambda name, seen: seen.loss,
    **dict.fromkeys(("preds", "input", "y_pred"), _find_predictions),
    "predictions": _find_classes,
    **dict.fromkeys(("target", "targets", "labels", "references", "y_true"), _find_targets),
}


def _read_names(name: str, takes: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(takes).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    # Arguments with defaults are options. The exceptions are those of `add_batch` in Hugging Face's evaluate.
    wanted = [p.name for p in named if p.default is p.empty or p.name in ("predictions", "references")]
    unknown = [each for each in wanted if each not in _KNOWN]
    if unknown or (named and not wanted):
        listed, unclear = ", ".join(p.name for p in named), unknown[0] if unknown else named[0].name
        raise ContractError(
            f"metrics.{name}: unknown argument {unclear} of {takes.__name__}({listed})",
            hint=f"metrics.{name}.inputs: {{{unclear}: outputs.NAME}} (or batch.NAME, loss)",
        )
    return wanted or ["preds", "target"]
