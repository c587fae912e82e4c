"""Fixtures that several test modules share, and what is left out unless it is asked for."""

import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

pytest_plugins = ["builders", "s3", "whole_jobs"]


# Set before torch is imported. With two threads in each of two test processes, on two cores, threads wait for one
# another, and small training runs take four times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else inductor starts interpreters


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs, unless tests marked `gpu` are selected: all others expect the CPU, as do the ranks they start."""
    if not selects_gpu(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def selects_gpu(config: pytest.Config) -> bool:
    """Whether `-m` asks for the tests marked `gpu`."""
    expression: str = config.option.markexpr
    return "gpu" in expression and "not gpu" not in expression


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none; leaves out most of long proofs, but for `-m full`.

    With -n, the files with most slow tests come first: a worker that begins a long file last lets the others wait.
    """
    if hasattr(config, "workerinput"):
        slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
        items.sort(key=lambda item: -slow[item.path])
    need_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if need_gpu:
        import torch

        if not torch.cuda.is_available():
            reason = "needs a CUDA device" if selects_gpu(config) else "needs a CUDA device: pytest -m gpu"
            for item in need_gpu:
                item.add_marker(pytest.mark.skip(reason=reason))
    if "full" in config.option.markexpr:
        whole = {
            item.function for item in items if isinstance(item, pytest.Function) and item.get_closest_marker("full")
        }
        for item in items:
            if isinstance(item, pytest.Function) and item.function in whole:  # the cut is a part of the proof
                item.add_marker(pytest.mark.full)
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture(scope="module", autouse=True)
def leave_process_groups() -> Iterator[None]:
    """Ends the process group that an engine of this test process has made: `dsjob.run` expects none."""
    yield
    distributed = sys.modules.get("torch.distributed")  # not imported by tests that do without torch
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
