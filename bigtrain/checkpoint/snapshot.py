"""Host memory for the state that an update would overwrite before it is on disk. Kept from one save to the next.

Fresh memory is slow (first touch: 1.1 GB/s a rank where copying to memory in use runs at 5, docs/results/checkpoint.md; pinning
slower still), so blocks stay for the next save unless the machine is short of memory. There are as many as one save needed at
most: nothing, where the disk is done before the update. Where memory is short no block is made, and the update waits for the disk.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from bigtrain import ranks
from bigtrain.checkpoint.slices import raw
from bigtrain.memory import heap, pastcache
from bigtrain.memory.pinned import HostMemory as PageLocked
from bigtrain.plan.room import room

BLOCK_BYTES = 64 << 20
ALIGN_BYTES = 64
KEEP_SHARE = 0.25  # blocks are kept while this share of the host's memory is available
# No new block below this one: a copy that can be done without must not set off the watch (plan/room.py, 0.08).
SHORT_SHARE = 0.1


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
        self._locked: list[PageLocked] = []  # what unlocks the blocks' pages when it goes
        self._open, self._filled = -1, 0

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return BLOCK_BYTES * len(self._blocks)

    def take(self, like: torch.Tensor, even_if_short: bool = False) -> Copy | None:
        """Room for a copy of `like`, which is at most `BLOCK_BYTES` long; None where the host is short of memory."""
        need = -(-like.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        with self._lock:
            if self._open < 0 or self._filled + need > BLOCK_BYTES:
                number = self._free_block(even_if_short)
                if number is None:
                    return None
                self._open, self._filled = number, 0
            begin, number = self._filled, self._open
            self._filled += need
            self._users[number] += 1
        return Copy(self._blocks[number][begin : begin + like.nbytes].view(like.dtype), number, self)

    def reserve(self, nbytes: int, threads: int, device: torch.device | None = None, keep_free: float = SHORT_SHARE) -> None:
        """Make the blocks that copies of `nbytes` will need, `threads` at a time: one after the other, pages are pinned at 1.5 GB/s.

        Args:
            nbytes: of copies that are still to come.
            threads: how many at a time.
            device: whose driver pins them.
            keep_free: the share of the host's memory that stays available.
        """
        with self._lock:
            free = sum(users == 0 for users in self._users)
        # Threads and ranks look before any of them has made its block: a rank makes its part of what there is room for, no more.
        has_room = _spare_bytes(keep_free) / BLOCK_BYTES / ranks.local_world_size()
        missing = int(min(-(-nbytes // BLOCK_BYTES) - free, has_room))
        if missing <= 0:
            return
        with contextlib.suppress(RuntimeError):  # no thread can be started at the interpreter's end: `take` makes them
            with threads_on(device, min(threads, missing)) as pool:
                list(pool.map(lambda _: self._add_block(keep_free), range(missing)))

    def _free_block(self, even_if_short: bool) -> int | None:
        for number, users in enumerate(self._users):
            if users == 0 and number != self._open:
                return number
        if self._blocks and not even_if_short and _spare_bytes(SHORT_SHARE) < BLOCK_BYTES:
            return None
        try:
            block = self._new_block()
        except OSError:  # a limit that `room` does not know, such as that of address space
            if even_if_short:
                raise
            return None
        self._append(block)
        return len(self._blocks) - 1

    def _add_block(self, keep_free: float) -> None:
        if _spare_bytes(keep_free) >= BLOCK_BYTES:
            with contextlib.suppress(OSError):  # `take` tells what it is short of
                block = self._new_block()
                with self._lock:
                    self._append(block)

    def _append(self, block: torch.Tensor) -> None:
        self._blocks.append(block)
        self._users.append(0)

    def _new_block(self) -> torch.Tensor:
        if self._pinned:
            memory = page_locked(BLOCK_BYTES)
            self._locked.append(memory)
            return memory.tensors["bytes"]
        # Private pages of 4 KiB in one call: two thirds of the time of shared memory. Huge pages take three times as long on a virtual
        # machine that returns large free blocks to its host.
        block = torch.frombuffer(mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
        heap.populate(block.data_ptr(), BLOCK_BYTES)
        return block

    def give_back(self, block: int) -> None:
        """One copy less in `block`."""
        with self._lock:
            self._users[block] -= 1
            if self._users[block] == 0 and block == self._open:
                self._filled = 0

    def settle(self) -> None:
        """After a save: let go of all blocks where memory is short."""
        with self._lock:
            if self._blocks and not any(self._users) and _spare_bytes(KEEP_SHARE) < 0:
                self._blocks.clear()
                self._users.clear()
                self._locked.clear()
                self._open = -1


def threads_on(device: torch.device | None, count: int) -> ThreadPoolExecutor:
    """Threads that use this GPU, if one is named: a thread begins on the first, and would take memory there for every rank."""
    return ThreadPoolExecutor(count) if device is None else ThreadPoolExecutor(count, "gpu", torch.cuda.set_device, (device,))


def page_locked(nbytes: int) -> PageLocked:
    """Host memory of exactly this size that a GPU copies to and from at the bus's speed; its tensor is called "bytes".

    It is the program's own, registered with the driver: good for direct I/O too, and given back to the system.
    """
    return PageLocked({"bytes": (nbytes, torch.uint8)}, pin=True)


def copy_host(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy between CPU tensors past the cache; releases the interpreter lock."""
    pastcache.copy(raw(target), raw(source))


def _spare_bytes(share: float) -> float:
    """Memory that can be had, of the machine or the container that is fuller, until no more than `share` of it is available."""
    now = room()
    return math.inf if now is None else (1.0 - share) * now.limit_bytes - now.used_bytes
