"""What an optimizer is built with: decided once, by the engine's settings, and handed on as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from bigtrain.errors import UsageError
from bigtrain.plan.constants import STATE_BUFFERS


class Offload(NamedTuple):
    """How much lives on the host beside a model on a GPU, where an optimizer keeps its state there itself.

    Attributes:
        ratio: share of the state.
        pin: page-lock that memory.
        buffers: chunks of state that may be on the GPU at a time.
        gradients: share of the gradients that leave during backward.
    """

    ratio: float = 1.0
    pin: bool = True
    buffers: int = STATE_BUFFERS
    gradients: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a builder may use.

    Attributes:
        lr: peak learning rate; the engine sets the rate of each step.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: for groups that do not say their own.
        offload: the optimizer's state lives on the CPU although the model may be on a GPU; None: it does not.
        device: where the model is; kept as "cuda" or "cpu", whichever card.

    Raises:
        UsageError: on values out of range.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    offload: Offload | None = None
    device: str | torch.device = "cuda"

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", torch.device(self.device).type)
        if not self.lr >= 0.0:
            raise UsageError(f"the learning rate is {self.lr}: it must be 0 or more.")
        if len(self.betas) != 2 or not all(0.0 <= b < 1.0 for b in self.betas):
            raise UsageError(f"betas are {self.betas}: they must be two numbers, each at least 0 and below 1.")
        if not self.eps >= 0.0:
            raise UsageError(f"eps is {self.eps}: it must be 0 or more.")
        if not self.weight_decay >= 0.0:
            raise UsageError(f"weight_decay is {self.weight_decay}: it must be 0 or more.")

    @property
    def adam(self) -> dict[str, Any]:
        """The keyword arguments common to all AdamW classes."""
        return {"lr": self.lr, "betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}
