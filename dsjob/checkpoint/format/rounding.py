"""Rounding tensors on their way into a file: any floating dtype to fp32, bf16 or fp16, as torch's `to` rounds.

Imports no torch.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from dsjob.checkpoint.format import zero_to_fp32 as plain

Array = npt.NDArray[Any]

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_PART = 1 << 16  # elements: what stays in a core's cache from one step of the arithmetic to the next
LARGEST = {"F32": 3.4e38, "BF16": 3.38e38, "F16": 65504.0}  # below these nothing is rounded to infinity


class Rounded(plain.Fp32):
    """What is written: floating dtypes become `dtype` (F32, BF16 or F16) by way of F32, as torch's `to` does.

    `overflows` counts, by tensor, the finite values that became infinite.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.overflows: dict[str, int] = {}

    def target(self, dtype: str) -> str:
        """See Fp32."""
        return self.dtype if dtype in ("F64", "F32", "F16", "BF16") else dtype

    def __call__(self, name: str, dtype: str, block: memoryview) -> memoryview:
        """See Fp32."""
        if self.target(dtype) == dtype:
            return block
        width = plain.WIDTH[dtype]
        out = np.empty(len(block) // width, "<f4" if self.dtype == "F32" else "<u2")
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for start in range(0, len(out), _PART):
                self._round(name, dtype, block[start * width : (start + _PART) * width], out[start : start + _PART])
        return out.view(np.uint8).data

    def _round(self, name: str, dtype: str, block: memoryview, out: Array) -> None:
        before = np.frombuffer(block, "<f8") if dtype == "F64" else widen(dtype, block)
        wide = before.astype("<f4", copy=False)
        if self.dtype == "F32":
            out[:] = wide
        else:
            _ROUND[self.dtype](wide.view("<u4"), out)
        limit = LARGEST[self.dtype]
        if before.max() < limit and before.min() > -limit:  # nothing becomes infinite, and nothing is nan
            return
        if self.dtype == "F32":
            infinite = np.isinf(out)
        else:
            infinity, shift = (0x7F80, 16) if self.dtype == "BF16" else (0x7C00, 13)
            one = infinity & -infinity  # of the exponent; below it are the payload of a NaN and what makes it quiet
            nan = np.isnan(wide)
            bits = wide.view("<u4")[nan]
            out[nan] = (bits >> 16) & 0x8000 | infinity | one >> 1 | (bits >> shift) & (one - 1)
            infinite = (out & 0x7FFF) == infinity
        count = int(np.count_nonzero(infinite & np.isfinite(before)))
        if count:
            self.overflows[name] = self.overflows.get(name, 0) + count


def widen(dtype: str, block: memoryview) -> Array:
    """Elements of F32, BF16 or F16 as float32; bit for bit what the script makes of them."""
    if dtype == "F32":
        return np.frombuffer(block, "<f4")
    bits = np.frombuffer(block, "<u2")
    if dtype == "BF16":
        wide: Array = (bits.astype("<u4") << 16).view("<f4")
        return wide
    by_table: Array = _half_bits()[bits].view("<f4")  # the machine's own conversion makes signalling NaNs quiet
    return by_table


@functools.cache
def _half_bits() -> Array:
    table: Array = np.array(plain.half_bits(), "<u4")
    return table


def _round_to_bf16(bits: Array, out: Array) -> None:
    """The bits of float32, none of them NaN, to bfloat16's, to nearest even."""
    # Half of the last place that is kept, less one unless that place is odd: ties go to even.
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    out[:] = rounded.view("<u2")[1::2]


def _round_to_f16(bits: Array, out: Array) -> None:
    """The same to float16. numpy's own conversion takes 20 times as long where results are subnormal.

    To a magnitude is added 2^13 times its power of two, or that of the smallest normal number: what the processor keeps
    of the sum, to nearest even, ends where float16 ends. The difference of the bits is how many last places there are.
    """
    size = bits & 0x7FFFFFFF
    np.minimum(size, 0x47800000, out=size)  # 2^16, which is infinity
    power = np.maximum(size, 0x38800000)  # 2^-14
    power &= 0x7F800000
    added = power + (13 << 23)
    total = size.view("<f4")
    total += added.view("<f4")
    size -= added
    power >>= 13
    size += power
    size -= (127 - 15 + 1) << 10
    sign = bits >> 16
    sign &= 0x8000
    size |= sign
    out[:] = size.view("<u2")[0::2]


_ROUND = {"BF16": _round_to_bf16, "F16": _round_to_f16}
