"""Updates of fp32 masters a chunk at a time, so that no gradient of a whole partition in fp32 exists.

DeepSpeed lays the gradients of a partition out flat, casts them to fp32 in one piece, 4 bytes a parameter, and calls the
optimizer. Here each chunk is cast, multiplied and used by itself, in DeepSpeed's order: the results are the same bit for bit.

Of torch's AdamW `_init_group` is used, which makes the state of a parameter (torch/optim/adam.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim.adamw import adamw

from bigtrain import zero
from bigtrain.optim.pieces import cut, joined
from bigtrain.plan.constants import CPU_CHUNK_ELEMS, GATHER_ELEMS
from bigtrain.zero import flat

CHUNK_ELEMS = {"cpu": CPU_CHUNK_ELEMS, "cuda": GATHER_ELEMS}
OPTIONS = ("foreach", "capturable", "differentiable", "fused", "amsgrad", "lr", "weight_decay", "eps", "maximize")

# Updates a flat parameter from an element on, a multiple of 256, by the fp32 gradient of as many as it has.
Update = Callable[[int, torch.Tensor], None]


class Chunks:
    """Takes the place of `step` of an optimizer inside DeepSpeed, whose classes, groups and state stay what they are.

    Args:
        optimizer: its parameters are flat fp32 masters.
        begin: counts an update of one parameter and returns what updates a part of it.

    Attributes:
        grad_factor: what gradients are multiplied by in the next step.
    """

    def __init__(self, optimizer: Any, begin: Callable[[torch.Tensor, dict[str, Any]], Update]):
        self.optimizer, self.begin = optimizer, begin
        self.grad_factor: torch.Tensor | float = 1.0
        self._pieces: dict[torch.Tensor, Sequence[torch.Tensor]] = {}
        optimizer.step = self.step

    def hand_over(self, param: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
        """Give the next step's gradient as tensors that in this order cover `param`; those in fp32 are overwritten."""
        self._pieces[param] = pieces

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every parameter of the groups; the gradient of each must have been handed over."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                self._update(param, self._pieces.pop(param), self.begin(param, group))

    def _update(self, param: torch.Tensor, pieces: Sequence[torch.Tensor], update: Update) -> None:
        for start, grads in cut(pieces, chunk_elems(param.device.type)):
            update(start, self._scaled(joined(grads).to(param.dtype)))  # no name: it is gone when the next one is made

    def _scaled(self, grad: torch.Tensor) -> torch.Tensor:
        if isinstance(self.grad_factor, torch.Tensor) or self.grad_factor != 1.0:
            grad.mul_(self.grad_factor)
        return grad


def chunk_elems(device: str) -> int:
    """Elements updated at a time on "cpu" or "cuda"."""
    return CHUNK_ELEMS[device] * (torch.get_num_threads() if device == "cpu" else 1)


def begin_adamw(optimizer: Any, param: torch.Tensor, group: dict[str, Any]) -> Update:
    """One update of torch's AdamW, by whichever of its kernels it was built with."""
    param.grad = param.new_zeros(1).expand_as(param)  # parameters without one are left out; nobody reads it
    moments, squares, largest, steps = lists = [], [], [], []  # type: ignore[var-annotated]
    optimizer._init_group({**group, "params": [param]}, [], [], *lists)
    param.grad = None
    count = steps[0].clone()

    def update(start: int, grad: torch.Tensor) -> None:
        steps[0].copy_(count)  # adamw adds one for every chunk
        here = slice(start, start + grad.numel())
        weight, m, v, most = ([t.detach()[here] for t in whole] for whole in ([param], moments, squares, largest))
        beta1, beta2 = group["betas"]
        adamw(weight, [grad], m, v, most, steps, beta1=beta1, beta2=beta2, **{k: group[k] for k in OPTIONS})

    return update


def attach(ds_engine: Any) -> None:
    """Let the optimizer inside a DeepSpeed engine update in chunks, where the gradients lie with the masters.

    With DeepSpeed's offload the fp32 gradient exists already, on the host; at stage 0, and at stage 1 with fp32 accumulation,
    gradients are fp32 and used where they are.
    """
    optimizer, ds_optimizer = ds_engine.basic_optimizer, ds_engine.optimizer
    offloaded = getattr(ds_optimizer, "cpu_offload", False) or getattr(ds_optimizer, "offload_optimizer", False)
    if zero.optimizer_kind(ds_optimizer) in ("zero12", "zero3") and not offloaded:
        begin = getattr(optimizer, "begin", None) or partial(begin_adamw, optimizer)
        flat.hand_over_gradients(ds_optimizer, Chunks(optimizer, begin))
