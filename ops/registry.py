"""The ops: what each is for, the sources it is built from, and what is used where it is missing.

Ops in plain torch have nothing to build; they run wherever torch does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SOURCES = Path(__file__).parent / "csrc"
Wish = Literal["auto", "require", "off"]


@dataclass(frozen=True)
class Op:
    """A native op. Its sources are the files in `csrc/<name>/`; it registers functions under `torch.ops.dsjob`.

    users: the keys of a job document that use it. instead: what is used where the op is missing. switches: names with
    which DeepSpeed's DS_BUILD_<NAME> selects it.
    """

    name: str
    device: Literal["cpu", "cuda"]
    users: str
    instead: str
    switches: tuple[str, ...]

    @property
    def sources(self) -> list[Path]:
        """The files to compile, in a fixed order."""
        return sorted(path for path in (SOURCES / self.name).iterdir() if path.suffix in (".cpp", ".cu"))

    @property
    def files(self) -> list[Path]:
        """Every file that a build depends on, in a fixed order: the sources and what they include."""
        return sorted((*(SOURCES / self.name).iterdir(), *SOURCES.glob("*.h")))


_ALL = (
    Op(
        "cpu_optimizers",
        "cpu",
        "optimizer.type Adam, AdamW, Lion, Adagrad and Lamb, for state on the host",
        "torch's operators",
        ("CPU_OPTIMIZERS", "CPU_ADAM", "CPU_LION", "CPU_ADAGRAD", "CPU_LAMB"),
    ),
    Op(
        "onebit",
        "cpu",
        "optimizer.type OneBitAdam, OneBitLamb and ZeroOneAdam, for parameters on the host",
        "torch's operators",
        ("ONEBIT",),
    ),
    Op(
        "onebit_cuda",
        "cuda",
        "optimizer.type OneBitAdam, OneBitLamb and ZeroOneAdam, for parameters on GPUs, once it has been built ahead",
        "torch's operators",
        ("ONEBIT", "ONEBIT_CUDA"),
    ),
    Op(
        "transformer",
        "cuda",
        "models with dsjob.deepspeed.DeepSpeedTransformerLayer on GPUs, once it has been built ahead",
        "torch's operators",
        ("TRANSFORMER",),
    ),
    Op(
        "lamb",
        "cuda",
        "optimizer.type Lamb, for parameters on GPUs, once it has been built ahead",
        "torch's operators",
        ("LAMB", "FUSED_LAMB"),
    ),
)
# The ops in plain torch: who uses each.
PLAIN = {
    "linear_cross_entropy": "models of transformers with many logits, loss._target_: dsjob.linear_cross_entropy",
    "fused_adam": "optimizer.type Adam and AdamW on GPUs: torch's own fused kernels, which move each byte once",
    "foreach_lion": "optimizer.type Lion on GPUs: torch's operators for lists of tensors",
}
OPS: dict[str, Op] = {op.name: op for op in _ALL}


def choose_prebuilt() -> list[Op]:
    """The ops that the environment asks to build ahead: all with DSJOB_BUILD_OPS=1 or DS_BUILD_OPS=1, except those with
    DS_BUILD_<OP>=0; otherwise those with DS_BUILD_<OP>=1."""
    everything = any(os.environ.get(name) == "1" for name in ("DSJOB_BUILD_OPS", "DS_BUILD_OPS"))
    return [op for op in OPS.values() if is_demanded(op) or (everything and "0" not in _switches(op))]


def is_demanded(op: Op) -> bool:
    """Whether the environment asks for this op with DS_BUILD_<OP>=1, so that it is an error if it cannot be built."""
    return "1" in _switches(op)


def _switches(op: Op) -> list[str | None]:
    return [os.environ.get(f"DS_BUILD_{switch}") for switch in op.switches]
