"""A document with pipeline stages gives the numbers of the same document without them, and resumes with any number."""

from __future__ import annotations

import json
import shutil
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pipelined_models
import pytest
import torch
from job_documents import find_problems, make_job, resolve
from jobs import dsjob
from ranks import run_ranks
from safetensors.torch import load_file

from dsjob import storage
from dsjob.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from dsjob.document.resolve import complete_job
from dsjob.errors import DsjobError
from dsjob.ranks.mesh import World
from dsjob.training import job
from dsjob.trust.grant import Trust

STEPS = 8  # two epochs of 64 samples
TRUST = Trust(folders=(str(Path(pipelined_models.__file__).parent),))
LAYERS: dict[str, Any] = {
    "model": {"_target_": "pipelined_models.build_layers"},
    "data": {
        "train": {"_target_": "pipelined_models.Rows"},
        "eval": {"_target_": "pipelined_models.Rows", "length": 13, "seed": 1},
    },
    "inputs": ["x"],
    "targets": ["y"],
    "losses": {
        "ce": {"_target_": "torch.nn.CrossEntropyLoss"},
        "smooth": {"_target_": "torch.nn.CrossEntropyLoss", "label_smoothing": 0.1, "weight": 0.5},
    },
    "metrics": {"accuracy": {"_target_": "torchmetrics.classification.MulticlassAccuracy", "num_classes": 3}},
    "tasks": ["train", "predict"],
    "predict": {"format": "safetensors"},
}
_LINEAR = "torch.nn.Linear"
LISTED: dict[str, Any] = {
    **LAYERS,
    "model": {
        "_target_": "dsjob.Layers",
        "layers": [
            {"_target_": _LINEAR, "in_features": 6, "out_features": 8},
            {"_target_": "pipelined_models.Residual", "width": 8},
            {"_target_": _LINEAR, "in_features": 8, "out_features": 6},
            {"tied": 0},
            {"_target_": "torch.nn.ReLU"},
            {"tied": 1},
            {"tied": 0, "forward": {"_target_": "pipelined_models.turn", "_partial_": True}},
            {"_target_": _LINEAR, "in_features": 6, "out_features": 3},
        ],
    },
}


DOUBLING: dict[str, Any] = {**LAYERS, "model": {"_target_": "pipelined_models.Doubling"}}
ONE_LOSS: dict[str, Any] = {**LAYERS, "losses": {"ce": {"_target_": "torch.nn.CrossEntropyLoss"}}}


def make_document(kind: str, folder: str, **sections: Any) -> dict[str, Any]:
    data = {
        "train": {"_target_": "pipelined_models.Tokens"},
        "eval": {"_target_": "pipelined_models.Tokens", "length": 13, "seed": 1},
    }
    own: dict[str, Any] = {"layers": LAYERS, "listed": LISTED, "one loss": ONE_LOSS, "doubling": DOUBLING}.get(
        kind
    ) or {
        "model": {"_target_": f"pipelined_models.build_{kind}"},
        "data": data,
    }
    steps = {"train_batch": 16, "micro_batch": 2, "max_steps": STEPS, "log_every": 1, "eval_at_start": True}
    return make_job(
        **{
            **own,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3}},
            "gradient_clipping": 0.5,
            "checkpoint": {"every": STEPS // 2, "keep": 5},
            "output": {"dir": folder},
            **sections,
            "trainer": {**steps, **sections.get("trainer", {})},
        }
    )


def run(world: World, documents: list[dict[str, Any]]) -> None:
    for document in documents:
        resolved = resolve(document, world_size=world.everyone.size)
        folder = resolved["output"]["dir"]
        storage.make_folder(folder)
        job.run_job(complete_job(resolved), folder, world, TRUST)


def read(folder: str) -> dict[str, Any]:
    records = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "grad_norm", "eval/loss", "loss/ce", "loss/smooth", "eval/loss/ce", "eval/accuracy")
    found = {name: [record[name] for record in records if name in record] for name in names}
    weights = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/checkpoints")
    predicted = Path(folder, "predictions-eval.safetensors")
    return {**found, "weights": weights, "predictions": load_file(predicted) if predicted.exists() else {}}


@cache
def run_alone(kind: str) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        run_ranks(run, 1, [make_document(kind, folder)])
        return read(folder)


def compare(found: dict[str, Any], kind: str, tolerance: float = 1e-5, *, resumed: bool = False) -> None:
    alone = run_alone(kind)
    assert len(found["loss"]) == STEPS
    for name in {"loss", "grad_norm"} if resumed else alone.keys() - {"weights", "predictions"}:
        assert found[name] == pytest.approx(alone[name], rel=tolerance * (100 if name == "grad_norm" else 1)), name
    # Before the first step, the weights are those of the job without a pipeline.
    assert found["eval/loss"][0] == pytest.approx(alone["eval/loss"][0], rel=1e-7)
    for part in ("weights", "predictions"):
        assert found[part].keys() == alone[part].keys()
        for name, tensor in alone[part].items():
            torch.testing.assert_close(found[part][name], tensor, rtol=0, atol=20 * tolerance)


OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
Case = tuple[int, str, dict[str, Any]]  # ranks, kind of model, sections
CASES: list[Case] = [
    (2, "layers", {"pipeline": {"stages": 2}}),
    (2, "listed", {"pipeline": {"stages": 2, "partition": "uniform"}}),
    (2, "gpt2", {"pipeline": {"stages": 2}}),
    (2, "doubling", {"pipeline": {"stages": 2, "schedule": "interleaved", "chunks": 2}}),
    (
        4,
        "one loss",
        {"pipeline": {"stages": 2}, "tensor_parallel": {"size": 2, "plan": {"fc": "colwise", "out": "rowwise"}}},
    ),
]
MORE: list[Case] = [
    (2, "t5", {"pipeline": {"stages": 2, "schedule": "zero-bubble", "chunks": 2}}),
    (2, "llama", {"pipeline": {"stages": 2, "schedule": "interleaved", "chunks": 2}}),
    (2, "t5", {"pipeline": {"stages": 2, "schedule": "gpipe"}}),
    (4, "t5", {"pipeline": {"stages": 4}}),
    (4, "gpt2", {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 3}}),
    (4, "llama", {"pipeline": {"stages": 2, "schedule": "zero-bubble"}, "zero_optimization": {"stage": 1}}),
    (2, "gpt2", {"pipeline": {"stages": 2}, "activation_checkpointing": {"mode": "full"}}),
    (
        2,
        "llama",
        {"pipeline": {"stages": 2, "partition": "type:llama"}, "activation_checkpointing": {"mode": "selective"}},
    ),
    (2, "layers", {"pipeline": {"stages": 2, "partition": "time", "activation_checkpoint_interval": 2}}),
    (4, "layers", {"pipeline": {"stages": 4, "partition": "uniform", "schedule": "gpipe"}}),
    (4, "listed", {"pipeline": {"stages": 4}}),
    (4, "listed", {"pipeline": {"stages": 2, "partition": "uniform"}, "zero_optimization": {"stage": 3}}),
    (4, "layers", {"pipeline": {"stages": 2, "schedule": {"_target_": "dsjob.pipelines.schedules.TrainSchedule"}}}),
    (
        4,
        "layers",
        {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    ),
]


@pytest.mark.parametrize(
    ("ranks", "kind", "sections"), [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)]
)
@pytest.mark.full("4-one loss-sections4", "2-listed-sections1")
def test_a_pipelined_job_gives_the_numbers_of_one_process(
    ranks: int, kind: str, sections: dict[str, Any], tmp_path: Path
) -> None:
    run_ranks(run, ranks, [make_document(kind, str(tmp_path), **sections)])
    compare(read(str(tmp_path)), kind)


def test_a_job_resumes_with_other_stages(tmp_path: Path) -> None:
    """To the bit with the same ones."""
    folder = str(tmp_path)
    whole, first = f"{folder}/whole", f"{folder}/parts"
    two, drop = {"pipeline": {"stages": 2}}, {"model": {"_target_": "pipelined_models.build_layers", "drop": 0.3}}
    short = {"trainer": {"max_steps": STEPS // 2}}
    run_ranks(
        run, 2, [make_document("layers", whole, **two, **drop), make_document("layers", first, **two, **drop, **short)]
    )
    run_ranks(run, 2, [make_document("layers", first, **two, **drop)])
    one, resumed = read(whole), read(first)
    assert resumed["loss"] == one["loss"]
    assert all(torch.equal(resumed["weights"][name], tensor) for name, tensor in one["weights"].items())
    changing = f"{folder}/changing"
    run_ranks(run, 2, [make_document("layers", changing, **two, **short)])
    run_ranks(run, 3, [make_document("layers", changing, pipeline={"stages": 3}, trainer={"max_steps": STEPS - 2})])
    run_ranks(run, 1, [make_document("layers", changing)])
    compare(read(changing), "layers", resumed=True)


def fail(world: World, documents: list[dict[str, Any]]) -> list[str]:
    said = []
    for document in documents:
        with pytest.raises(DsjobError) as found:
            run(world, [document])
        said.append(f"{'.'.join(map(str, found.value.path))}: {found.value.message}")
    return said


def test_models_that_cannot_be_divided(tmp_path: Path) -> None:
    def document(name: str, **pipeline: Any) -> dict[str, Any]:
        model = {"_target_": f"pipelined_models.{name}"}
        return make_document("layers", f"{tmp_path}/{name}", model=model, pipeline={"stages": 2, **pipeline})

    documents = [
        document("Recurrent"),
        document("Crossing"),
        document("build_layers", partition="type:Conv"),
    ]
    for said in run_ranks(fail, 2, documents):
        expected = [
            ("model", "Recurrent cannot be divided into pipeline stages: it has no repeated blocks"),
            (
                "model",
                "cannot be divided into pipeline stages by itself: it calls last.1 before a layer that it has in",
            ),
            ("pipeline.partition", "pipeline partition type:Conv: no layer matches"),
        ]
        for text, (place, told) in zip(said, expected, strict=True):
            assert text.startswith(place)
            assert told in text


def test_sizes_of_a_pipelined_job() -> None:
    document = make_document("layers", "out", pipeline={"stages": 2, "micro_batches": 4})
    trainer = resolve(document, world_size=4)["trainer"]
    assert (trainer["grad_accum"], trainer["micro_batch"], trainer["train_batch"]) == (4, 2, 16)
    (problem,) = find_problems(document, world_size=3)
    assert problem.message == "3 ranks do not divide into groups of 2"
    (alone,) = find_problems(document, world_size=1)
    assert alone.message == "1 rank does not divide into groups of 2"
    assert problem.dotted == "pipeline.stages"


@pytest.mark.parametrize(
    ("how", "place", "backward"),
    [
        ("die", 3, False),
        *(
            pytest.param(how, place, backward, marks=pytest.mark.full)
            for how in ("die", "exit", "hang")
            for place in (0, 3, 5)
            for backward in (False, True)
            if (how, place, backward) != ("die", 3, False)
        ),
    ],
)
def test_a_stage_that_ends_or_hangs_within_a_step_is_named(
    how: str, place: int, backward: bool, tmp_path: Path
) -> None:
    """Three stages of two layers each; one of them has trouble in the second of its steps."""
    shutil.copy(str(pipelined_models.__file__), tmp_path)
    model = {"_target_": "pipelined_models.build_troubled", "place": place, "how": how, "backward": backward}
    document = make_document(
        "layers", "run", model=model, pipeline={"stages": 3, "partition": "uniform"},
        launch={"nproc": 3, "timeout": 4}, tasks=["train"], metrics=None, predict=None,
        trainer={"micro_batch": None, "grad_accum": 4, "eval_at_start": False},
    )  # fmt: skip
    (tmp_path / "cfg.json").write_text(json.dumps(document))
    started = time.monotonic()
    done = dsjob("cfg.json", cwd=tmp_path)
    assert time.monotonic() - started < 40
    told = {
        "die": " was killed by SIGKILL",
        "exit": ": user code called os._exit(0) before the last step",
        "hang": " has stalled in step 2 (training)",
    }
    rank = place // 2
    assert done.returncode == 1
    assert f"rank {rank} (stage {rank} of the pipeline){told[how]}" in done.stderr, done.stderr
