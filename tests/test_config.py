"""DeepSpeed configs as Python objects."""

import re
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

import dsjob
from dsjob.config import BatchConfig, BF16Config, Config, FP16Config, TorchAutocastConfig, TrainingConfig
from dsjob.errors import ConfigError, DocumentError


def test_a_config_is_a_struct() -> None:
    config = Config(verbose=True)
    assert config.verbose is True
    assert config["verbose"] is True
    assert Config.from_dict({"verbose": True}) == config == {"verbose": True}
    config.verbose = False
    config["level"] = 3
    assert config.to_dict() == {"verbose": False, "level": 3}
    assert config.is_valid()
    with pytest.raises(AttributeError, match="Config has no key 'quiet'"):
        _ = config.quiet


def test_a_section_knows_its_keys_and_defaults() -> None:
    config = FP16Config(enabled=True)
    assert (config.enabled, config.loss_scale, config.initial_scale_power, config.loss_scale_window) == (
        True,
        0,
        16,
        1000,
    )
    assert BF16Config().enabled is False
    assert TorchAutocastConfig().dtype is None
    with pytest.raises(ConfigError, match='FP16Config has no key enabeld; did you mean "enabled"'):
        FP16Config(enabeld=True)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (FP16Config, {"loss_scale": -1}),
        (FP16Config, {"loss_scale_window": "1000"}),
        (BF16Config, {"enabled": "yes"}),
        (TorchAutocastConfig, {"enabled": False, "dtype": "int8"}),
    ],
)
def test_values_are_judged_by_the_schemas(kind: type[Config], values: dict[str, Any]) -> None:
    assert kind().is_valid()
    assert not kind(**values).is_valid()


def test_batch_sizes_are_completed() -> None:
    batch = BatchConfig(train_batch_size=32, train_micro_batch_size_per_gpu=4)
    batch.resolve(world_size=4)
    assert batch.gradient_accumulation_steps == 2
    assert batch.is_valid(world_size=4)
    assert not batch.is_valid(world_size=3)
    assert not BatchConfig().is_valid()
    with pytest.raises(DocumentError, match="train_batch 33 is not micro_batch 17"):
        BatchConfig(train_batch_size=33, train_micro_batch_size_per_gpu=17, gradient_accumulation_steps=2).resolve(2)


def test_a_training_config_is_made_by_parts_or_from_deepspeeds() -> None:
    by_parts = TrainingConfig(batch={"train_batch_size": 8}, fp16={"enabled": False})
    as_deepspeed = TrainingConfig.from_dict(
        {"train_batch_size": 8, "fp16": {"enabled": False}, "zero_optimization": {"stage": 2}}
    )
    assert by_parts == as_deepspeed
    assert by_parts.is_valid(world_size=2)
    assert by_parts.batch.train_micro_batch_size_per_gpu == 4
    both = TrainingConfig(batch={"train_batch_size": 8}, fp16={"enabled": True}, bf16={"enabled": True})
    assert not both.is_valid()
    with pytest.raises(ConfigError, match="did you mean"):
        TrainingConfig.from_dict({"train_batch_size": 8, "fp61": {}})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FP16Config.from_dict([1]), "FP16Config: must be an object, but is [1]"),
        (lambda: FP16Config.from_dict({1: 2}), "FP16Config: keys must be strings, but one is 1"),
        (lambda: BatchConfig("32"), "BatchConfig takes keyword arguments only, not '32'"),
        (lambda: BatchConfig(train_batch_size="32").resolve(), "must be an integer, but is '32'"),
        (lambda: TrainingConfig(fp16=True), 'fp16: must be an object, but is True; write {"enabled": true}'),
        (lambda: TrainingConfig.from_dict({"bfloat16": True}), "bfloat16: must be an object, but is True"),
        (lambda: TrainingConfig.from_dict({"batch": 3, "train_batch_size": 3}), "batch: must be an object, but is 3"),
        (lambda: TrainingConfig.from_dict({"train_batch_siez": 3}), 'did you mean "train_batch_size"?'),
        (lambda: BatchConfig.from_dict({"train_batch": 3}), 'did you mean "train_batch_size"?'),
    ],
)
def test_wrong_types_and_keys_are_config_errors_with_advice(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()


def test_the_old_name_of_bf16_is_read() -> None:
    config = TrainingConfig.from_dict({"train_batch_size": 8, "bfloat16": {"enabled": True}})
    assert config.bf16.enabled is True


def test_a_subclass_declares_keys_and_resolves_as_the_manual_has_it() -> None:
    class Sizes(Config):
        x = None
        y = 3
        names: ClassVar[list[str]] = []

        def resolve(self) -> None:  # type: ignore[override]
            self.x = self.x or 2 * self.y

    class More(Sizes):
        z = "last"

    sizes = More(y=4, other=True)
    assert (sizes.x, sizes["y"], sizes.z, sizes.other, More.y) == (None, 4, "last", True, 3)
    assert sizes.is_valid()
    assert (sizes.x, sizes.to_dict()) == (8, {"x": 8, "y": 4, "z": "last", "names": [], "other": True})
    sizes.names.append("one")
    assert (More().names, More.from_dict({"x": 1}).x) == ([], 1)
    outer = Config(inner=Sizes())
    outer.resolve()
    assert outer.inner.x == 6
    with pytest.raises(AttributeError):
        _ = Sizes().absent


def test_the_package_offers_the_one_class_of_batch_sizes() -> None:
    assert dsjob.BatchConfig is BatchConfig
    with pytest.raises(ConfigError, match='BatchConfig has no key train_batch; did you mean "train_batch_size"'):
        dsjob.BatchConfig(train_batch=32)
