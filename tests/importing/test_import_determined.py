"""Experiments of Determined: lengths, checkpoint policies, and what becomes a note."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from imports import get, import_texts, messages

from dsjob.errors import DocumentError
from dsjob.importing.settle import Imported

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}
EXPERIMENT: dict[str, Any] = {
    "name": "cifar10 pipe",
    "hyperparameters": {"deepspeed_config": "ds.json", "lr": 0.1},
    "resources": {"slots_per_trial": 2},
    "searcher": {
        "name": "single",
        "metric": "validation_loss",
        "smaller_is_better": True,
        "max_length": {"batches": 200},
    },
    "min_validation_period": {"batches": 50},
    "entrypoint": "python3 -m determined.launch.deepspeed model_def:CIFARTrial",
}


def load(folder: Path, **changes: Any) -> Imported:
    files = {"ds.json": CONFIG, "experiment.json": {**EXPERIMENT, **changes}}
    return import_texts(folder, files, given=["experiment.json"])


def test_lengths_and_the_deepspeed_config_are_taken(tmp_path: Path) -> None:
    imported = load(tmp_path, reproducibility={"experiment_seed": 7})
    document = imported.document
    assert get(document, "name") == "cifar10-pipe"
    assert get(document, "launch.nproc") == 2
    assert get(document, "trainer") == {"micro_batch": 2, "max_steps": 200, "eval_every": "50ba", "seed": 7}
    assert get(document, "optimizer.type") == "AdamW"
    assert "entrypoint: the job document defines what to run" in messages(imported, "left out")
    for length, key, value in (({"epochs": 3}, "max_epochs", 3), ({"records": 500}, "max_length", "500sp")):
        imported = load(tmp_path, searcher={"max_length": length})
        assert get(imported.document, f"trainer.{key}") == value
        assert "how long to train" not in messages(imported, "fill in")
    imported = load(tmp_path, hyperparameters={"deepspeed_config": {"type": "const", "val": "ds.json"}})
    assert get(imported.document, "optimizer.type") == "AdamW"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"best": {"metric": "eval/loss", "mode": "min"}}),
        (
            {
                "checkpoint_policy": "best",
                "min_checkpoint_period": {"epochs": 1},
                "checkpoint_storage": {"save_trial_best": 3, "save_trial_latest": 4},
            },
            {"every": "1ep", "keep": 4, "best": {"metric": "eval/loss", "mode": "min", "keep": 3}},
        ),
        (
            {"searcher": {"metric": "f1", "smaller_is_better": False, "max_length": 9}},
            {"best": {"metric": "eval/f1", "mode": "max"}},
        ),
        ({"searcher": {"metric": "f1"}}, {"best": {"metric": "eval/f1", "mode": "min"}}),
        ({"searcher": {"metric": "perplexity"}}, {"best": {"metric": "eval/perplexity"}}),
        ({"checkpoint_policy": "all"}, {"every": "50ba", "keep": 0}),
        ({"checkpoint_policy": "all", "min_checkpoint_period": {"batches": 10}}, {"every": "10ba", "keep": 0}),
        ({"checkpoint_policy": "none"}, None),
    ],
)
def test_checkpoint_policies_become_keys(tmp_path: Path, changes: dict[str, Any], expected: Any) -> None:
    imported = load(tmp_path, **changes)
    assert imported.document.get("checkpoint") == expected
    assert messages(imported, "mend") == ""  # apart from what is to be filled in, the document is valid
    assert get(imported.document, "data.eval._target_") == "my_module.build_eval_data"


def test_a_manual_initialisation_becomes_a_function_to_fill_in(tmp_path: Path) -> None:
    imported = load(tmp_path, environment={"environment_variables": ["DET_MANUAL_INIT_DISTRIBUTED=1", "A=secret"]})
    assert get(imported.document, "launch.init_distributed._target_") == "my_module.init_distributed"
    assert "launch.init_distributed: replace my_module.init_distributed" in messages(imported, "fill in")
    told = messages(imported, "left out")
    assert "A: set it for dsjob too" in told
    assert "secret" not in told


@pytest.mark.parametrize(
    "wrong", [{"checkpoint_policy": "some"}, {"min_validation_period": {"weeks": 1}}, {"min_validation_period": "soon"}]
)
def test_invalid_values_are_errors(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(DocumentError, match="must be"):
        load(tmp_path, **wrong)


def overwrite(folder: Path, part: Any, **more: Any) -> Imported:
    return load(folder, hyperparameters={"deepspeed_config": "ds.json", "overwrite_deepspeed_args": part, **more})


def test_what_an_experiment_overwrites_in_its_deepspeed_config_counts(tmp_path: Path) -> None:
    """As Determined merges it: key by key, the experiment's values first."""
    part = {
        "zero_optimization": {"stage": 2},
        "fp16": {"enabled": {"type": "const", "val": True}},
        "optimizer": {"params": {"lr": 0.5}},
        "gradient_clipping": {"type": "double", "minval": 0.1, "maxval": 1.0},
    }
    imported = overwrite(tmp_path, part)
    document = imported.document
    assert get(document, "zero_optimization.stage") == 2
    assert get(document, "fp16.enabled") is True
    assert get(document, "optimizer") == {"type": "AdamW", "params": {"lr": 0.5}}
    assert get(document, "trainer.micro_batch") == 2
    assert "gradient_clipping" not in document
    assert "overwrite_deepspeed_args.gradient_clipping: sweep with dsjob -m" in messages(imported, "left out")
    assert messages(imported, "conflict") == ""


def test_an_experiment_may_have_all_of_its_config_in_itself(tmp_path: Path) -> None:
    whole = {"type": "const", "val": {**CONFIG, "zero_optimization": {"stage": 3}}}
    imported = load(tmp_path, hyperparameters={"overwrite_deepspeed_args": whole})
    assert get(imported.document, "zero_optimization.stage") == 3
    assert get(imported.document, "optimizer.params.lr") == 1e-4
    with pytest.raises(DocumentError, match=r"experiment\.json:\d+:\d+: .*must be an object with keys of a DeepSpeed"):
        overwrite(tmp_path, [1])


def test_a_wrong_value_is_told_where_the_experiment_has_it(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"experiment\.json:\d+:\d+: error\[enum\]: zero_optimization\.stage"):
        overwrite(tmp_path, {"zero_optimization": {"stage": 7}})
