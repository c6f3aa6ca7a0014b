"""A number in the place of logits that are never made, for a forward that scales or caps them on their way to the loss.

The head has made the loss of them already, scale and cap included. What it hands on goes through the forward's own lines, and
through the hooks of ZeRO-3; it then joins the loss again, so that the graph of autograd passes by the head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from bigtrain.kernels.logits import Change


class StandIn(torch.autograd.Function):
    """Of (loss, value): value in fp32 without dimensions, on the loss's device. No gradient comes back through it."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, value: float) -> torch.Tensor:
        return torch.full_like(loss, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return torch.zeros_like(grad), None


class Joined(torch.autograd.Function):
    """Of (loss, what became of the stand-in): the loss, with the gradient for itself."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, handed: torch.Tensor) -> torch.Tensor:
        ctx.dtype = handed.dtype
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, torch.zeros_like(grad, dtype=ctx.dtype)


def telling(change: Change) -> float:
    """A value at which factor and cap both show in what comes out."""
    return 0.9 * (change.cap or 1.0) / change.scale


def is_changed_so(handed: torch.Tensor, change: Change) -> bool:
    """Whether the stand-in went through this change alone. The host waits for its value."""
    return math.isclose(handed.item(), change.of(telling(change)), rel_tol=8 * torch.finfo(handed.dtype).eps)
