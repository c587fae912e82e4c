"""What an engine says of its config, and of what it has counted."""

from __future__ import annotations

import pytest
import torch
from engines import ADAMW, build_net, make_engine, make_tokens

import dsjob
from dsjob.engine.rhythm import Rhythm
from dsjob.engine.settings import Settings
from dsjob.errors import UsageError


def test_getters_give_values_and_defaults_of_the_config() -> None:
    engine = make_engine(2, accumulation=3, gradient_clipping=0.5, steps_per_print=7, fp16={"enabled": False})
    assert engine.gradient_clipping() == 0.5
    assert engine.steps_per_print() == 7
    assert engine.fp16_enabled() is engine.bfloat16_enabled() is engine.amp_enabled() is False
    assert engine.zero_optimization() is engine.zero_optimization_partition_gradients() is True
    assert engine.zero_optimization_partition_weights() is False
    assert engine.zero_reduce_bucket_size() == 500_000_000
    assert engine.zero_allgather_partitions() is True
    assert engine.zero_cpu_offload() is False
    assert engine.checkpoint_tag_validation() == "Warn"
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("adamw", None)
    assert engine.optimizer_params()["lr"] == 0.01
    assert engine.postscale_gradients() is True
    assert engine.get_data_types() == (torch.float32, torch.float32)
    assert (engine.world_size, engine.dp_world_size, engine.mp_world_size, engine.global_rank) == (1, 1, 1, 0)
    assert engine.get_batch_info() == (6, 2, 3)
    assert engine.dynamic_loss_scale_args()["init_scale"] == engine.initial_dynamic_scale() == 2**16


def test_every_getter_can_be_called() -> None:
    engine = make_engine(0)
    names = [name for name in vars(Settings) if not name.startswith("_") and callable(getattr(engine, name, None))]
    assert len(names) > 60
    for name in names:
        getattr(engine, name)()


def test_old_spellings_and_auto_are_seen_resolved() -> None:
    config = {"train_batch_size": 4, "optimizer": ADAMW, "bfloat16": {"enabled": True}, "gradient_clipping": "auto"}
    engine = dsjob.initialize(model=build_net(), config=config)[0]
    assert engine.bfloat16_enabled() is True
    assert engine.gradient_clipping() == 1.0


def test_what_an_engine_lacks_is_looked_up_in_the_model() -> None:
    engine = make_engine(0)
    assert engine.head is engine.module.head
    assert len(list(engine.parameters())) == len(list(engine.module.parameters()))
    with pytest.raises(AttributeError, match="neither the engine nor its model has an attribute 'nothing'"):
        _ = engine.nothing


def test_batch_sizes_can_be_changed_while_training() -> None:
    engine = make_engine(0, accumulation=3)
    x, y = make_tokens(0, 2)

    def step() -> int:
        count = 0
        while True:
            engine.backward(engine(x, y))
            engine.step()
            count += 1
            if engine.was_step_applied():
                return count

    assert step() == 3
    engine.set_train_batch_size(4)
    assert (step(), engine.gradient_accumulation_steps(), engine.global_samples) == (2, 2, 10)
    engine.set_train_micro_batch_size(5)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (10, 5)
    with pytest.raises(UsageError, match="a train batch of 7 is no multiple of micro batch 5 x 1 ranks"):
        engine.set_train_batch_size(7)


def test_the_boundary_is_counted_unless_the_program_says_it() -> None:
    rhythm = Rhythm(micro_batch=2, accumulation=2, world_size=3)
    seen = []
    for forced in (None, None, False, False, True, None, None):
        rhythm.forced = forced
        seen.append(rhythm.boundary)
        rhythm.end_micro_step(stepped=rhythm.boundary)
    assert seen == [False, True, False, False, True, False, True]
    assert rhythm.counts() == {"global_steps": 3, "global_samples": 36, "micro_steps": 7, "skipped_steps": 0}


def test_rates_and_momenta_are_read_and_set() -> None:
    engine = make_engine(0)
    engine.set_lr(0.5)
    assert engine.get_lr() == [0.5]
    assert engine.get_mom() == [(0.9, 0.95)]
    assert engine.get_type() == [0.0]
    sgd = make_engine(0, optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.8}})
    assert sgd.get_mom() == [0.8]


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


def test_what_programs_ask_of_an_engine_besides() -> None:
    make = lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer)  # noqa: E731
    config = {"train_batch_size": 2, "optimizer": ADAMW}
    engine = dsjob.initialize(model=build_net(), config=config, lr_scheduler=make)[0]
    assert engine.client_lr_scheduler is make
    assert isinstance(engine.lr_scheduler, torch.optim.lr_scheduler.ConstantLR)
    assert make_engine(0).client_lr_scheduler is None
    assert engine.monitor.enabled is False
    assert engine.get_wall_clock_timers() == {}
    engine.monitor.write_events([("Train/loss", 1.0, 0)])
    assert engine.is_compiled is False
    assert make_engine(0, compile={"enabled": True, "backend": "eager"}).is_compiled is True
    engine.compile(backend="eager")
    assert engine.is_compiled is True


def test_a_mesh_of_ranks_is_one_of_data_parallel_ranks() -> None:
    config = {"train_batch_size": 2, "optimizer": ADAMW}
    assert dsjob.initialize(model=build_net(), config=config, mesh_param=(1, 1))[0].world_size == 1
    with pytest.raises(UsageError, match=r"mesh_param=\(1, 2\)"):
        dsjob.initialize(model=build_net(), config=config, mesh_param=(1, 2))
