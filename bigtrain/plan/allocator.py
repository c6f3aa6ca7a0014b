"""What PyTorch's caching allocator reserves for a tape: a replay of its rules on sizes alone.

Rules of c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.11): sizes in units of 512 B; requests up to 1 MiB come out of
2 MiB segments, up to 10 MiB out of 20 MiB segments, larger ones out of segments rounded to 2 MiB; the smallest free
block that is large enough is taken (lowest address first among equals) and split when the rest is worth keeping;
neighbours that are free merge. Every CUDA stream has pools of its own: what the gradient-reduction stream once needed
is not there for the forward pass. Delays by `record_stream` are not replayed.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from bigtrain.plan.tape import ALLOC, EMPTY_CACHE, FREE, Tape

_MIB = 2**20
_SMALL, _SMALL_SEGMENT = _MIB, 2 * _MIB
_LARGE_SEGMENT, _MIN_LARGE, _ROUND_LARGE = 20 * _MIB, 10 * _MIB, 2 * _MIB


class _Block:
    __slots__ = ("before", "free", "ident", "next", "pool", "size")

    def __init__(self, ident: int, size: int, pool: _Pool):
        self.ident, self.size, self.pool = ident, size, pool
        self.free = True
        self.before: _Block | None = None
        self.next: _Block | None = None


class _Pool:
    """Free blocks ordered by size, then age (age stands for the address)."""

    def __init__(self) -> None:
        self.order: list[tuple[int, int]] = []
        self.blocks: dict[int, _Block] = {}

    def add(self, block: _Block) -> None:
        insort(self.order, (block.size, block.ident))
        self.blocks[block.ident] = block

    def remove(self, block: _Block) -> None:
        del self.order[bisect_left(self.order, (block.size, block.ident))]
        del self.blocks[block.ident]

    def best(self, size: int) -> _Block | None:
        at = bisect_left(self.order, (size, -1))
        return self.blocks[self.order[at][1]] if at < len(self.order) else None


def _segment_bytes(size: int) -> int:
    if size <= _SMALL:
        return _SMALL_SEGMENT
    if size < _MIN_LARGE:
        return _LARGE_SEGMENT
    return -(-size // _ROUND_LARGE) * _ROUND_LARGE


class _Replay:
    def __init__(self, limit_bytes: int | None):
        self.limit = limit_bytes
        self.pools: dict[tuple[int, bool], _Pool] = {}
        self.slots: dict[int, _Block] = {}
        self.reserved = self.peak = self.count = 0
        self.overflowed = False

    def _new(self, size: int, pool: _Pool) -> _Block:
        self.count += 1
        return _Block(self.count, size, pool)

    def allocate(self, slot: int, size: int, stream: int) -> None:
        small = size <= _SMALL
        pool = self.pools.setdefault((stream, small), _Pool())
        block = pool.best(size)
        if block is None:
            segment = _segment_bytes(size)
            if self.limit is not None and self.reserved + segment > self.limit:
                self.empty_cache()
                self.overflowed |= self.reserved + segment > self.limit
            block = self._new(segment, pool)
            self.reserved += segment
            self.peak = max(self.peak, self.reserved)
        else:
            pool.remove(block)
        rest = block.size - size
        if rest >= 512 if small else rest > _SMALL:
            tail = self._new(rest, pool)
            tail.before, tail.next = block, block.next
            if block.next is not None:
                block.next.before = tail
            block.next, block.size = tail, size
            pool.add(tail)
        block.free = False
        self.slots[slot] = block

    def release(self, slot: int) -> None:
        block = self.slots.pop(slot)
        pool = block.pool
        block.free = True
        for other in (block.before, block.next):
            if other is not None and other.free:
                pool.remove(other)
                block = _merge(other, block) if other is block.before else _merge(block, other)
        pool.add(block)

    def empty_cache(self) -> None:
        for pool in self.pools.values():
            for block in list(pool.blocks.values()):
                if block.before is None and block.next is None:
                    pool.remove(block)
                    self.reserved -= block.size


def _merge(first: _Block, second: _Block) -> _Block:
    first.size += second.size
    first.next = second.next
    if second.next is not None:
        second.next.before = first
    return first


def reserved_bytes(tape: Tape, limit_bytes: int | None = None) -> tuple[int, bool]:
    """Most bytes that the caching allocator holds from the driver while it plays the tape.

    Args:
        tape: GPU events.
        limit_bytes: what the process may reserve; at the limit the allocator gives cached segments back first.

    Returns:
        (peak of reserved bytes, whether the limit was passed even so).
    """
    replay = _Replay(limit_bytes)
    for kind, slot, size, _ in tape.events:
        if kind == ALLOC:
            replay.allocate(slot, size, tape.streams[slot])
        elif kind == FREE:
            replay.release(slot)
        elif kind == EMPTY_CACHE:
            replay.empty_cache()
    return replay.peak, replay.overflowed
