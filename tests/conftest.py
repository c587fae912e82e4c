"""Fixtures that several test modules share, and what is left out unless it is asked for."""

import gc
import os
import shutil
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

# Checkpoints are flushed to the disk (fsync), which takes milliseconds each time. Temporary files in memory take none.
if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 8 << 30:
    os.environ.setdefault("TMPDIR", "/dev/shm")

# With -n, these files start first, the longest at the front: a worker that begins one last lets the others wait. Their
# seconds are in `--junit-xml`'s file.
LONGEST = [
    "test_hf_trainer", "test_accelerate_programs", "test_run", "test_smoke", "test_blame", "test_launch", "test_guides",
    "test_transformer_kernels", "test_deepspeed_driven", "test_object_stores", "test_front_run", "test_exec",
    "test_pipelined_jobs", "test_user", "test_packaging", "test_zero", "test_stream", "test_stages", "test_compose",
    "test_views", "test_one_rank", "test_simulated_cuda", "test_store_faults", "test_parity_grid", "test_user_backward",
    "test_import_time", "test_several_models", "test_document", "test_saving_on_ranks", "test_blocks",
    "test_compressing_optimizers", "test_resume_grid", "test_pipelines", "test_several_models_recipes", "test_watchdog",
    "test_cli_plan", "test_convert_hostile", "test_zero_to_fp32", "test_monitors", "test_restarts", "test_front_tasks",
    "test_nvme_parameters", "test_gpu_smoke", "test_ends", "test_rank_groups", "test_malicious",
    "test_convert_adapters", "test_tensor_parallel", "test_deepspeed_resume", "test_pipeline_engine", "test_places",
    "test_front_smoke", "test_trl", "test_hostile_documents", "test_one_batch", "test_convert", "test_fuzz",
    "test_model_parallel_jobs", "test_model_parallel", "test_unshardable", "test_mesh_grid", "test_deepspeed_write",
    "test_interpolation", "test_passed", "test_storage_points", "test_native",
]  # fmt: skip


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

    With -n, the files that take longest come first, and after them those with most slow tests.
    """
    if hasattr(config, "workerinput"):
        slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
        places = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: (places.get(item.path.stem, len(places)), -slow[item.path]))
    need_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if need_gpu:
        import torch

        if not torch.cuda.is_available():
            reason = "needs a CUDA device" if selects_gpu(config) else "needs a CUDA device: pytest -m gpu"
            for item in need_gpu:
                item.add_marker(pytest.mark.skip(reason=reason))
    if "full" in config.option.markexpr:
        whole = {item.function for item in items if isinstance(item, pytest.Function) and is_left_out(item)}
        for item in items:
            if isinstance(item, pytest.Function) and item.function in whole:  # the cut is a part of the proof
                item.add_marker(pytest.mark.full)
        return
    config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
    items[:] = [item for item in items if not is_left_out(item)]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Spares the garbage collector what has been imported: looking through that again and again takes a tenth of the
    time of tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def is_left_out(item: pytest.Item) -> bool:
    """Whether only `-m full` runs a test: `@pytest.mark.full`, or `full("id", ...)` for these parameters alone."""
    marks = list(item.iter_markers("full"))
    parameters = item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""
    return any(not mark.args or parameters in mark.args for mark in marks)


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
