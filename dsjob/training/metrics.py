"""Metrics: each sees every sample once, whatever the micro batch and the number of ranks, and returns one result.

A metric is fed on the rank that has the batch. Rank 0 then gathers states, values or the inputs themselves (depending
on the kind of metric), computes the result, and sends it to all ranks. Padding batches are not fed to metrics.

The collectives of torchmetrics are not used: they would hang if all batches of a rank are padding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from dsjob.compute.calls import to_scalar
from dsjob.data import to_device
from dsjob.errors import ContractError, DsjobError, MetricError
from dsjob.ranks.agreement import all_gather, gather_on_rank_0, on_rank_0
from dsjob.ranks.failures import follows_from_another
from dsjob.ranks.mesh import World
from dsjob.torch_private import tree_map_only
from dsjob.training.metric_inputs import Inputs, Seen, compares
from dsjob.training.objective import Objective
from dsjob.trust.frames import TRACEBACK_HINT, describe_failure

T = TypeVar("T")
_NO_NUMBER = "return one number (averaged over classes, for example), or a dict of numbers by name"


class Measure(Protocol):
    """One metric of a run. `start` resets it, `feed` adds a batch, `collect` returns this rank's part (picklable), and
    `conclude`, on rank 0, computes a number or a dict of numbers from the parts of all ranks."""

    def start(self, alone: bool) -> None: ...
    def feed(self, seen: Seen) -> None: ...
    def collect(self) -> Any: ...
    def conclude(self, parts: list[Any]) -> Any: ...


class Measures:
    """The metrics of one phase (`eval` or `train`) by name. Constructing it is a collective."""

    def __init__(
        self, phase: str = "eval", world: World | None = None, measures: Mapping[str, Measure] | None = None
    ) -> None:
        self._phase, self._measures = phase, dict(measures or {})
        self._everyone = world.everyone if world is not None else None
        self._counts = bool(measures) and world is not None and is_counted(world)

    def __len__(self) -> int:
        return len(self._measures)

    def copy(self) -> Measures:
        """A copy with copies of the metrics, which share its parameters. Omits metrics that cannot be copied."""
        other = Measures(self._phase)
        other._everyone, other._counts = self._everyone, self._counts
        other._measures = {name: own for name, each in self._measures.items() if (own := _copy(each)) is not None}
        return other

    def start(self) -> None:
        """Begins a new evaluation, or the steps up to the next log record."""
        for name, measure in self._measures.items():
            with _RaiseAsMetricError(name):
                measure.start(alone=self._everyone is None or self._everyone.size == 1)

    @torch.no_grad()
    def feed(
        self, outputs: Any, batch: Any, loss: Tensor | None, samples: int, objective: Objective | None = None
    ) -> None:
        """Feeds a batch to all metrics, unless another rank feeds the data of this rank's model.

        objective: chooses predictions and targets, if the document does.
        """
        # Padding batches do not get here: the evaluator feeds only batches with samples.
        if self._counts:
            seen = Seen(outputs, batch, loss, samples, objective)
            for name, measure in self._measures.items():
                with _RaiseAsMetricError(name):
                    measure.feed(seen)

    @torch.no_grad()
    def finish(self, prefix: str = "") -> dict[str, float]:
        """The results by `<prefix>/<name>`, or `<prefix>/<name>/<key>` for dicts; the same on all ranks. A collective.

        prefix: by default the phase. Raises MetricError if a metric fails on any rank, ContractError for results that
        are not numbers; both on all ranks.
        """
        everyone = self._everyone
        if not self._measures or everyone is None:
            return {}
        # A rank that does not feed metrics sends None, but must take part.
        parts = gather_on_rank_0(everyone, self._collect)
        results: dict[str, float] = on_rank_0(everyone, lambda: self._conclude(prefix or self._phase, parts))
        self.start()  # frees what was kept per batch, and keeps partial state out of checkpoints
        return results

    def _collect(self) -> dict[str, Any] | None:
        if not self._counts:
            return None
        parts = {}
        for name, measure in self._measures.items():
            with _RaiseAsMetricError(name):
                parts[name] = measure.collect()
        return parts

    def _conclude(self, prefix: str, ranks: list[dict[str, Any] | None]) -> dict[str, float]:
        results: dict[str, float] = {}
        for name, measure in self._measures.items():
            with _RaiseAsMetricError(name):
                found = measure.conclude([of_rank[name] for of_rank in ranks if of_rank is not None])
                results |= {f"{prefix}/{key}": value for key, value in _read_numbers(name, found)}
        return results


def _copy(measure: Measure) -> Measure | None:
    modules = [value for value in vars(measure).values() if isinstance(value, nn.Module)]
    shared = {id(each): each for module in modules for each in module.parameters()}
    try:
        return copy.deepcopy(measure, shared)
    except Exception:  # copying a user's class may raise anything
        return None


def is_counted(world: World) -> bool:
    """Whether this rank feeds its batches to metrics, and writes predictions: of the ranks of one model, the first that
    reports and reads data. A collective."""
    everyone = world.everyone
    ranks = all_gather(everyone, (world.data_rank, not world.reports, not world.loads))
    own = [(quiet, idle, number) for number, (data, quiet, idle) in enumerate(ranks) if data == world.data_rank]
    quiet, _, number = min(own)
    return not quiet and number == everyone.rank


def _read_numbers(name: str, found: Any) -> Iterator[tuple[str, float]]:
    """The numbers in a result: NAME, or NAME/KEY for each key of a dict, whose key NAME gives NAME."""
    if not isinstance(found, Mapping):
        yield name, _read_number(name, found)
        return
    for key, value in found.items():
        full = name if key == name else f"{name}/{key}"
        yield full, _read_number(full, value)


def _read_number(name: str, value: Any) -> float:
    scalar = to_scalar(value)
    if scalar is None:
        raise ContractError(f"metrics.{name} is {describe(value)}, not a number", hint=_NO_NUMBER)
    return float(scalar)


def describe(value: Any) -> str:
    """A value's type and shape, for messages."""
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"a {type(value).__name__} of shape {list(shape)}"


class _RaiseAsMetricError:
    """Turns errors of a metric's code into a MetricError that names the metric, so that all ranks raise the same."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not (isinstance(error, DsjobError) or follows_from_another(error)):
            raise MetricError(f"metrics.{self._name}: {describe_failure(error)}", hint=TRACEBACK_HINT) from error


class BatchMean:
    """A function that returns the mean over a batch. The result is the mean over batches, weighted by samples."""

    def __init__(self, name: str, function: Callable[..., Any], inputs: Inputs) -> None:
        self._name, self._function, self._inputs = name, function, inputs
        self._sums: Tensor | None = None  # float64 [2]: sum of value x samples, sum of samples

    def start(self, alone: bool) -> None:
        self._sums = None

    def feed(self, seen: Seen) -> None:
        value = self._inputs.call(self._function, seen)
        scalar = to_scalar(value)
        if scalar is None:
            raise ContractError(
                f"metrics.{self._name} returned {describe(value)}, not a number", hint="return the mean over the batch"
            )
        scalar = scalar.double()
        # float64 [2], left on its device: reading it here would wait for every batch.
        added = torch.stack([scalar * seen.samples, torch.full_like(scalar, seen.samples)])
        self._sums = added if self._sums is None else self._sums + added

    def collect(self) -> list[float]:
        found: list[float] = [0.0, 0.0] if self._sums is None else self._sums.tolist()
        return found

    def conclude(self, parts: list[list[float]]) -> float:
        total, samples = (sum(column) for column in zip(*parts, strict=True))
        return total / samples if samples else float("nan")


class BatchValues:
    """A function that returns any value per batch, and a second one that computes the result from all values."""

    def __init__(self, function: Callable[..., Any], inputs: Inputs, reduce: Callable[[list[Any]], Any]) -> None:
        self._function, self._inputs, self._reduce = function, inputs, reduce
        self._values: list[Any] = []

    def start(self, alone: bool) -> None:
        self._values = []

    def feed(self, seen: Seen) -> None:
        self._values.append(to_host(self._inputs.call(self._function, seen)))

    def collect(self) -> list[Any]:
        return self._values

    def conclude(self, parts: list[list[Any]]) -> Any:
        return self._reduce(list(in_order(parts)))


class Reducer:
    """Determined's MetricReducer: `update` by batch, `per_slot_reduce` by rank, `cross_slot_reduce` over all ranks."""

    def __init__(self, reducer: Any, inputs: Inputs) -> None:
        self._reducer, self._inputs = reducer, inputs

    def start(self, alone: bool) -> None:
        self._reducer.reset()

    def feed(self, seen: Seen) -> None:
        self._inputs.call(self._reducer.update, seen)

    def collect(self) -> Any:
        return to_host(self._reducer.per_slot_reduce())

    def conclude(self, parts: list[Any]) -> Any:
        return self._reducer.cross_slot_reduce(parts)


class Gathered:
    """An object whose states cannot be combined. With several ranks, it receives all inputs on rank 0, in data order.

    update: the name of the method that takes the inputs.
    """

    def __init__(self, metric: Any, inputs: Inputs, device: torch.device, update: str = "update") -> None:
        self._metric, self._inputs, self._device, self._update = metric, inputs, device, update
        self._alone, self._kept = True, list[Mapping[str, Any]]()

    def start(self, alone: bool) -> None:
        self._alone, self._kept = alone, []
        if hasattr(self._metric, "reset"):
            self._metric.reset()

    def feed(self, seen: Seen) -> None:
        given = self._inputs.read(seen)
        if self._alone:
            self._give(given)
        else:
            self._kept.append(to_host(given))

    def collect(self) -> list[Mapping[str, Any]]:
        return self._kept

    def conclude(self, parts: list[list[Mapping[str, Any]]]) -> Any:
        for given in in_order(parts):
            self._give(to_device(given, self._device))
        return self._metric.compute()

    def _give(self, given: Mapping[str, Any]) -> None:
        getattr(self._metric, self._update)(**given)


class Joined:
    """A torchmetrics metric, or a module that contains some. States are combined as each metric declares."""

    def __init__(self, metric: nn.Module, inputs: Inputs) -> None:
        self._metric, self._inputs = metric, inputs
        self._holders: list[Any] = [each for each in metric.modules() if holds_states(each)]
        for holder in self._holders:  # its own synchronisation would wait for ranks that have no batch
            holder.sync_on_compute = holder._to_sync = False

    def start(self, alone: bool) -> None:
        self._metric.reset()  # type: ignore[operator]

    def feed(self, seen: Seen) -> None:
        self._inputs.call(self._metric.update, seen)  # type: ignore[arg-type]

    def collect(self) -> list[tuple[int, dict[str, Any]]]:
        each: Any
        for each in self._metric.modules():
            if has_methods(each, "items", "add_metrics"):
                list(each.items(keep_base=True, copy_state=False))  # updates metrics that share a state in a collection
        return [
            (holder._update_count, {name: to_host(getattr(holder, name)) for name in holder._defaults})
            for holder in self._holders
        ]

    def conclude(self, parts: list[list[tuple[int, dict[str, Any]]]]) -> Any:
        # Rank 0 computes the result on its own metric object, with the states of all ranks in place of its own.
        own = [{name: getattr(holder, name) for name in holder._defaults} for holder in self._holders]
        for number, holder in enumerate(self._holders):
            fed = [part[number] for part in parts if part[number][0]]  # skip ranks that had no batch
            if not fed:
                continue
            holder._update_count, holder._computed = sum(count for count, _ in fed), None
            for name in holder._defaults:
                states = to_device([state[name] for _, state in fed], holder.device)
                setattr(holder, name, _join(states, holder._reductions[name]) if len(fed) > 1 else states[0])
        found = self._metric.compute()  # type: ignore[operator]
        for holder, states in zip(self._holders, own, strict=True):  # restore the types that `reset` expects
            for name, state in states.items():
                setattr(holder, name, state)
        return found


def _join(states: list[Any], reduction: Callable[[Any], Any] | None) -> Any:
    """Combines the states of several ranks like torchmetrics: concatenates lists, stacks tensors, then reduces."""
    together = list(chain.from_iterable(states)) if isinstance(states[0], list) else torch.stack(states)
    if isinstance(together, list) and not together:
        return together
    return together if reduction is None else reduction(together)


def holds_states(value: Any) -> bool:
    """Whether `value` is a torchmetrics metric."""
    return all(hasattr(value, name) for name in ("_defaults", "_reductions", "_update_count"))


def has_methods(value: Any, *names: str) -> bool:
    """Whether an object has these methods."""
    return all(callable(getattr(value, name, None)) for name in names)


def make_measure(
    name: str,
    made: Any,
    *,
    inputs: Mapping[str, str] | None,
    reduce: Callable[[list[Any]], Any] | None,
    device: torch.device,
) -> Measure:
    """Wraps the object of metrics.<name> by its kind. Raises ContractError if it is not a supported kind."""
    if has_methods(made, "reset", "update", "per_slot_reduce", "cross_slot_reduce"):
        return Reducer(made, Inputs(name, inputs, made.update))
    if has_methods(made, "add_batch", "compute"):
        return Gathered(made, Inputs(name, inputs, made.add_batch), torch.device("cpu"), "add_batch")
    if has_methods(made, "update", "compute", "reset") and (inputs or not _is_called(made)):
        given = Inputs(name, inputs, made.update)
        if isinstance(made, nn.Module) and any(map(holds_states, made.modules())):
            return Joined(made, given)
        return Gathered(made, given, device)
    if not callable(made):
        raise ContractError(
            f"metrics.{name}: {type(made).__name__} is not a metric",
            hint="a function, an object with update, compute and reset, or a MetricReducer",
        )
    given = Inputs(name, inputs, made if compares(made) else None)
    return BatchMean(name, made, given) if reduce is None else BatchValues(made, given, reduce)


def _is_called(made: Any) -> bool:
    """Whether the user's class defines `__call__`, rather than torch or torchmetrics."""
    owner = next((kind for kind in type(made).__mro__ if "__call__" in vars(kind)), None)
    return owner is not None and owner.__module__.partition(".")[0] not in ("torch", "torchmetrics")


def to_host(value: Any) -> Any:
    """`value` with all its tensors detached and on the CPU."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)


def in_order(parts: Sequence[Sequence[Any]]) -> Iterator[Any]:
    """Interleaves the values of the ranks in data order: the first of each rank, then the second of each, ..."""
    nothing = object()
    for row in zip_longest(*parts, fillvalue=nothing):
        yield from (item for item in row if item is not nothing)
