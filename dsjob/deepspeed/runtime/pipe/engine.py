"""`deepspeed.runtime.pipe.engine`: the engine that `initialize` returns for a PipelineModule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsjob.data import to_device
from dsjob.data.epochs import RepeatingLoader
from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.runtime.engine import DeepSpeedEngine
from dsjob.deepspeed.runtime.pipe.topology import PipelineParallelGrid
from dsjob.errors import DataError, UsageError
from dsjob.parallel.pipeline.module import PipelineModule
from dsjob.parallel.pipeline.passes import StagePasses
from dsjob.parallel.strategy import MicroBatch
from dsjob.pipelines.schedules import PipeSchedule


class PipelineError(UsageError):
    """A call that a pipeline cannot answer: it trains and evaluates whole batches."""


class EndOfDataError(DataError, StopIteration):
    """The data of a stage ended before the batch was complete."""


class PipelineEngine(DeepSpeedEngine):
    """Trains a PipelineModule. Each batch consists of `gradient_accumulation_steps()` micro batches for each pipeline.

    The first and the last stage read data: the first one the inputs, the last one the labels of pairs (inputs, labels).
    """

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self._batches: Iterator[Any] | None = None
        self._batch_fn: Callable[[Any], Any] | None = None
        self.grid = PipelineParallelGrid(self._pipeline_module.topology(), world=self.world)
        self.num_stages, self.stage_id = self.grid.pipe_parallel_size, self.grid.stage_id
        function = self._pipeline_module.loss_fn
        if isinstance(function, nn.Module):
            function.to(self.device)

    def obey(self, own: Mapping[str, Any]) -> None:
        if "progressive_layer_drop" in own:
            raise UsageError("progressive_layer_drop: pipelines do not have it", hint="remove it")
        super().obey(own)

    @property
    def _pipeline_module(self) -> PipelineModule:
        return cast(PipelineModule, self.module)

    @property
    def _passes(self) -> StagePasses:
        return cast(StagePasses, self.strategy.pipeline)

    @property
    def micro_batches(self) -> int:
        """The micro batches of each pipeline in a batch."""
        return self.rhythm.accumulation

    def is_first_stage(self) -> bool:
        """Whether this rank has the first layers."""
        return self.grid.is_first_stage

    def is_last_stage(self) -> bool:
        """Whether this rank has the last layers."""
        return self.grid.is_last_stage

    def get_pipeline_parallel_rank(self) -> int:
        """The number of this rank's stage."""
        return self.stage_id

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Trains on the batches of a loader, again from its beginning whenever it ends."""
        self.set_dataiterator(RepeatingLoader(loader))

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Trains on the micro batches of an iterator."""
        self._batches = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Calls `fn` with each micro batch that is read, and uses what it returns."""
        self._batch_fn = fn

    def set_train_schedule(self, schedule: Callable[[int, int, int], PipeSchedule]) -> None:
        """Trains by another schedule: (micro batches, stages, stage) -> its instructions; a class derived from
        PipeSchedule, for example. Set the same one on all stages."""
        self._passes.use_schedule(schedule)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Trains on the next batch: `gradient_accumulation_steps()` micro batches of the data, and an optimizer step.

        data_iter: yields micro batches (inputs, labels); by default, those of `set_dataiterator` or of the argument
        `training_data` of `initialize`. Returns the mean loss of the batch, over all pipelines, on all stages.

        Raises EndOfDataError, a StopIteration, if the data ends; then the other stages raise LostRankError.
        """
        if data_iter is not None:
            self._batches = data_iter
        given = self._read_batch(self._require_data(), self.micro_batches)
        self.module.train()
        return self._average(self.run_step(given, self._compute_loss))

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluates a batch, without gradients. Returns its mean loss, over all pipelines, on all stages.

        return_logits: also returns the model's outputs of all micro batches, joined along their first dim, on the last
        stage (None elsewhere). Without `compute_loss`, the outputs are returned in place of the loss. reduce_output:
        `avg`, or None for one value per micro batch, on the last stage. bcast_loss: has no effect, the loss is known on
        all stages. num_micro_batches: by default `gradient_accumulation_steps()`. Raises as `train_batch`.
        """
        given = self._read_batch(data_iter, num_micro_batches or self.micro_batches)
        before = self.module.training
        self.module.eval()
        keeps = return_logits or not compute_loss

        def finish(outputs: Any, labels: Any) -> tuple[Any, Any]:
            loss = self._compute_loss(outputs, labels).detach().float() if compute_loss else None
            return outputs if keeps else None, loss

        found = self._passes.infer(self.strategy, given, finish)
        self.module.train(before)
        last = self.is_last_stage()
        outputs = [pair[0] for pair in found] if last and keeps else []
        logits = (
            torch.cat(outputs) if outputs and all(isinstance(each, Tensor) for each in outputs) else outputs or None
        )
        if not compute_loss:
            return logits
        losses = [pair[1] for pair in found] if last else []
        if reduce_output is None:
            result: Any = torch.stack(losses) if last else None
        else:
            result = self._average(self._passes.share(losses, len(given)).mean())
        return (result, logits) if return_logits else result

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the engine is reducing gradients or stepping the optimizer."""
        return self.rhythm.stepping

    def _require_data(self) -> Iterator[Any]:
        if self._batches is None:
            if self.training_dataloader is not None:
                self.set_dataloader(self.training_dataloader)
            elif self.is_first_stage() or self.is_last_stage():
                error = DataError("train_batch has no data", hint="pass an iterator, or training_data to initialize()")
                self._passes.fail(error)
                raise error
        return self._batches if self._batches is not None else iter(())

    def _read_batch(self, batches: Iterator[Any], count: int) -> list[MicroBatch]:
        """The micro batches of a batch, of which the stages in the middle read nothing."""
        if not (self.is_first_stage() or self.is_last_stage()):
            return [MicroBatch((), {})] * count
        try:
            return [self._read_micro_batch(batches, number, count) for number in range(count)]
        except BaseException as error:
            self._passes.fail(error)
            raise

    def _read_micro_batch(self, batches: Iterator[Any], number: int, count: int) -> MicroBatch:
        if not hasattr(batches, "__next__"):
            raise DataError(
                f"a pipeline reads its data from an iterator, but got {type(batches).__name__}",
                hint="pass iter(data), or deepspeed.utils.RepeatingLoader(data), and the same one for each batch",
            )
        try:
            batch = next(batches)
        except StopIteration:
            raise EndOfDataError(
                f"the data ended after {number} of {count} micro batches",
                hint="deepspeed.utils.RepeatingLoader starts a loader again whenever it ends",
            ) from None
        batch = self._batch_fn(batch) if self._batch_fn is not None else batch
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            found = f"{type(batch).__name__}{f' of {len(batch)}' if isinstance(batch, (tuple, list)) else ''}"
            raise DataError(
                f"a micro batch of a pipeline is a pair (inputs, labels), but the data yields {found}",
                hint="engine.set_batch_fn(fn) makes pairs of what it yields",
            )
        inputs, labels = batch
        first, last = self.is_first_stage(), self.is_last_stage()
        inputs = tuple(inputs) if isinstance(inputs, list) else inputs
        args = (to_device(inputs, self.device),) if first else ()
        return MicroBatch(args, {}, to_device(labels, self.device) if last else None)

    def _compute_loss(self, outputs: Any, labels: Any) -> Tensor:
        function = self._pipeline_module.loss_fn
        loss = function(outputs, labels) if function is not None else outputs
        if not isinstance(loss, Tensor):
            raise UsageError(
                f"the last layer of the pipeline returned {type(loss).__name__}, not a loss", hint="give it a loss_fn"
            )
        return loss

    def _average(self, loss: Tensor) -> Tensor:
        """The mean over the pipelines."""
        if self.world.data_size > 1:
            dist.all_reduce(loss, group=self.world.data_group)
            loss /= self.world.data_size
        return loss

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: use `train_batch` or `eval_batch`."""
        raise PipelineError("a pipeline has no forward() of its own", hint="call train_batch() or eval_batch()")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: use `train_batch`."""
        raise PipelineError("a pipeline has no backward() of its own", hint="call train_batch()")

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Refused: use `train_batch`."""
        if not self.rhythm.together:
            raise PipelineError("a pipeline has no step() of its own", hint="call train_batch()")
        super().step(lr_kwargs)

    def set_has_attention_mask(self, value: bool) -> None:
        """No effect: stages send masks like any other tensor."""

    def reset_activation_shape(self) -> None:
        """No effect: shapes may change with every micro batch."""


__getattr__ = _explain_names(__name__)
