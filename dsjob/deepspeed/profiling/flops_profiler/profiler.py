"""`deepspeed.profiling.flops_profiler.profiler`: profiles a model without an engine.

torch's flop counter counts the operators, so operations that it has no formula for, such as activations and norms,
count as 0. A multiply-accumulate operation (MAC) is two operations.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.errors import UsageError
from dsjob.terminal import make_printable, print_block, print_lines

_UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


class _Row(NamedTuple):
    """What a module and those inside it have used."""

    name: str
    kind: str
    depth: int
    parameters: int
    flops: int
    seconds: float


class FlopsProfiler:
    """Counts the operations of a model between `start_profile` and `stop_profile`, and times its modules.

    ds_engine, recompute_fwd_factor: have no effect.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.ds_engine, self.started = model, ds_engine, False
        self._ignored: set[nn.Module] = set()
        self._counter: FlopCounterMode | None = None
        self._counts: dict[str, int] = {}  # by name in the model
        self._begun: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._handles: list[Any] = []

    @property
    def flops(self) -> int:
        """All operations."""
        return int(self.get_total_flops())

    def start_profile(self, ignore_list: Collection[type[nn.Module]] | None = None) -> None:
        """Starts counting. ignore_list: classes of modules whose operations are left out."""
        self.end_profile()
        kinds = tuple(ignore_list or ())
        self._ignored = {module for module in self.model.modules() if isinstance(module, kinds)}
        for name, module in self.model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(lambda *_, name=name: self._begin(name)),
                module.register_forward_hook(lambda *_, name=name: self._end(name)),
            ]
        self._counter = FlopCounterMode(display=False)
        self._counter.__enter__()  # type: ignore[no-untyped-call]
        self.started = True

    def _begin(self, name: str) -> None:
        _wait()
        self._begun[name] = time.perf_counter()

    def _end(self, name: str) -> None:
        _wait()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - self._begun.pop(name)

    def stop_profile(self) -> None:
        """Stops counting. What was counted stays until `end_profile`."""
        if self._counter is None:
            return
        self._read()
        self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._counter = None
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _read(self) -> None:
        """Takes the counts of all modules, also while counting goes on."""
        assert self._counter is not None
        root = type(self.model).__name__
        found = {name: sum(counts.values()) for name, counts in self._counter.get_flop_counts().items()}
        names = dict.fromkeys(name for name, _ in self.model.named_modules(remove_duplicate=False))
        self._counts = {name: found.get(f"{root}.{name}" if name else root, 0) for name in names}
        self._counts[""] = found.get("Global", 0)
        modules = dict(self.model.named_modules())
        for name in [name for name, module in modules.items() if module in self._ignored]:
            outer = name.rpartition(".")[0]
            if any(
                module in self._ignored for inside, module in modules.items() if f"{outer}.".startswith(f"{inside}.")
            ):
                continue  # it is part of one that is left out as a whole
            left_out = self._counts[name]
            for around in [each for each in self._counts if not each or f"{name}.".startswith(f"{each}.")]:
                self._counts[around] -= left_out

    def reset_profile(self) -> None:
        """Forgets what was counted and timed."""
        self._counts, self._seconds = {}, {}

    def end_profile(self) -> None:
        """Stops counting, and forgets everything."""
        self.stop_profile()
        self.reset_profile()
        self.started = False

    def get_total_flops(self, as_string: bool = False) -> Any:
        """The operations of the model."""
        if self._counter is not None:
            self._read()
        flops = self._counts.get("", 0)
        return number_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """The multiply-accumulate operations of the model."""
        macs = self.flops // 2
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """The seconds of the model's forward passes."""
        seconds = self._seconds.get("", 0.0)
        return duration_to_string(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """The parameters of the model; those that modules share count once."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        return params_to_string(count) if as_string else count

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Prints the profile, or writes it to `output_file`.

        module_depth: of the modules among which the `top_modules` with the most of each kind are listed; -1: the
        innermost. detailed: list all modules, too.
        """
        flops, seconds = self.flops, self.get_total_duration()
        rate = f", {flops_to_string(flops / seconds)}" if seconds else ""
        told = f"{number_to_string(flops)} operations, {self.get_total_macs(as_string=True)}"
        lines = [
            f"flops profile of step {profile_step}",
            f"  parameters  {params_to_string(self.get_total_params())}",
            f"  forward     {told}, in {duration_to_string(seconds)}{rate}",
            *self._describe_top(module_depth, top_modules),
            *(["", *_make_table(self._list_rows())] if detailed else []),
        ]
        text = "\n".join(lines) + "\n"
        if output_file:
            Path(output_file).parent.mkdir(parents=True, exist_ok=True)
            Path(output_file).write_text(text)
        else:
            print_block(text)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Prints the classes with the most parameters, operations and latency at a depth."""
        print_lines(*self._describe_top(module_depth, top_modules))

    def _list_rows(self) -> list[_Row]:
        rows = []
        for name, module in self.model.named_modules():
            size = sum(parameter.numel() for parameter in module.parameters())
            depth = name.count(".") + 1 if name else 0
            used = self._counts.get(name, 0), self._seconds.get(name, 0.0)
            shown = make_printable(name) or "(model)"
            rows.append(_Row(shown, make_printable(type(module).__name__), depth, size, *used))
        return rows

    def _describe_top(self, module_depth: int, top_modules: int) -> list[str]:
        rows = self._list_rows()
        deepest = max(row.depth for row in rows)
        depth = deepest if module_depth < 0 else min(module_depth, deepest)
        totals: dict[str, list[float]] = {}
        for row in (row for row in rows if row.depth == depth):
            total = totals.setdefault(row.kind, [0.0, 0.0, 0.0])
            for column, value in enumerate((row.parameters, row.flops, row.seconds)):
                total[column] += value
        shown = (params_to_string, number_to_string, duration_to_string)
        lines = [f"most at depth {depth}:"]
        for column, what in enumerate(("parameters", "operations", "latency")):
            top = sorted(totals, key=lambda kind: totals[kind][column], reverse=True)[:top_modules]
            named = ", ".join(f"{kind} {shown[column](totals[kind][column])}" for kind in top)
            lines.append(f"  {what:<12}{named}")
        return lines


def _make_table(rows: Sequence[_Row]) -> list[str]:
    total = rows[0].flops or 1
    lines = [("module", "class", "parameters", "operations", "share", "latency")]
    for row in rows:
        share, seconds = f"{row.flops / total:.1%}", duration_to_string(row.seconds)
        lines.append((row.name, row.kind, f"{row.parameters:,}", f"{row.flops:,}", share, seconds))
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    return [
        "  ".join([line[0].ljust(widths[0]), line[1].ljust(widths[1]), *map(str.rjust, line[2:], widths[2:])])
        for line in lines
    ]


def _wait() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Collection[type[nn.Module]] | None = None,
    mode: Literal["forward", "generate"] = "forward",
) -> tuple[Any, Any, Any]:
    """The operations, MACs and parameters of a model called with `args` and `kwargs`, or with one tensor of a shape.

    The model is called `warm_up` times before, in evaluation mode, without gradients. as_string: return texts with
    units. The other arguments are those of `FlopsProfiler`. Raises UsageError.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"get_model_profile needs a torch.nn.Module, not {type(model).__name__}")
    if input_shape is not None:
        args = [_make_input(model, input_shape)]
    if not args and not kwargs:
        raise UsageError("get_model_profile needs an input", hint="pass input_shape, args or kwargs")
    profiler, call = FlopsProfiler(model), model.generate if mode == "generate" else model
    before = model.training
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(warm_up):
                with FlopCounterMode(display=False):  # its own first use takes long
                    call(*args, **(kwargs or {}))  # type: ignore[operator]
            profiler.start_profile(ignore_modules)
            call(*args, **(kwargs or {}))  # type: ignore[operator]
        profiler.stop_profile()
        if print_profile:
            profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
        found = [each(as_string) for each in (profiler.get_total_flops, profiler.get_total_macs)]
        return found[0], found[1], profiler.get_total_params(as_string)
    finally:
        profiler.end_profile()
        model.train(before)


def _make_input(model: nn.Module, shape: object) -> Tensor:
    if not isinstance(shape, tuple) or not shape:
        raise UsageError(f"input_shape is {shape!r}", hint="pass a tuple with at least one size")
    first = next(model.parameters(), torch.ones(()))
    return torch.ones(shape, dtype=first.dtype, device=first.device)


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """A number with the unit T, G, M, K, m or u."""
    if units is None:
        units = next((unit for unit, size in _UNITS.items() if abs(num) >= size), "u") if num else ""
    return f"{round(num / _UNITS.get(units, 1.0), precision):g} {units}"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """A number of MACs with its unit."""
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Operations per second with their unit."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def bytes_to_string(b: float, units: str | None = None, precision: int = 2) -> str:
    """A number of bytes with its unit."""
    return f"{number_to_string(b, units, precision)}B"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """A number of parameters, with B for billions."""
    units = units.replace("B", "G") if units else units
    return number_to_string(params_num, units, precision).replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Seconds with their unit."""
    return f"{number_to_string(duration, units, precision)}s"


__getattr__ = _explain_names(__name__)
