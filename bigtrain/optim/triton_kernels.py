"""The split AdamW update as one GPU kernel: reads weight, rest, moments and gradient once, writes the first four once.

The arithmetic and its order are those of `arithmetic.py`, with every operation rounded on its own: fused multiply-adds are
written out and the compiler's own fusing is off (`enable_fp_fusion=False`), divisions and roots are the correctly rounded ones.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from bigtrain.optim.arithmetic import CELL_BITS, SMALLEST_CELL, Scalars, cell_start, code_tables
from bigtrain.optim.table import BLOCK_ELEMS

WARPS = 4
FP32_BLOCK = 1024
ROWS, WARPS_8BIT = 4, 4  # 8-bit blocks of 256 elements a program handles, and by how many warps: the fastest of ten on an H100


@triton.jit
def _join(weight, low, tie):
    bits = (weight.to(tl.int16, bitcast=True).to(tl.int32) << 16) + low.to(tl.int32) + (tie << 16)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _round(master):
    """bf16 nearest even, the rest as int32 in [-32768, 32768]. In integers, because Triton's interpreter truncates the cast."""
    bits = master.to(tl.int32, bitcast=True)
    high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    high = tl.where(master == master, high, 0x7FC0)
    return high.to(tl.int16).to(tl.bfloat16, bitcast=True), bits - (high << 16)


@triton.jit
def _divide(x, minus_d, inverse):
    """x / d as `div_rn` has it, given -d and 1 / d rounded: by two residues (Markstein, IBM J. Res. Dev. 34(1), 1990).

    For d between 2^-60 and 2^60 and x zero or above 2^-100, so that no residue underflows.
    """
    q = x * inverse
    q = tl.fma(tl.fma(q, minus_d, x), inverse, q)
    return tl.fma(tl.fma(q, minus_d, x), inverse, q)


@triton.jit
def _adamw(master, g, m, v, decay, weight1, beta2, weight2, root2, eps, step_size, RESIDUES: tl.constexpr):
    master = master * decay
    if weight1 < 0.5:
        m = tl.fma(weight1, g - m, m)
    else:
        m = tl.fma(weight1 - 1.0, g - m, g)
    v = tl.fma(weight2 * g, g, v * beta2)
    root = tl.sqrt_rn(v)
    if RESIDUES:
        root = _divide(root, tl.zeros_like(v) - root2, tl.zeros_like(v) + tl.div_rn(1.0, root2))
    else:
        root = tl.div_rn(root, root2 + tl.zeros_like(v))
    d = root + eps
    return master + tl.div_rn(step_size * m, d), m, v


@triton.jit
def _dither(index, salt):
    """32 random bits an element (`arithmetic.dither_bits`)."""
    h = index.to(tl.uint32) * 0x9E3779B1 + salt.to(tl.uint32)
    h = (h ^ (h >> 15)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


# Not specialised: `salt` is another number every step, and one that is 1 or a multiple of 16 would be compiled for.
@triton.jit(do_not_specialize=["start", "salt"])
def _elementwise_kernel(
    weight_ptr, low_ptr, m_ptr, v_ptr, grad_ptr, factor_ptr, n, start, salt,
    decay, weight1, beta2, weight2, root2, eps, step_size,
    HAS_FACTOR: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Moments in fp32, or (HALF) in bf16, rounded by chance."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    v_bits = tl.load(v_ptr + at, mask=inside, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    tie = (v_bits >> 31) & 1
    v = (v_bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    master = _join(tl.load(weight_ptr + at, mask=inside, other=0.0), tl.load(low_ptr + at, mask=inside, other=0), tie)
    g = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        g = g * tl.load(factor_ptr)
    m = tl.load(m_ptr + at, mask=inside, other=0.0).to(tl.float32)
    master, m, v = _adamw(master, g, m, v, decay, weight1, beta2, weight2, root2, eps, step_size, False)
    weight, rest = _round(master)
    tl.store(weight_ptr + at, weight, mask=inside)
    tl.store(low_ptr + at, rest.to(tl.int16), mask=inside)
    if HALF:
        h = _dither(at + start, salt)
        m_bits = (m.to(tl.uint32, bitcast=True) + (h & 0xFFFF)) >> 16
        v_bits = (v.to(tl.uint32, bitcast=True) + (h >> 16)) >> 16 | tl.where(rest == 32768, 0x8000, 0).to(tl.uint32)
        tl.store(m_ptr + at, m_bits.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(v_ptr + at, v_bits.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=inside)
    else:
        tl.store(m_ptr + at, m, mask=inside)
        sign = tl.where(rest == 32768, -2147483648, 0).to(tl.int32)
        tl.store(v_ptr + at, (v.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True), mask=inside)


@triton.jit
def _look_up(table_ptr, index, SIZE: tl.constexpr):
    """table[index] for int32 `index` below SIZE, of any shape. The tables are small and the indices all over them: the banks of shared
    memory answer that several times faster than the lines of the first-level cache."""
    flat = tl.reshape(index, [index.numel])
    return tl.reshape(tl.gather(tl.load(table_ptr + tl.arange(0, SIZE)), flat, 0), index.shape)


@triton.jit
def _number(size, cells_ptr, START: tl.constexpr, BITS: tl.constexpr, LEAST: tl.constexpr):
    """How many mid-points lie below the magnitude with these int32 bits (`arithmetic.code_tables`, `nearest`)."""
    size = tl.maximum(size, LEAST)
    power = ((size >> 2) + (size >> 4) + START).to(tl.float32, bitcast=True) + (1 << (23 - BITS))
    cell = power.to(tl.int32, bitcast=True) & ((1 << BITS) - 1)
    carried = _look_up(cells_ptr, cell, 1 << BITS) + size
    return (carried.to(tl.uint32, bitcast=True) >> 24).to(tl.int32)


@triton.jit
def _ratio(x, scale):
    """Rows `x` by their largest magnitudes `scale`, 0 by 1, correctly rounded from 2^-40 on, and less where less."""
    small = scale < 8.673617379884035e-19  # 2^-60
    large = scale > 1.152921504606847e18  # 2^60
    power = tl.where(small, 1.2676506002282294e30, tl.where(large, 5.421010862427522e-20, 1.0))  # 2^100, 2^-64
    d = tl.where(scale == 0.0, 1.0, scale * power)
    inverse = tl.div_rn(tl.zeros_like(d) + 1.0, d)
    return _divide(x * power[:, None], tl.zeros_like(x) - d[:, None], tl.zeros_like(x) + inverse[:, None])


@triton.jit
def _8bit_kernel(
    weight_ptr, low_ptr, code1_ptr, code2_ptr, scale1_ptr, scale2_ptr, grad_ptr, factor_ptr,
    signed_ptr, signed_cells_ptr, unsigned_ptr, unsigned_cells_ptr, n,
    decay, weight1, beta2, weight2, root2, eps, step_size,
    HAS_FACTOR: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    START1: tl.constexpr, BITS1: tl.constexpr, START2: tl.constexpr, BITS2: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = at < n
    has_row = row * WIDTH < n
    scale1 = tl.load(scale1_ptr + row, mask=has_row, other=0.0)
    scale2 = tl.load(scale2_ptr + row, mask=has_row, other=0.0)
    code1 = tl.load(code1_ptr + at, mask=inside, other=127).to(tl.int32)  # 0.0: beyond the end both moments stay that
    code2 = tl.load(code2_ptr + at, mask=inside, other=0).to(tl.int32)
    low = tl.load(low_ptr + at, mask=inside, other=0)
    master = _join(tl.load(weight_ptr + at, mask=inside, other=0.0), low, tl.zeros_like(low).to(tl.int32))
    g = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        g = g * tl.load(factor_ptr)
    m = _look_up(signed_ptr, code1, 256) * scale1[:, None]
    v = _look_up(unsigned_ptr, code2, 256) * scale2[:, None]
    master, m, v = _adamw(master, g, m, v, decay, weight1, beta2, weight2, root2, eps, step_size, True)
    weight, rest = _round(master)
    tl.store(weight_ptr + at, weight, mask=inside)
    tl.store(low_ptr + at, tl.minimum(rest, 32767).to(tl.int16), mask=inside)
    scale1 = tl.max(tl.abs(m), axis=1)
    scale2 = tl.max(v, axis=1)
    tl.store(scale1_ptr + row, scale1, mask=has_row)
    tl.store(scale2_ptr + row, scale2, mask=has_row)
    bits = _ratio(m, scale1).to(tl.int32, bitcast=True)
    below = bits >> 31
    number = _number((bits & 0x7FFFFFFF) - below, signed_cells_ptr, START1, BITS1, LEAST)
    index = tl.maximum(127 + (number ^ below) - below, 0)
    tl.store(code1_ptr + at, index.to(tl.uint8), mask=inside)
    bits = _ratio(v, scale2).to(tl.int32, bitcast=True)
    number = _number(bits, unsigned_cells_ptr, START2, BITS2, LEAST)
    index = tl.maximum(number, (v > 0.0).to(tl.int32))
    tl.store(code2_ptr + at, index.to(tl.uint8), mask=inside)


def update(
    weight: torch.Tensor,
    grad: torch.Tensor,
    parts: dict[str, torch.Tensor],
    s: Scalars,
    factor: torch.Tensor | float | None,
    *,
    start: int,
    salt: int,
) -> None:
    """Update one flat chunk in place.

    Args:
        weight: bf16 [n], on the GPU.
        grad: bf16 or fp32 [n].
        parts: the state's tensors for this chunk, as `AdamWSplit` keeps them.
        s: the update's scalars.
        factor: what the gradient is multiplied by first, a 0-d fp32 tensor or a number, or None.
        start, salt: as `cpu_kernel.update`.
    """
    n = weight.numel()
    has_factor = factor is not None
    if isinstance(factor, torch.Tensor):
        factor = factor.to(weight.device, torch.float32)
    else:  # filled on the device: a copy from the host would wait for the stream
        factor = torch.full((), 1.0 if factor is None else factor, dtype=torch.float32, device=weight.device)
    scalars = (s.decay, s.weight1, s.beta2, s.weight2, s.root2, s.eps, s.step_size)
    options: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": WARPS}
    if "exp_avg" in parts:
        salt = (salt + (1 << 31)) % (1 << 32) - (1 << 31)  # always 32 bits, signed: one type for the compiler
        half = parts["exp_avg"].dtype == torch.bfloat16
        _elementwise_kernel[(triton.cdiv(n, FP32_BLOCK),)](
            weight, parts["low"], parts["exp_avg"], parts["exp_avg_sq"], grad, factor, n, start, salt, *scalars,
            HAS_FACTOR=has_factor, HALF=half, BLOCK=FP32_BLOCK, **options,
        )  # fmt: skip
        return
    tables = [table for signed in (True, False) for table in code_tables(signed, weight.device)[::2]]
    _8bit_kernel[(triton.cdiv(n, ROWS * BLOCK_ELEMS),)](
        weight, parts["low"], parts["state1"], parts["state2"], parts["absmax1"], parts["absmax2"], grad, factor,
        *tables, n, *scalars, HAS_FACTOR=has_factor, ROWS=ROWS, WIDTH=BLOCK_ELEMS,
        START1=cell_start(True), BITS1=CELL_BITS[True], START2=cell_start(False), BITS2=CELL_BITS[False], LEAST=SMALLEST_CELL,
        **options | {"num_warps": WARPS_8BIT},
    )  # fmt: skip
