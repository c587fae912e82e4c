"""How a job calls its model with a batch, and what its loss is: `inputs`, `outputs`, `targets` and the losses.

Without any of these keys, the whole batch is passed to the model, which returns its loss (`dsjob.compute.calls`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsjob.compute.calls import Loss, LossFunction, call_model, call_with, find_loss, read_loss, shifts_labels
from dsjob.contract.paths import Path
from dsjob.contract.spec import JobSpec, Target
from dsjob.data.batches import IGNORED, count_samples, count_targets
from dsjob.errors import ContractError
from dsjob.ops.linear_cross_entropy import linear_cross_entropy
from dsjob.parallel.strategy import ELSEWHERE
from dsjob.torch_private import tree_map_only
from dsjob.training.selection import Chosen, Selection
from dsjob.trust.frames import put_at
from dsjob.trust.grant import Trust
from dsjob.trust.signatures import name_loss_arguments
from dsjob.trust.targets import build_callable

Count = Tensor | int
_CHOOSE = "set inputs: [...] to choose what the model receives, and targets: [...] for the loss"
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Term:
    """One loss of the job. where: its place in the document. name: in the log, such as `loss/NAME`.

    targets: None if `function` receives (outputs, batch). outputs: None for the model's default predictions.
    """

    function: LossFunction
    where: Path
    name: str = "loss"
    weight: float = 1.0
    outputs: Selection | None = None
    targets: Selection | None = None
    shifts: bool = False  # whether `function` shifts targets by one

    def count(self, batch: Any) -> Count | None:
        """The number of targets in a batch, see `count_chosen`; None if they do not count."""
        if self.targets is None:
            return count_targets(batch, shifted=self.shifts)
        ignored = getattr(self.function, "ignore_index", IGNORED)
        if isinstance(self.function, nn.Module) and _is_of_torch(self.function):
            # Of torch's losses, those with `ignore_index` are means over targets; the others over samples.
            ignored = getattr(self.function, "ignore_index", None)
        return count_chosen(self.targets.read(batch), batch, ignored=ignored, shifted=self.shifts)


@dataclass(frozen=True)
class Objective:
    """How a job calls its model, and how it finds predictions, targets and the loss. By default, the model receives the
    whole batch and returns its loss.

    terms: the losses; empty if the model returns its loss. shifts: whether the model shifts labels by one.
    makes_inputs: whether the model makes the inputs of its decoder from the targets. own_loss, own_prediction: the
    methods compute_loss and prediction_step of a Trainer that replaces them; the latter also receives `needs_loss`.
    """

    inputs: Selection | None = None
    outputs: Selection | None = None
    targets: Selection | None = None
    terms: Sequence[Term] = ()
    shifts: bool = False
    makes_inputs: bool = False
    own_loss: Callable[..., Any] | None = None
    own_prediction: Callable[..., Any] | None = None
    _withheld: set[Any] = field(init=False)  # keys of the batch that the model does not receive

    def __post_init__(self) -> None:
        withheld = {key for term in self.terms if term.targets is not None for key in term.targets.tops}
        object.__setattr__(self, "_withheld", withheld)

    def call(self, model: Callable[..., Any], batch: Any) -> Any:
        """The model's output for a batch. Raises ContractError if the batch lacks a key, or the model does not take
        its inputs."""
        if self.inputs is not None:
            chosen = self.inputs.read(batch)
            return call_with(model, chosen.args, chosen.keywords)
        return call_model(model, self._withhold(batch), _CHOOSE)

    def _withhold(self, batch: Any) -> Any:
        """The batch without targets that a loss receives."""
        if not self._withheld:
            return batch
        if isinstance(batch, Mapping):
            if self.makes_inputs and "decoder_input_ids" not in batch:
                return batch
            return {key: value for key, value in batch.items() if key not in self._withheld}
        if isinstance(batch, (tuple, list)):
            names = getattr(batch, "_fields", [None] * len(batch))
            numbered = zip(range(len(batch)), names, batch, strict=True)
            return [item for n, name, item in numbered if not {n, n - len(batch), name} & self._withheld]
        return batch

    def predict(self, outputs: Any) -> Chosen:
        """The predictions in the model's output. Raises ContractError."""
        return self.outputs.read(outputs) if self.outputs is not None else Chosen((find_predictions(outputs),))

    @property
    def chooses(self) -> bool:
        """Whether the document chooses the predictions or the targets."""
        return self.outputs is not None or self.targets is not None

    def name_predictions(self, outputs: Any) -> dict[str, Any]:
        """The predictions by name: an argument's, or the key in the output; `logits` if the document names none."""
        if self.outputs is None:
            return {"logits": find_predictions(outputs)}
        return self.outputs.name(outputs)

    @property
    def losses(self) -> Sequence[Term]:
        """The losses of the document that are in use."""
        return () if self.own_loss is not None else self.terms

    def compute(self, model: Callable[..., Any], batch: Any) -> tuple[Any, list[Loss]]:
        """The model's output for a batch, and the losses; none where the output is ELSEWHERE. Raises the errors of
        `call` and `find`."""
        if self.own_loss is None:
            outputs = self.call(model, batch)
            return outputs, [] if outputs is ELSEWHERE else self.find(outputs, batch)
        given = self.own_loss(model, copy_batch(batch), return_outputs=True)
        if not isinstance(given, tuple) or len(given) != 2:
            raise ContractError(
                f"compute_loss returned {type(given).__name__} with return_outputs=True",
                hint="end it with: return (loss, outputs) if return_outputs else loss",
            )
        return given[1], [read_loss(given[0], self.own_loss)]

    def evaluate(self, model: Callable[..., Any], batch: Any) -> tuple[Any, list[Loss], Any]:
        """In evaluation: the model's output, the losses, and the batch, with the labels that a prediction_step of the
        user's returned."""
        if self.own_prediction is None:
            return (*self.compute(model, batch), batch)
        loss, outputs, labels = self._predict_own(model, batch, needs_loss=True)
        if loss is None:
            raise ContractError(
                "prediction_step returned no loss in an evaluation", hint="return (loss, logits, labels)"
            )
        return outputs, [read_loss(loss, self.own_prediction)], _add_labels(batch, labels)

    def answer(self, model: Callable[..., Any], batch: Any) -> Any:
        """The model's output in prediction, for which the batch needs no targets.

        A compute_loss of the user's knows how to call the model. Without its targets it fails, and the model receives
        the batch as it is.
        """
        if self.own_prediction is not None:
            return self._predict_own(model, batch, needs_loss=False)[1]
        if self.own_loss is None:
            return self.call(model, batch)
        if self.has_targets(batch):
            return self.compute(model, batch)[0]
        try:
            return self.compute(model, batch)[0]
        except (AttributeError, KeyError, TypeError):
            return self.call(model, batch)

    def has_targets(self, batch: Any) -> bool:
        """Whether a batch has the targets that the document names, or else `labels`."""
        chosen = [each for each in (self.targets, *(term.targets for term in self.terms)) if each is not None]
        if isinstance(batch, Mapping):
            wanted = {key for each in chosen for key in each.tops}
            return wanted <= batch.keys() if wanted else bool({"labels", "shift_labels"} & batch.keys())
        return bool(chosen)

    def _predict_own(self, model: Callable[..., Any], batch: Any, *, needs_loss: bool) -> tuple[Any, Any, Any]:
        assert self.own_prediction is not None
        given = self.own_prediction(model, copy_batch(batch), needs_loss=needs_loss)
        if not isinstance(given, tuple) or len(given) != 3:
            found = f"{type(given).__name__}{f' of {len(given)}' if isinstance(given, tuple) else ''}"
            raise ContractError(f"prediction_step returned {found}", hint="return (loss, logits, labels)")
        return given[0], {"logits": given[1]} if isinstance(given[1], Tensor) else given[1], given[2]

    def find(self, outputs: Any, batch: Any) -> list[Loss]:
        """The losses of a micro batch, one for each term; a single one if the model returns its loss.

        Raises ContractError for a loss that cannot be called, or that does not return a scalar.
        """
        if not self.terms:
            return [find_loss(outputs, batch, None)]
        return [self._find_term(term, outputs, batch) for term in self.terms]

    def _find_term(self, term: Term, outputs: Any, batch: Any) -> Loss:
        if term.targets is None:
            found = find_loss(outputs, batch, term.function)
        else:
            targets = term.targets.read(batch)
            try:
                predictions = term.outputs.read(outputs) if term.outputs is not None else self.predict(outputs)
                found = read_loss(_compare(term.function, predictions, targets), term.function, _REDUCTION)
            except Exception as error:
                put_at(error, (*term.where, "_target_") if term.where != ("label_smoothing",) else term.where)
                raise
        if len(self.terms) > 1 and found.count is not None:
            raise ContractError(
                f"{term.name} returned a pair (sum, count), which is only possible for a single loss",
                hint="return the mean: each of several losses is averaged over its own targets",
            )
        return found

    def count(self, batch: Any) -> list[Count] | None:
        """The number of targets of each loss in a batch; None if one of them does not count targets."""
        if self.losses:
            counts = [term.count(batch) for term in self.terms]
        elif self.targets is not None:
            counts = [count_chosen(self.targets.read(batch), batch, ignored=IGNORED, shifted=self.shifts)]
        else:
            counts = [count_targets(batch, shifted=self.shifts)]
        known = [count for count in counts if count is not None]
        return known if len(known) == len(counts) else None

    def name(self, values: Sequence[Any]) -> dict[str, Any]:
        """Values of the losses, one for each, by their names in the log."""
        names = [term.name for term in self.losses] or ["loss"]
        return dict(zip(names, values, strict=True))

    def add(self, values: Sequence[Any]) -> Any:
        """The loss: the weighted sum of the losses."""
        if len(self.losses) < 2 and not any(term.weight != 1 for term in self.losses):
            return values[0]
        return sum(term.weight * value for term, value in zip(self.terms, values, strict=True))

    def complete(self, means: Mapping[str, float]) -> dict[str, float]:
        """Means by name, with `loss` first, which is computed if each of several losses has its own mean."""
        if not self.losses or "loss" in means:
            return dict(means)
        return {"loss": self.add([means[term.name] for term in self.terms]), **means}


def copy_batch(batch: Any) -> Any:
    """A copy for a method of the user's, which may remove keys from it; the tensors are the same."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def _add_labels(batch: Any, labels: Any) -> Any:
    return {**batch, "labels": labels} if isinstance(batch, Mapping) and labels is not None else batch


def count_chosen(chosen: Chosen, batch: Any, *, ignored: int | None, shifted: bool = False) -> Count:
    """The number of targets: of the first of the chosen values, if these are integers, the elements that are not
    `ignored` (None: the samples). Otherwise the samples."""
    value = next(iter((*chosen.args, *chosen.keywords.values())), None)
    if not isinstance(value, Tensor) or not value.dim():
        return count_samples(batch)
    if ignored is None or value.is_floating_point() or value.dtype == torch.bool:
        return value.shape[0]
    count = torch.count_nonzero((value[..., 1:] if shifted and value.dim() > 1 else value) != ignored)
    return int(count) if count.device.type == "cpu" else count


def find_predictions(outputs: Any) -> Any:
    """The predictions in a model's output where the document does not choose them. Raises ContractError."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        others = [value for key, value in outputs.items() if key != "loss"]
        if outputs.get("logits") is not None or len(others) == 1:
            return outputs["logits"] if outputs.get("logits") is not None else others[0]
    elif getattr(outputs, "logits", None) is not None:
        return outputs.logits
    elif isinstance(outputs, (tuple, list)) and outputs:
        return outputs[0]
    keys = f" of {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else ""
    raise ContractError(
        f"the model's output, a {type(outputs).__name__}{keys}, has no `logits`",
        hint="name its predictions, for example outputs: [NAME]",
    )


_REDUCTION = "return the mean over the batch; a loss of torch.nn does so with reduction: mean"


def _compare(function: LossFunction, predictions: Chosen, targets: Chosen) -> Any:
    """The result of a loss function. Errors of torch's own functions become a ContractError that shows the shapes."""
    given = predictions
    if _inner(function) is not linear_cross_entropy:  # it widens its sums itself, and a whole weight would cost memory
        given = tree_map_only(Tensor, lambda tensor: tensor.float() if tensor.dtype in _HALF else tensor, predictions)
    try:
        return function(*given.args, *targets.args, **given.keywords, **targets.keywords)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        if not _is_of_torch(function):
            raise
        text = str(error).strip().splitlines()
        raise ContractError(
            f"{_name(function)} failed: {text[0] if text else type(error).__name__}",
            hint=f"it was called with predictions {_show(predictions)} and targets {_show(targets)}",
        ) from error


def _show(chosen: Chosen) -> str:
    shown = [
        f"{item.dtype} {list(item.shape)}".removeprefix("torch.") if isinstance(item, Tensor) else type(item).__name__
        for item in (*chosen.args, *chosen.keywords.values())
    ]
    return ", ".join(shown) or "none"


def _inner(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function)


def _is_of_torch(function: Any) -> bool:
    return str(getattr(_inner(function), "__module__", "")).partition(".")[0] == "torch"


def _name(function: Any) -> str:
    return str(getattr(_inner(function), "__qualname__", function))


@dataclass(frozen=True)
class SmoothedCrossEntropy:
    """Cross entropy with a part of each target's weight spread evenly over all classes. shifts: whether each position
    predicts the next one's target."""

    part: float
    shifts: bool

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over targets other than -100. logits: [..., classes], labels: integers [...] or [..., 1]."""
        if self.shifts:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=self.part)


def build_objective(spec: JobSpec, model: nn.Module, device: torch.device, trust: Trust) -> Objective:
    """The objective of a job; losses that are modules are moved to `device`. model: the job's first one.

    Raises TargetError.
    """
    choose = functools.partial(_choose, what="the model's output")
    inputs, targets = _choose(spec.inputs, ("inputs",)), _choose(spec.targets, ("targets",))
    shifts, terms = shifts_labels(model), list[Term]()
    if spec.loss is not None:
        names = name_loss_arguments(spec.outputs, spec.targets)
        function = _build_loss(spec.loss, ("loss",), names, device, trust)
        terms.append(Term(function, ("loss",), targets=targets, shifts=shifts and targets is None))
    elif spec.label_smoothing:
        smoothed = SmoothedCrossEntropy(spec.label_smoothing, shifts)
        labels = targets or Selection(["labels"], ("targets",), "the batch")
        terms.append(Term(smoothed, ("label_smoothing",), targets=labels, shifts=shifts))
    for name, loss in spec.losses.items():
        where: Path = ("losses", name)
        names = name_loss_arguments(loss.outputs or spec.outputs, loss.targets or spec.targets)
        function = _build_loss(loss.target, where, names, device, trust)
        own = _choose(loss.targets, (*where, "targets")) or targets
        outputs = choose(loss.outputs, (*where, "outputs"))
        shifted = shifts and own is None
        terms.append(Term(function, where, f"loss/{name}", loss.weight, outputs, own, shifts=shifted))
    return Objective(
        inputs,
        choose(spec.outputs, ("outputs",)),
        targets,
        tuple(terms),
        shifts=shifts,
        makes_inputs=bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False)),
    )


def _choose(keys: Any, where: Path, what: str = "the batch") -> Selection | None:
    return None if keys is None else Selection(keys, where, what)


def _build_loss(
    target: Target, where: Path, names: tuple[Sequence[str], Sequence[str]], device: torch.device, trust: Trust
) -> LossFunction:
    function: LossFunction = build_callable(target, ".".join(map(str, where)), trust, where, passed=names)
    return function.to(device) if isinstance(function, nn.Module) else function
