"""Rounds tensors while they are written to a file: any floating dtype to fp32, bf16 or fp16, exactly as torch's `to`.

Imports no torch, so `dsjob convert` starts fast.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from dsjob.checkpoint.format import zero_to_fp32 as plain

Array = npt.NDArray[Any]

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_PART = 1 << 16  # elements per pass; small enough to stay in a core's cache between the steps of the arithmetic
LARGEST = {"F32": 3.4e38, "BF16": 3.38e38, "F16": 65504.0}  # smaller magnitudes never round to infinity


class Rounded(plain.Fp32):
    """Converts floating dtypes to `dtype` (F32, BF16 or F16). F64 is rounded to F32 first, as torch's `to` does.

    `overflows` counts, per tensor, the finite values that became infinite.
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
        # As bits: numpy has no bf16, and fp16 is computed by its bits too.
        out = np.empty(len(block) // width, "<f4" if self.dtype == "F32" else "<u2")
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for start in range(0, len(out), _PART):
                self._round(name, dtype, block[start * width : (start + _PART) * width], out[start : start + _PART])
        return out.view(np.uint8).data

    def _round(self, name: str, dtype: str, block: memoryview, out: Array) -> None:
        # Kept in fp64, so that finite values beyond fp32 count as overflows below.
        before = np.frombuffer(block, "<f8") if dtype == "F64" else widen(dtype, block)
        wide = before.astype("<f4", copy=False)
        if self.dtype == "F32":
            out[:] = wide
        else:
            _ROUND[self.dtype](wide.view("<u4"), out)
        limit = LARGEST[self.dtype]
        # The common case: no overflow and no NaN. (Comparisons with NaN are false.)
        if before.max() < limit and before.min() > -limit:
            return
        if self.dtype == "F32":
            infinite = np.isinf(out)
        else:
            infinity, shift = (0x7F80, 16) if self.dtype == "BF16" else (0x7C00, 13)
            # _round_to_* mishandle NaN, so write those elements again: the sign, all exponent bits, the quiet bit, and
            # the upper bits of the payload. `one` is the lowest exponent bit; the quiet bit lies right below it.
            one = infinity & -infinity
            nan = np.isnan(wide)
            bits = wide.view("<u4")[nan]
            out[nan] = (bits >> 16) & 0x8000 | infinity | one >> 1 | (bits >> shift) & (one - 1)
            infinite = (out & 0x7FFF) == infinity
        count = int(np.count_nonzero(infinite & np.isfinite(before)))
        if count:
            self.overflows[name] = self.overflows.get(name, 0) + count


def widen(dtype: str, block: memoryview) -> Array:
    """Elements of F32, BF16 or F16 as float32, bit-identical to what `zero_to_fp32.py` produces."""
    if dtype == "F32":
        return np.frombuffer(block, "<f4")
    bits = np.frombuffer(block, "<u2")
    if dtype == "BF16":
        # BF16 is the upper half of fp32.
        wide: Array = (bits.astype("<u4") << 16).view("<f4")
        return wide
    # A table, because the processor's own conversion would turn signalling NaNs into quiet ones.
    by_table: Array = _half_bits()[bits].view("<f4")
    return by_table


@functools.cache
def _half_bits() -> Array:
    table: Array = np.array(plain.half_bits(), "<u4")
    return table


def _round_to_bf16(bits: Array, out: Array) -> None:
    """Rounds float32 bits (not NaN) to bfloat16 bits, to nearest, ties to even."""
    # Adding 0x7FFF rounds up everything above a tie. Adding the lowest kept bit as well rounds a tie up if that bit is
    # odd, so ties go to even.
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    # The upper half of each 32-bit word, which is its second half in little-endian order.
    out[:] = rounded.view("<u2")[1::2]


def _round_to_f16(bits: Array, out: Array) -> None:
    """Rounds float32 bits (not NaN) to float16 bits, to nearest, ties to even.

    numpy's own conversion takes 20 times as long for subnormal results. Here the processor's float32 addition does the
    rounding: adding 2^13 times a value's power of two (at least 2^-14, for subnormal results) leaves exactly as many
    mantissa bits as float16 has. Subtracting the bits of the added number gives the rounded mantissa.
    """
    size = bits & 0x7FFFFFFF  # the magnitude, without the sign
    np.minimum(size, 0x47800000, out=size)  # clamp to 2^16, which becomes infinity
    power = np.maximum(size, 0x38800000)  # at least 2^-14, the smallest normal float16
    power &= 0x7F800000  # keep the exponent: a power of two
    added = power + (13 << 23)
    total = size.view("<f4")
    total += added.view("<f4")
    size -= added
    power >>= 13  # move the exponent to its place in float16
    size += power
    size -= (127 - 15 + 1) << 10  # change the exponent's bias from 127 to 15
    sign = bits >> 16
    sign &= 0x8000
    size |= sign
    out[:] = size.view("<u2")[0::2]


_ROUND = {"BF16": _round_to_bf16, "F16": _round_to_f16}
