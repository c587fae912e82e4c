"""What an engine offers to a Python program, and what it says of itself."""

from __future__ import annotations

from operator import attrgetter

import pytest
from engines import make_deepspeed_engine, make_engine, make_tokens

from dsjob.engine.engine import OWN_WORDS

# Adding a name is a promise to every program: think twice, and keep the list below 49.
PUBLIC = """
backward config count_parameters counters destroy device divide_gradients divides_gradients driver eval forward
get_global_grad_norm get_lr global_rank global_samples global_steps is_gradient_accumulation_boundary last_lr
load_checkpoint load_module_state_dict loss_scale lr_scheduler module module_state_dict no_sync offload_states
optimizer precision reload_states restore_counters rhythm run_step save_16bit_model save_checkpoint scale
set_gradient_accumulation_boundary set_lr skipped_steps spec state step strategy train was_step_applied world
world_size zero_grad zero_stage
"""


def test_the_public_attributes_are_those_that_are_promised() -> None:
    names = PUBLIC.split()
    assert sorted(name for name in dir(make_engine(0)) if not name.startswith("_")) == names
    assert len(names) <= 48


def test_an_engine_says_what_it_is() -> None:
    engine = make_engine(2, bf16=True)
    engine.backward(engine(*make_tokens(0, 2)))
    engine.step()
    size = sum(p.numel() for p in engine.module.parameters())
    assert repr(engine) == f"Engine(Net, {size:,} parameters, ZeRO stage 2, bf16, 1 rank, step 1)"
    assert repr(make_deepspeed_engine(0)).startswith("DeepSpeedEngine(Net, ")


def test_what_an_engine_lacks_is_looked_up_in_the_model() -> None:
    engine = make_engine(0)
    assert engine.head is engine.module.head
    assert len(list(engine.parameters())) == len(list(engine.module.parameters()))
    with pytest.raises(AttributeError, match="neither Engine nor its model Net has an attribute 'nothing'"):
        _ = engine.nothing


@pytest.mark.parametrize("name", OWN_WORDS)
def test_deepspeeds_names_are_on_the_engine_of_its_own_namespace(name: str) -> None:
    engine, deepspeed_engine = make_engine(1, accumulation=3), make_deepspeed_engine(1, accumulation=3)
    with pytest.raises(AttributeError, match=f"use engine.{OWN_WORDS[name]}.*dsjob.deepspeed.initialize"):
        getattr(engine, name)
    ours, theirs = attrgetter(OWN_WORDS[name])(engine), getattr(deepspeed_engine, name)
    if callable(ours):
        ours(12)
        theirs(12)
        assert engine.rhythm.train_batch == deepspeed_engine.train_batch_size() == 12
    else:
        assert ours == (theirs() if callable(theirs) else theirs)


def test_an_engine_that_is_destroyed_has_no_state_left() -> None:
    engine = make_engine(0)
    engine.backward(engine(*make_tokens(0, 2)))
    engine.step()
    assert engine.optimizer is not None
    assert engine.optimizer.state
    engine.backward(engine(*make_tokens(0, 2)))
    engine.destroy()
    assert not engine.optimizer.state
    assert all(parameter.grad is None for parameter in engine.module.parameters())
