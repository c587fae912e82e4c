"""`deepspeed.initialize` beside `dsjob.initialize`: the same arguments, an engine with more names."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from engines import make_config
from torch import nn

import dsjob
import dsjob.deepspeed as deepspeed
from dsjob.engine.engine import Engine
from dsjob.errors import ConfigError, ConfigWarning, UsageError


def test_both_take_the_same_arguments() -> None:
    ours, theirs = (inspect.signature(call).parameters for call in (dsjob.initialize, deepspeed.initialize))
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


def test_the_engine_has_deepspeeds_names_and_knows_what_the_program_gave() -> None:
    make = lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer)  # noqa: E731
    engine, optimizer, loader, schedule = deepspeed.initialize(
        model=nn.Linear(2, 1), training_data=[torch.ones(2)] * 4, lr_scheduler=make, config=make_config(0)
    )
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert isinstance(engine, Engine)
    assert (engine.optimizer, engine.training_dataloader, engine.lr_scheduler) == (optimizer, loader, schedule)
    assert (engine.client_lr_scheduler, engine.mpu) == (make, None)
    assert [len(batch) for batch in engine.training_dataloader or ()] == [2, 2]
    plain = dsjob.initialize(model=nn.Linear(2, 1), config=make_config(0))[0]
    assert type(plain) is Engine


@pytest.mark.parametrize("initialize", [dsjob.initialize, deepspeed.initialize])
def test_warnings_name_the_line_of_the_program(initialize: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        initialize(model=nn.Linear(2, 1), config=make_config(0, gradient_clipping="auto"))
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("initialize", [dsjob.initialize, deepspeed.initialize])
def test_a_model_is_needed(initialize: Any) -> None:
    with pytest.raises(UsageError, match="initialize needs a model"):
        initialize(config=make_config(0))


def test_keys_that_join_section_and_key_by_a_dot_have_no_effect() -> None:
    known, unknown = {"zero_optimization.reduce_bucket_size": 1024}, {"zero_optimization.bucket": 1024}
    with pytest.warns(ConfigWarning, match="no effect, as in DeepSpeed.*: zero_optimization.reduce_bucket_size"):
        deepspeed.initialize(model=nn.Linear(2, 1), config={**make_config(0), **known})
    with pytest.raises(ConfigError, match=r"zero_optimization\.bucket: unknown key"):
        deepspeed.initialize(model=nn.Linear(2, 1), config={**make_config(0), **unknown})
