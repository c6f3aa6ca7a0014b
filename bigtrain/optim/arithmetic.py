"""AdamW's arithmetic, the split of an fp32 number into bf16 and the rest, and 8-bit moments: each defined once, here.

**Order of operations.** For fp32 master w, gradient g, moments m and v, at update t (all rounded to fp32 after each step):

    w = w * (1 - lr*wd)
    m = fma(1-b1, g - m, m)              (torch's lerp; for 1-b1 >= 0.5: fma(-b1, g - m, g))
    v = fma((1-b2) * g, g, v * b2)
    d = sqrt(v) / sqrt(1 - b2^t) + eps
    w = w + (-lr/(1 - b1^t) * m) / d

The numbers in brackets are computed in double and rounded to fp32 once. That is what `torch.optim.AdamW(foreach=False)` does
to fp32 CPU tensors (torch/optim/adam.py `_single_tensor_adam`; the fused multiply-adds are those of torch's vectorised
kernels), so the torch path below, which calls the same torch functions, gives its bits. The Triton kernel
(`triton_kernels.py`) gives the same bits with a correctly rounded square root; MKL's root, which torch uses on x86, is one unit
off in 0.6 % of the numbers. `exact_root=True` takes the correctly rounded root here too, to compare both.

**Split.** The bf16 weight is the fp32 master rounded to nearest even, as everywhere else. `low`, the master's bits minus the
bits of the bf16 weight, fits 16 signed bits except in one case: a master exactly half-way above an even bf16 has +32768. One
bit more is needed; the sign of the second moment, which is never negative, holds it (`tie`). Without a free bit (8-bit moments)
`low` saturates at 32767: the master is then one fp32 unit too small, in one of 2^17 updates.

**bf16 moments.** Rounded up or down by chance, with the probabilities that leave the mean as it is: to nearest, a second moment
with b2 = 0.999 would never fall, because a change of 0.1 % is less than half a unit of bf16. Chance is a hash of the element's
position in its partition and the update's number, so a run can be repeated. The sign bit holds `tie` as with fp32.

**8-bit moments.** bitsandbytes' dynamic code in blocks of 256 with an fp32 scale (the largest magnitude of the block), rounded
to the nearest code, except that a positive second moment never becomes 0.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from bigtrain.optim.table import BLOCK_ELEMS


@dataclass(frozen=True)
class Scalars:
    """What one update of one group multiplies by; doubles, rounded to fp32 where they meet a tensor."""

    decay: float
    weight1: float
    beta2: float
    weight2: float
    root2: float
    eps: float
    step_size: float

    @staticmethod
    def of(step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> Scalars:
        """The values at update `step`, which counts from 1."""
        beta1, beta2 = betas
        return Scalars(
            decay=1 - lr * weight_decay,
            weight1=1 - beta1,
            beta2=beta2,
            weight2=1 - beta2,
            root2=(1 - beta2**step) ** 0.5,
            eps=eps,
            step_size=-(lr / (1 - beta1**step)),
        )


def adamw_(
    master: torch.Tensor, grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor, s: Scalars, exact_root: bool = False
) -> None:
    """One update in place; all four fp32, of one shape."""
    master.mul_(s.decay)
    m.lerp_(grad, s.weight1)
    v.mul_(s.beta2).addcmul_(grad, grad, value=s.weight2)
    root = v.double().sqrt_().float() if exact_root else v.sqrt()
    master.addcdiv_(m, root.div_(s.root2).add_(s.eps), value=s.step_size)


def join_master(weight: torch.Tensor, low: torch.Tensor, tie: torch.Tensor | None = None) -> torch.Tensor:
    """The fp32 master of a bf16 weight and its int16 rest.

    Args:
        weight: bf16, any shape.
        low: int16, same shape.
        tie: bool, same shape: where the rest is +32768. None where that case was saturated.
    """
    bits = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(low)
    if tie is not None:
        bits.add_(tie, alpha=1 << 16)
    return bits.view(torch.float32)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bf16 weight (nearest even), int16 rest, and the bool `tie` (see the module's text); the inverse of `join_master`.

    The rest wraps to -32768 where `tie` is set; `saturate_low` gives the form without the bit.
    """
    weight = master.to(torch.bfloat16)
    rest = master.view(torch.int32) - weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return weight, rest.to(torch.int16), rest == 32768


def saturate_low(low: torch.Tensor, tie: torch.Tensor) -> torch.Tensor:
    """`low` for states without room for `tie`: one fp32 unit less where it is set."""
    return low.masked_fill_(tie, 32767)


def salt_of(step: int) -> int:
    """What the rounding of bf16 moments at update `step` is drawn from, a 32-bit number."""
    return step * 0x27D4EB2F & 0xFFFFFFFF


def dither_bits(n: int, start: int, salt: int, device: torch.device) -> torch.Tensor:
    """32 random bits for each of `n` elements from position `start` on, int32."""

    def signed(number: int) -> int:
        return (number + (1 << 31)) % (1 << 32) - (1 << 31)

    h = torch.arange(start, start + n, device=device).to(torch.int32).mul_(signed(0x9E3779B1)).add_(signed(salt))
    for shift, factor in ((15, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = h.bitwise_xor_((h >> shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(signed(factor))
    return h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF))


def round_moments(
    m: torch.Tensor, v: torch.Tensor, tie: torch.Tensor, start: int, salt: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both moments in bf16, rounded by chance; `tie` goes into the sign of the second."""
    h = dither_bits(m.numel(), start, salt, m.device)
    m_bits = (m.view(torch.int32) + (h & 0xFFFF)) >> 16
    v_bits = (v.view(torch.int32) + ((h >> 16) & 0xFFFF)) >> 16 | tie.to(torch.int32) << 15
    return m_bits.to(torch.int16).view(torch.bfloat16), v_bits.to(torch.int16).view(torch.bfloat16)


# Cells are even steps of t^(5/16), which puts the 127 or 255 mid-points about evenly on [0, 1]: none holds two.
CELL_BITS = {True: 9, False: 10}
SMALLEST_CELL = 103 << 23  # 2^-24, below every mid-point: smaller magnitudes are looked up as this one


def cell_start(signed: bool) -> int:
    """What makes the power of 1.0 fall into the last cell; half a cell's width below 1.0, and a little for rounding."""
    return (127 << 23) * 11 // 16 - (1 << 23 - CELL_BITS[signed]) - 4096


def cell_of(bits: torch.Tensor, signed: bool) -> torch.Tensor:
    """The cells (see `code_tables`) of magnitudes in [2^-24, 1], given as the int32 `bits` of fp32 numbers.

    Bits of a float are about its logarithm, so 5/16 of them are about a power; adding a large number rounds that to a cell.
    """
    power = ((bits >> 2) + (bits >> 4) + cell_start(signed)).view(torch.float32)
    return (power + float(1 << 23 - CELL_BITS[signed])).view(torch.int32) & (1 << CELL_BITS[signed]) - 1


@functools.cache
def _codes(signed: bool) -> torch.Tensor:
    """bitsandbytes' dynamic map with 8 bits, ascending: decades of fractions, precise near 1, reaching down to 1e-7.

    Built as published (arXiv:2110.02861, section 2.3): within decade i the magnitudes are 2^i evenly spaced means (2^(i+1) when
    unsigned) of the interval [0.1, 1], times 10^(i-6); and 0 and 1.
    """
    values = [0.0, 1.0]
    for i in range(7):
        count = (1 << i if signed else 1 << (i + 1)) + 1
        edges = torch.linspace(0.1, 1, count, dtype=torch.float32)
        means = (edges[:-1] + edges[1:]) / 2.0
        part = (10.0 ** (i - 6)) * means
        values += part.tolist()
        if signed:
            values += (-part).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32)


@functools.cache
def code_tables(signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What decoding and encoding look up, on `device`.

    Returns:
        The 256 code values, ascending, fp32; the 255 mid-points between neighbours and infinity, fp32; and the cells, int32 [512]
        signed, [1024] unsigned, by which the mid-points below a magnitude t are counted without a search (`nearest`): the upper
        8 bits of t's cell plus t's own bits, modulo 2^32. Such a cell is c * 2^24 + 2^24 - 1 - (bits of the one mid-point in
        it), c being those before it: a greater t carries. Both are less than 2^24 units, two binades, apart. In a cell without a
        mid-point a number one binade above its middle stands for it, which nothing in it reaches.
    """
    codes = _codes(signed)
    middles = torch.cat([(codes[:-1] + codes[1:]) / 2, torch.tensor([float("inf")])])
    bits = (middles[127:-1] if signed else middles[:-1]).view(torch.int32).long()
    count = 1 << CELL_BITS[signed]
    at = cell_of(bits.to(torch.int32), signed).long()
    heights = ((torch.arange(count) / count).float().view(torch.int32).long() - cell_start(signed)).clamp_(min=0)
    limits = heights * 16 // 5 + (1 << 23)
    limits[at] = bits
    before = torch.searchsorted(at, torch.arange(count))
    entries = (before << 24) + (1 << 24) - 1 - limits
    cells = (entries + (1 << 31)).remainder_(1 << 32).sub_(1 << 31).to(torch.int32)
    return codes.to(device), middles.to(device), cells.to(device)


def encode(values: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit codes and block scales of flat fp32 `values`: uint8 [n], fp32 [ceil(n / 256)]."""
    n = values.numel()
    padded = torch.nn.functional.pad(values, (0, -n % BLOCK_ELEMS)).view(-1, BLOCK_ELEMS)
    scale = padded.abs().amax(dim=1)
    ratio = padded / scale.masked_fill(scale == 0, 1.0).unsqueeze(1)
    index = nearest(ratio, signed)
    if not signed:
        index.masked_fill_((index == 0) & (padded > 0), 1)
    return index.to(torch.uint8).view(-1)[:n], scale


def nearest(ratio: torch.Tensor, signed: bool) -> torch.Tensor:
    """The codes nearest to fp32 `ratio` in [-1, 1] ([0, 1] if unsigned), int32; of two equally near ones the smaller."""
    _, _, cells = code_tables(signed, ratio.device)
    bits = ratio.view(torch.int32)
    below = bits >> 31  # -1 where negative: there a mid-point itself counts, as if the magnitude were one unit larger
    size = ((bits & 0x7FFFFFFF) - below).clamp_(min=SMALLEST_CELL)
    number = (cells[cell_of(size, signed)] + size >> 24) & 0xFF
    return (127 + (number ^ below) - below).clamp_(min=0) if signed else number


def decode(index: torch.Tensor, scale: torch.Tensor, signed: bool) -> torch.Tensor:
    """The fp32 values of flat 8-bit codes."""
    codes, _, _ = code_tables(signed, index.device)
    n = index.numel()
    values = torch.nn.functional.pad(codes[index.to(torch.int32)], (0, -n % BLOCK_ELEMS)).view(-1, BLOCK_ELEMS)
    return values.mul_(scale.unsqueeze(1)).view(-1)[:n]
