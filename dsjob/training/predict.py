"""Prediction: runs the models over sets of data on all ranks, and writes what they return for each sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dsjob import storage
from dsjob.contract.spec import JobSpec
from dsjob.data import LoaderEvaluation, to_device
from dsjob.engine.several import Engines
from dsjob.errors import ContractError, DataError, DsjobError
from dsjob.ranks.agreement import gather_on_rank_0, on_rank_0
from dsjob.ranks.watchdog import position
from dsjob.text.generation import Generated, Generator
from dsjob.training.evaluation import name_data, read_set
from dsjob.training.metric_inputs import Seen, follow
from dsjob.training.metrics import is_counted
from dsjob.training.objective import Objective
from dsjob.training.prediction_files import Part, Rows, merge
from dsjob.training.selection import describe_output, find_logits
from dsjob.training.steps import UserStep


@dataclasses.dataclass(frozen=True)
class Predictor:
    """Everything that predictions need. It requires neither an optimizer nor training data, nor labels.

    sets: by the prefix of their metrics; see `build_evaluation_sets`. folder: a path or URL, for the files. step: the
    user's `trainer.eval_step`, instead of the forward pass of `objective`; what it returns are the outputs.
    """

    spec: JobSpec
    engines: Engines
    sets: Mapping[str, Any]
    folder: str
    collate: Callable[[list[Any]], Any] | None = None
    step: UserStep | None = None
    objective: Objective = dataclasses.field(default_factory=Objective)
    generator: Generator | None = None

    def predict(self) -> dict[str, str]:
        """Writes a file for each set: one entry per sample, in the order of the data. Returns the files by prefix. A
        collective.

        Leaves models in training mode. Raises ContractError, DataError, StorageError.
        """
        return {prefix: self._predict(prefix) for prefix in self.sets}

    @torch.no_grad()
    def _predict(self, prefix: str) -> str:
        engine, form = self.engines.first, self.spec.predict.format
        world, name, most = engine.world, name_data(prefix), self.spec.predict.batches
        _require_in_order(self.sets[prefix], name, world.data_size)
        url = storage.join(self.folder, f"predictions-{prefix.replace('/', '-')}.{form}")
        parts = f"{url}.parts"
        on_rank_0(world.everyone, lambda: _begin(parts))
        counts = is_counted(world)
        self.engines.eval()
        with Part(parts, world.everyone.rank, form) as part:
            # The first batches: the files number samples by their positions in the data.
            pairs = read_set(
                self.spec, world, self.sets[prefix], name, collate=self.collate, max_batches=most, spread=False
            )
            for batch, samples in pairs:
                position.micro_steps += 1
                batch = to_device(batch, engine.device)
                outputs = self._call(batch)
                # A batch without samples only keeps the ranks of a sharded model together.
                if samples and counts:
                    seen = Seen(outputs, batch, None, samples)
                    rows = choose_rows(self.spec, self.objective, seen, own=self.step is not None)
                    part.add(rows, samples, _list_padded(rows, outputs))
        self.engines.train()
        written = gather_on_rank_0(world.everyone, lambda: (world.data_rank, world.everyone.rank, part.written))

        def finish() -> None:
            in_turn = {rank: found for _, rank, found in sorted(written, key=lambda entry: entry[:2])}
            merge(url, parts, in_turn, form)
            storage.delete(parts)

        on_rank_0(world.everyone, finish)
        return url

    def _call(self, batch: Any) -> Any:
        if self.generator is None:
            engine = self.engines.first
            return self.objective.answer(engine, batch) if self.step is None else self.step(self.engines, batch)
        return self.generator.add(self.engines.first, batch)


def choose_rows(spec: JobSpec, objective: Objective, seen: Seen, *, own: bool) -> Rows:
    """What `predict.outputs` names, by name. own: whether the outputs are those of `trainer.eval_step`. Raises
    ContractError."""
    paths = spec.predict.outputs
    if paths is None and isinstance(seen.outputs, Generated):
        return _check_rows(seen.outputs, seen.samples)
    if paths is None and not own and objective.chooses:
        return _check_rows(objective.name_predictions(seen.outputs), seen.samples)
    if paths is None:
        return _check_rows({"logits": _find_logits(seen.outputs)}, seen.samples)
    found = {}
    for key, path in paths.items():
        try:
            found[key] = follow(path, seen, f"predict.outputs.{key}")
        except DsjobError as error:
            error.put_at(("predict", "outputs", key))
            raise
    return _check_rows(found, seen.samples)


def _list_padded(rows: Rows, outputs: Any) -> dict[str, int]:
    """The rows that are generated ids, whose length differs between batches, each with its pad token."""
    if not isinstance(outputs, Generated):
        return {}
    return {name: outputs.pad for name, value in rows.items() if value is outputs["generated"]}


def _begin(parts: str) -> None:
    """Prepares an empty folder for parts, without those of a run that was killed."""
    storage.delete(parts)
    storage.make_folder(parts)


def _require_in_order(data: Any, name: str, ranks: int) -> None:
    if isinstance(data, LoaderEvaluation) and data.divided and ranks > 1:
        raise DataError(
            f"{name} is a loader that divides its samples among the ranks itself, so their order is not known",
            hint="make it return a dataset, or predict on one rank",
        )


def _find_logits(outputs: Any) -> Any:
    found = find_logits(outputs)
    if found is None:
        message = f"the model's output ({describe_output(outputs)}) has no logits to predict"
        raise ContractError(message, hint="set predict.outputs: {NAME: outputs.KEY}")
    return found


def _check_rows(rows: Rows, samples: int) -> Rows:
    """Raises ContractError unless every value has one entry per sample."""
    for name, value in rows.items():
        if isinstance(value, Tensor):
            fits, what = value.dim() > 0 and value.shape[0] == samples, f"a tensor of shape {list(value.shape)}"
        else:
            fits, what = isinstance(value, (list, tuple)) and len(value) == samples, type(value).__name__
        if not fits:
            raise ContractError(
                f"predict.outputs: {name} is {what}, but the batch has {samples} samples",
                hint="choose a value with one entry per sample",
            )
    return rows
