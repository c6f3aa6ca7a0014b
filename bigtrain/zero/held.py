"""What DeepSpeed's optimizer and parameters hold at the moment, by kind, for the table of a rank that runs out of memory.

What is not there yet is left out. Imports nothing of DeepSpeed; looks at these attributes of 0.19.8: of the optimizers
    param_groups_fp16_flat_cpu_memory, param_buffer_of_bit16_for_cpu_offload_groups, averaged_gradients, grad_partitions_flat_buffer,
    accumulated_grads_in_cpu, param_groups; of a parameter: ds_tensor, grad_accum
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from bigtrain.zero.flat import MASTERS


def weights(params: Iterable[Any], optimizer: Any) -> Iterator[torch.Tensor]:
    """The parameters, this rank's slices of them, and copies on the host."""
    for name in ("param_groups_fp16_flat_cpu_memory", "param_buffer_of_bit16_for_cpu_offload_groups"):
        yield from _tensors(getattr(optimizer, name, None))
    for param in params:
        yield param.data
        if getattr(param, "ds_tensor", None) is not None:
            yield param.ds_tensor.data


def gradients(params: Iterable[Any], optimizer: Any) -> Iterator[torch.Tensor]:
    """Of the parameters and of the masters, and sums over micro batches."""
    for param in params:
        yield from _tensors((param.grad, getattr(param, "grad_accum", None)))
    for name in ("averaged_gradients", "grad_partitions_flat_buffer", "accumulated_grads_in_cpu"):
        yield from _tensors(getattr(optimizer, name, None))
    for name in MASTERS.values():
        yield from _tensors([p.grad for p in _tensors(getattr(optimizer, name, None))])


def states(optimizer: Any) -> Iterator[torch.Tensor]:
    """Masters and moments."""
    yield from _tensors([group["params"] for group in getattr(optimizer, "param_groups", ())])
    for name in ("state", *MASTERS.values()):
        yield from _tensors(getattr(optimizer, name, None))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in list(value.values()):
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)
