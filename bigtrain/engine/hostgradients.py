"""Norms of gradients, and ZeRO-1/2 with offload on a CPU without a copy of every gradient in passing.

DeepSpeed takes each gradient's norm from an fp64 copy and keeps the result: 64 bytes, which malloc cuts out of the hole that the
copy has just left. The next copy (8 bytes an element, below glibc's largest mmap threshold of 32 MiB) fits into no hole any more,
and by the end of a backward the heap has grown by 8 bytes for nearly every element that the rank owns: 0.80 GiB for 157e6.

Attributes of DeepSpeed 0.19.8's ZeRO-1/2 optimizer used, on instances only:
  copy_grads_in_partition, set_norm_for_param_grad_in_gpu, async_inplace_copy_grad_to_fp32_buffer_from_gpu, grad_position,
  norm_for_param_grads, single_partition_of_fp32_groups, get_param_id, get_param_gradient_attribute, clear_grad_attribute,
  _get_param_group_idx, _use_compact_grad_partition_buffer, _get_compact_grad_partition_slice, _offload_accumulated_param_ids,
  real_dp_process_group, is_gradient_accumulation_boundary, update_offload_overflow_tracker
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

NORM_PIECE_ELEMS = 1 << 16  # on a CPU: its fp64 copy should stay in the cache


def norms_of(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The 2-norm of each, 0-d: on a GPU in fp32, on a CPU in fp64.

    On a CPU piece by piece: torch's own norm with an fp64 result takes 6 ns an element and thread there, this about 1 ns.
    """
    if not grads or grads[0].is_cuda:
        return list(torch._foreach_norm(list(grads), 2, dtype=torch.float32)) if grads else []
    found = []
    for grad in grads:
        total = torch.zeros((), dtype=torch.float64)
        for piece in grad.reshape(-1).split(NORM_PIECE_ELEMS):
            total += piece.to(torch.float64, copy=True).square_().sum()
        found.append(total.sqrt())
    return found


def norm_of(grad: torch.Tensor) -> torch.Tensor:
    """One gradient's, with the same bits."""
    return norms_of([grad])[0]


def add_to(output: torch.Tensor | None, source: torch.Tensor) -> None:
    """DeepSpeed's `_add_to_grad_partition_buffer` without an fp32 copy of what is added; the same bits.

    On a GPU the kernel converts what it reads. On a CPU torch would convert the whole operand first (TensorIterator.cpp), so piecewise.
    """
    if output is None:
        return
    if output.is_cuda:
        output.add_(source)
        return
    for into, piece in zip(output.view(-1).split(NORM_PIECE_ELEMS), source.reshape(-1).split(NORM_PIECE_ELEMS)):
        into.add_(piece)


class HostGradients:
    """Substitutes what takes norms and moves gradients on one DeepSpeed optimizer instance with offload, whose device is a CPU."""

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer
        self._copy_unsummed = optimizer.copy_grads_in_partition
        optimizer.set_norm_for_param_grad_in_gpu = self._take_norm
        optimizer.async_inplace_copy_grad_to_fp32_buffer_from_gpu = self._move
        optimizer.copy_grads_in_partition = self._copy_grads

    def _owned(self, param: torch.nn.Parameter) -> torch.Tensor:
        """What this rank owns of the parameter's gradient, flat."""
        o = self.optimizer
        _, start, _, elems = o.grad_position[o.get_param_id(param)]
        held: Any = o.get_param_gradient_attribute(param)
        grad: Any = param.grad if held is None else held
        return grad.detach().view(-1).narrow(0, start, elems)

    def _target(self, param: torch.nn.Parameter) -> torch.Tensor:
        """Its place in the fp32 gradient."""
        o = self.optimizer
        group, _, place, elems = o.grad_position[o.get_param_id(param)]
        return o.single_partition_of_fp32_groups[group].grad.view(-1).narrow(0, place, elems)

    def _take_norm(self, param: torch.nn.Parameter) -> None:
        self.optimizer.norm_for_param_grads[self.optimizer.get_param_id(param)] = norm_of(self._owned(param))

    def _move(self, param: torch.nn.Parameter) -> None:
        self._target(param).copy_(self._owned(param))
        self.optimizer.clear_grad_attribute(param)

    def _copy_grads(self, param: torch.nn.Parameter, group: int | None = None) -> None:
        """`copy_grads_in_partition`: here only where gradients are summed in fp32, in one buffer."""
        o = self.optimizer
        group = o._get_param_group_idx(param) if group is None else group
        if not o._use_compact_grad_partition_buffer(group):
            return self._copy_unsummed(param, group)
        name = o.get_param_id(param)
        o._offload_accumulated_param_ids.add(name)
        if o.is_gradient_accumulation_boundary():
            elems = o.grad_position[name][3]
            rank = torch.distributed.get_rank(o.real_dp_process_group[group])
            total = o._get_compact_grad_partition_slice(group, rank, name, elems)
            o.norm_for_param_grads[name] = norm_of(total)
            o.update_offload_overflow_tracker(total)
            self._target(param).copy_(total)
            o.clear_grad_attribute(param)
