"""How a document says what a model is called with and what its loss is: the same numbers as a loop written by hand."""

from __future__ import annotations

import json
import tempfile
from typing import Any

import plain_jobs
import pytest
import token_jobs
import torch
from ranks import run_ranks
from torch import Tensor, nn

from dsjob.compute.calls import Loss
from dsjob.errors import ContractError, DataError
from dsjob.ranks.mesh import World
from dsjob.training.averaging import Step
from dsjob.training.objective import Objective, Term, find_predictions
from dsjob.training.selection import Chosen, Selection

CLOSE = {"rtol": 0.0, "atol": 1e-6}
CROSS_ENTROPY = {"_target_": "torch.nn.CrossEntropyLoss"}
BOTH = {
    "inputs": ["image", "scale"],
    "losses": {
        "class": {**CROSS_ENTROPY, "weight": 0.7, "outputs": ["classes"], "targets": ["label"]},
        "score": {"_target_": "torch.nn.MSELoss", "weight": 2, "outputs": ["score"], "targets": ["score"]},
    },
}


def run_job(world: World | None, folder: str, **given: Any) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    return token_jobs.run(plain_jobs.make_document(tempfile.mkdtemp(dir=folder), **given), world)


def run_all(world: World, folder: str) -> dict[Any, Any]:
    sizes = [size for size in (8, 4, 1) if size * world.data_size <= plain_jobs.BATCH]
    return {
        (stage, size): run_job(world, folder, stage=stage, micro_batch=size, **BOTH)
        for stage in range(4)
        for size in (sizes if world.data_size == 1 else sizes[stage % 2 :: 2])
    }


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.full("1")
def test_several_losses_are_those_of_a_loop_by_hand(tmp_path: Any, world_size: int) -> None:
    """At every stage and micro batch, also of samples that are no target of one of the losses."""
    expected, weights = plain_jobs.train_by_hand(plain_jobs.both)
    for rank, results in enumerate(run_ranks(run_all, world_size, str(tmp_path))):
        for found, ends in results.values():
            for name, weight in weights.items():
                torch.testing.assert_close(ends[name], weight, **CLOSE)
            if rank == 0:
                *records, last = found
                for record, losses in zip(records, expected, strict=False):
                    names = ("loss", "loss/class", "loss/score")
                    assert [record[name] for name in names] == pytest.approx(list(losses.values()), rel=0, abs=1e-6)
                names = ("eval/loss", "eval/loss/class", "eval/loss/score")
                assert [last[name] for name in names] == pytest.approx(list(expected[-1].values()), rel=0, abs=1e-6)


FORMS: dict[str, dict[str, Any]] = {
    "a dict by position": {"inputs": ["image", "scale"], "targets": ["label"], "outputs": ["classes"]},
    "a dict by name": {
        "inputs": {"scale": "scale", "image": "image"},
        "targets": {"target": "label"},
        "outputs": {"input": "classes"},
    },
    "dicts in a dict": {"batch": "nested", "inputs": ["inputs.image", "inputs.scale"], "targets": ["label"]},
    "a tuple": {"batch": "tuple", "inputs": [0, 1], "targets": [2]},
    "a tuple from its end": {"batch": "tuple", "inputs": {"image": 0, "scale": "1"}, "targets": [-2]},
    "a namedtuple": {"batch": "named", "inputs": ["image", 1], "targets": ["label"]},
}


@pytest.mark.parametrize("output", ["dict", "tuple", "tensor"])
@pytest.mark.parametrize("form", FORMS)
def test_a_loss_of_torch_gets_predictions_and_targets(tmp_path: Any, form: str, output: str) -> None:
    given = {"output": output, "loss": CROSS_ENTROPY, "metrics": {"again": CROSS_ENTROPY}, **FORMS[form]}
    if output == "dict":
        given.setdefault("outputs", ["classes"])
    elif "outputs" in given:
        del given["outputs"]
    if given["targets"] == {"target": "label"} and output != "dict":
        given["outputs"] = {"input": 0 if output == "tuple" else "."}
    expected, weights = plain_jobs.train_by_hand(plain_jobs.classify)
    (*records, last), ends = run_job(None, str(tmp_path), **given)
    assert [record["loss"] for record in records] == pytest.approx([each["loss"] for each in expected[:-1]], abs=1e-6)
    assert last["eval/loss"] == pytest.approx(expected[-1]["loss"], abs=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(ends[name], weight, **CLOSE)
    # The metric is called as the loss is: the mean of the one batch of 8 and the one of 3, by samples.
    assert last["eval/again"] == pytest.approx(last["eval/loss"], abs=0.2)


def run_half(world: World, folder: str) -> list[Any]:
    return [run_job(world, folder, stage=stage, micro_batch=2, bf16={"enabled": True}, **BOTH) for stage in range(4)]


def test_in_bf16_a_loss_of_torch_gets_fp32(tmp_path: Any) -> None:
    expected, weights = plain_jobs.train_by_hand(plain_jobs.both, torch.bfloat16)
    for rank, results in enumerate(run_ranks(run_half, 2, str(tmp_path))):
        for found, ends in results:
            for name, weight in weights.items():
                torch.testing.assert_close(ends[name].float(), weight, rtol=0, atol=1e-2)
            if rank == 0:
                for record, losses in zip(found[:-1], expected, strict=False):
                    assert record["loss"] == pytest.approx(losses["loss"], rel=2e-2)


def test_without_targets_a_loss_gets_outputs_and_batch_as_ever(tmp_path: Any) -> None:
    by_hand = {"_target_": "plain_jobs.compare"}
    given = {"inputs": ["image", "scale"], "micro_batch": 2, "trainer": {"loss_average": "batches"}}
    chosen = {"outputs": ["score"], "targets": ["score"], "loss": {"_target_": "torch.nn.MSELoss"}}
    one, other = (run_job(None, str(tmp_path), **given, **each)[0] for each in ({"loss": by_hand}, chosen))
    assert [line.get("loss") for line in one] == [line.get("loss") for line in other]


class Takes(nn.Module):
    def forward(self, *args: Any, **keywords: Any) -> Any:
        return args, keywords


def make(targets: list[Any] | None = None, inputs: Any = None, **given: Any) -> Objective:
    chosen = None if targets is None else Selection(targets, ("targets",), "the batch")
    terms = (Term(nn.MSELoss(), ("loss",), targets=chosen),) if given.pop("compared", True) else ()
    chooses = None if inputs is None else Selection(inputs, ("inputs",), "the batch")
    return Objective(inputs=chooses, targets=chosen, terms=terms, **given)


@pytest.mark.parametrize(
    ("objective", "batch", "args", "keywords"),
    [
        (make(), {"x": 1, "y": 2}, (), {"x": 1, "y": 2}),
        (make(["y"]), {"x": 1, "y": 2}, (), {"x": 1}),
        (make(["y"], compared=False), {"x": 1, "y": 2}, (), {"x": 1, "y": 2}),
        (make([1]), (1, 2, 3), (1, 3), {}),
        (make([-1]), [1, 2, 3], (1, 2), {}),
        (make(["."]), 5, (5,), {}),
        (make(["y"], makes_inputs=True), {"x": 1, "y": 2}, (), {"x": 1, "y": 2}),
        (make(["y"], makes_inputs=True), {"decoder_input_ids": 1, "y": 2}, (), {"decoder_input_ids": 1}),
        (make(["y"], ["y", "x"]), {"x": 1, "y": 2}, (2, 1), {}),
        (make(["y"], {"a": "."}), (1, 2), (), {"a": (1, 2)}),
        (make(None, []), {"x": 1}, (), {}),
    ],
)
def test_a_model_is_called_with_the_batch_without_what_a_loss_gets(
    objective: Objective, batch: Any, args: Any, keywords: Any
) -> None:
    assert objective.call(Takes(), batch) == (args, keywords)


X = torch.zeros(4, 3)


def test_a_plain_model_that_does_not_take_the_batch_leads_to_inputs_and_targets() -> None:
    with pytest.raises(ContractError) as caught:
        Objective().call(nn.Linear(2, 1), {"image": torch.ones(3, 2), "label": torch.ones(3)})
    way = "passed as keywords: image, label; set inputs: [...] to choose what the model receives, and targets: [...]"
    assert way in caught.value.hint


@pytest.mark.parametrize(
    ("outputs", "found"),
    [
        (X, X),
        ({"loss": 1, "logits": X, "other": 2}, X),
        ({"loss": 1, "out": X}, X),
        ((X, 1), X),
        (type("Output", (), {"logits": X})(), X),
    ],
)
def test_predictions_are_found_in_what_models_return(outputs: Any, found: Any) -> None:
    assert find_predictions(outputs) is found


def test_predictions_that_are_not_found_are_asked_for() -> None:
    with pytest.raises(ContractError, match="a dict of start, end, has no `logits`") as caught:
        find_predictions({"start": 1, "end": 2})
    assert "outputs: [NAME]" in caught.value.hint


@pytest.mark.parametrize(
    ("key", "batch", "told"),
    [
        ("z", {"x": 1, "y": 2}, "targets[0]: the batch, of type dict, has no 'z', but x, y"),
        ("a.z", {"a": {"b": 1}}, "targets[0]: the batch.a, of type dict, has no 'z', but b"),
        (3, (1, 2), "targets[0]: the batch, of type tuple, has no 3, but 2 elements"),
        ("y", (1, 2), "targets[0]: the batch, of type tuple, has no 'y', but 2 elements"),
        (0, X, "targets[0]: the batch, of type Tensor, has no 0"),
    ],
)
def test_a_key_that_is_not_there_is_told_with_its_place_and_with_those_that_are(
    key: Any, batch: Any, told: str
) -> None:
    with pytest.raises(ContractError) as caught:
        Selection([key], ("targets",), "the batch").read(batch)
    assert (caught.value.message, caught.value.path) == (told, ("targets", 0))


@pytest.mark.parametrize(
    ("function", "outputs", "told", "hint"),
    [
        (
            nn.CrossEntropyLoss(),
            X,
            "loss: CrossEntropyLoss failed: ",
            "predictions float32 [4, 3] and targets float32 [5, 3]",
        ),
        (
            nn.MSELoss(reduction="none"),
            torch.zeros(5, 3),
            "loss: the loss function (MSELoss) returned a tensor of",
            "mean",
        ),
        (lambda a, b: "much", X, "returned str, not a loss", "return the mean over the batch"),
    ],
)
def test_a_loss_that_cannot_be_used_is_told_with_its_place(function: Any, outputs: Any, told: str, hint: str) -> None:
    targets = Selection(["y"], ("targets",), "the batch")
    objective = Objective(terms=(Term(function, ("loss",), targets=targets),))
    with pytest.raises(ContractError) as caught:
        objective.find(outputs, {"y": torch.zeros(5, 3)})
    assert told in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.path == ("loss", "_target_")


def test_an_error_of_ones_own_loss_stays_what_it_is() -> None:
    def divide(prediction: Any, target: Any) -> Any:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        Objective(terms=(Term(divide, ("loss",), targets=Selection(["y"], (), "")),)).find(X, {"y": X})


def test_one_of_several_losses_returns_a_mean() -> None:
    terms = tuple(Term(lambda outputs, batch: (outputs, 2), ("losses", name), f"loss/{name}") for name in "ab")
    with pytest.raises(ContractError, match="loss/a returned a pair"):
        Objective(terms=terms).find(torch.ones((), requires_grad=True), None)


INTEGERS = torch.tensor([[1, -100], [0, 2]])


@pytest.mark.parametrize(
    ("function", "target", "count"),
    [
        (nn.CrossEntropyLoss(), INTEGERS, 3),
        (nn.CrossEntropyLoss(ignore_index=0), INTEGERS, 3),
        (nn.CrossEntropyLoss(), INTEGERS.float(), 2),
        (nn.CTCLoss(), INTEGERS, 2),
        (lambda a, b: a, INTEGERS, 3),
        (lambda a, b: a, INTEGERS > 0, 2),
        (lambda a, b: a, ["a", "b"], 2),
    ],
)
def test_what_counts_as_a_target(function: Any, target: Any, count: int) -> None:
    term = Term(function, ("loss",), targets=Selection(["y"], (), "the batch"))
    assert term.count({"x": X[:2], "y": target}) == count


@pytest.mark.parametrize("device", [False, True])
def test_a_loss_without_targets_adds_nothing_to_a_step_of_several(device: bool) -> None:
    def give(number: int) -> Any:
        return torch.tensor(number) if device else number

    losses = [Loss(torch.tensor(2.0)), Loss(torch.tensor(torch.nan))]
    one, none = Step(None, 1, targets=[give(4), give(0)]).weigh(losses, [give(4), give(0)])
    assert (one.item(), none.item()) == (2.0, 0.0)
    with pytest.raises(DataError, match="a step has no targets"):
        Step(None, 1, targets=[give(0), give(0)]).weigh(losses, [give(0), give(0)])


def test_a_single_value_is_given_as_it_is() -> None:
    assert (Chosen((1,)).value, Chosen((), {"a": 1}).value) == (1, 1)
    assert (Chosen((1, 2)).value, Chosen((), {"a": 1, "b": 2}).value) == ((1, 2), {"a": 1, "b": 2})


def test_predictions_are_written_by_the_keys_that_the_document_chooses(tmp_path: Any) -> None:
    given = {**FORMS["a dict by position"], "outputs": ["score", "classes"], "targets": ["score", "label"]}
    token_jobs.run(
        plain_jobs.make_document(
            tmp_path / "run", **given, tasks=["train", "predict"], loss={"_target_": "plain_jobs.compare_both"}
        )
    )
    first, *_ = (tmp_path / "run" / "predictions-eval.jsonl").read_text().splitlines()
    assert list(json.loads(first)) == ["index", "score", "classes"]
