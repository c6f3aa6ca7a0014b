"""Short fingerprints of state that must be equal on all ranks."""

from __future__ import annotations

from typing import Any

import torch
import xxhash

from bigtrain import zero

_ORDER_BITS = 40


def digest(value: Any) -> int:
    """63-bit hash of a value's repr, equal on all ranks and Python processes."""
    return xxhash.xxh64_intdigest(repr(value).encode()) >> 1


def fold(index: int, order: int) -> int:
    """Put a small index (-1 or more) and a hash into one integer."""
    return ((index + 1) << _ORDER_BITS) | (order & ((1 << _ORDER_BITS) - 1))


def unfold(packed: int) -> tuple[int, int]:
    """The index and the shortened hash behind `fold`."""
    return (packed >> _ORDER_BITS) - 1, packed & ((1 << _ORDER_BITS) - 1)


@torch.no_grad()
def state_digests(module: torch.nn.Module) -> dict[str, Any]:
    """A checksum of every replicated parameter and persistent buffer, by name; one wait for the device.

    Partitioned parameters differ between ranks by design and are left out. The checksum is made where the tensor is: the sum
    of its bits as integers, and of their squares; any single changed value changes it.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, param in module.named_parameters():
        if not zero.is_partitioned(param) or (zero.is_persistent(param) and zero.is_available(param)):
            tensors[name] = param.data
    persistent = set(module.state_dict(keep_vars=True)) if not tensors else None
    for name, buffer in module.named_buffers():
        if persistent is None or name in persistent:
            tensors[name] = buffer
    if not tensors:
        return {}
    sums = torch.stack([_checksum(t) for t in tensors.values()]).tolist()
    return {name: xxhash.xxh64_hexdigest(repr(pair).encode())[:12] for name, pair in zip(tensors, sums)}


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().contiguous().reshape(-1).view(kinds[tensor.element_size()])
    if tensor.element_size() == 8:
        return torch.stack([bits.sum(), (bits ^ (bits >> 7)).sum()])
    return torch.stack([bits.sum(dtype=torch.int64), (bits.bitwise_right_shift(3) ^ bits).sum(dtype=torch.int64)])
