"""What would make a job fit does; the sweep is the prediction for each layout."""

from __future__ import annotations

from dataclasses import replace

from dsjob.planning.fit import Job, find_remedies, sweep
from dsjob.planning.memory import predict_memory
from dsjob.planning.model import Layout, Model, OptimizerState, Weight

MIB = 1 << 20
MODEL = Model(tuple(Weight((1024, 1024), unit=number) for number in range(9)))  # 36 MiB in fp32
JOB = Job(MODEL, Layout(0, 4, micro_batch=8, grad_accum=2), OptimizerState(2, 4), activations=800 * MIB)


def test_a_change_keeps_the_samples_of_a_step_and_scales_activations() -> None:
    changed = JOB.change(micro_batch=2)
    assert changed.layout.grad_accum == 8
    assert changed.activations == 200 * MIB
    assert JOB.change(world_size=16).layout.grad_accum == 1


def test_a_smaller_micro_batch_is_the_largest_that_fits() -> None:
    limit = JOB.change(micro_batch=2).memory().peak
    assert find_remedies(JOB, limit)[0] == "trainer.micro_batch=2"
    assert find_remedies(JOB, limit - 1)[0] == "trainer.micro_batch=1"


def test_a_higher_stage_and_more_ranks_are_named_where_they_suffice() -> None:
    job = Job(MODEL, JOB.layout, JOB.state)  # nothing but model states
    limit = job.change(stage=3).memory().peak
    assert "zero_optimization.stage=3" in find_remedies(job, limit)
    half = job.change(stage=3, world_size=64).memory().peak
    assert half < limit
    assert any("ranks at zero_optimization.stage=3" in text for text in find_remedies(job, half))
    assert not any(text.startswith("zero_optimization") for text in find_remedies(job, half))


def test_a_pipeline_is_not_told_to_offload_parameters() -> None:
    """The rule pipeline-offload refuses it."""
    told = []
    for stages in (1, 2):
        layout = Layout(3, 1, micro_batch=1, stages=stages)
        job = Job(MODEL, layout, JOB.state, activations=MIB)
        limit = job.change(offload="param").memory().peak
        told.append("zero_optimization.offload_param.device=cpu" in find_remedies(job, limit))
        assert any(row.offload == "param" for row in sweep(job)) == (stages == 1)
    assert told == [True, False]


def test_a_zero_bubble_schedule_is_not_told_to_shard_parameters() -> None:
    """The rule zero-bubble-stage refuses it."""
    job = Job(MODEL, replace(JOB.layout, stages=2, most_stage=2), JOB.state)
    remedies = find_remedies(job, job.change(stage=3).memory().peak)
    assert remedies == ["32 ranks at zero_optimization.stage=2"]
    assert {row.stage for row in sweep(job)} == {0, 1, 2}


def test_checkpointing_is_named_where_it_suffices() -> None:
    assert "activation_checkpointing.mode=full" in find_remedies(JOB, 400 * MIB, checkpointed=100 * MIB)
    assert find_remedies(JOB, MIB, checkpointed=100 * MIB) == []


def test_the_sweep_has_a_row_for_each_stage_and_offload_that_deepspeed_has() -> None:
    rows = sweep(JOB)
    assert [(row.stage, row.offload) for row in rows] == [
        (0, "none"), (1, "none"), (1, "optimizer"), (2, "none"), (2, "optimizer"),
        (3, "none"), (3, "optimizer"), (3, "param"),
    ]  # fmt: skip
    assert list(rows[0].peaks) == [1, 4, 8, 16, 32]
    for row in rows:
        layout = Layout(row.stage, 4, micro_batch=16, grad_accum=1, offload=row.offload)
        assert row.peaks[16] == predict_memory(MODEL, layout, JOB.state, activations=1600 * MIB).peak
        assert (row.host > 0) == (row.offload != "none")
