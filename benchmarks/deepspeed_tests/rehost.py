"""Makes `import deepspeed` import `dsjob.deepspeed` in every test process. It is installed there as sitecustomize.

Names that dsjob lacks become stubs. Importing a stub works, but using it fails the test. With REHOST_ENGINE=deepspeed,
`import deepspeed` imports DeepSpeed itself, and only the harness is adapted to a machine without GPUs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import re
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any

REHOSTED = os.environ.get("REHOST_ENGINE") != "deepspeed"


class Stub(type):
    """Stands for a name that dsjob lacks. Using it raises an error."""

    _path: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make_stub(f"{cls._path}.{name}")

    def __instancecheck__(cls, instance: object) -> bool:
        return False

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"dsjob has no {cls._path}")


def make_stub(path: str) -> Stub:
    """Makes a stub class with this dotted name."""
    return Stub(path.rpartition(".")[2], (), {"_path": path})


# What tests import beside what they test: the size from which a tensor is swapped.
UNUSED: dict[str, Any] = {"MIN_SWAPPABLE_BYTES": 1 << 20}


class Mirror(types.ModuleType):
    """A module of deepspeed: the names of dsjob's module, and stubs for the others."""

    def __init__(self, name: str, real: types.ModuleType | None) -> None:
        super().__init__(name)
        self.__dict__.update(_real=real, __path__=[], __all__=list(getattr(real, "__all__", [])))

    def __getattr__(self, name: str) -> Any:
        real = self.__dict__["_real"]
        if real is not None and hasattr(real, name):
            value = getattr(real, name)
            if isinstance(value, types.ModuleType) and value.__name__.startswith("dsjob.deepspeed."):
                return importlib.import_module(value.__name__.removeprefix("dsjob."))  # its absent names are stubs too
            return value
        if name.startswith("__"):
            raise AttributeError(name)
        if name in UNUSED:
            return UNUSED[name]
        try:
            importlib.import_module(f"dsjob.{self.__name__}.{name}")
        except ModuleNotFoundError:
            return make_stub(f"{self.__name__}.{name}")
        return importlib.import_module(f"{self.__name__}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        real = self.__dict__.get("_real")
        if real is not None and not isinstance(value, Mirror) and not name.startswith("__"):
            setattr(real, name, value)
        super().__setattr__(name, value)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds deepspeed and all its modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "deepspeed":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        try:
            return Mirror(spec.name, importlib.import_module("dsjob." + spec.name))
        except ModuleNotFoundError as error:
            # dsjob's own error about a module that it lacks names no module.
            if not (error.name or "dsjob.deepspeed").startswith("dsjob.deepspeed"):
                raise
            return Mirror(spec.name, None)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class HarnessFinder(importlib.abc.MetaPathFinder):
    """Finds the harness of the tests once, to adapt it to a machine without GPUs."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "unit.common":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_fit(module: types.ModuleType) -> None:
                execute(module)
                fit_devices()
                if REHOSTED:
                    fit_torch()
                fit_harness(module.DistributedExec)
                hurried = types.SimpleNamespace(time=time.time, sleep=lambda seconds: time.sleep(seconds / 10))
                module.__dict__["time"] = hurried  # it waits half a second after each test
                fit_skips()

            spec.loader.exec_module = execute_and_fit  # type: ignore[method-assign]
        return spec


def fit_devices() -> None:
    """Ignores the device numbers that test helpers pass, which a CPU does not have, and lets fork_rng accept a CPU."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    cpu: Any = torch.cpu
    cpu.get_rng_state = lambda device=None: torch.get_rng_state()
    cpu.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    before = DistributedDataParallel.__init__

    def init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **others: Any) -> None:
        before(self, module, **others)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign,assignment]


def fit_torch() -> None:
    """Adapts test helpers, which compare parameters that are shards here."""
    import torch
    from torch.distributed.tensor import DTensor

    from dsjob.deepspeed import get_accelerator
    from dsjob.deepspeed.ops.op_builder import OpBuilder
    from dsjob.engine.engine import Engine

    def on_whole(compare: Callable[..., Any]) -> Callable[..., Any]:
        def whole(value: Any) -> Any:
            return value.full_tensor() if isinstance(value, DTensor) else value

        return lambda a, b, *args, **kwargs: compare(whole(a), whole(b), *args, **kwargs)

    torch.allclose, torch.equal = on_whole(torch.allclose), on_whole(torch.equal)
    torch.testing.assert_close = on_whole(torch.testing.assert_close)
    # What tests ask beside what they test: a wrapped optimizer, its loss scale, the name of a file.
    optimizer: Any = torch.optim.Optimizer
    optimizer.optimizer = property(lambda self: self)
    optimizer.loss_scaler = optimizer.loss_scale_config = property(read_scaler)
    optimizer.dynamic_loss_scale = property(lambda self: read_scaler(self).dynamic_loss_scale)
    optimizer.loss_scale = optimizer.cur_scale = property(lambda self: read_scaler(self).cur_scale)
    OpBuilder.installed_rocm_version = staticmethod(lambda: (0, 0))  # type: ignore[attr-defined]
    Engine._get_optimizer_ckpt_name = lambda self, *args: ""  # type: ignore[attr-defined]
    if get_accelerator().device_name() == "cpu":
        start: Any = torch.amp.GradScaler.__init__
        start.__defaults__ = ("cpu", *start.__defaults__[1:])
        get_accelerator().current_device = lambda: "cpu"  # type: ignore[method-assign,assignment,return-value]


class Scaler:
    """An engine's loss scale under DeepSpeed's names."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    cur_scale = loss_scale = property(lambda self: self._scaler.scale)
    cur_iter = property(lambda self: self._scaler._step)
    dynamic_loss_scale = dynamic = property(lambda self: self._scaler.dynamic)
    scale_window = property(lambda self: self._scaler._spec.loss_scale_window)
    min_scale = min_loss_scale = property(lambda self: self._scaler._spec.min_loss_scale)


def read_scaler(optimizer: Any) -> Scaler:
    """The loss scale of the engine that owns this optimizer."""
    from dsjob.parallel.parameters import _known

    updates = [getattr(engine, "_update", None) for engine in _known if engine.optimizer is optimizer]
    scalers = [update.scaler for update in updates if update is not None]
    if not scalers or scalers[0] is None:
        raise AttributeError("the optimizer has no loss scale")
    return Scaler(scalers[0])


def fit_harness(harness: Any) -> None:
    """Makes a failing rank report its error and exit, so that nothing waits for the other ranks.

    Ranks are reused by the next test until one fails, as the harness itself does for some tests. After a failure they
    are new, because in a second process group, torch may still use meshes of the first.
    """
    import torch.distributed as dist
    from _pytest.outcomes import Skipped

    run, launch, launch_in_pool = harness._dist_run, harness._launch_procs, harness._launch_daemonic_procs

    @functools.wraps(run)  # pickle finds a method by its name
    def run_and_tell(self: Any, local_rank: int, *args: Any, **kwargs: Any) -> Any:
        try:
            return run(self, local_rank, *args, **kwargs)
        except Skipped:
            raise
        except BaseException as error:
            told = {"rank": local_rank, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            with open(os.environ["REHOST_OUT"] + ".ranks", "a") as file:
                file.write(json.dumps(told) + "\n")
            if dist.is_initialized():
                dist.destroy_process_group()
            if isinstance(error, Exception):
                raise
            raise AssertionError(str(error)) from None  # what pytest raises would end the process

    def launch_kept(self: Any, *args: Any) -> None:
        ordinary = self.init_distributed and self.set_dist_env and not self.non_daemonic_procs
        self.reuse_dist_env = ordinary and os.environ["REHOST_KEEP"] == "1"
        launch(self, *args)

    def launch_until_failure(self: Any, num_procs: int, init_method: str) -> None:
        try:
            launch_in_pool(self, num_procs, init_method)
        except Exception:  # not where all have skipped
            pool = self._pool_cache.pop(num_procs, None)
            if pool is not None:
                pool.terminate()
            raise

    harness._dist_run, harness._launch_procs = run_and_tell, launch_kept
    harness._launch_daemonic_procs = launch_until_failure


def fit_skips() -> None:
    """Enables tests that DeepSpeed skips on the CPU, such as those of bf16."""
    import pytest
    import unit.util  # type: ignore[import-not-found]

    unit.util.bf16_required_version_check = lambda *args, **kwargs: True

    skip = pytest.skip

    def skip_unless_cpu(reason: str = "", **others: Any) -> None:
        if re.search("CPU accelerator does not support|timesout with CPU", reason, re.IGNORECASE) is None:
            skip(reason, **others)

    pytest.skip = skip_unless_cpu  # type: ignore[assignment]


if importlib.util.find_spec("hjson") is None:
    sys.modules["hjson"] = json  # the tests write hjson that is JSON
sys.meta_path[:0] = [*([Finder()] if REHOSTED else []), HarnessFinder()]
multiprocessing.set_forkserver_preload(
    ["torch", "torch.distributed.fsdp", "dsjob.deepspeed"] if REHOSTED else ["torch", "deepspeed"]
)
