"""Which GPUs ranks use. The machine is made up: tests run without any."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsjob.contract import schema as contract
from dsjob.contract.spec import Launch, view
from dsjob.errors import UsageError
from dsjob.launch import devices, launcher
from dsjob.launch.devices import choose_gpus, count_visible
from dsjob.programs.launch import choose_ranks


@pytest.mark.parametrize(
    ("include", "exclude", "gpus"),
    [
        ("localhost:2,0", None, [0, 2]),
        ("localhost:1,1", None, [1]),
        ("localhost", None, [0, 1, 2, 3]),
        ([3, 1], None, [1, 3]),
        (None, "localhost:1", [0, 2, 3]),
        (None, [0, 3], [1, 2]),
    ],
)
def test_include_names_gpus_and_exclude_leaves_the_others(include: Any, exclude: Any, gpus: list[int]) -> None:
    assert choose_gpus(include, exclude, 4) == gpus


@pytest.mark.parametrize(
    ("include", "exclude", "count", "message"),
    [
        ("localhost:4", None, 4, "--include names GPU 4, but this machine has GPUs 0 to 3"),
        (None, [1], 1, "--exclude names GPU 1, but this machine has only GPU 0"),
        ("localhost:0", None, 0, "--include names GPUs, but this machine has none"),
        (None, "localhost", 4, "--exclude leaves no GPU of 4"),
        ("worker-1:0", None, 4, "--include worker-1:0 names another machine, worker-1"),
        ("a:0@b:1", None, 4, "names several machines"),
        ("localhost:x", None, 4, "cannot read --include 'localhost:x'"),
        ([0], [1], 4, "--include and --exclude exclude each other"),
    ],
)
def test_gpus_that_cannot_be_used_are_named(include: Any, exclude: Any, count: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_gpus(include, exclude, count, "--{}")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("listed", "count"), [(None, 4), ("", 0), ("-1", 0), ("0,2", 2), ("GPU-1, GPU-2", 2), ("1,-1,2", 1)]
)
def test_visible_gpus_are_counted_as_cuda_does(monkeypatch: pytest.MonkeyPatch, listed: str | None, count: int) -> None:
    monkeypatch.setattr(devices, "count_gpus", lambda: 4)
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    if listed is not None:
        monkeypatch.setenv(devices.VISIBLE, listed)
    assert count_visible() == count


def make_options(**given: Any) -> Launch:
    return view(Launch, contract.fill_defaults(given, contract.job_schema()["properties"]["launch"]))


def test_a_job_shows_its_ranks_the_first_of_the_chosen_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count_gpus", lambda: 4)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    choose = launcher._choose_gpus
    assert choose(make_options(nproc=2)) == {}
    assert choose(make_options(nproc=2, exclude=[0], device="cpu")) == {}
    chosen = {"CUDA_VISIBLE_DEVICES": "1,2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert choose(make_options(nproc=2, exclude=[0])) == chosen
    with pytest.raises(UsageError, match="leaves 3 GPUs for 4 ranks") as caught:
        choose(make_options(nproc=4, exclude=[0]))
    assert caught.value.path == ("launch", "exclude")


def test_a_program_gets_a_rank_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count_gpus", lambda: 4)
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    assert choose_ranks(None, None, None).count == 4
    assert choose_ranks(3, None, None).count == 3
    ranks = choose_ranks(None, None, "localhost:1,2", port=29500)
    assert (ranks.count, ranks.gpus, ranks.address, ranks.port) == (2, (0, 3), "127.0.0.1", 29500)
    with pytest.raises(UsageError, match="--num_gpus 5, but 4 GPUs are visible"):
        choose_ranks(5, None, None)


@pytest.mark.parametrize(
    ("nproc", "variable", "refused"),
    [
        (1, None, True),
        (1, "0", True),
        (1, "1", False),  # the second run of a sweep
        (2, None, False),  # ranks in processes of their own
    ],
)
def test_gpus_are_chosen_for_this_process_only_before_it_uses_one(
    nproc: int, variable: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "count_gpus", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(devices.VISIBLE, variable)
    options = Launch(nproc, "auto", "auto", 60.0, None, 60.0, [1, 2][:nproc], None)
    if refused:
        with pytest.raises(UsageError, match="this process uses a GPU already"):
            launcher._choose_gpus(options)
    else:
        assert launcher._choose_gpus(options)[devices.VISIBLE] == "1,2"[: 2 * nproc - 1]
