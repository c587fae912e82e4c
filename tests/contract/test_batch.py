"""The batch triad, as DeepSpeed derives it, and that what its messages advise holds."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dsjob.contract.batch import BatchSizes
from dsjob.errors import ConfigError, DocumentError, Problem

Triad = tuple[int | None, int | None, int | None]


def refuse(config: BatchSizes, world_size: int) -> Problem:
    with pytest.raises(DocumentError) as caught:
        config.resolve(world_size)
    (only,) = caught.value.problems
    return only


@pytest.mark.parametrize("world_size", [1, 2, 8])
@pytest.mark.parametrize(
    ("train", "micro", "accum"),
    [(1, 1, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 0, 0), (0, 1, 0)],
)
@pytest.mark.parametrize(("per_rank", "passes"), [(4, 1), (3, 5)])
def test_what_is_not_given_is_derived(
    train: int, micro: int, accum: int, per_rank: int, passes: int, world_size: int
) -> None:
    passes = passes if accum or (train and micro) else 1  # which nothing else tells
    full = BatchSizes(per_rank * passes * world_size, per_rank, passes)
    given_part = BatchSizes(
        full.train_batch if train else None, full.micro_batch if micro else None, full.grad_accum if accum else None
    )
    assert given_part.resolve(world_size) == full


@pytest.mark.parametrize("world_size", [1, 2, 8])
@pytest.mark.parametrize("given_part", [BatchSizes(), BatchSizes(grad_accum=4)])
def test_accumulation_alone_tells_nothing(given_part: BatchSizes, world_size: int) -> None:
    found = refuse(given_part, world_size)
    assert found.message == "the batch size is missing"
    assert "trainer.micro_batch=8" in found.hint


# From DeepSpeed's tests/unit/runtime/test_ds_config_dict.py, TestBatchConfig
@pytest.mark.parametrize(
    ("train", "micro", "accum", "is_valid"),
    [(32, 16, 1, True), (32, 8, 2, True), (33, 17, 2, False), (32, 18, 1, False)],
)
def test_deepspeeds_own_cases_on_two_ranks(train: int, micro: int, accum: int, is_valid: bool) -> None:
    full = BatchSizes(train, micro, accum)
    assert full.is_valid(2) == is_valid
    if is_valid:
        assert full.resolve(2) == full
        assert replace(full, grad_accum=None).resolve(2) == full
        assert replace(full, micro_batch=None).resolve(2) == full
        assert replace(full, train_batch=None).resolve(2) == full
    else:
        product = f"micro_batch {micro} x grad_accum {accum} x world size 2"
        assert refuse(full, 2).message == f"train_batch {train} is not {product}"


@pytest.mark.parametrize(
    ("triad", "world_size", "message", "hint"),
    [
        (
            (33, 16, None),
            2,
            "train_batch 33 is not micro_batch 16 x grad_accum 1 (derived) x world size 2",
            "use trainer.train_batch=32",
        ),
        (
            (32, 8, 2),
            1,
            "train_batch 32 is not micro_batch 8 x grad_accum 2 x world size 1",
            "use launch.nproc=2 (world size 2), or trainer.grad_accum=4, or trainer.train_batch=16",
        ),
        (
            (10, None, None),
            4,
            "train_batch 10 does not divide evenly among 4 data-parallel ranks",
            "use launch.nproc=5 (world size 5), or trainer.train_batch=8",
        ),
        (
            (2, None, None),
            4,
            "train_batch 2 is smaller than the number of data-parallel ranks, 4",
            "use launch.nproc=2 (world size 2), or trainer.train_batch=4",
        ),
    ],
)
def test_a_mismatch_names_the_numbers_and_what_would_do(triad: Triad, world_size: int, message: str, hint: str) -> None:
    found = refuse(BatchSizes(*triad), world_size)
    assert (found.message, found.hint) == (message, hint)
    assert (found.path, found.rule) == (("trainer",), "batch")


sizes = st.one_of(st.none(), st.integers(1, 12), st.integers(1, 4096))


@given(triad=st.tuples(sizes, sizes, sizes), world_size=st.integers(1, 64))
def test_every_remedy_holds(triad: Triad, world_size: int) -> None:
    config = BatchSizes(*triad)
    try:
        config.resolve(world_size)
    except DocumentError as error:
        remedies = re.findall(r"(launch\.nproc|trainer\.\w+)=(\d+)", error.problems[0].hint)
    else:
        assume(False)
    assert remedies
    for key, value in remedies:
        section, name = key.split(".")
        changed = config if section == "launch" else replace(config, **{name: int(value)})
        ranks = int(value) if section == "launch" else world_size
        assert changed.resolve(ranks).is_valid(ranks), f"{key}={value}"


@given(triad=st.tuples(sizes, sizes, sizes), world_size=st.integers(1, 64))
def test_what_resolves_multiplies_out_and_keeps_what_was_given(triad: Triad, world_size: int) -> None:
    try:
        full = BatchSizes(*triad).resolve(world_size)
    except DocumentError:
        assume(False)
    train, micro, accum = full.train_batch, full.micro_batch, full.grad_accum
    assert train is not None
    assert micro is not None
    assert accum is not None
    assert train == micro * accum * world_size
    assert min(train, micro, accum) > 0
    assert all(ours in (None, result) for ours, result in zip(triad, (train, micro, accum), strict=True))
    assert full.resolve(world_size) == full


@pytest.mark.parametrize("triad", [(0, 0, 1), (-4, 4, -1), (4, None, -1), (4, 2, None), (None, 2, 1)])
def test_is_valid_wants_three_positive_numbers_that_multiply_out(triad: Triad) -> None:
    assert not BatchSizes(*triad).is_valid(1)


@pytest.mark.parametrize(
    "values",
    [
        {"train_batch": 32, "micro_batch": 8, "grad_accum": 4},
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4},
        {"train_batch": 32.0, "micro_batch": 8, "grad_accum": "auto"},
        {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4},
        {"train_batch": 32, "micro_batch": 8, "grad_accum": None},
    ],
)
def test_from_dict_reads_both_spellings_and_leaves_auto_to_be_derived(values: dict[str, Any]) -> None:
    full = BatchSizes.from_dict(values).resolve(1)
    assert full == BatchSizes(32, 8, 4)
    assert isinstance(full.train_batch, int)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train_batch_siez": 32}, 'train_batch_siez: unknown key; did you mean "train_batch_size"'),
        ({"micro_batch": 8, "seed": 1}, "seed: unknown key; available: train_batch, micro_batch, grad_accum"),
        ({"train_batch": "32"}, "train_batch: must be an integer, but is '32'"),
        ({"train_batch": True}, "must be an integer, but is True"),
        ({"train_batch": 8.5}, "must be an integer, but is 8.5"),
        ([32], "must be a mapping, but are of type list"),
    ],
)
def test_from_dict_refuses_what_it_cannot_read(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        BatchSizes.from_dict(values)


def test_wrong_types_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        BatchSizes("32", micro_batch=[4])  # type: ignore[arg-type]
    assert {problem.dotted for problem in caught.value.problems} == {"train_batch", "micro_batch"}


def test_a_mismatch_says_where_the_numbers_and_the_world_size_come_from() -> None:
    with pytest.raises(DocumentError) as caught:
        BatchSizes(16, 4).resolve(3, name=lambda key: f" (cfg.json: {key})" if key != "grad_accum" else "", ranks="-n")
    (found,) = caught.value.problems
    assert found.message == (
        "train_batch 16 (cfg.json: train_batch) is not micro_batch 4 (cfg.json: micro_batch) x "
        "grad_accum 1 (derived) x world size 3 (-n)"
    )
