"""Composition: recipes, job files and overrides, who wins, and what is said when they do not fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from job_documents import compose_file, make_job, resolve_composed, write_json

from dsjob.cli.flags import add_arguments
from dsjob.document.compose import compose, compose_known, list_overrides, parse_arguments
from dsjob.document.origins import read_document
from dsjob.errors import DocumentError, DsjobError, UsageError


@pytest.fixture(scope="module")
def quickstart() -> dict[str, Any]:
    """The recipe as it is."""
    return compose(["+recipe=quickstart"]).document


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    return write_json(tmp_path / "job.json", make_job())


def refuse(kind: type[DsjobError], overrides: list[str], **kwargs: Any) -> DsjobError:
    with pytest.raises(kind) as caught:
        compose(overrides, **kwargs)
    return caught.value


# ---- who wins


def test_precedence_is_command_line_job_file_recipe_deepspeed_file_default(tmp_path: Path) -> None:
    """Each layer sets one key less than the one below it, so that every layer wins exactly once."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        """\
# @package _global_
model: {_target_: mine.build}
data: {train: {_target_: mine.Data}}
optimizer: {type: Adam, params: {lr: 2}}
trainer: {max_steps: 2, micro_batch: 2, seed: 2}
"""
    )
    write_json(
        tmp_path / "ds.json",
        {"optimizer": {"type": "Adam", "params": {"lr": 1, "eps": 1}}, "train_micro_batch_size_per_gpu": 1},
    )
    job = write_json(tmp_path / "job.json", {"trainer": {"max_steps": 3, "seed": 3}, "deepspeed": "ds.json"})
    composed = compose_file(job, ["+recipe=mine", "trainer.max_steps=4"], config_dir=str(tmp_path))
    resolved = resolve_composed(composed)
    assert resolved["trainer"]["max_steps"] == 4
    assert resolved["trainer"]["seed"] == 3
    assert resolved["trainer"]["micro_batch"] == 2
    assert resolved["optimizer"]["params"]["lr"] == 2
    assert resolved["optimizer"]["params"]["eps"] == 1
    assert resolved["optimizer"]["params"]["weight_decay"] == 0
    assert resolved["trainer"]["log_every"] == 20


def test_a_job_file_and_a_deepspeed_file_that_differ_are_an_error_naming_both_lines(tmp_path: Path) -> None:
    deepspeed = write_json(tmp_path / "ds.json", {"bf16": {"enabled": True}, "gradient_clipping": 3})
    job = write_json(tmp_path / "job.json", {"gradient_clipping": 2, **make_job(deepspeed="ds.json")})
    with pytest.raises(DocumentError) as caught:
        resolve_composed(compose_file(job))
    (found,) = caught.value.problems
    assert found.place == f"{job}:2:3"
    assert f"is 2 ({job}:2:3), but deepspeed.gradient_clipping says 3 ({deepspeed}:5:3)" in str(found)


@pytest.mark.parametrize("text", ["root:x:0:0::\ndaemon:*:1:1::\n", "user: bob\nhunter2: {x: 1}\n"])
def test_a_file_that_is_no_deepspeed_config_is_not_quoted(tmp_path: Path, text: str) -> None:
    (tmp_path / "accounts").write_text(text)
    job = write_json(tmp_path / "job.json", make_job(deepspeed="accounts"))
    with pytest.raises(DocumentError) as caught:
        resolve_composed(compose_file(job))
    (found,) = caught.value.problems
    assert (found.rule, found.place) == ("not-a-config", f"{tmp_path}/accounts:1:1")
    assert not any(word in found.message + found.hint for word in ("root", "daemon", "user", "bob", "hunter2"))


@pytest.mark.parametrize(("ours", "theirs"), [(8, 8), (8.0, 8), ("auto", 8), (8, "auto")])
def test_equal_values_and_auto_are_fine(tmp_path: Path, ours: Any, theirs: Any) -> None:
    write_json(tmp_path / "ds.json", {"train_micro_batch_size_per_gpu": theirs})
    trainer = {"micro_batch": ours, "max_steps": 1}
    job = write_json(tmp_path / "job.json", make_job(trainer=trainer, deepspeed="ds.json"))
    assert resolve_composed(compose_file(job))["trainer"]["micro_batch"] == 8


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("zero_optimization.stage=1", ("zero_optimization", "stage"), 1),
        ("zero=stage1", ("zero_optimization", "stage"), 1),
        ("precision=bf16", ("bf16", "enabled"), True),
        ("optimizer=sgd", ("optimizer", "type"), "SGD"),
        ("optimizer.params.lr=7", ("optimizer", "params", "lr"), 7),
    ],
)
def test_the_command_line_beats_both_files(tmp_path: Path, override: str, path: tuple[str, ...], value: Any) -> None:
    sections: dict[str, Any] = {
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "betas": [0, 0]}},
    }
    write_json(tmp_path / "ds.json", sections)
    job = write_json(tmp_path / "job.json", make_job(**sections, deepspeed="ds.json"))
    resolved: Any = resolve_composed(compose_file(job, [override]))
    for part in path:
        resolved = resolved[part]
    assert resolved == value


def test_a_group_chosen_on_the_command_line_replaces_the_section_of_the_job_file(job_file: Path) -> None:
    composed = compose_file(job_file, ["optimizer=sgd"])
    assert composed.document["optimizer"] == {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    composed = compose_file(job_file, ["optimizer=sgd", "optimizer.params.lr=7"])
    assert composed.document["optimizer"] == {"type": "SGD", "params": {"lr": 7, "momentum": 0.9}}


def test_a_group_that_sets_one_key_leaves_the_job_file_its_others(tmp_path: Path) -> None:
    section = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    job = write_json(tmp_path / "job.json", make_job(zero_optimization=section))
    composed = compose_file(job, ["zero=stage2"])
    assert composed.document["zero_optimization"] == section | {"stage": 2}
    assert compose_file(job).document["zero_optimization"] == section


def test_composing_leaves_the_parsed_file_as_it_is(job_file: Path) -> None:
    file = read_document(str(job_file))
    compose(["zero=stage2", "optimizer=sgd", "trainer.max_steps=99"], file=file)
    assert file.value == make_job()


@pytest.mark.parametrize(
    ("override", "path", "found"),
    [
        ("trainer.max_steps=5", ("trainer", "max_steps"), "command line: trainer.max_steps=5"),
        ("+trainer.seed=5", ("trainer", "seed"), "command line: +trainer.seed=5"),
        ("optimizer=sgd", ("optimizer", "params", "lr"), "command line: optimizer=sgd"),
        ("zero=stage2", ("zero_optimization", "stage"), "command line: zero=stage2"),
        ("precision=bf16", ("bf16", "enabled"), "command line: precision=bf16"),
        ("~optimizer.params.lr", ("optimizer", "params", "lr"), "command line: ~optimizer.params.lr"),
        ("+model.sizes=[1,2]", ("model", "sizes", 1), "command line: +model.sizes=[1,2]"),
        ("trainer.seed=${trainer.max_steps}", ("trainer", "seed"), "command line: trainer.seed=${trainer.max_steps}"),
    ],
)
def test_values_remember_the_override_that_set_them(
    job_file: Path, override: str, path: tuple[str | int, ...], found: str
) -> None:
    assert compose_file(job_file, [override]).locate(path) == (found, 0, 0)


# ---- recipes and overrides


def test_a_recipe_gives_the_job_its_name_and_its_values() -> None:
    composed = compose(["+recipe=quickstart"])
    assert composed.recipes == ("quickstart",)
    assert composed.document["name"] == "quickstart"
    assert composed.document["optimizer"]["type"] == "AdamW"
    assert composed.document["model"]["_target_"] == "dsjob.recipes.gpt.build"
    assert "loss" not in composed.document


def test_a_group_replaces_the_one_that_the_recipe_has_chosen() -> None:
    document = compose(["+recipe=quickstart", "scheduler=warmup"]).document
    assert document["scheduler"]["type"] == "WarmupLR"


def test_a_job_file_is_merged_over_a_recipe(tmp_path: Path, quickstart: dict[str, Any]) -> None:
    job = write_json(tmp_path / "job.json", {"trainer": {"max_steps": 3}, "model": {"width": 32}})
    document = compose_file(job, ["+recipe=quickstart"]).document
    assert document["trainer"] == quickstart["trainer"] | {"max_steps": 3}
    assert document["model"] == quickstart["model"] | {"width": 32}


def test_a_plus_appends_an_argument_to_a_target() -> None:
    assert compose(["+recipe=quickstart", "+model.dropout=0.1"]).document["model"]["dropout"] == 0.1


def test_a_tilde_deletes() -> None:
    document = compose(["+recipe=quickstart", "~model.heads", "~callbacks.sample"]).document
    assert "heads" not in document["model"]
    assert "callbacks" not in document


def test_a_tilde_deletes_a_group_with_all_that_the_recipe_adds_to_it() -> None:
    assert "scheduler" not in compose(["+recipe=quickstart", "~scheduler"]).document
    document = compose(["+recipe=quickstart", "~scheduler", "scheduler.type=WarmupLR"]).document
    assert document["scheduler"]["type"] == "WarmupLR"


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_a_tilde_deletes_a_section_of_the_job_file_too(tmp_path: Path, section: str) -> None:
    job = write_json(tmp_path / "job.json", make_job(scheduler={"type": "WarmupLR"}))
    assert section not in compose_file(job, [f"~{section}"]).document
    assert section in compose_file(job, [f"~{section}.params"]).document


def test_null_unsets() -> None:
    document = compose(["+recipe=quickstart", "trainer.max_steps=null", "trainer.max_epochs=1"]).document
    assert "max_steps" not in document["trainer"]
    assert document["trainer"]["max_epochs"] == 1
    assert "callbacks" not in compose(["+recipe=quickstart", "callbacks.sample=null"]).document


def test_null_unsets_what_a_job_file_gives(tmp_path: Path) -> None:
    job = write_json(tmp_path / "job.json", make_job(gradient_clipping=3))
    assert "gradient_clipping" not in compose_file(job, ["gradient_clipping=null"]).document


def test_arguments_of_an_optimizer_need_no_plus(quickstart: dict[str, Any]) -> None:
    document = compose(["optimizer.type=Adagrad", "optimizer.params.lr_decay=0.5"]).document
    assert document["optimizer"] == {"type": "Adagrad", "params": {"lr_decay": 0.5}}
    document = compose(["+recipe=quickstart", "optimizer.params.eps=0.5"]).document
    assert document["optimizer"]["params"] == quickstart["optimizer"]["params"] | {"eps": 0.5}


def test_interpolations_are_resolved() -> None:
    document = compose(["+recipe=quickstart", "model.context=64", "trainer.seed=${model.context}"]).document
    assert document["data"]["train"]["context"] == 64
    assert document["scheduler"]["params"]["warmup_max_lr"] == document["optimizer"]["params"]["lr"]
    assert document["trainer"]["seed"] == 64


@pytest.mark.parametrize("value", ["hf_canary", None])
def test_a_secret_that_may_be_absent_stays_a_reference(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSJOB_TEST_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("DSJOB_TEST_TOKEN", value)
    composed = compose(["+recipe=quickstart", "+data.train.token='${oc.env:DSJOB_TEST_TOKEN,null}'"])
    assert composed.document["data"]["train"]["token"] == "${oc.env:DSJOB_TEST_TOKEN,null}"


@pytest.mark.parametrize("override", ["data.train.token=[hunter2", "token:hunter2"])
def test_an_override_that_cannot_be_read_is_told_without_its_secret(override: str) -> None:
    with pytest.raises(UsageError, match="cannot read") as caught:
        compose(["+recipe=quickstart", override])
    assert "hunter2" not in str(caught.value)


def test_a_folder_of_the_users_own_adds_recipes_and_groups(tmp_path: Path, quickstart: dict[str, Any]) -> None:
    for group in ("recipe", "optimizer"):
        (tmp_path / group).mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [quickstart, {override /optimizer: mine}]\ntrainer: {max_steps: 7}\n"
    )
    (tmp_path / "optimizer" / "mine.yaml").write_text("type: SGD\nparams: {lr: 0.5}\n")
    document = compose(["+recipe=mine"], config_dir=str(tmp_path)).document
    assert document["name"] == "mine"
    assert document["trainer"] == quickstart["trainer"] | {"max_steps": 7}
    assert document["optimizer"] == {"type": "SGD", "params": {"lr": 0.5}}


def test_two_compositions_do_not_touch_one_another(job_file: Path, tmp_path: Path) -> None:
    first = compose_file(job_file, ["+recipe=quickstart"])
    compose_file(write_json(tmp_path / "other.json", {"trainer": {"seed": 1}}), ["optimizer=sgd"])
    assert compose_file(job_file, ["+recipe=quickstart"]).document == first.document
    assert "seed" not in compose(["+recipe=quickstart"]).document["trainer"]


# ---- what is said when it does not fit

RECIPES = (
    "available: bert_mlm, distill_digits, gan_digits, mesh_gpt, pipe_gpt, "
    "quickstart, vision_digits, zero2_gpt, zero3_t5"
)


@pytest.mark.parametrize(
    ("override", "dotted", "hint"),
    [
        ("trainer.mirco_batch=4", "trainer.mirco_batch", 'did you mean "micro_batch"?'),
        ("trainr.micro_batch=4", "trainr", 'did you mean "trainer"?'),
        ("output.zzz=4", "output.zzz", "available: dir"),
        ("max_steps=4", "max_steps", "it belongs under trainer"),
        ("lr=4", "lr", "it belongs under optimizer.params"),
        ("optimizer.lr=4", "optimizer.lr", "it belongs under optimizer.params"),
        ("optimizer.name=Adam", "optimizer.name", 'did you mean "type"?'),
        ("model.widht=4", "model.widht", 'did you mean "width"? (to add model.widht: +model.widht=...)'),
        ("model.inner.widht=4", "model.inner.widht", "to add it: +model.inner.widht=..."),
        ("data.train.tokenizer=4", "data.train.tokenizer", "to add it: +data.train.tokenizer=..."),
        ("trainer.max_steps.x=4", "trainer.max_steps.x", ""),
        ("callbacks.mine._target_=a.b", "callbacks.mine._target_", "to add it: +callbacks.mine._target_=..."),
        ("optimizer.parms.lr=1", "optimizer.parms.lr", 'did you mean "optimizer.params.lr"?'),
    ],
)
def test_an_unknown_override_is_named_with_what_was_meant(override: str, dotted: str, hint: str) -> None:
    error = refuse(DocumentError, ["+recipe=quickstart", override])
    assert isinstance(error, DocumentError)
    (found,) = error.problems
    assert (found.dotted, found.hint, found.source) == (dotted, hint, "command line")


def test_all_overrides_of_unknown_keys_are_reported_at_once() -> None:
    words = ["trainer.mirco_batch=4", "trainer.max_steps=2", "optimizer.parms.lr=1", "model.widht=4"]
    error = refuse(DocumentError, ["+recipe=quickstart", *words])
    assert isinstance(error, DocumentError)
    assert [found.dotted for found in error.problems] == ["model.widht", "optimizer.parms.lr", "trainer.mirco_batch"]


def test_overrides_of_unknown_keys_are_left_out_for_a_check() -> None:
    composed = compose_known(["+recipe=quickstart", "trainer.mirco_batch=4", "trainer.max_steps=2"])
    assert [found.dotted for found in composed.unknown] == ["trainer.mirco_batch"]
    assert composed.document["trainer"]["max_steps"] == 2


def test_very_many_overrides_of_unknown_keys_end_with_the_first_twenty() -> None:
    error = refuse(DocumentError, [f"trainer.zzz{n}=1" for n in range(30)])
    assert isinstance(error, DocumentError)
    assert len(error.problems) == 20


def test_an_unknown_key_of_the_file_is_left_for_the_check(tmp_path: Path) -> None:
    job = write_json(tmp_path / "job.json", make_job(optimzer={"type": "Adam"}))
    with pytest.raises(DocumentError) as caught:
        resolve_composed(compose_file(job, ["trainer.seed=1"]))
    (found,) = caught.value.problems
    assert found.dotted == "optimzer"
    assert found.place.startswith(f"{job}:")


def test_an_appended_unknown_key_is_found_by_the_check(job_file: Path) -> None:
    with pytest.raises(DocumentError) as caught:
        resolve_composed(compose_file(job_file, ["+trainer.zzz=4"]))
    assert str(caught.value).startswith("command line: +trainer.zzz=4: error[unknown-key]: trainer.zzz: unknown key")


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (["+recipe=quickstrat"], "unknown recipe 'quickstrat'", f'did you mean "quickstart"? ({RECIPES})'),
        (["+recipe=zzzz"], "unknown recipe 'zzzz'", RECIPES),
        (
            ["optimizer=sdg"],
            "unknown optimizer 'sdg'",
            "available: adam, adamw, adamw_fast, adamw_gpt, onebit_adam, sgd)",
        ),
        (["hydra/launcher=nope"], "unknown hydra/launcher 'nope'", None),
        (["trainer.max_steps"], "cannot read the override 'trainer.max_steps': there is no = in it", None),
        (["trainer.max_steps=[1,"], "cannot read the override 'trainer.max_steps=[1,': the bracket [ at", None),
        (["trainer..x=3"], "cannot read the override 'trainer..x=3': a part of the key is empty", None),
        (["=3"], "cannot read the override '=3': it names no key", None),
        (
            ["+trainer.max_steps=3", "+recipe=quickstart"],
            "+trainer.max_steps=3 adds a key, but trainer.max_steps is already set",
            "leave out the +: trainer.max_steps=3",
        ),
        (
            ["~model.nope"],
            "~model.nope removes a key, but the document does not set model.nope",
            "leave out this override",
        ),
        (["~seed"], "~seed removes a key, but the document does not set seed", "it belongs under trainer"),
        (["~model.nope=1"], "~model.nope=1 removes a key, but the document", "leave out this override"),
        (
            ["+recipe=quickstart", "~trainer.max_steps=9"],
            "~trainer.max_steps=9 removes trainer.max_steps only if it has this value",
            "in any case: ~trainer.max_steps",
        ),
        (["trainer.max_steps=1,2"], "several values are given by 'trainer.max_steps=1,2'", None),
        (["trainer=[1]"], "trainer is a section with keys of its own, and cannot be a list", "trainer.KEY=..."),
        (["+recipe=quickstart", "+optimizer=sgd"], "optimizer is chosen twice", "without a +: optimizer=NAME"),
        (["zero=9"], "zero takes the name of a config, not 9", "to set a value: zero_optimization.stage=..."),
        (["scheduler=null"], "scheduler takes the name of a config, not null", "to remove it: ~scheduler"),
        (["hydra.job.nope=1"], "Could not override 'hydra.job.nope'", None),
    ],
)
def test_what_hydra_refuses_is_a_usage_error(overrides: list[str], message: str, hint: str | None) -> None:
    error = refuse(UsageError, overrides)
    assert error.message.startswith(message)
    assert "\n" not in error.message
    assert hint is None or hint in error.hint


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.seed=${trainer.nope}", "${trainer.nope} names a key that the document does not set"),
        ("trainer.seed=${trainer.seed}", "the interpolation refers to itself"),
        ("trainer.seed=${oc.env:SGE_TASK_ID}", "Environment variable 'SGE_TASK_ID' not found"),
        ("trainer.seed=${oc.env:DSJOB_NO_SUCH_VARIABLE}", "environment variable DSJOB_NO_SUCH_VARIABLE"),
        ("trainer.seed=${no_resolver:1}", "Unsupported interpolation type no_resolver"),
    ],
)
def test_an_interpolation_that_leads_nowhere_is_placed_on_the_command_line(override: str, said: str) -> None:
    error = refuse(DocumentError, ["+recipe=quickstart", override])
    assert isinstance(error, DocumentError)
    (found,) = error.problems
    assert said in found.message
    assert (found.dotted, found.source) == ("trainer.seed", f"command line: {override}")


def test_an_interpolation_that_leads_nowhere_is_placed_in_the_file(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("trainer:\n  max_steps: 1\nmodel:\n  _target_: a.b\n  sizes:\n    - 1\n    - ${nope.x}\n")
    with pytest.raises(DocumentError) as caught:
        compose_file(job)
    (found,) = caught.value.problems
    told = "${nope.x} names a key that the document does not set"
    assert str(found) == f"{job}:7:7: error[interpolation]: model.sizes[1]: {told}"


def test_a_folder_of_configs_that_is_missing_is_named(tmp_path: Path) -> None:
    error = refuse(UsageError, [], config_dir=f"{tmp_path}/nope")
    assert error.message == f"--config-dir: no such folder: {tmp_path}/nope"


def test_a_config_of_the_users_own_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\ntrainer: {max_steps: [\n")
    error = refuse(DocumentError, ["+recipe=mine"], config_dir=str(tmp_path))
    assert str(error).startswith(f"{tmp_path}/recipe/mine.yaml:3:1: ")


@pytest.mark.parametrize("arguments", [["--nope"], ["--cfg", "nope"], ["--config-dir"]])
def test_unknown_flags_are_a_usage_error_and_do_not_exit(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match="argument") as caught:
        parse_arguments(arguments, add_arguments)
    assert "--help" in caught.value.hint


def test_flags_and_overrides_may_come_in_any_order() -> None:
    given = ["job.json", "--cfg", "job", "a=1", "-cd", "mine", "b=2", "--trust", "a", "--unpinned", "--trust=b.c"]
    args = parse_arguments(given, add_arguments)
    assert args.overrides == ["job.json", "a=1", "b=2"]
    assert (args.cfg, args.config_dir) == ("job", "mine")
    assert (args.trust, args.trust_remote_code, args.unpinned) == (["a", "b.c"], False, True)


def test_the_job_file_comes_in_as_the_last_group(job_file: Path) -> None:
    file = read_document(str(job_file))
    assert list_overrides(["+recipe=a", "x=1"], file) == ["+recipe=a", "x=1", "+job_file=given"]
    assert list_overrides(["x=1"], None) == ["x=1"]
