"""The Trainer's schedules: step by step the rates that transformers itself would give, and what a file's own keeps."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from imports import import_command, import_texts, messages, resolve_imported

from dsjob.contract.check import check_job
from dsjob.contract.spec import EngineSpec, view
from dsjob.errors import DocumentError
from dsjob.importing.schedules import SCHEDULES
from dsjob.optim.schedules import build_scheduler, settle_length

STEPS, RATE = 40, 0.02
CASES: list[tuple[str, float, dict[str, Any]]] = [
    *((name, warm_up, {}) for name in ("linear", "cosine", "polynomial", "inverse_sqrt") for warm_up in (0, 7)),
    ("constant", 0, {}),
    ("constant", 7, {}),  # which transformers does not look at
    ("constant_with_warmup", 7, {}),
    ("linear", 0.13, {}),  # a share, rounded up
    ("cosine", 3, {"num_cycles": 1.25}),
    ("cosine_with_restarts", 3, {}),
    ("cosine_with_restarts", 3, {"num_cycles": 3}),
    ("cosine_with_min_lr", 3, {"min_lr": 0.005}),
    ("cosine_with_min_lr", 3, {"min_lr_rate": 0.3, "num_cycles": 1.0}),
    ("cosine_warmup_with_min_lr", 5, {"min_lr_rate": 0.3}),
    ("cosine_warmup_with_min_lr", 5, {"min_lr": 0.005, "warmup_lr_rate": 0.25}),
    ("polynomial", 3, {"lr_end": 0.001, "power": 2.0}),
    ("inverse_sqrt", 5, {"timescale": 9}),
    ("warmup_stable_decay", 4, {"num_decay_steps": 10}),
    ("warmup_stable_decay", 4, {"num_decay_steps": 10, "num_stable_steps": 8, "decay_type": "1-sqrt"}),
    ("warmup_stable_decay", 4, {"num_decay_steps": 10, "warmup_type": "cosine", "min_lr_ratio": 0.2}),
]


def list_rates(optimizer: Any, schedule: Any) -> list[float]:
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def list_theirs(name: str, warm_up: float, kwargs: dict[str, Any]) -> list[float]:
    """What the Trainer itself makes of its arguments."""
    transformers = pytest.importorskip("transformers")
    asked = transformers.TrainingArguments.get_warmup_steps(SimpleNamespace(warmup_steps=warm_up), STEPS)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    schedule = transformers.get_scheduler(name, optimizer, asked, STEPS, scheduler_specific_kwargs=kwargs)
    return list_rates(optimizer, schedule)


def list_ours(document: dict[str, Any]) -> list[float]:
    method = view(EngineSpec, document).scheduler
    assert method is not None
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=document["optimizer"]["params"]["lr"])
    return list_rates(optimizer, build_scheduler(settle_length(method, document["trainer"]["max_steps"]), optimizer))


@pytest.mark.parametrize(("name", "warm_up", "kwargs"), CASES, ids=str)
def test_rates_are_those_of_the_trainer(name: str, warm_up: float, kwargs: dict[str, Any]) -> None:
    command = f"python train.py --output_dir o --max_steps {STEPS} --learning_rate {RATE} --lr_scheduler_type {name}"
    command += f" --warmup_steps {warm_up} --lr_scheduler_kwargs {shlex.quote(json.dumps(kwargs))}"
    document = resolve_imported(import_command(command))
    if "." not in SCHEDULES[name]:
        assert document["scheduler"]["type"] == name
    assert list_ours(document) == pytest.approx(list_theirs(name, warm_up, kwargs), abs=1e-9)


BASE = "python train.py --output_dir o --max_steps 40"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--lr_scheduler_type constant --warmup_steps 7", "--warmup_steps=7: constant has no warm-up"),
        (
            "--lr_scheduler_type constant_with_warmup --lr_scheduler_kwargs '{\"a\": 1}'",
            "--lr_scheduler_kwargs.a=1: constant_with_warmup takes no arguments",
        ),
        ("--warmup_steps 7 --warmup_ratio 0.1", "--warmup_ratio=0.1: --warmup_steps=7 takes precedence"),
        ("--lr_scheduler_type greedy", "--lr_scheduler_type=greedy has no equivalent: the rate stays constant"),
    ],
)
def test_what_a_schedule_has_no_use_for_is_told(arguments: str, words: str) -> None:
    assert words in messages(import_command(f"{BASE} {arguments}"), "left out")


def test_arguments_and_names_that_nobody_knows() -> None:
    imported = import_command(f"{BASE} --lr_scheduler_type cosine --lr_scheduler_kwargs '{{\"num_cycle\": 2}}'")
    assert "--lr_scheduler_kwargs.num_cycle=2" in messages(imported, "unknown")
    assert 'did you mean "num_cycles"?' in messages(imported, "unknown")
    imported = import_command(f"{BASE} --lr_scheduler_type cosin")
    assert '--lr_scheduler_type=cosin: did you mean "cosine"?; the rate stays' in messages(imported, "unknown")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--lr_scheduler_kwargs 5", "--lr_scheduler_kwargs=5: must be an object"),
        ("--lr_scheduler_kwargs '{\"num_warmup_steps\": 3}'", "num_warmup_steps=3: must not be set here"),
        ('--lr_scheduler_type cosine --lr_scheduler_kwargs \'{"num_cycles": "x"}\'', "num_cycles=x: must be a number"),
        ("--warmup_ratio 1.5", "--warmup_ratio=1.5: must be between 0 and 1"),
        ("--warmup_steps -3", "--warmup_steps=-3: must be at least 0"),
        ("--warmup_steps 3.5", "--warmup_steps=3.5: must be an integer"),
    ],
)
def test_wrong_arguments_are_refused(arguments: str, words: str) -> None:
    with pytest.raises(DocumentError) as caught:
        import_command(f"{BASE} {arguments}")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("warmup_stable_decay", "needs num_decay_steps"),
        ("cosine_with_min_lr", "needs min_lr or min_lr_rate"),
    ],
)
def test_a_schedule_that_lacks_what_makes_it_is_to_be_mended(name: str, words: str) -> None:
    assert words in messages(import_command(f"{BASE} --lr_scheduler_type {name}"), "mend")


ONE_CYCLE = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--warmup_steps 7", "--warmup_steps=7: scheduler.type=OneCycle ("),
        ("--lr_scheduler_kwargs '{\"a\": 1}'", "--lr_scheduler_kwargs.a=1: the schedule is scheduler.type=OneCycle ("),
    ],
)
def test_what_a_files_schedule_has_no_use_for_is_told(tmp_path: Path, arguments: str, words: str) -> None:
    imported = import_texts(tmp_path, {"ds.json": {"scheduler": ONE_CYCLE}}, f"{BASE} {arguments}")
    assert imported.document["scheduler"] == ONE_CYCLE
    assert words in messages(imported, "left out")


def test_arguments_of_a_schedule_that_was_replaced_are_told_once(tmp_path: Path) -> None:
    config = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_min_lr": 0.1}}}
    imported = import_texts(tmp_path, {"ds.json": config}, f"{BASE} --lr_scheduler_type linear")
    assert imported.document["scheduler"] == {"type": "linear"}
    (told,) = messages(imported, "left out").splitlines()
    assert "warmup_num_steps=9, scheduler.params.warmup_min_lr=0.1: for WarmupLR, which linear replaces" in told


@pytest.mark.parametrize(("kind", "name"), [("linear", "num_warmup_steps"), ("WarmupLR", "warmup_num_steps")])
def test_the_trainers_name_for_the_warm_up_is_put_right_in_either_schedule(kind: str, name: str) -> None:
    document = {"scheduler": {"type": kind, "params": {"warmup_steps": 3}}}
    hints = [problem.hint for problem in check_job(document) if problem.rule == "unknown-key"]
    assert hints == [f'did you mean "{name}"?']
