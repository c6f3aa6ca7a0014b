"""Host memory for the state that an update would overwrite before it is on disk. Kept from one save to the next.

Fresh memory is slow (first touch: 1.1 GB/s a rank where copying to memory in use runs at 5, docs/results/checkpoint.md; pinning
slower still), so blocks stay for the next save unless the machine is short of memory. There are as many as one save needed at
most: nothing, where the disk is done before the update.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from dataclasses import dataclass

import torch

from bigtrain.checkpoint.slices import raw

BLOCK_BYTES = 64 << 20
ALIGN_BYTES = 64
KEEP_SHARE = 0.25  # blocks are kept while this share of the host's memory is available


@dataclass(frozen=True)
class Copy:
    """Room for a tensor's copy in block number `block` of `home`."""

    tensor: torch.Tensor
    block: int
    home: HostMemory

    def give_back(self) -> None:
        """The copy is not needed any more; its memory may be taken again at once."""
        self.home.give_back(self.block)


class HostMemory:
    """Blocks of host memory, filled side by side; a block is free again when all its copies were given back.

    Args:
        pinned: page-locked, for copies from a GPU.
    """

    def __init__(self, pinned: bool):
        self._pinned = pinned
        self._lock = threading.Lock()
        self._blocks: list[torch.Tensor] = []
        self._users: list[int] = []
        self._open, self._filled = -1, 0

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return BLOCK_BYTES * len(self._blocks)

    def take(self, like: torch.Tensor) -> Copy:
        """Room for a copy of `like`, which is at most `BLOCK_BYTES` long."""
        need = -(-like.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        with self._lock:
            if self._open < 0 or self._filled + need > BLOCK_BYTES:
                self._open, self._filled = self._free_block(), 0
            begin, number = self._filled, self._open
            self._filled += need
            self._users[number] += 1
        return Copy(self._blocks[number][begin : begin + like.nbytes].view(like.dtype), number, self)

    def _free_block(self) -> int:
        for number, users in enumerate(self._users):
            if users == 0 and number != self._open:
                return number
        self._blocks.append(self._new_block())
        self._users.append(0)
        return len(self._blocks) - 1

    def _new_block(self) -> torch.Tensor:
        if self._pinned:
            return torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
        area = mmap.mmap(-1, BLOCK_BYTES)
        with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
            area.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(area, dtype=torch.uint8)

    def give_back(self, block: int) -> None:
        """One copy less in `block`."""
        with self._lock:
            self._users[block] -= 1
            if self._users[block] == 0 and block == self._open:
                self._filled = 0

    def settle(self) -> None:
        """After a save: let go of all blocks where memory is short."""
        with self._lock:
            if self._blocks and not any(self._users) and _available_share() < KEEP_SHARE:
                self._blocks.clear()
                self._users.clear()
                self._open = -1


def copy_host(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy between CPU tensors by memmove, which is 1.7 times as fast as Tensor.copy_ here; releases the interpreter lock."""
    import numpy as np

    np.frombuffer(raw(target), dtype=np.uint8)[:] = np.frombuffer(raw(source), dtype=np.uint8)


def _available_share() -> float:
    """Memory that can be had without swapping, as a share of all; 1 where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            entries = dict(line.split(":", 1) for line in file)
        return int(entries["MemAvailable"].split()[0]) / int(entries["MemTotal"].split()[0])
    except (OSError, KeyError, ValueError):
        return 1.0
