"""The small operations around the grouped products of routed experts, as one GPU kernel each; fp32 inside, rounded once."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Columns at a time of a row of sums.
_BLOCK = 1024


class Gate(NamedTuple):
    """gate x sigmoid(alpha gate) x (up + plus), gate at most `limit` and up within it; columns take turns, or halves follow each other."""

    alpha: float = 1.0
    limit: float | None = None
    plus: float = 0.0
    interleaved: bool = False


@triton.jit
def _sum_kernel(rows_ptr, place_ptr, out_ptr, WIDTH: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """One token's columns: the sum of the K rows at its places."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(K):
        place = tl.load(place_ptr + token * K + k)
        total += tl.load(rows_ptr + place * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + at, total, mask=inside)


@triton.jit
def _at_most(x, LIMIT: tl.constexpr):
    """A NaN stays one, as in torch's clamp: `tl.minimum` would make it the limit, and a broken weight would go unnoticed."""
    return tl.where(x > LIMIT, LIMIT, x)


@triton.jit
def _halves(given_ptr, bias_ptr, row, expert, at, inside, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr, BIASED: tl.constexpr):
    """Gate and up of a row, with their bias, and where they lie in it."""
    gate_at = 2 * at if INTERLEAVED else at
    up_at = 2 * at + 1 if INTERLEAVED else at + WIDTH
    gate = tl.load(given_ptr + row * (2 * WIDTH) + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(given_ptr + row * (2 * WIDTH) + up_at, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        gate += tl.load(bias_ptr + expert * (2 * WIDTH) + gate_at, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + expert * (2 * WIDTH) + up_at, mask=inside, other=0.0).to(tl.float32)
    return gate, up, gate_at, up_at


@triton.jit
def _gate_kernel(
    given_ptr, bias_ptr, expert_ptr, weight_ptr, out_ptr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, PLUS: tl.constexpr,
    WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: its weight x gate x sigmoid(ALPHA gate) x (up + PLUS), gate and up limited."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    expert = tl.load(expert_ptr + row).to(tl.int64)
    gate, up, _, _ = _halves(given_ptr, bias_ptr, row, expert, at, inside, WIDTH, INTERLEAVED, BIASED)
    if LIMIT is not None:
        gate = _at_most(gate, LIMIT)
        up = -_at_most(-_at_most(up, LIMIT), LIMIT)
    value = gate * tl.sigmoid(ALPHA * gate) * (up + PLUS)
    tl.store(out_ptr + row * WIDTH + at, value * tl.load(weight_ptr + row).to(tl.float32), mask=inside)


@triton.jit
def _gate_backward_kernel(
    grad_ptr, given_ptr, bias_ptr, expert_ptr, weight_ptr, to_given_ptr, to_weight_ptr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    PLUS: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: gradients of gate, up and weight."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    to_given_ptr += row * (2 * WIDTH)
    expert = tl.load(expert_ptr + row).to(tl.int64)
    gate, up, gate_at, up_at = _halves(given_ptr, bias_ptr, row, expert, at, inside, WIDTH, INTERLEAVED, BIASED)
    gate_passes = tl.full([BLOCK], 1.0, tl.float32)
    up_passes = tl.full([BLOCK], 1.0, tl.float32)
    if LIMIT is not None:
        gate_passes = tl.where(gate > LIMIT, 0.0, 1.0)
        up_passes = tl.where((up < -LIMIT) | (up > LIMIT), 0.0, 1.0)
        gate = _at_most(gate, LIMIT)
        up = -_at_most(-_at_most(up, LIMIT), LIMIT)
    sigmoid = tl.sigmoid(ALPHA * gate)
    value = gate * sigmoid
    grad = tl.load(grad_ptr + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(to_weight_ptr + row, tl.sum(grad * value * (up + PLUS), 0))
    grad *= tl.load(weight_ptr + row).to(tl.float32)
    slope = sigmoid * (1.0 + ALPHA * gate * (1.0 - sigmoid))
    tl.store(to_given_ptr + gate_at, grad * (up + PLUS) * slope * gate_passes, mask=inside)
    tl.store(to_given_ptr + up_at, grad * value * up_passes, mask=inside)


def sum_rows(rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """[tokens, width] of [tokens * k, width]; place: int64 [tokens, k]."""
    tokens, k = place.shape
    width = rows.shape[1]
    out = torch.empty((tokens, width), dtype=rows.dtype, device=rows.device)
    with _on(rows):
        _sum_kernel[(tokens, triton.cdiv(width, _BLOCK))](rows, place, out, width, k, _BLOCK, num_warps=4)
    return out


def gated(
    given: torch.Tensor, bias: torch.Tensor | None, expert: torch.Tensor, weight: torch.Tensor, gate: Gate
) -> torch.Tensor:
    """[rows, width] of [rows, 2 width]; bias [experts, 2 width], expert and weight [rows]."""
    rows, width = given.shape[0], given.shape[1] // 2
    out = torch.empty((rows, width), dtype=given.dtype, device=given.device)
    with _on(given):
        _gate_kernel[(rows,)](
            given, given if bias is None else bias, expert, weight, out, gate.alpha, gate.limit, gate.plus, width, gate.interleaved,
            bias is not None, triton.next_power_of_2(width), num_warps=_warps(width),
        )  # fmt: skip
    return out


def gated_backward(
    grad: torch.Tensor, given: torch.Tensor, bias: torch.Tensor | None, expert: torch.Tensor, weight: torch.Tensor, gate: Gate
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `given`, and of `weight` in fp32."""
    rows, width = given.shape[0], given.shape[1] // 2
    to_given = torch.empty_like(given)
    to_weight = torch.empty(rows, dtype=torch.float32, device=given.device)
    with _on(given):
        _gate_backward_kernel[(rows,)](
            grad, given, given if bias is None else bias, expert, weight, to_given, to_weight, gate.alpha, gate.limit, gate.plus, width,
            gate.interleaved, bias is not None, triton.next_power_of_2(width), num_warps=_warps(width),
        )  # fmt: skip
    return to_given, to_weight


def _warps(width: int) -> int:
    """Eight elements of a thread, or more where a row is wider than 32 warps hold."""
    return max(1, min(16, triton.next_power_of_2(width) // 256))


def _on(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device. Its interpreter runs on the CPU, which has none."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
