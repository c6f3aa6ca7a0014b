"""Muon: momentum whose matrices are orthogonalised, on ZeRO's flat partitions; AdamW for everything that is no hidden matrix.

DeepSpeed has a Muon of its own, which replaces the gradient by the orthogonalised update before the norm is taken and the
gradient clipped: the reported norm is then one of the update, and clipping at 1 shrinks every step (an orthogonal n x n matrix
has norm sqrt(n)). Here the gradient is clipped like any other and the orthogonalisation happens inside the step.

A partition cuts matrices at arbitrary elements. The momentum is element-wise and stays where it is; a matrix that lies on one
rank is orthogonalised there; those that are spread over ranks travel, one to each rank at a time, by an all-to-all and back.
The result is that of the whole matrix at every stage and world size.
"""
# No class here may have "muon" in its name: DeepSpeed 0.19.8 goes by that (stage_1_and_2.py, _is_muon_group).

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from bigtrain.errors import UsageError
from bigtrain.optim import arithmetic
from bigtrain.optim.state import load_keeping_dtypes

# Quintic Newton-Schulz: coefficients of Keller Jordan, https://kellerjordan.github.io/posts/muon/ (2024): singular values go to
# somewhere within 0.7 .. 1.2 in five iterations.
A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
MOMENTUM = 0.95


def orthogonalise(matrix: torch.Tensor) -> torch.Tensor:
    """The nearest semi-orthogonal matrix, roughly: singular vectors kept, singular values near 1. [rows, cols] -> fp32."""
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.mT if tall else matrix
    x = x / (x.norm() + 1e-7)
    x = x.to(torch.bfloat16 if x.device.type == "cuda" else torch.float32)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return (x.mT if tall else x).float()


def update_of(matrix: torch.Tensor) -> torch.Tensor:
    """The step for one matrix of Nesterov momentum, of the size of AdamW's: RMS 0.2 (arXiv:2502.16982, section 2.2)."""
    return orthogonalise(matrix) * (0.2 * math.sqrt(max(matrix.shape)))


class OrthogonalMomentum(torch.optim.Optimizer):
    """Muon for parameters tagged `is_hidden_matrix` (see `param_groups`), AdamW for the others.

    Both halves use one learning rate and weight decay: the orthogonalised step is scaled to AdamW's typical size. State:
    `momentum_buffer`, fp32, for matrices; `exp_avg` and `exp_avg_sq`, fp32, for the rest. Works on whole 2-d parameters, and,
    after `attach`, on the flat partitions of ZeRO 1, 2, 3, on the GPU or offloaded (the matrices are then orthogonalised on the
    GPU).

    Args:
        groups: parameter groups.
        lr: learning rate of both halves.
        betas: AdamW's decay rates.
        eps: AdamW's epsilon.
        weight_decay: decoupled decay for groups without their own.
    """

    def __init__(
        self,
        groups: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "momentum": MOMENTUM}
        super().__init__(_halves(groups), defaults)
        self._layouts: dict[torch.Tensor, Any] = {}
        self._compute_device: torch.device | None = None

    def use_layouts(self, layouts: dict[torch.Tensor, Any], device: torch.device) -> None:
        """Say where the matrices lie in each flat partition (`flat.PartitionLayout`) and where to compute."""
        self._layouts, self._compute_device = layouts, device

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if group["matrices"]:
                    self._step_matrices(param, group)
                else:
                    self._step_adamw(param, group)

    def _step_adamw(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(param).float(), exp_avg_sq=torch.zeros_like(param).float())
        state["step"] += 1
        scalars = arithmetic.Scalars.of(state["step"], group["lr"], group["betas"], group["eps"], group["weight_decay"])
        master = param.detach().float()
        arithmetic.adamw_(master, param.grad.float(), state["exp_avg"], state["exp_avg_sq"], scalars)  # type: ignore[union-attr]
        if master.data_ptr() != param.data_ptr():
            param.copy_(master)

    def _step_matrices(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state.update(momentum_buffer=torch.zeros_like(param).float())
        grad = param.grad.float()  # type: ignore[union-attr]
        state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        nesterov = grad.lerp(state["momentum_buffer"], group["momentum"])
        if param in self._layouts:
            update = self._update_partition(nesterov, self._layouts[param])
        elif param.ndim == 2:
            update = update_of(nesterov)
        else:
            raise UsageError(
                f"muon got a flat parameter of {param.numel()} elements and does not know its matrices: call "
                "bigtrain.optim.after_initialize(name, ds_engine) after deepspeed.initialize."
            )
        param.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.to(param.dtype), alpha=-group["lr"])

    def _update_partition(self, nesterov: torch.Tensor, layout: Any) -> torch.Tensor:
        update = torch.zeros_like(nesterov)
        spread = []
        for matrix in layout.matrices:
            _, elems = matrix.spans[layout.rank]
            if elems == matrix.shape.numel():
                here = slice(matrix.at, matrix.at + elems)
                update[here] = update_of(nesterov[here].view(matrix.shape).to(self._compute_device)).flatten().to(update.device)
            elif max(n for _, n in matrix.spans) < matrix.shape.numel():
                spread.append(matrix)
        world = len(layout.matrices[0].spans) if layout.matrices else 1
        for first in range(0, len(spread), world):
            self._update_spread(nesterov, update, spread[first : first + world], layout)
        return update

    def _update_spread(self, nesterov: torch.Tensor, update: torch.Tensor, batch: list[Any], layout: Any) -> None:
        """Orthogonalise `batch`, one matrix on each rank: pieces go there by an all-to-all, and come back by another."""
        world, me = len(batch[0].spans), layout.rank
        mine = batch[me] if me < len(batch) else None
        pieces = [nesterov[m.at : m.at + m.spans[me][1]] for m in batch]
        sizes_out = [p.numel() for p in pieces] + [0] * (world - len(batch))
        sizes_in = [n for _, n in mine.spans] if mine is not None else [0] * world
        outgoing = torch.cat(pieces).to(self._compute_device)
        whole = outgoing.new_empty(sum(sizes_in))
        dist.all_to_all_single(whole, outgoing, sizes_in, sizes_out, group=layout.group)
        if mine is not None:
            whole = update_of(whole.view(mine.shape)).flatten()
        dist.all_to_all_single(outgoing, whole, sizes_out, sizes_in, group=layout.group)
        for matrix, piece in zip(batch, outgoing.split(sizes_out)):
            update[matrix.at : matrix.at + piece.numel()] = piece.to(update.device)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but every state tensor keeps its dtype."""
        load_keeping_dtypes(self, state_dict, super().load_state_dict)


def _halves(groups: Any) -> list[dict[str, Any]]:
    """Split each group into hidden matrices and the rest; `names`, if given, follow their parameters."""
    out = []
    for group in groups:
        names = group.get("names", [""] * len(group["params"]))
        for wanted in (True, False):
            part = [(p, n) for p, n in zip(group["params"], names) if bool(getattr(p, "is_hidden_matrix", False)) is wanted]
            if part:
                out.append({**group, "params": [p for p, _ in part], "names": [n for _, n in part], "matrices": wanted})
    return out


def attach(ds_engine: Any) -> None:
    """Tell the optimizer where DeepSpeed has put each matrix."""
    from bigtrain.zero import flat

    layouts = flat.partition_layouts(ds_engine.optimizer)
    if layouts:  # at stage 0 every matrix is whole
        ds_engine.basic_optimizer.use_layouts(layouts, torch.device(ds_engine.device))
