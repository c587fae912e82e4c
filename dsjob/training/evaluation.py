"""Evaluation: runs the models over sets of data on all ranks, and returns metrics by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dsjob.checkpoint.live.rng import keep_rng
from dsjob.contract.spec import JobSpec
from dsjob.data import EvaluationBatches, LoaderEvaluation, to_device
from dsjob.data.given import EvaluationPass
from dsjob.data.loader import choose_loading
from dsjob.engine.several import Engines
from dsjob.errors import ContractError, MetricError
from dsjob.parallel.strategy import ELSEWHERE
from dsjob.ranks.mesh import World
from dsjob.ranks.mpu import share, share_length
from dsjob.ranks.watchdog import position
from dsjob.text.generation import Generator
from dsjob.training.averaging import Averaging
from dsjob.training.metrics import Measures
from dsjob.training.objective import Objective
from dsjob.training.steps import Names, UserStep, read_scalars


def read_set(
    spec: JobSpec,
    world: World,
    data: Any,
    name: str,
    *,
    collate: Callable[[list[Any]], Any] | None = None,
    max_batches: int | None = None,
    spread: bool = True,
) -> Iterator[tuple[Any, int]]:
    """This rank's batches of a set, each with its number of samples, 0 if it only keeps ranks together. The batch is
    None where this rank reads no data.

    data: see `build_evaluation_sets`. name: its key in the document. max_batches: the most per rank: spread evenly
    over a dataset, or with `spread` false, its first ones; always the first ones of a loader. A collective. Raises
    DataError.
    """
    unit = f"batches of {name}"
    if not world.loads:
        for _ in range(share_length(0, world, unit)):
            yield None, share(0, world)
        return
    pairs: EvaluationBatches | EvaluationPass
    if isinstance(data, LoaderEvaluation):
        pairs = data.limit(max_batches)
    else:
        pairs = EvaluationBatches(
            data,
            micro_batch=spec.trainer.eval_micro_batch or spec.trainer.micro_batch,
            world=world,
            collate=collate,
            max_batches=max_batches,
            spread=spread,
            name=name,
            **choose_loading(spec.data, data, world),
        )
    share_length(len(pairs), world, unit)
    for batch, samples in pairs:
        yield batch, share(samples, world)


def name_data(prefix: str) -> str:
    """The key of a set in the document, from the prefix of its metrics: `data.eval.news` for `eval/news`."""
    return f"data.{prefix.replace('/', '.')}"


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Everything that an evaluation needs. It requires neither an optimizer nor training data.

    sets: by the prefix of their metrics; see `build_evaluation_sets`. step: the user's, instead of the forward pass and
    loss of `objective`. averaging: the weight of each batch. taken: names in the result of `step` that only `measures`
    use. generator: writes for each sample, for the metrics.
    """

    spec: JobSpec
    engines: Engines
    sets: Mapping[str, Any]
    collate: Callable[[list[Any]], Any] | None = None
    objective: Objective = dataclasses.field(default_factory=Objective)
    step: UserStep | None = None
    averaging: Averaging = dataclasses.field(default_factory=Averaging)
    measures: Measures = dataclasses.field(default_factory=Measures)
    taken: Collection[str] = ()
    generator: Generator | None = None

    @property
    def followed(self) -> str:
        """The name of the loss that schedules follow: that of the first set."""
        return f"{next(iter(self.sets))}/loss"

    def evaluate(self) -> dict[str, float]:
        """The mean loss of each set as `<prefix>/loss`, or the values that `step` returned, and the metrics. A
        collective.

        Leaves models in training mode. Raises ContractError, DataError, MetricError.
        """
        found: dict[str, float] = {}
        for prefix in self.sets:
            found |= {**self._measure(prefix), **self.measures.finish(prefix)}
        return found

    def list_buffers(self) -> list[Tensor]:
        """The buffers of all models, which a forward pass may change."""
        return [buffer for each in self.engines.values() for buffer in each.module.buffers()]

    def rehearse(self, say: Callable[[str, str], None], *, adds: bool = False) -> None:
        """Evaluates one batch of each set and discards the result, so that mistakes in metrics show before the first
        step. adds: a Trainer adds metrics, which are not known yet.

        Restores random generators, buffers and metrics afterwards. Does nothing if data can be read only once. say:
        shows a title and a text to the user. Raises the errors of an evaluation, ContractError.
        """
        engine = self.engines.first
        # An iterator can be read only once: a rehearsal would take its first batch away.
        if share(int(any(isinstance(data, Iterator) for data in self.sets.values())), engine.world):
            return
        with keep_rng(engine.device):
            self._rehearse(say, adds)

    def _rehearse(self, say: Callable[[str, str], None], adds: bool) -> None:
        buffers = self.list_buffers()
        before = [buffer.clone() for buffer in buffers]
        trainer = dataclasses.replace(self.spec.trainer, eval_batches=1)
        measures = self.measures.copy()
        once = dataclasses.replace(self, spec=dataclasses.replace(self.spec, trainer=trainer), measures=measures)
        results: dict[str, float] = {}
        complete = len(measures) == len(self.measures) and not adds  # otherwise, some metric cannot be copied
        for prefix in self.sets:
            results |= once._measure(prefix)
            try:
                results |= measures.finish(prefix)
            except MetricError as error:  # one batch may not be enough for a metric: it may have a single class
                name, complete = name_data(prefix), False
                say("note", f"{error.message} (on one batch of {name}; all of {name} may be enough)")
        if complete:
            self._require_best(results)
        # In place: DDP, FSDP2 and compiled graphs refer to these buffers.
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)

    def _require_best(self, results: Mapping[str, float]) -> None:
        best = self.spec.checkpoint.best
        if best is not None and best.metric not in results:
            raise ContractError(
                f"checkpoint.best.metric: evaluation produces no metric {best.metric}",
                hint=f"available: {', '.join(sorted(results))}",
            )

    @torch.no_grad()
    def _measure(self, prefix: str) -> dict[str, float]:
        """The means over a set by name. Feeds all its batches to `measures`."""
        engine, trainer = self.engines.first, self.spec.trainer
        pairs = read_set(
            self.spec,
            engine.world,
            self.sets[prefix],
            name_data(prefix),
            collate=self.collate,
            max_batches=trainer.eval_batches,
        )
        self.engines.eval()
        self.measures.start()
        same = Names("trainer.eval_step")
        sums: dict[str, Tensor] = {}  # by name: float64 [2], the weighted sum and the sum of weights
        for batch, samples in pairs:
            position.micro_steps += 1
            try:
                values = self._evaluate_batch(batch, samples)
            except ContractError as error:
                if not isinstance(error, MetricError):
                    error.message += f" (on a batch of {name_data(prefix)})"
                raise
            if self.step is not None:
                scalars = same.require({name: value for name, (value, _) in values.items()}, engine.world)
                values = {name: (value, samples) for name, value in scalars.items()}
            # A batch with weight 0 only keeps the ranks of a sharded model together.
            counts = samples and engine.world.reports
            for name, (value, weight) in values.items():
                added = _pair(value, weight, engine.device) if counts else _pair(0, 0, engine.device)
                sums[name] = sums[name] + added if name in sums else added
        self.engines.train()
        # float64 [names, 2]: one all-reduce for all names.
        names, together = list(sums), torch.stack(list(sums.values()))
        # Over all ranks. Those that do not report have added zeros.
        if engine.world.everyone.size > 1:
            dist.all_reduce(together)
        means = dict(zip(names, (together[:, 0] / together[:, 1]).tolist(), strict=True))
        if self.step is None:
            means = self.objective.complete(means)
        follows = any(isinstance(each.lr_scheduler, ReduceLROnPlateau) for each in self.engines.values())
        if follows and "loss" not in means:
            raise ContractError("trainer.eval_step returned no `loss`, which ReduceLROnPlateau requires")
        return {f"{prefix}/{name}": mean for name, mean in means.items()}

    def _evaluate_batch(self, host_batch: Any, samples: int) -> dict[str, tuple[Tensor, Tensor | float]]:
        """The means of a batch by name, each with its weight."""
        engine = self.engines.first
        batch = to_device(host_batch, engine.device)
        if self.step is not None:
            given = self.step(self.engines, batch)
            if not engine.world.reports:
                return {}
            scalars = read_scalars(given, "trainer.eval_step", self.taken)
            if samples:
                self.measures.feed(given, batch, None, samples)
            return {name: (scalars[name], samples) for name in sorted(scalars)}
        outputs, losses, batch = self.objective.evaluate(engine, batch)
        if outputs is ELSEWHERE:
            if self.generator is not None:
                self.generator.add(engine, batch)  # with the last stage, which has the losses
            nothing = torch.zeros((), device=engine.device)
            return dict.fromkeys(self.objective.name([None] * max(1, len(self.objective.losses))), (nothing, 0))
        means = [loss.mean for loss in losses]
        if self.generator is not None:
            outputs = self.generator.add(engine, batch, outputs)
        if samples:
            self.measures.feed(outputs, batch, self.objective.add(means), samples, self.objective)
        weights = self.averaging.measure(losses, host_batch, samples)
        return self.objective.name(list(zip(means, weights, strict=True)))


def _pair(value: Tensor | float, weight: Tensor | float, device: torch.device) -> Tensor:
    """(value x weight, weight) as float64 [2]. A value with weight 0 adds nothing, even if it is NaN."""
    value, weight = (
        part.detach().to(device, torch.float64)
        if isinstance(part, Tensor)
        else torch.full((), part, dtype=torch.float64, device=device)
        for part in (value, weight)
    )
    return torch.stack([torch.where(weight == 0, 0.0, value * weight), weight])
