"""Decides whether a job computes its model's loss without the logits (`ops.linear_cross_entropy`).

Only for models of transformers in the default training step: there, nobody sees the logits after the loss. Evaluation,
prediction and generation compute logits as usual. A `compute_loss` of a Trainer that uses them gets them, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from dsjob.compute.calls import find_inside_peft
from dsjob.compute.deferred_logits import Head
from dsjob.compute.find_blocks import find_blocks
from dsjob.contract.spec import JobSpec
from dsjob.engine.engine import Engine
from dsjob.errors import ContractError

Say = Callable[[str, str], None]  # prints a title and a text
# Logits of a micro batch, 1 GiB in fp32: four times the chunk that `linear_cross_entropy` holds on a GPU. This follows
# from the sizes alone; no measurement has chosen it.
WORTHWHILE = 1 << 28


class LossOfVocabulary:
    """Computes a model's loss in chunks of the vocabulary, for calls with enough logits. say: prints a message once."""

    def __init__(self, engine: Engine, spec: JobSpec, say: Say) -> None:
        self._required, self._say, self._said = spec.ops.linear_cross_entropy == "require", say, False
        self._model = _name(find_inside_peft(engine.module))
        self._head = Head(engine.module, _find_head(engine.module), 1 if self._required else WORTHWHILE, self._give_up)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """The model's calls inside return loss without logits."""
        with self._head.deferring():
            yield
        if self._head.deferred and not self._said:
            size = f"{self._head.deferred * 4 / 2**20:,.0f} MiB in fp32"
            self._tell(
                f"the loss is computed in chunks of the vocabulary: the logits ({size}) are never held as a whole"
            )

    def _give_up(self) -> None:
        if self._required:
            raise _refuse(f"something else than the cross entropy of {self._model} uses its logits")
        self._head.fewest = sys.maxsize
        self._tell(f"something else than the cross entropy of {self._model} uses its logits, so they are held")

    def _tell(self, text: str) -> None:
        self._said = True
        self._say("note", f"ops.linear_cross_entropy: {text}")


def choose_loss(engine: Engine, spec: JobSpec, say: Say, *, own_step: bool, measured: bool) -> LossOfVocabulary | None:
    """How the job computes its loss without logits; None if it holds them.

    own_step: whether the training step is the user's. measured: whether metrics of training see the model's output.
    Raises ContractError where the document requires it and it is not possible.
    """
    if spec.ops.linear_cross_entropy == "off":
        return None
    reason = _find_job_reason(engine, spec, own_step, measured) or _find_model_reason(engine.module, spec)
    if not reason:
        return LossOfVocabulary(engine, spec, say)
    if spec.ops.linear_cross_entropy == "require":
        raise _refuse(reason)
    return None


def _refuse(reason: str) -> ContractError:
    error = ContractError(
        f"ops.linear_cross_entropy is require, but {reason}",
        hint="set auto, or use dsjob.linear_cross_entropy as the job's loss",
    )
    error.put_at(("ops", "linear_cross_entropy"))
    return error


def _find_job_reason(engine: Engine, spec: JobSpec, own_step: bool, measured: bool) -> str:
    """Why the job needs logits; "" if it does not."""
    reasons = {
        "engine is deepspeed": spec.driven,
        "the training step is not dsjob's": own_step,
        "the loss is not the model's own": bool(spec.loss or spec.losses or spec.label_smoothing),
        "metrics of training read the model's output": measured,
        "the model is spread over several ranks by trainer.mpu": engine.world.model.size > 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _name(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP")


def _find_head(model: nn.Module) -> nn.Linear:
    return find_inside_peft(model).get_output_embeddings()  # type: ignore[operator, no-any-return]


def _find_model_reason(model: nn.Module, spec: JobSpec) -> str:
    """Why the model's loss cannot be computed without its logits, as far as it shows before a call."""
    bare = find_inside_peft(model)
    name = _name(bare)
    # A forward pass of the user's might hand the logits to an autograd function, which takes only tensors.
    if not str(type(bare).forward.__module__).startswith("transformers.") or "forward" in vars(bare):
        return f"{name} is not a model of transformers"
    head = _find_head(model) if callable(getattr(bare, "get_output_embeddings", None)) else None
    if head is None:
        return f"{name} has no layer of logits"
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        return f"the last layer of {name} is not a plain torch.nn.Linear, but {_name(head)}"
    if sum(own is head for module in model.modules() for _, own in module.named_children()) != 1:
        return f"the last layer of {name} has several places in the model"
    if spec.compile.enabled and not find_blocks(model, sharing=True):
        return "the whole model is compiled"
    return ""
