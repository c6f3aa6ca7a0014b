"""Kernels that write into their inputs where torch does not see it."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch


def copy_before_rotary(model: torch.nn.Module) -> None:
    """Let liger-kernel's rotary embeddings of this model's classes work on copies of queries and keys.

    They turn queries and keys in place (liger_kernel/ops/rope.py `rope_forward`: `contiguous()` of what is contiguous already).
    Where the projection's result is kept for backward, the recompute would turn it a second time, and gradients would be wrong
    without any error. The copies live inside of one block.
    """
    for name in {type(m).__module__ for m in model.modules()}:
        namespace = vars(sys.modules[name]) if name in sys.modules else {}
        for key, value in list(namespace.items()):
            home = getattr(value, "__module__", None) or ""
            if callable(value) and home.startswith("liger_kernel.") and "rope" in home and not isinstance(value, type):
                namespace[key] = _copying(value)


def _copying(rotate: Any) -> Any:
    @functools.wraps(rotate)
    def on_copies(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # `contiguous()` of a transposed projection is a view of it as it lies in memory, hence the copy of that layout.
        return rotate(q.clone(), k.clone(), *args, **kwargs)

    on_copies.__module__ = __name__  # it is not wrapped again
    return on_copies
