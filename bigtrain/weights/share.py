"""Whole parameters on several GPUs: each rank reads a share of the file, the ranks exchange the rest over the training group.

At ZeRO 0 to 2 every rank needs every parameter. Reading the file on each of them costs N passes over a network disk and N
times the traffic to the GPUs; instead every byte is read by one rank and broadcast from its GPU. On the CPU each rank
reads for itself: the pages of the file are shared by the kernel and gloo would be slower than memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from bigtrain import ranks
from bigtrain.weights.slots import Piece, Slot

SEGMENT_BYTES = 64 << 20  # unit of the exchange: large enough for full bandwidth, small enough to balance the ranks


class Shared:
    """Which segments of which slots this rank reads, and the exchange that follows."""

    def __init__(self, slots: Sequence[Slot]):
        self._segments: list[tuple[int, torch.Tensor]] = []  # (reading rank, memory), the same order on every rank
        self._pieces: dict[int, list[Piece]] = {}
        loads = [0] * ranks.world_size()
        for slot in slots:
            flat = slot.tensor.detach().view(-1)
            mine = self._pieces.setdefault(id(slot), [])
            step = max(1, SEGMENT_BYTES // slot.dtype.itemsize)
            for first in range(0, slot.numel, step):
                part = flat[first : first + step]
                reader = min(range(len(loads)), key=loads.__getitem__)
                loads[reader] += part.numel() * slot.dtype.itemsize
                self._segments.append((reader, part))
                if reader == ranks.rank():
                    mine.append(Piece(first, part))

    def covers(self, slot: Slot) -> bool:
        """True if `slot` is read in shares."""
        return id(slot) in self._pieces

    def pieces(self, slot: Slot) -> list[Piece]:
        """What this rank reads of `slot`."""
        return self._pieces[id(slot)]

    def exchange(self) -> None:
        """Every rank gets what the others read; collective, in one fixed order."""
        for reader, part in self._segments:
            dist.broadcast(part, src=reader)


def assign(slots: Sequence[Slot], always: bool = False) -> Shared:
    """Choose the slots to read in shares: whole, contiguous, on a GPU (or, with `always`, anywhere), more than one rank."""
    if not ranks.is_distributed() or ranks.world_size() == 1:
        return Shared([])
    return Shared([
        slot for slot in slots
        if not slot.partitioned and slot.numel and slot.tensor.is_contiguous() and (slot.tensor.is_cuda or always)
    ])  # fmt: skip
