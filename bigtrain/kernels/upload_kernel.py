"""The kernel of `upload`: apart, because Triton exists only where GPUs are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _copy(source, to, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to + at, tl.load(source + at, mask=at < n), mask=at < n)


def copy(source: torch.Tensor, to: torch.Tensor) -> None:
    """Copy between flat tensors of one dtype and length; `source` may lie in page-locked host memory, which the device can read."""
    n = to.numel()
    with torch.cuda.device(to.device):
        _copy[(triton.cdiv(n, BLOCK),)](source, to, n, BLOCK=BLOCK)
