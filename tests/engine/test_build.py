"""`dsjob.initialize` as programs for DeepSpeed call it."""

import argparse
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import ADAMW, build_net, make_engine, make_tokens, train_engine
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import dsjob
from dsjob.config import BF16Config, TrainingConfig
from dsjob.errors import ConfigError, ConfigWarning, TargetError, UsageError

CONFIG: dict[str, Any] = {"train_batch_size": 4, "optimizer": ADAMW}


def test_the_four_results_are_those_of_deepspeed() -> None:
    data = [(torch.zeros(3, dtype=torch.long), torch.zeros(3, dtype=torch.long))] * 8
    engine, optimizer, loader, scheduler = dsjob.initialize(
        model=build_net(), training_data=data, config={**CONFIG, "scheduler": {"type": "WarmupLR", "params": {}}}
    )
    assert isinstance(optimizer, torch.optim.AdamW)
    assert engine.optimizer is optimizer
    assert engine.lr_scheduler is scheduler is not None
    assert loader is not None
    assert next(iter(loader))[0].shape == (4, 3)
    assert (engine.rhythm.train_batch, engine.rhythm.micro_batch) == (4, 4)


@pytest.mark.parametrize("as_object", [True, False], ids=["objects", "callables"])
def test_optimizer_and_schedule_may_be_the_users(as_object: bool) -> None:
    net = build_net()
    make = lambda parameters: torch.optim.SGD(parameters, lr=0.5)  # noqa: E731
    schedule = lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1))  # noqa: E731
    given: Any = make(net.parameters()) if as_object else make
    engine = dsjob.initialize(
        model=net,
        optimizer=given,
        lr_scheduler=schedule(given) if as_object else schedule,
        config={"train_batch_size": 4},
    )[0]
    assert isinstance(engine.optimizer, torch.optim.SGD)
    train_engine(engine, 0, 2)
    assert engine.get_lr() == pytest.approx([0.5 / 3])


def test_parameter_groups_keep_their_settings_and_leave_out_what_is_frozen() -> None:
    net = build_net()
    net.emb.weight.requires_grad_(False)
    groups = [
        {"params": [net.emb.weight, net.head.weight], "lr": 0.5, "weight_decay": 0.0},
        {"params": list(net.blocks.parameters())},
    ]
    engine = dsjob.initialize(model=net, model_parameters=groups, config=CONFIG)[0]
    assert engine.optimizer is not None
    first, second = engine.optimizer.param_groups
    assert (first["lr"], first["weight_decay"], len(first["params"])) == (0.5, 0.0, 1)
    assert (second["lr"], second["weight_decay"]) == (0.01, 0.1)
    before = net.ln_f.weight.clone()
    train_engine(engine, 0, 1)
    assert torch.equal(before, net.ln_f.weight)


def test_accumulation_steps_at_the_boundary_alone() -> None:
    engine = make_engine(0, accumulation=3)
    x, y = make_tokens(0, 2)
    seen = []
    for _ in range(6):
        seen.append((engine.is_gradient_accumulation_boundary(), engine.global_steps, engine.rhythm.micro_steps))
        loss = engine(x, y)
        assert engine.backward(loss).item() == pytest.approx(loss.item() / 3)
        engine.step()
    assert seen == [(False, 0, 0), (False, 0, 1), (True, 0, 2), (False, 1, 3), (False, 1, 4), (True, 1, 5)]
    assert engine.counters() == {"global_steps": 2, "global_samples": 12, "micro_steps": 6, "skipped_steps": 0}


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_the_norm_is_that_before_clipping(clip: float) -> None:
    net = build_net()
    x, y = make_tokens(0, 12)
    net(x, y).backward()
    expected = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).norm().item()
    engine = make_engine(0, gradient_clipping=clip)
    assert engine.get_global_grad_norm() == 0.0
    train_engine(engine, 0, 1)
    assert engine.get_global_grad_norm() == pytest.approx(expected, rel=1e-5)


def test_bf16_computes_low_and_keeps_masters_in_fp32() -> None:
    engine = make_engine(0, bf16=True)
    assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}
    assert {m.dtype for m in engine.strategy.masters.values()} == {torch.float32}
    assert engine.module.blocks[0].scale.dtype == torch.float32  # type: ignore[index,union-attr]
    train_engine(engine, 0, 1)
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(parameter, engine.strategy.masters[name].bfloat16())


@pytest.mark.parametrize(("name", "read"), [("w.safetensors", load_file), ("w.bin", torch.load)])
def test_a_16_bit_model_is_the_whole_model_in_the_compute_dtype(tmp_path: Path, name: str, read: Any) -> None:
    engine = make_engine(3, bf16=True)
    assert engine.save_16bit_model(str(tmp_path), name) is True
    saved = read(tmp_path / name)
    assert set(saved) == set(build_net().state_dict())
    assert saved["emb.weight"].dtype == torch.bfloat16
    build_net().load_state_dict(saved)


def test_torch_func_differentiates_the_model_as_it_is() -> None:
    config = {"train_batch_size": 8, "gradient_accumulation_steps": 4, "optimizer": ADAMW}
    engine = dsjob.initialize(model=nn.Linear(4, 1), config=config)[0]
    found, expected = (torch.func.grad(lambda x, m=m: m(x).sum())(torch.ones(4)) for m in (engine, engine.module))
    torch.testing.assert_close(found, expected)


def test_a_missing_checkpoint_is_none_none(tmp_path: Path) -> None:
    assert make_engine(0).load_checkpoint(str(tmp_path)) == (None, None)


def test_configs_come_from_files_dicts_and_arguments(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    parser = dsjob.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    for given in ({"config": str(path)}, {"config": CONFIG}, {"config_params": CONFIG}, {"args": args}):
        assert dsjob.initialize(model=build_net(), **given)[0].rhythm.train_batch == 4  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="given twice"):
        dsjob.initialize(args=args, model=build_net(), config=CONFIG)


def test_tuples_are_lists() -> None:
    params = {"lr": 1e-3, "betas": (0.8, 0.9)}
    config = {**CONFIG, "optimizer": {"type": "AdamW", "params": params}}
    optimizer: Any = dsjob.initialize(model=build_net(), config=config)[1]
    assert tuple(optimizer.param_groups[0]["betas"]) == params["betas"] == (0.8, 0.9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"config": {**CONFIG, "train_batch_siez": 4}}, 'train_batch_siez: unknown key.*"train_batch_size"'),
        ({"config": {"optimizer": ADAMW}}, "set train_batch_size or train_micro_batch_size_per_gpu"),
        ({"config": None}, "needs a config"),
        ({"config": CONFIG, "model": None}, "needs a model"),
        ({"config": CONFIG, "model": nn.Linear}, "a torch.nn.Module, not the class Linear"),
        ({"config": CONFIG, "model": len}, "a torch.nn.Module, not of type builtin_function"),
        ({"config": [CONFIG]}, "the config is of type list"),
        ({"config": "no.json"}, "cannot read no.json: no such file or folder\n.*relative path starts at "),
        ({"config": CONFIG, "optimizer": "sgd"}, "optimizer must be a torch.optim.Optimizer or a function, not "),
        ({"config": {"model": {"_target_": "x.Y"}, "trainer": {}}}, "job document \\(it has model, trainer"),
        ({"config": {"train_batch_size": 4, "fp16": True}}, "fp16: must be an object"),
        ({"config": CONFIG, "model_parameters": [nn.Parameter(torch.zeros(1))]}, "not a parameter of the model"),
    ],
)
def test_mistakes_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, UsageError), match=message):
        dsjob.initialize(**{"model": build_net(), **given})


def test_a_program_without_a_launcher_gets_a_group_of_one() -> None:
    dsjob.init_distributed()
    assert torch.distributed.get_world_size() == 1
    dsjob.init_distributed()


def test_a_failed_call_leaves_no_group_of_its_own() -> None:
    if torch.distributed.is_initialized():  # that of an earlier test
        torch.distributed.destroy_process_group()
    with pytest.raises(ConfigError, match="optimizr"):
        dsjob.initialize(model=build_net(), config={"train_batch_size": 4, "optimizr": {}})
    assert not torch.distributed.is_initialized()
    dsjob.init_distributed()
    with pytest.raises(ConfigError, match="optimizr"):
        dsjob.initialize(model=build_net(), config={"train_batch_size": 4, "optimizr": {}})
    assert torch.distributed.is_initialized()  # the program's own


def test_what_a_config_does_not_get_is_told() -> None:
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": "auto"},
    }
    with pytest.warns(ConfigWarning) as caught:
        engine = dsjob.initialize(model=build_net(), config=config)[0]
    told = [str(warning.message) for warning in caught]
    assert engine.get_lr() == [5e-5]
    idle, auto = told
    assert idle.splitlines()[1:] == [
        "  zero_optimization.overlap_comm: FSDP2 and DDP always overlap",
        "  zero_optimization.reduce_bucket_size: FSDP2 chooses its buffer sizes itself",
    ]
    assert auto.splitlines()[1:] == [
        '  optimizer.params.lr: "auto" means 5e-05 (the default learning_rate of TrainingArguments)'
    ]
    assert caught[0].filename == __file__


def test_a_target_that_is_not_trusted_is_granted_by_an_argument() -> None:
    config = {"train_batch_size": 4, "optimizer": {"_target_": "torch.compile"}}
    with pytest.raises(TargetError, match=re.escape('call initialize with trust=["torch.compile"]')):
        dsjob.initialize(model=build_net(), config=config)


def test_prefixes_that_are_none_are_told_in_the_words_of_the_call() -> None:
    config = {"train_batch_size": 4}
    with pytest.raises(UsageError, match=re.escape("trust=my-package: not a dotted name")) as caught:
        dsjob.initialize(model=build_net(), config=config, trust=["my-package"])
    assert caught.value.hint == 'trust=["my_package.models"], for example'
    with pytest.raises(UsageError, match="a list of prefixes"):
        dsjob.initialize(model=build_net(), config=config, trust="torch")


def test_a_training_config_is_a_config() -> None:
    given = TrainingConfig.from_dict({"train_batch_size": 4, "optimizer": ADAMW, "zero_optimization": {"stage": 1}})
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConfigWarning)  # of no key that nobody has given
        engine = dsjob.initialize(model=build_net(), config=given)[0]
    assert (engine.rhythm.train_batch, engine.zero_stage) == (4, 1)
    parts = {"train_batch_size": 4, "optimizer": ADAMW, "bf16": BF16Config(enabled=True)}
    assert dsjob.initialize(model=build_net(), config=parts)[0].spec.bf16.enabled
    mixed = TrainingConfig(batch={"train_batch_size": 4}, fp16={"enabled": True}, bf16={"enabled": True})
    with pytest.raises(ConfigError, match=r"fp16"):
        dsjob.initialize(model=build_net(), config=mixed)


def test_never_printing_may_be_an_infinite_number_of_steps() -> None:
    """accelerate writes that into every config."""
    engine = dsjob.initialize(model=build_net(), config={**CONFIG, "steps_per_print": float("inf")})[0]
    assert engine.config.get("steps_per_print") is None
