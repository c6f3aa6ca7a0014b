"""Cross-entropy of rows of logits, with their gradient in place, and a gradient's factor, as one GPU kernel each.

A row of 128,256 words fits neither registers nor shared memory, so it is read twice, the second time mostly from the cache: the
132 rows that an H100 works on at a time are 34 MB of its 50. Everything is computed in fp32 and rounded once, on its way out.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl

LARGEST_BLOCK = 32768
SCALE_BLOCK = 4096


@triton.jit
def _changed(x, SCALE: tl.constexpr, CAP: tl.constexpr):
    if SCALE != 1.0:
        x = x * SCALE
    if CAP is not None:
        x = CAP * (1.0 - 2.0 / (tl.exp(x * (2.0 / CAP)) + 1.0))  # tanh, which is 1 or -1 where exp is infinite or 0
    return x


@triton.jit
def _rows_kernel(
    logits_ptr, stride, targets_ptr, losses_ptr,
    VOCAB: tl.constexpr, IGNORED: tl.constexpr, WITH_GRAD: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: its loss, and over its logits their gradient; zeros where the target is ignored."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    logits_ptr += row * stride
    if target == IGNORED:
        tl.store(losses_ptr + row, 0.0)
        if WITH_GRAD:
            for start in range(0, VOCAB, BLOCK):
                at = start + tl.arange(0, BLOCK)
                tl.store(logits_ptr + at, tl.zeros([BLOCK], tl.float32), mask=at < VOCAB)
    else:
        # A target that is no word gives NaN, which the step's own check finds, and not the value of some other memory.
        is_word = (target >= 0) & (target < VOCAB)
        mine = _changed(tl.load(logits_ptr + target, mask=is_word, other=float("nan")).to(tl.float32), SCALE, CAP)
        most = float("-inf")
        total = 0.0
        for start in range(0, VOCAB, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = _changed(tl.load(logits_ptr + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32), SCALE, CAP)
            if CAP is not None or SCALE < 0:
                x = tl.where(at < VOCAB, x, float("-inf"))  # what is beyond the row came out as -cap or infinite
            higher = tl.maximum(most, tl.max(x, 0))
            total = total * tl.exp(most - higher) + tl.sum(tl.exp(x - higher), 0)
            most = higher
        tl.store(losses_ptr + row, tl.log(total) + most - mine)
        if WITH_GRAD:
            # 1 / total of this row; NaN for no word, as the loss
            inverse = tl.where(is_word, 1.0, float("nan")) / total
            for start in range(0, VOCAB, BLOCK):
                at = start + tl.arange(0, BLOCK)
                x = _changed(tl.load(logits_ptr + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32), SCALE, CAP)
                # The 1 is taken off in fp32: near it the difference has no digits left after a rounding to bf16.
                grad = tl.exp(x - most) * inverse - tl.where(at == target, 1.0, 0.0)
                if CAP is not None:
                    grad *= 1.0 - (x / CAP) * (x / CAP)
                if SCALE != 1.0:
                    grad *= SCALE
                tl.store(logits_ptr + at, grad, mask=at < VOCAB)


@triton.jit
def _scale_kernel(values_ptr, factor_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(values_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(values_ptr + at, values * tl.load(factor_ptr), mask=at < n)


def rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
    with_grad: bool,
    scale: float = 1.0,
    cap: float | None = None,
) -> None:
    """See `cross_entropy.Kernels`."""
    tokens, vocab = logits.shape
    block = min(LARGEST_BLOCK, triton.next_power_of_2(vocab))
    with _on(logits):
        _rows_kernel[(tokens,)](
            logits, logits.stride(0), targets, losses, vocab, -100, with_grad, float(scale), cap, block,
            num_warps=min(32, max(4, block // 1024)),
        )  # fmt: skip


def scale(values: torch.Tensor, factor: torch.Tensor) -> None:
    """See `cross_entropy.Kernels`."""
    if values.numel():
        with _on(values):
            _scale_kernel[(triton.cdiv(values.numel(), SCALE_BLOCK),)](values, factor, values.numel(), SCALE_BLOCK)


def _on(tensor: torch.Tensor) -> Any:
    """Triton launches on the current device, whatever the tensors' is."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
