"""The parts of a job as methods of one class, with the names of HF's Trainer.

The loop calls these methods, and their implementations here are the job's own parts. So a subclass replaces exactly
those that it overrides, and everything else stays: gradient accumulation, ZeRO, ranks, checkpoints, the order of data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dsjob.contract.spec import EngineSpec, JobSpec
from dsjob.data.batches import count_samples
from dsjob.engine.engine import Engine
from dsjob.engine.several import Engines
from dsjob.errors import ContractError
from dsjob.optim import build_optimizer, build_scheduler
from dsjob.training.averaging import Part
from dsjob.training.evaluation import Evaluator
from dsjob.training.loaders import call_data, call_training_data
from dsjob.training.metrics import Measures
from dsjob.training.objective import Objective, copy_batch
from dsjob.training.predict import Predictor
from dsjob.trust.grant import Trust

if TYPE_CHECKING:
    from dsjob.training.run import Run

T = TypeVar("T")
_OF_HF = {  # attributes of HF's Trainer that methods written for it use
    "accelerator": "write self.backward(loss) for self.accelerator.backward(loss)",
    "args": "self.spec is the job",
    "optimizer": "self.model.optimizer is the optimizer",
    "lr_scheduler": "self.model.lr_scheduler is the schedule",
    "train_dataset": "super().get_train_dataloader() returns what data.train names",
    "eval_dataset": "super().get_eval_dataloader() returns what data.eval names",
}
METHODS = (
    "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "create_optimizer", "create_scheduler",
    "compute_loss", "training_step", "prediction_step", "log", "evaluate", "predict",
)  # fmt: skip
# Methods of HF's Trainer that a program may have replaced, and that have no meaning here.
UNUSED = (
    "create_optimizer_and_scheduler", "get_train_tfdataset", "get_eval_tfdataset", "get_test_tfdataset", "run_model",
    "train", "save_model", "prediction_loop", "evaluation_loop", "get_decay_parameter_names", "compute_loss_func",
    "num_examples", "store_flos", "floating_point_ops",
)  # fmt: skip


class Trainer:
    """Derive a class from this one, override the methods that you need, and name it in `trainer.parts`, or pass it to
    `dsjob.run(..., trainer=...)`. The other keys of `trainer.parts` are arguments of its constructor.

    All ranks call each method in the same order, so methods may communicate. `super()` in a method is what dsjob does
    without it.
    """

    _parts: Parts  # the only attribute that dsjob sets

    @property
    def spec(self) -> JobSpec:
        """The job."""
        return self._parts.spec

    @property
    def engines(self) -> Engines:
        """All engines by name, once they are built."""
        return self._parts.engines

    @property
    def model(self) -> Engine:
        """The engine of the first model. Its `module` is the model."""
        return self.engines.first

    def __getattr__(self, name: str) -> Any:
        advice = _OF_HF.get(name, "")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{advice and f': {advice}'}")

    def get_train_dataloader(self) -> Any:
        """The training set, or a loader: by default what `data.train` returns.

        dsjob batches a dataset, shuffles it and divides it among the ranks. It uses a loader as it is.
        """
        return call_training_data(self.spec, self._parts.trust)

    def get_eval_dataloader(self, name: str = "") -> Any:
        """The evaluation set, or a loader: by default what `data.eval` returns. name: that of one of several sets."""
        return call_data(self.spec.data.eval[name], ("eval", *filter(None, [name])), self._parts.trust)

    def get_test_dataloader(self, name: str = "") -> Any:
        """The test set, or a loader: by default what `data.test` returns. name: that of one of several sets."""
        return call_data(self.spec.data.test[name], ("test", *filter(None, [name])), self._parts.trust)

    def create_optimizer(self, parameters: dict[str, nn.Parameter]) -> Optimizer:
        """The optimizer over `parameters`, by their names in the model: by default that of `optimizer`.

        With ZeRO, these are this rank's shards in fp32, not the parameters of the module. Called for each model.
        """
        assert self._parts.built.optimizer is not None
        names = {id(parameter): name for name, parameter in parameters.items()}
        return build_optimizer(self._parts.built.optimizer, list(parameters.values()), self._parts.trust, names)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer) -> LRScheduler | None:
        """The schedule, which steps once in each optimizer step: by default that of `scheduler`, None without one.

        num_training_steps: of the whole run; an upper bound if tokens or time end it.
        """
        if self._parts.built.scheduler is None:
            return None
        return build_scheduler(self._parts.built.scheduler, optimizer, self._parts.trust)

    def compute_loss(self, model: Engine, inputs: Any, return_outputs: bool = False) -> Any:
        """The loss of a micro batch, a scalar: the mean over its targets. With `return_outputs`, (loss, outputs).

        By default, calls the model with `inputs`, and finds the loss by `loss`, `losses` and `targets` of the document.
        `inputs` is a copy of the batch, on the device: keys may be removed from it.
        """
        outputs, losses = self._parts.objective.compute(model, inputs)
        loss = self._parts.objective.add([each.mean for each in losses])
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: Engine, inputs: Any) -> Any:
        """Computes the loss of a micro batch and its gradients. Returns the loss for the log, or a dict with `loss`.

        dsjob takes the optimizer step after the last micro batch. Calls `compute_loss` and `backward`, and feeds the
        metrics of the phase `train`.
        """
        own = self._parts.own
        outputs, losses = own.compute(model, inputs)
        weighed = self._parts.part.weigh(losses)
        loss = own.add(weighed)
        model.backward(loss)
        if self._parts.measures:
            mean = own.add([each.mean for each in losses])
            self._parts.measures.feed(outputs, inputs, mean, count_samples(inputs), own)
        self._parts.named = (
            {name: each.detach() for name, each in own.name(weighed).items()} if len(weighed) > 1 else {}
        )
        return loss.detach()

    def backward(self, loss: Tensor) -> Tensor:
        """For a `training_step` of your own: computes the gradients of a mean loss, weighted by the micro batch's part
        of the step's targets (see `trainer.loss_average`). Returns the weighted loss, detached, for the log."""
        weighed = self._parts.part.weigh_mean(loss)
        self.model.backward(weighed)
        return weighed.detach()

    @torch.no_grad()
    def prediction_step(self, model: Engine, inputs: Any, prediction_loss_only: bool = False) -> tuple[Any, Any, Any]:
        """(loss, logits, labels) of a micro batch in evaluation and prediction, without gradients. Labels may be None;
        if they are not, metrics receive them as `labels` of the batch. The loss may be None in prediction.

        By default, calls `compute_loss`; in prediction, without the targets that it needs, only the model.
        """
        own = self._parts.own
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        if not self._parts.needs_loss and not own.has_targets(inputs):
            outputs: Any = own.answer(model, inputs)
            return None, own.predict(outputs).value, labels
        outputs, losses = own.compute(model, inputs)
        loss = own.add([each.mean for each in losses])
        return loss, None if prediction_loss_only else own.predict(outputs).value, labels

    def log(self, logs: dict[str, float]) -> None:
        """Passes a log record to the console, metrics.jsonl, the monitors and all callbacks. Called on all ranks."""
        self._parts.run.progress.last_record = logs
        self._parts.run.tell("on_log", logs)

    def evaluate(self) -> dict[str, float]:
        """Evaluates all sets. Returns their metrics by name, such as `eval/loss`; yours may be among them."""
        return self._parts.evaluator.evaluate()

    def predict(self) -> dict[str, str]:
        """Writes the predictions of the task `predict`. Returns the files by the name of their set, such as `test`."""
        return self._parts.predictor.predict()


class Parts:
    """A Trainer's methods as parts of a job. Without a class of the user's, they are the job's own."""

    engines: Engines
    built: EngineSpec  # of the model whose optimizer is built
    objective: Objective  # of the document
    own: Objective  # with compute_loss, if that is replaced
    measures: Measures  # of training
    part: Part  # of the micro batch
    named: Mapping[str, Tensor]  # the losses by name of the last training_step, if there are several
    needs_loss: bool = False  # whether prediction_step is called in an evaluation
    evaluator: Evaluator
    predictor: Predictor
    run: Run

    def __init__(self, trainer: Trainer, spec: JobSpec, trust: Trust) -> None:
        self.trainer, self.spec, self.trust = trainer, spec, trust
        trainer._parts = self  # not in its constructor, which subclasses would have to call

    @property
    def name(self) -> str:
        """The name of the class."""
        return type(self.trainer).__name__

    def read_set(self, role: str, name: str) -> Any:
        """The data of one of the sets of a role, eval or test."""
        return self.trainer.get_eval_dataloader(name) if role == "eval" else self.trainer.get_test_dataloader(name)

    def overrides(self, method: str) -> bool:
        """Whether a subclass has replaced a method."""
        return getattr(type(self.trainer), method) is not getattr(Trainer, method)

    def bind(self, engines: Engines, objective: Objective, measures: Measures) -> Objective:
        """Gives the methods their parts: the document's objective and the metrics of training. Returns the objective
        with the methods that a subclass has replaced."""
        self.engines, self.objective, self.measures = engines, objective, measures
        loss = self.trainer.compute_loss if self.overrides("compute_loss") else None
        self.own = dataclasses.replace(objective, own_loss=loss)
        prediction = self._run_prediction_step if self.overrides("prediction_step") else None
        return dataclasses.replace(self.own, own_prediction=prediction)

    def _run_prediction_step(self, engine: Engine, batch: Any, *, needs_loss: bool) -> Any:
        self.needs_loss = needs_loss
        return self.trainer.prediction_step(engine, batch)

    def attach(self, run: Run) -> None:
        """Tells the methods the run."""
        self.run = run

    def build_methods(self, spec: EngineSpec, steps: int) -> dict[str, Any]:
        """The arguments `create` and `schedule` of `build_job_engine` for a model with this `spec`, as far as the class
        replaces these methods."""

        def create(masters: Mapping[str, nn.Parameter]) -> Optimizer:
            self.built = spec
            made = self.trainer.create_optimizer(dict(masters))
            return _require(made, Optimizer, "create_optimizer", "a torch.optim.Optimizer")

        def schedule(optimizer: Optimizer) -> Any:
            self.built = spec
            return self.trainer.create_scheduler(steps, optimizer)

        own = {"create": ("create_optimizer", create), "schedule": ("create_scheduler", schedule)}
        return {key: function for key, (method, function) in own.items() if self.overrides(method)}

    def run_evaluation(self, evaluator: Evaluator) -> dict[str, float]:
        """`evaluate` with this evaluator. Raises ContractError unless it returns numbers by name."""
        self.evaluator = evaluator
        found = self.trainer.evaluate()
        pairs = found.items() if isinstance(found, dict) else [("", found)]
        wrong = [(name, value) for name, value in pairs if not (name and isinstance(value, (int, float)))]
        if wrong:
            what = f"{wrong[0][0]}: " * bool(wrong[0][0]) + type(wrong[0][1]).__name__
            raise ContractError(
                f"{self.name}.evaluate returned {what}, not numbers by name",
                hint="return super().evaluate(), with your own metrics added: {**super().evaluate(), 'eval/mine': 0.5}",
            )
        return {name: float(value) for name, value in found.items()}

    def run_prediction(self, predictor: Predictor) -> dict[str, str]:
        """`predict` with this predictor. Raises ContractError unless it returns files by name."""
        self.predictor = predictor
        found = self.trainer.predict()
        if not isinstance(found, dict):
            raise ContractError(
                f"{self.name}.predict returned {type(found).__name__}, not files by name",
                hint="return what super().predict() returns, or {}",
            )
        return found

    def run_training_step(self, engine: Engine, batch: Any, part: Part) -> tuple[Any, Mapping[str, Tensor]]:
        """What `training_step` returns for a micro batch, and the losses by name if there are several."""
        self.part, self.named = part, {}
        before = engine.rhythm.passes
        given = self.trainer.training_step(engine, copy_batch(batch))
        if engine.rhythm.passes == before and engine.driver == "":
            raise ContractError(
                f"{self.name}.training_step computed no gradients",
                hint="call self.backward(loss), or super().training_step(model, inputs)",
            )
        return given, self.named


def _require(made: Any, kind: type[T], method: str, called: str) -> T:
    if not isinstance(made, kind):
        raise ContractError(f"{method} returned {type(made).__name__}, not {called}", hint="end it with a return")
    return made
