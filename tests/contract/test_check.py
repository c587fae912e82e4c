"""What is found wrong with a document, in which words, and what is suggested."""

from __future__ import annotations

import string
from collections.abc import Iterator
from typing import Any

import pytest
from job_documents import make_job

from dsjob.contract import schema as contract
from dsjob.contract.check import MAX_UNKNOWN, check_config, check_job, check_shape
from dsjob.contract.hints import suggest
from dsjob.contract.schema import Schema
from dsjob.errors import Problem

NAME_FORM = "a name of letters, digits, dots, hyphens and underscores that starts with a letter or digit"


def problems(**sections: Any) -> dict[str, Problem]:
    """What is wrong with a job that is valid but for `sections`, by path."""
    found = check_job(make_job(**sections))
    assert len({problem.path for problem in found}) == len(found)
    return {problem.dotted: problem for problem in found}


def problem(path: str, **sections: Any) -> Problem:
    (only,) = problems(**sections).values()
    assert only.dotted == path
    return only


@pytest.mark.parametrize("place", [(), ("deepspeed",), ("models", "one")])
def test_arguments_of_a_mistyped_optimizer_are_those_of_the_one_that_is_meant(place: tuple[str, ...]) -> None:
    section: Any = {"optimizer": {"type": "Lionn", "params": {"lr": "x", "eps": 1e-8}}}
    for part in reversed(place):
        section = {part: section}
    found = {problem.path for problem in check_job(make_job(**{"optimizer": None, **section}))}
    params = (*place, "optimizer", "params")
    assert {(*params, "lr"), (*params, "eps")} <= found


def test_arguments_of_an_optimizer_that_is_near_to_none_may_be_any() -> None:
    assert list(problems(optimizer={"type": "Mystery", "params": {"lr": "x"}})) == ["optimizer.type"]


def test_a_missing_section_is_not_hidden_by_the_english_of_another_hint() -> None:
    # Its hint, "this is HF Trainer's name for ...", has words of "is missing" in it.
    assert list(problems(optimizer=None, fp16_backend="apex")) == ["fp16_backend", "optimizer"]


def test_a_missing_section_is_not_reported_if_it_is_only_misspelt() -> None:
    assert list(problems(optimizer=None, optimiser={"type": "AdamW"})) == ["optimiser"]


def test_a_valid_job_has_no_problems() -> None:
    assert problems() == {}


@pytest.mark.parametrize(
    ("path", "sections", "message"),
    [
        ("trainer.seed", {"trainer": {"seed": "x", "max_steps": 1}}, 'must be an integer, but is "x"'),
        ("trainer.seed", {"trainer": {"seed": 1.5, "max_steps": 1}}, "must be an integer, but is 1.5"),
        ("trainer.seed", {"trainer": {"seed": True, "max_steps": 1}}, "must be an integer, but is true"),
        ("trainer.seed", {"trainer": {"seed": [], "max_steps": 1}}, "must be an integer, but is []"),
        ("trainer.seed", {"trainer": {"seed": -1, "max_steps": 1}}, "must be at least 0, but is -1"),
        ("trainer.max_epochs", {"trainer": {"max_epochs": 0}}, "must be greater than 0, but is 0"),
        ("name", {"name": "my job"}, f'must be {NAME_FORM}, but is "my job"'),
        ("model", {"model": "mine.build"}, 'must be an object, but is "mine.build"'),
        ("model", {"model": {}}, "the required key _target_ is missing"),
        ("model._target_", {"model": {"_target_": "build"}}, None),
        ("data", {"data": {}}, "the required key train is missing"),
        ("", {"model": None}, "the job has no model section, which is required"),
        ("trainer", {"trainer": 5}, "must be an object, but is 5"),
        ("launch", {"launch": 2}, "must be an object, but is 2"),
        ("launch.device", {"launch": {"device": "gpu"}}, 'must be one of "auto", "cpu", "cuda", but is "gpu"'),
        ("zero_optimization.stage", {"zero_optimization": {"stage": 4}}, "must be one of 0, 1, 2, 3, but is 4"),
        ("bf16.enabled", {"bf16": {"enabled": "true"}}, 'must be true or false, but is "true"'),
        ("checkpoint.dir", {"checkpoint": {"dir": ""}}, "must not be empty"),
        ("optimizer", {"optimizer": "Adam"}, 'must be an object, but is "Adam"'),
        ("optimizer", {"optimizer": {"params": {"lr": 1}}}, "the required key type is missing"),
        (
            "optimizer",
            {"optimizer": {"type": "Adam", "_target_": "torch.optim.Adam"}},
            "has both `type` and `_target_`, which exclude each other",
        ),
        (
            "optimizer.params.lr",
            {"optimizer": {"type": "Adam", "params": {"lr": None}}},
            "must be a number, but is null",
        ),
        (
            "optimizer.params.amsgrad",
            {"optimizer": {"type": "Adam", "params": {"amsgrad": "auto", "lr": "auto"}}},
            'must be true or false, but is "auto"',
        ),
        (
            "optimizer.params.betas",
            {"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}},
            "must have at least 2 items, but is [0.9]",
        ),
        (
            "optimizer.params.betas[1]",
            {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1]}}},
            "must be less than 1, but is 1",
        ),
        ("scheduler", {"scheduler": {"type": "OneCycle"}}, "the required key params is missing"),
        (
            "scheduler.params",
            {"scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": 1}}},
            "the required key cycle_min_lr is missing",
        ),
        ("metrics.a", {"metrics": {"a": {}}}, "the required key _target_ is missing"),
        ("deepspeed", {"deepspeed": 5}, "must be a string or an object, but is 5"),
    ],
)
def test_each_mistake_is_said_once_and_in_words(path: str, sections: dict[str, Any], message: str | None) -> None:
    found = problem(path, **sections)
    assert found.severity == "error"
    assert message is None or found.message == message


@pytest.mark.parametrize(
    ("sections", "hint"),
    [
        ({"trainer": {"seed": "7", "max_steps": 1}}, "write 7 without the quotes"),
        ({"trainer": {"seed": "seven", "max_steps": 1}}, ""),
        ({"bf16": {"enabled": "True"}}, "write true without the quotes"),
        ({"bf16": {"enabled": "yes"}}, "write true"),
        ({"bf16": {"enabled": 0}}, "write false"),
        ({"bf16": True}, 'write {"enabled": true}'),
        ({"zero_optimization": 2}, 'write {"stage": 2}'),
        ({"zero_optimization": 5}, ""),
        ({"checkpoint": {"every": "5e2"}}, "write 5e2 without the quotes"),
        ({"launch": {"device": "cudda"}}, 'did you mean "cuda"?'),
        ({"model": None}, "add it to the document, or start from a recipe: +recipe=quickstart"),
        ({"model": {"width": 5}}, "set it to the dotted path of a callable, for example my_module.build"),
        ({"checkpiont": {}}, 'did you mean "checkpoint"?'),
        ({"trainer": {"mirco_batch": 4, "max_steps": 1}}, 'did you mean "micro_batch"?'),
        ({"optimizer": {"type": "Adam", "parms": {}}}, 'did you mean "params"?'),
        ({"optimizer": {"type": "Adam", "params": {"beta": [0, 0]}}}, 'did you mean "betas"?'),
        ({"deepspeed": {"gradient_clippin": 1}}, 'did you mean "gradient_clipping"?'),
        ({"pipeline": {"stage": 2}}, 'did you mean "stages"?'),
        ({"pipeline": {"max_steps": 2}}, "it belongs under trainer"),
        ({"max_steps": 5}, "it belongs under trainer"),
        ({"keep": 5}, "it belongs under checkpoint or under checkpoint.best"),
        ({"on_signal": True}, "it belongs under checkpoint"),
        ({"steps_per_print": 5}, "this is DeepSpeed's name for trainer.log_every"),
        ({"dump_state": True}, "it belongs under deepspeed"),
        ({"save_steps": 5}, "this is HF Trainer's name for checkpoint.every"),
        ({"_note": "mine"}, "for a note, write a comment (// in JSON, # in YAML), or a key that starts with _comment"),
        ({"output": {"x": 5}}, "available: dir"),
        (
            {"monitor": {"wandb": {"enabled": True, "api_key": "x"}}},
            "leave it out: wandb reads its key from the environment variable WANDB_API_KEY",
        ),
    ],
)
def test_a_mistake_comes_with_what_to_do(sections: dict[str, Any], hint: str) -> None:
    (found,) = problems(**sections).values()
    assert found.hint == hint


def test_all_problems_are_found_at_once() -> None:
    found = problems(
        nam="x", trainer={"max_stps": 5, "seed": "x"}, optimizer={"type": "Adam", "params": {"lr": -1, "momentum": 1}}
    )
    assert set(found) == {
        "nam",
        "trainer.max_stps",
        "trainer.seed",
        "optimizer.params.lr",
        "optimizer.params.momentum",
    }


def test_long_values_are_shown_cut() -> None:
    assert len(problem("model", model="x" * 1000).message) < 120


@pytest.mark.parametrize("number", [5e8, 1e14, 4.0])
def test_a_whole_float_is_an_integer(number: float) -> None:
    assert problems(trainer={"max_steps": number}) == {}


@pytest.mark.parametrize("key", ["train_batch", "micro_batch", "grad_accum"])
def test_auto_is_taken_where_it_can_be_derived(key: str) -> None:
    assert problems(trainer={"max_steps": 1, key: "auto"}) == {}


@pytest.mark.parametrize("key", ["max_steps", "seed", "eval_batches"])
def test_auto_is_refused_where_it_cannot(key: str) -> None:
    assert "must be an integer" in problem(f"trainer.{key}", trainer={"max_epochs": 1, key: "auto"}).message


def test_another_word_than_auto_is_refused() -> None:
    assert problem("trainer.micro_batch", trainer={"max_steps": 1, "micro_batch": "automatic"})


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("fp16", "fp16_master_weights_and_grads", True),
        ("zero_optimization", "zero_quantized_gradients", True),
    ],
)
def test_what_is_not_supported_is_an_error_with_the_reason(section: str, key: str, value: Any) -> None:
    found = problem(f"{section}.{key}", **{section: {key: value}})
    assert (found.severity, found.rule) == ("error", "unsupported")
    assert found.message.endswith("is not supported by dsjob")
    assert found.hint == contract.job_schema()["properties"][section]["properties"][key]["x-note"]


def test_an_unsupported_key_may_be_left_at_its_default() -> None:
    assert problems(fp16={"enabled": False}, zero_optimization={"mics_shard_size": -1}) == {}


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ({"cpu_offload": True}, "offload_optimizer"),
        ({"cpu_offload_params": True}, "offload_param"),
        ({"cpu_offload_param": True}, "offload_param"),
    ],
)
def test_an_old_spelling_is_told_and_stands_for_what_it_stood_for(old: dict[str, bool], now: str) -> None:
    (key,) = old
    spelling, meaning = check_job(make_job(zero_optimization={"stage": 0, **old}))
    assert (spelling.dotted, spelling.rule) == (f"zero_optimization.{key}", "deprecated")
    assert now in spelling.hint
    assert (meaning.dotted, meaning.severity) == (f"zero_optimization.{key}", "error")
    needs = "has no effect below stage 3" if now == "offload_param" else "needs stage"
    assert meaning.message.startswith(f"stands for zero_optimization.{now}.device: {needs}")
    (only,) = problems(zero_optimization={key: False}).values()
    assert only.severity == "warning"


@pytest.mark.parametrize(
    "kind",
    ["MuAdam", "muadam", "MuAdamW", "MuSGD"],
)
def test_an_optimizer_that_is_not_built_is_refused_by_name_with_another_way(kind: str) -> None:
    found = problem("optimizer.type", optimizer={"type": kind, "params": {"lr": 0.1}})
    assert (found.rule, found.message) == ("unsupported", f'"{kind}" is not supported by dsjob')
    assert found.hint


def test_the_arguments_of_an_optimizer_that_is_not_built_are_checked_all_the_same() -> None:
    found = problems(optimizer={"type": "MuSGD", "params": {"momntum": 3}})
    assert found["optimizer.params.momntum"].hint == 'did you mean "momentum"?'


@pytest.mark.parametrize(
    "kind",
    [
        *("Adagrad", "adagrad", "Adamax", "SGD", "adamw", "Lamb", "lamb", "Lion", "LION", "Muon"),
        *("OneBitAdam", "onebitadam", "ZeroOneAdam", "OneBitLamb"),
    ],
)
def test_an_optimizer_that_is_built_is_not_refused(kind: str) -> None:
    assert problems(optimizer={"type": kind, "params": {"lr": 0.1}}) == {}


def test_the_lengths_of_transformers_schedules_are_looked_at() -> None:
    section = {"type": "linear", "params": {"num_training_steps": 5, "num_warmup_steps": 8}}
    found = problems(scheduler=section, trainer={"micro_batch": 4, "max_steps": 10})
    assert {path: problem.rule for path, problem in found.items()} == {
        "scheduler.params.num_warmup_steps": "warmup-beyond-end",
        "scheduler.params.num_training_steps": "schedule-too-short",
    }


@pytest.mark.parametrize(
    ("kind", "params", "needed"),
    [
        ("cosine", {}, True),
        ("cosine", {"num_training_steps": 9}, False),
        ("inverse_sqrt", {}, False),
        ("warmup_stable_decay", {"num_decay_steps": 3}, True),
        ("warmup_stable_decay", {"num_decay_steps": 3, "num_stable_steps": 4}, False),
    ],
)
def test_a_program_says_where_a_schedule_ends(kind: str, params: dict[str, Any], needed: bool) -> None:
    config = {"train_batch_size": 4, "scheduler": {"type": kind, "params": params}}
    assert [p.rule for p in check_config(config) if p.severity == "error"] == ["no-total-steps"] * needed


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("warmup_stable_decay", {}, "needs num_decay_steps"),
        ("cosine_with_min_lr", {}, "needs min_lr or min_lr_rate"),
        ("cosine_with_min_lr", {"min_lr": 0, "min_lr_rate": 0}, "has both min_lr and min_lr_rate"),
    ],
)
def test_a_schedule_without_what_it_needs_is_told(kind: str, params: dict[str, Any], message: str) -> None:
    found = problem("scheduler", scheduler={"type": kind, "params": params})
    assert (found.rule, found.message) == ("schedule-incomplete", f"{kind} {message}")


def test_a_rule_for_parameters_says_which_and_what() -> None:
    rules = {"a": {"weight_decay": 0}, "b": {"match": "*bias"}, "c": {"max_ndim": 1, "weight_decay": 0}}
    found = problems(optimizer={"type": "AdamW", "params": {"lr": 0.1}, "param_groups": rules})
    assert sorted(found) == ["optimizer.param_groups.a", "optimizer.param_groups.b"]
    assert {problem.rule for problem in found.values()} == {"empty-param-group"}


def defaults(schema: Schema) -> dict[str, Any]:
    """Every key at its default, sections without any left out."""
    found: dict[str, Any] = {}
    for key, below in schema["properties"].items():
        if contract.is_target(below):
            continue
        value = defaults(below) if "properties" in below else below.get("default")
        if value not in (None, {}) and not below.get("deprecated"):
            found[key] = value
    return found


# Sections that are on as soon as they are there, as in DeepSpeed.
PRESENT_IS_ON = {"sparse_attention", "weight_quantization", "zero_optimization.zenflow"} | {
    "zero_optimization.zeropp_loco_param"
}


def test_a_deepspeed_config_with_every_key_at_its_default_asks_for_nothing_unsupported() -> None:
    schema = contract.deepspeed_schema()
    config = defaults(schema)
    assert len(config) > 40
    errors = [found for found in check_shape(config, schema) if found.severity == "error"]
    assert {found.dotted for found in errors} == PRESENT_IS_ON
    assert {found.rule for found in errors} == {"unsupported"}


@pytest.mark.parametrize(
    ("config", "path", "hint"),
    [
        ({"fp16": {"clip": 1.0}}, "fp16.clip", "gradient_clipping"),
        ({"fp32_allreduce": True}, "fp32_allreduce", "communication_data_type=fp32"),
        (
            {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
            "optimizer.params.max_grad_norm",
            "clipping",
        ),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile", "compile.enabled"),
    ],
)
def test_a_key_of_an_older_config_is_refused_with_what_to_write(config: dict[str, Any], path: str, hint: str) -> None:
    (found,) = check_shape(config, contract.deepspeed_schema())
    assert (found.dotted, found.rule, found.severity) == (path, "unsupported", "error")
    assert hint in found.hint


def test_keys_that_a_file_of_hugging_face_has_as_auto_ask_for_nothing() -> None:
    config: dict[str, Any] = {
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "amp": {"enabled": "auto", "opt_level": "auto"},
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "optimizer": {"type": "AdamW", "params": {"betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}},
    }
    assert check_shape(config, contract.deepspeed_schema()) == []


def test_unknown_keys_are_found_in_maps_and_lists() -> None:
    config = {
        "compression_training": {"row_pruning": {"different_groups": {"mine": {"modulez": []}}}},
        "tensor_parallel": {"partition_config": {"layer_specs": [{"pattern": []}]}},
    }
    found = {
        item.dotted: item.hint
        for item in check_shape(config, contract.deepspeed_schema())
        if item.rule == "unknown-key"
    }
    assert found == {
        "compression_training.row_pruning.different_groups.mine.modulez": 'did you mean "modules"?',
        "tensor_parallel.partition_config.layer_specs[0].pattern": 'did you mean "patterns"?',
    }


def test_unsupported_keys_are_found_at_any_depth() -> None:
    section = {"stage": 3, "zeropp_loco_param": {"reset_T": 3}, "zero_quantized_weights": True}
    found = problems(zero_optimization=section)
    assert {found[f"zero_optimization.{key}"].rule for key in list(section)[1:]} == {"unsupported"}


def test_a_key_without_effect_is_a_warning_with_the_reason() -> None:
    found = problem("zero_optimization.overlap_comm", zero_optimization={"overlap_comm": True})
    assert (found.severity, found.rule) == ("warning", "no-effect")
    assert found.hint == "FSDP2 and DDP always overlap"


def test_a_warning_does_not_keep_errors_from_being_found() -> None:
    found = problems(zero_optimization={"overlap_comm": True}, trainer={"micro_batch": 1})
    assert found["trainer"].rule == "no-end"


def test_a_key_and_another_spelling_of_it_exclude_one_another() -> None:
    section = {"gather_16bit_weights_on_model_save": True, "stage3_gather_16bit_weights_on_model_save": True}
    found = problem("zero_optimization.gather_16bit_weights_on_model_save", zero_optimization=section)
    assert "another spelling of stage3_gather_16bit_weights_on_model_save" in found.message
    assert found.hint == "keep one"


def test_another_spelling_alone_is_fine() -> None:
    assert problems(zero_optimization={"gather_16bit_weights_on_model_save": True}) == {}


@pytest.mark.parametrize(
    ("rule", "path", "sections"),
    [
        ("no-end", "trainer", {"trainer": {"micro_batch": 1}}),
        ("no-optimizer", "optimizer", {"optimizer": None}),
        ("no-eval-data", "trainer.eval_every", {"trainer": {"max_steps": 9, "eval_every": 5}}),
        ("no-eval-data", "trainer.eval_batches", {"trainer": {"max_steps": 1, "eval_batches": 5}}),
        ("no-eval-data", "metrics", {"metrics": {"a": {"_target_": "a.b"}}}),
        ("finite", "trainer.max_epochs", {"trainer": {"max_epochs": float("inf")}}),
        ("finite", "model.sizes[1]", {"model": {"_target_": "a.b", "sizes": [1, float("nan")]}}),
    ],
)
def test_rules_between_keys(rule: str, path: str, sections: dict[str, Any]) -> None:
    found = problem(path, **sections)
    assert (found.rule, found.severity) == (rule, "error")
    assert found.hint


@pytest.mark.parametrize(
    "sections",
    [
        {"trainer": {"max_epochs": 0.5}},
        {"trainer": {"max_steps": 1, "eval_every": 0}},
        {
            "trainer": {"max_steps": 9, "eval_every": 5, "eval_batches": 1},
            "metrics": {"a": {"_target_": "a.b"}},
            "data": {"train": {"_target_": "a.b"}, "eval": {"_target_": "a.b"}},
        },
        {"scheduler": {"type": "WarmupDecayLR"}},
        {"scheduler": {"type": "constant"}},
        {"scheduler": {"type": "cosine", "params": {"num_training_steps": "auto", "num_warmup_steps": "auto"}}},
        {"scheduler": {"type": "warmup_stable_decay", "params": {"num_decay_steps": 3}}},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}, "trainer": {"max_epochs": 1}},
        {"scheduler": {"type": "WarmupLR"}, "trainer": {"max_epochs": 1}},
    ],
)
def test_rules_between_keys_let_pass_what_is_complete(sections: dict[str, Any]) -> None:
    assert problems(**sections) == {}


def test_arguments_of_targets_and_of_unlisted_types_are_their_own_business() -> None:
    assert (
        problems(
            model={"_target_": "a.b", "anything": {"at": ["all", None]}},
            optimizer={"type": "Adamax", "params": {"foreach": True}},
            scheduler={"_target_": "a.b", "x": 1},
        )
        == {}
    )


@pytest.mark.parametrize(
    ("word", "hint"),
    [("micro_bacth", 'did you mean "micro_batch"?'), ("zzz", ""), ("", ""), ("SEED", 'did you mean "seed"?')],
)
def test_suggest_names_the_nearest_word_or_none(word: str, hint: str) -> None:
    assert suggest(word, ["micro_batch", "train_batch", "seed"]) == hint


# ---- typing errors


def sections() -> Iterator[tuple[tuple[str, ...], Schema, str]]:
    """Every place of a job that lists its keys: path, schema, and the type that `params` belongs to."""

    def walk(schema: Schema, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Schema, str]]:
        yield path, schema, ""
        for key, below in schema["properties"].items():
            if "else" in below and "properties" in below["else"] and key == "deepspeed":
                yield from walk(below["else"], (*path, key))
            elif "params" in below.get("properties", {}):
                for kind in (
                    "Adam",
                    "SGD",
                    "Adagrad",
                    "WarmupLR",
                    "WarmupDecayLR",
                    "WarmupCosineLR",
                    "OneCycle",
                    "LRRangeTest",
                    "cosine_with_min_lr",
                    "warmup_stable_decay",
                ):
                    if (found := contract.params_schema(below, kind)) is not None:
                        yield (*path, key, "params"), found, kind
            elif "properties" in below and not contract.is_target(below):
                yield from walk(below, (*path, key))

    yield from walk(contract.job_schema(), ())


def misspell(word: str) -> dict[str, set[str]]:
    replaced = string.ascii_lowercase + "_"
    return {
        "dropped": {word[:i] + word[i + 1 :] for i in range(len(word))},
        "doubled": {word[: i + 1] + word[i:] for i in range(len(word))},
        "swapped": {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in range(len(word) - 1)},
        "replaced": {word[:i] + letter + word[i + 1 :] for i in range(len(word)) for letter in replaced[i % 9 :: 9]},
    }


def put(path: tuple[str, ...], kind: str, value: dict[str, int]) -> dict[str, Any]:
    for part in reversed(path):
        value = {part: value} | ({"type": kind} if part == "params" else {})  # type: ignore[dict-item]
    return value


@pytest.mark.parametrize("mistake", ["dropped", "doubled", "swapped", "replaced"])
@pytest.mark.full("replaced", "doubled", "dropped")
def test_a_mistyped_key_is_refused_and_99_in_100_times_the_right_one_is_suggested(mistake: str) -> None:
    tried, right = 0, 0
    for path, schema, kind in sections():
        meant: dict[str, set[str]] = {}
        for key in (key for key, below in schema["properties"].items() if "x-alias-of" not in below):
            for wrong in misspell(key)[mistake] - set(schema["properties"]):
                meant.setdefault(wrong, set()).add(f'did you mean "{key}"?')
        hints: dict[Any, str] = {}
        wrongs = list(meant)
        for start in range(0, len(wrongs), MAX_UNKNOWN):
            some = dict.fromkeys(wrongs[start : start + MAX_UNKNOWN], 1)
            found = check_shape(put(path, kind, some), contract.job_schema())
            hints.update({problem.path[-1]: problem.hint for problem in found if problem.rule == "unknown-key"})
        assert set(meant) == set(hints), path
        tried += len(meant)
        right += sum(hints[wrong] in suggestions for wrong, suggestions in meant.items())
    assert tried > 1500
    assert right / tried >= 0.99, f"{right} of {tried}"


@pytest.mark.parametrize(
    ("sections", "hint"),
    [
        ({"epochs": 3}, 'did you mean "trainer.max_epochs"?'),
        ({"trainer": {"micro_batch": 1, "steps": 3}}, 'did you mean "max_steps"?'),
        ({"batch_size": 3}, 'did you mean "trainer.micro_batch"?'),
        ({"launch": {"device": "gpu"}}, 'did you mean "cuda"?'),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}}, 'did you mean "none"?'),
        ({"trainer": {"micro_batch": 1, "max_steps": "1_000"}}, "write 1000"),
    ],
)
def test_what_people_mean_is_named(sections: dict[str, Any], hint: str) -> None:
    assert hint in {problem.hint for problem in check_job(make_job(**sections))}


@pytest.mark.parametrize(("section", "key"), [("launch", "nproc"), ("data", "num_workers")])
def test_a_document_cannot_fill_the_machine_with_processes(section: str, key: str) -> None:
    document = make_job()
    document.setdefault(section, {})[key] = 100_000
    problems = check_job(document)
    assert [(each.dotted, each.rule) for each in problems] == [(f"{section}.{key}", "range")]
    assert problems[0].message == "must be at most 1024, but is 100000"
