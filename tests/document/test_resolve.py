"""From a composed document to a resolved one."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from job_documents import find_problems, make_job, nowhere, resolve

from dsjob.contract.schema import job_schema
from dsjob.document.bare import resolve_config
from dsjob.document.places import place_problems
from dsjob.document.resolve import resolve_job
from dsjob.document.sizes import read_nproc
from dsjob.errors import ConfigError, DocumentError, Problem


def test_a_resolved_job_is_complete_and_in_the_order_of_the_schema() -> None:
    document = make_job()
    before = copy.deepcopy(document)
    resolved = resolve(document)
    assert document == before
    assert list(resolved) == [key for key in job_schema()["properties"] if key in resolved]
    for section in ("trainer", "launch", "checkpoint", "output", "zero_optimization", "bf16"):
        keys = job_schema()["properties"][section]["properties"]
        works = {key: below for key, below in keys.items() if not {"x-status", "x-alias-of"} & set(below)}
        defaults = {key: below["default"] for key, below in works.items() if "default" in below}
        assert defaults.items() <= resolved[section].items()
        assert list(resolved[section]) == [key for key in keys if key in resolved[section]]
    batch = {"train_batch": 4, "micro_batch": 4, "grad_accum": 1, "max_steps": 10}
    assert batch.items() <= resolved["trainer"].items()
    assert resolved["gradient_clipping"] == 1.0
    assert resolved["optimizer"]["params"]["weight_decay"] == 0


def test_sections_that_are_only_for_the_way_there_are_gone() -> None:
    resolved = resolve(make_job(deepspeed={"gradient_clipping": 2}) | {"$schema": "x"})
    assert not {"deepspeed", "$schema"} & set(resolved)
    assert resolved["gradient_clipping"] == 2


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_the_batch_triad_is_settled_for_the_world_size(world_size: int) -> None:
    trainer = resolve(make_job(), world_size=world_size)["trainer"]
    assert (trainer["train_batch"], trainer["micro_batch"], trainer["grad_accum"]) == (4 * world_size, 4, 1)


def test_a_triad_that_does_not_fit_is_placed_at_its_first_number() -> None:
    document = make_job(trainer={"train_batch": 7, "micro_batch": 4, "max_steps": 1})
    (found,) = find_problems(document, locate=lambda path: ("/".join(map(str, path)), 3, 5))
    assert (found.place, found.rule) == ("trainer/train_batch:3:5", "batch")


def test_a_learning_rate_of_auto_is_told() -> None:
    document = make_job(optimizer={"type": "AdamW", "params": {"lr": "auto"}})
    (found,) = resolve_job(document, world_size=1, locate=nowhere).warnings
    assert (found.dotted, found.rule, found.severity) == ("optimizer.params.lr", "auto", "warning")
    assert "lr is 5e-05" in found.message
    assert resolve_job(resolve(document), world_size=1, locate=nowhere).warnings == []


@pytest.mark.parametrize("given", [{"train_batch": "auto"}, {"micro_batch": "auto", "grad_accum": 2}])
def test_auto_without_a_batch_size_says_what_it_would_be_derived_from(given: dict[str, Any]) -> None:
    with pytest.raises(DocumentError) as caught:
        resolve(make_job(trainer={**given, "max_steps": 3}))
    assert '"auto" is derived from train_batch or micro_batch, but neither is a number' in str(caught.value)


def test_auto_is_resolved_and_never_left() -> None:
    document = make_job(
        trainer={"train_batch": "auto", "micro_batch": 4, "grad_accum": "auto", "max_steps": 30},
        scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
    )
    resolved = resolve(document, world_size=2)
    assert resolved["trainer"]["train_batch"] == 8
    assert resolved["trainer"]["grad_accum"] == 1


@pytest.mark.parametrize(
    ("given", "kept"), [({}, None), ({"total_num_steps": 7}, 7), ({"total_num_steps": "auto"}, None)]
)
def test_the_length_of_a_schedule_is_left_to_the_run(given: dict[str, Any], kept: int | None) -> None:
    """A number here would be that of another run when the resolved document is trained on for longer."""
    section = {"scheduler": {"type": "WarmupDecayLR", "params": given}}
    params = resolve(make_job(**section))["scheduler"]["params"]
    assert params.get("total_num_steps") == kept


def reopen(command_line: dict[str, int], world_size: int) -> tuple[int, int, int]:
    """The triad of a document that was resolved as 16 = 4 x 2 x 2, with some of it given on the command line."""
    trainer = {"train_batch": 16, "micro_batch": 4, "grad_accum": 2, "max_steps": 1, **command_line}
    document = make_job(trainer=trainer, resolved={"world_size": 2})

    def locate(path: Any) -> tuple[str, int, int]:
        return ("command line: x" if path[-1] in command_line else "resolved.json", 0, 0)

    found = resolve_job(document, world_size=world_size, locate=locate).document
    assert found["resolved"]["world_size"] == world_size
    return found["trainer"]["train_batch"], found["trainer"]["micro_batch"], found["trainer"]["grad_accum"]


@pytest.mark.parametrize(
    ("command_line", "world_size", "triad"),
    [
        ({}, 2, (16, 4, 2)),
        ({}, 1, (16, 4, 4)),
        ({}, 4, (16, 4, 1)),
        ({}, 8, (16, 2, 1)),
        ({}, 16, (16, 1, 1)),
        ({"train_batch": 32}, 2, (32, 4, 4)),
        ({"micro_batch": 2}, 2, (16, 2, 4)),
        ({"grad_accum": 1}, 2, (16, 8, 1)),
        ({"micro_batch": 1, "grad_accum": 3}, 2, (6, 1, 3)),
        ({"train_batch": 8, "micro_batch": 2}, 1, (8, 2, 4)),
    ],
)
def test_what_was_derived_before_is_derived_anew(
    command_line: dict[str, int], world_size: int, triad: tuple[int, int, int]
) -> None:
    assert reopen(command_line, world_size) == triad


def test_a_batch_that_no_division_fits_is_explained() -> None:
    with pytest.raises(DocumentError, match=r"x world size 3; use launch\.nproc=4"):
        reopen({}, 3)


@pytest.mark.parametrize("number", [5e8, 500000000])
def test_whole_floats_become_integers_where_integers_are_asked(number: float) -> None:
    resolved = resolve(make_job(trainer={"micro_batch": 2.0, "max_steps": number}, gradient_clipping=2))
    assert type(resolved["trainer"]["max_steps"]) is int
    assert type(resolved["trainer"]["micro_batch"]) is int
    assert type(resolve(make_job(trainer={"micro_batch": 1, "max_epochs": 2.0}))["trainer"]["max_epochs"]) is float


def test_other_spellings_become_the_real_ones() -> None:
    resolved = resolve(make_job(zero_optimization={"stage": 3, "gather_16bit_weights_on_model_save": True}))
    found = resolved["zero_optimization"]
    assert {key: found[key] for key in found if "gather" in key} == {"stage3_gather_16bit_weights_on_model_save": True}


def test_arguments_of_a_target_are_left_alone() -> None:
    model = {"_target_": "a.b", "size": 5e8, "path": None, "inner": {"_target_": "c.d", "x": "auto"}}
    optimizer = {"_target_": "torch.optim.Adam", "lr": 1}
    resolved = resolve(make_job(model=model, optimizer=optimizer))
    assert resolved["model"] == model
    assert type(resolved["model"]["size"]) is float
    assert resolved["optimizer"] == optimizer


def test_warnings_come_back_and_errors_are_raised_all_at_once() -> None:
    document = make_job(zero_optimization={"overlap_comm": True})
    warnings = resolve_job(document, world_size=1, locate=nowhere).warnings
    assert [warning.severity for warning in warnings] == ["warning"]
    document["trainer"] = {"seed": "x", "max_stps": 1}
    assert {problem.dotted for problem in find_problems(document)} == {"trainer", "trainer.seed", "trainer.max_stps"}


# ---- precedence, as far as it is decided here


@pytest.mark.parametrize(
    ("sections", "config", "path"),
    [
        ({"gradient_clipping": 1.0}, {"gradient_clipping": 3}, "gradient_clipping"),
        ({"zero_optimization": {"stage": 1}}, {"zero_optimization": {"stage": 2}}, "zero_optimization.stage"),
        (
            {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}},
            {"zero_optimization": {"gather_16bit_weights_on_model_save": False}},
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        ),
        ({}, {"train_micro_batch_size_per_gpu": 8}, "trainer.micro_batch"),
        ({}, {"optimizer": {"type": "SGD"}}, "optimizer.type"),
    ],
)
def test_what_two_files_say_differently_is_an_error(sections: Any, config: Any, path: str) -> None:
    found = find_problems(make_job(**sections, deepspeed=config), locate=lambda path: ("job.json", 1, 1))
    assert [(problem.dotted, problem.rule) for problem in found] == [(path, "conflict")]


@pytest.mark.parametrize("source", ["command line: x=1", "recipe quickstart"])
def test_what_a_command_line_or_recipe_says_beats_the_deepspeed_file(source: str) -> None:
    def locate(path: tuple[str | int, ...]) -> tuple[str, int, int]:
        return ("ds.json", 1, 1) if path[:1] == ("deepspeed",) else (source, 0, 0)

    document = make_job(
        deepspeed={"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 3, "optimizer": {"type": "SGD"}}
    )
    resolved = resolve(document, locate=locate)
    assert resolved["trainer"]["micro_batch"] == 4
    assert resolved["gradient_clipping"] == 3
    assert resolved["optimizer"]["type"] == "AdamW"


def test_another_spelling_in_the_job_than_in_the_deepspeed_section_is_named() -> None:
    document = make_job(
        zero_optimization={"gather_16bit_weights_on_model_save": True},
        deepspeed={"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": False}},
    )
    (found,) = find_problems(document)
    assert found.rule == "conflict"
    assert "gather_16bit_weights_on_model_save" in found.dotted


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"gradient_clippin": 3}, "deepspeed.gradient_clippin"),
        ({"zero_optimization": {"stage": 7}}, "deepspeed.zero_optimization.stage"),
        ({"train_batch_size": "x"}, "deepspeed.train_batch_size"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup": 1}}}, "deepspeed.scheduler.params.warmup"),
        ({"fp16": {"clip": 1.0}}, "deepspeed.fp16.clip"),
        ({"scheduler": {"params": {}}}, "deepspeed.scheduler"),
        ({"optimizer": 5}, "deepspeed.optimizer"),
        (5, "deepspeed"),
    ],
)
def test_what_is_wrong_in_the_deepspeed_section_is_said_once_and_there(config: Any, path: str) -> None:
    document = make_job(deepspeed=config)
    if "optimizer" in path:
        del document["optimizer"]
    assert [problem.dotted for problem in find_problems(document)] == [path]


def test_the_job_may_give_a_part_of_a_section_whose_rest_the_deepspeed_section_has() -> None:
    document = make_job(
        optimizer={"params": {"lr": 7}}, deepspeed={"optimizer": {"type": "SGD", "params": {"momentum": 0.5}}}
    )
    optimizer = resolve(document)["optimizer"]
    assert optimizer["type"] == "SGD"
    assert (optimizer["params"]["lr"], optimizer["params"]["momentum"]) == (7, 0.5)


def test_arguments_that_do_not_fit_the_type_chosen_are_found_where_they_stand() -> None:
    document = make_job(
        optimizer={"type": "SGD"}, deepspeed={"optimizer": {"type": "Adam", "params": {"betas": [0, 0]}}}
    )

    def locate(path: tuple[str | int, ...]) -> tuple[str, int, int]:
        return ("ds.json", 2, 3) if path[:1] == ("deepspeed",) else ("command line", 0, 0)

    (found,) = find_problems(document, locate=locate)
    assert (found.dotted, found.message, found.place) == ("optimizer.params.betas", "unknown key", "ds.json:2:3")


# ---- a bare DeepSpeed config


def test_a_bare_config_is_an_engine_spec() -> None:
    config = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 2,
        "steps_per_print": 7,
        "zero_optimization": {"stage": 2, "gather_16bit_weights_on_model_save": True, "overlap_comm": True},
        "bf16": {"enabled": True},
        "scheduler": None,
    }
    spec, warnings = resolve_config(config, world_size=4, locate=nowhere)
    assert (spec.trainer.train_batch, spec.trainer.micro_batch, spec.trainer.grad_accum) == (32, 4, 2)
    assert (spec.trainer.log_every.amount, spec.trainer.seed, spec.trainer.max_steps) == (7, 42, None)
    assert (spec.zero_optimization.stage, spec.zero_optimization.stage3_gather_16bit_weights_on_model_save) == (2, True)
    assert spec.bf16.enabled
    assert (spec.optimizer, spec.scheduler) == (None, None)
    assert spec.gradient_clipping == 1.0
    assert [warning.dotted for warning in warnings] == ["zero_optimization.overlap_comm"]


def test_a_bare_config_that_is_wrong_is_a_config_error_with_all_problems() -> None:
    config = {"train_batch_siez": 32, "fp16": {"clip": 1.0}, "zero_optimization": {"stage": "two"}}
    with pytest.raises(ConfigError) as caught:
        resolve_config(config, world_size=1, locate=lambda path: ("config", 0, 0))
    assert {problem.dotted for problem in caught.value.problems} == {
        "train_batch_siez",
        "fp16.clip",
        "zero_optimization.stage",
    }
    assert all(problem.place == "config" for problem in caught.value.problems)


def test_batch_sizes_of_a_bare_config_that_do_not_fit_are_a_config_error_in_its_own_words() -> None:
    words = (
        "train_batch_size 7 (line 1) is not train_micro_batch_size_per_gpu 2 (line 1) x "
        "gradient_accumulation_steps 1 (derived) x world size 2"
    )
    with pytest.raises(ConfigError, match=re.escape(words)):
        resolve_config(
            {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}},
            world_size=2,
            locate=nowhere,
        )


# ---- the small parts


@pytest.mark.parametrize(
    ("document", "nproc"),
    [
        ({}, 1),
        ({"launch": {}}, 1),
        ({"launch": {"nproc": 3}}, 3),
        ({"launch": {"nproc": 2.0}}, 2),
        ({"launch": {"nproc": 0}}, 1),
        ({"launch": {"nproc": -2}}, 1),
        ({"launch": {"nproc": "4"}}, 1),
        ({"launch": {"nproc": float("inf")}}, 1),
        ({"launch": {"nproc": float("nan")}}, 1),
        ({"launch": 4}, 1),
        ({"launch": None}, 1),
    ],
)
def test_the_number_of_processes_is_read_from_any_document(document: dict[str, Any], nproc: int) -> None:
    assert read_nproc(document) == nproc


def test_problems_get_the_places_of_their_paths() -> None:
    problems = [Problem("one", ("a",), hint="h"), Problem("two", ("b", "c"))]
    placed = place_problems(problems, lambda path: ("job.json", len(path), 9))
    assert [(p.message, p.hint, p.place) for p in placed] == [("one", "h", "job.json:1:9"), ("two", "", "job.json:2:9")]


@pytest.mark.parametrize(
    ("amp", "fp16", "autocast"),
    [
        ({"opt_level": "O0"}, {"enabled": False}, {"enabled": False}),
        ({}, {"enabled": False, "loss_scale": 0}, {"enabled": True, "dtype": "float16"}),
        ({"opt_level": "auto"}, {"enabled": False}, {"enabled": True, "dtype": "float16"}),
        ({"opt_level": "O1", "loss_scale": 128.0}, {"loss_scale": 128.0}, {"enabled": True, "dtype": "float16"}),
        ({"opt_level": "O2", "loss_scale": "dynamic"}, {"enabled": True, "loss_scale": 0}, {"enabled": False}),
        ({"opt_level": "O3", "min_loss_scale": 4}, {"enabled": True, "min_loss_scale": 4}, {"enabled": False}),
    ],
)
@pytest.mark.parametrize("inside", [True, False], ids=["in-the-deepspeed-section", "in-the-job"])
def test_amp_is_mapped_to_what_pytorch_has_and_says_so(amp: Any, fp16: Any, autocast: Any, inside: bool) -> None:
    section = {"amp": {"enabled": True, **amp}}
    document = make_job(deepspeed=section) if inside else make_job(**section)
    found = resolve_job(document, world_size=1, locate=nowhere)
    assert fp16.items() <= found.document["fp16"].items()
    assert autocast.items() <= found.document["torch_autocast"].items()
    assert "amp" not in found.document
    assert {(w.rule, w.path[-1]) for w in found.warnings} == {
        ("deprecated", key) for key in ("enabled", *(k for k in amp if amp[k] != "auto"))
    }
    assert all("torch_autocast" in w.hint or "fp16" in w.hint for w in found.warnings)
    assert resolve(found.document) == found.document


@pytest.mark.parametrize(
    ("given", "minutes"),
    [
        ({}, 15),
        ({"keep": 3}, 15),
        ({"every": 0}, None),
        ({"every": 100}, None),
        ({"every_epochs": 1}, None),
        ({"every_minutes": 5}, 5),
        ({"at_end": False}, None),
    ],
    ids=str,
)
def test_a_run_saves_every_15_minutes_unless_told_when(given: dict[str, Any], minutes: float | None) -> None:
    assert resolve(make_job(checkpoint=given))["checkpoint"].get("every_minutes") == minutes
