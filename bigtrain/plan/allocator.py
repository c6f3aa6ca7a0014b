"""What PyTorch's caching allocator reserves for a tape: a replay of its rules on sizes alone.

Rules of c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.11). Common to both kinds of memory: sizes in units of 512 B; requests up to
1 MiB and larger ones have pools of their own, and every CUDA stream has both; the smallest free block that is large enough is
taken (lowest address among equals) and split; neighbours that are free merge; what another stream was told to use
(`record_stream`) comes back when that stream has passed. Where the process may reserve no more, the allocator waits for all
streams, gives back what is free, and asks once more.

Expandable (`expandable_segments:True`, what bigtrain sets): one range of addresses for each pool, of which pages of 2 MiB (small)
or 20 MiB (large) are mapped as they are needed. A request that no free block holds gets the lowest addresses where free and
unmapped blocks together are large enough; only what lacks is mapped. What is given back are whole pages without a byte in use.

Segments (torch's default): requests up to 1 MiB come out of 2 MiB segments, up to 10 MiB out of 20 MiB segments, larger ones out of
segments of their own size, rounded to 2 MiB. What is given back are segments without a byte in use.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from bigtrain.errors import UsageError
from bigtrain.plan.tape import ALLOC, EMPTY_CACHE, FREE, RETURN, TOUCH, Tape

_MIB = 2**20
_SMALL, _SMALL_PAGE, _LARGE_PAGE = _MIB, 2 * _MIB, 20 * _MIB
_MIN_LARGE, _ROUND_LARGE, _MIN_BLOCK = 10 * _MIB, 2 * _MIB, 512
# Addresses of one pool: more than any card has, so that they never run out (torch takes 9/8 of the card).
_ADDRESSES = 2**50


@dataclass(frozen=True)
class Reserved:
    """What a replay found.

    Attributes:
        peak_bytes: most that was reserved.
        unmet_bytes: a limit of so much is never met, in a replay without one; more than the peak, where what was asked for was mapped already.
        short_bytes: most that was lacking at the limit, after all that is free was given back; 0: the tape fits.
        returns: how often the limit was met and memory given back in the last step, and so in each.
        after: reserved bytes after each event of the tape, if they were asked for.
    """

    peak_bytes: int
    unmet_bytes: int
    short_bytes: int
    returns: int
    after: tuple[int, ...]


class _Block:
    __slots__ = ("at", "before", "free", "mapped", "next", "pool", "size")

    def __init__(self, at: int, size: int, pool: _Pool, mapped: bool = True):
        self.at, self.size, self.pool, self.mapped = at, size, pool, mapped
        self.free = True
        self.before: _Block | None = None
        self.next: _Block | None = None

    def cut(self, size: int) -> _Block:
        """Keep the first `size` bytes; the rest as a block of its own."""
        rest = _Block(self.at + size, self.size - size, self.pool, self.mapped)
        rest.before, rest.next = self, self.next
        if self.next is not None:
            self.next.before = rest
        self.next, self.size = rest, size
        return rest


class _Pool:
    """Blocks of one stream and kind of size: the free ones by size, then address; what is not mapped by address."""

    def __init__(self, small: bool) -> None:
        self.small, self.page = small, _SMALL_PAGE if small else _LARGE_PAGE
        self.order: list[tuple[int, int, _Block]] = []
        self.gaps: list[tuple[int, _Block]] = []

    def add(self, block: _Block) -> None:
        if block.mapped:
            insort(self.order, (block.size, block.at, block))
        else:
            insort(self.gaps, (block.at, block))

    def remove(self, block: _Block) -> None:
        if block.mapped:
            del self.order[bisect_left(self.order, (block.size, block.at))]
        else:
            del self.gaps[bisect_left(self.gaps, (block.at,))]

    def merged(self, block: _Block) -> _Block:
        """The block with its neighbours that are free and mapped (or unmapped) as it is, which leave the pool for it."""
        before, after = block.before, block.next
        if before is not None and before.free and before.mapped == block.mapped:
            self.remove(before)
            block = _join(before, block)
        if after is not None and after.free and after.mapped == block.mapped:
            self.remove(after)
            block = _join(block, after)
        return block


def _join(first: _Block, second: _Block) -> _Block:
    first.size += second.size
    first.next = second.next
    if second.next is not None:
        second.next.before = first
    return first


def _asked_bytes(size: int) -> int:
    """What the allocator compares with its limit before it grows ('get_allocation_size')."""
    if size <= _SMALL:
        return _SMALL_PAGE
    if size < _MIN_LARGE:
        return _LARGE_PAGE
    return -(-size // _ROUND_LARGE) * _ROUND_LARGE


def at_most_kept(size: int) -> int:
    """What expandable memory keeps for a block in use at the most, once what is free was given back.

    Only pages with a byte in use are kept then, and a block of s bytes lies on less than s / page + 2 of them. The block that is asked for
    is compared with the limit as no more than this either (`_asked_bytes`). So whatever lies where, nothing is short at a limit that these
    sum to, block by block in use.
    """
    return size + 2 * (_SMALL_PAGE if size <= _SMALL else _LARGE_PAGE)


class _Segments:
    """torch's default: segments that neither grow nor shrink."""

    def __init__(self, limit_bytes: int | None):
        self.limit = limit_bytes
        self.pools: dict[tuple[int, bool], _Pool] = {}
        self.slots: dict[int, _Block] = {}
        self.away: dict[int, _Block] = {}
        self.reserved = self.peak = self.unmet = self.short = self.returns = self.segments = 0

    def allocate(self, slot: int, size: int, stream: int) -> None:
        key = (stream, size <= _SMALL)
        pool = self.pools.get(key)
        if pool is None:
            pool = self.pools[key] = self._pool(key[1])
        order = pool.order
        place = bisect_left(order, (size,))
        if place == len(order):
            self._make_room(_asked_bytes(size))
            block = self._grow(pool, size)
            self.peak = max(self.peak, self.reserved)
        else:
            block = order.pop(self._best(order, place))[2]
        if block.size - size >= self._worth_keeping(pool):
            pool.add(block.cut(size))
        block.free = False
        self.slots[slot] = block

    def touch(self, slot: int, size: int, stream: int) -> None:
        """Allocate and free at once: a free block that is large enough is cut, and merged to what it was again."""
        pool = self.pools.get((stream, size <= _SMALL))
        if pool is None or bisect_left(pool.order, (size,)) == len(pool.order):
            self.allocate(slot, size, stream)
            self.free(slot, late=False)

    def _make_room(self, asked: int) -> None:
        self.unmet = max(self.unmet, self.reserved + asked)
        if self.limit is None or self.reserved + asked <= self.limit:
            return
        self.returns += 1
        self.empty_cache()
        self.short = max(self.short, self.reserved + asked - self.limit)

    def free(self, slot: int, late: bool) -> None:
        block = self.slots.pop(slot)
        if late:
            self.away[slot] = block
        else:
            self._free(block)

    def give_back(self, slot: int) -> None:
        """A stream has passed what it was told to use; at the limit that was waited for before."""
        block = self.away.pop(slot, None)
        if block is not None:
            self._free(block)

    def _free(self, block: _Block) -> None:
        block.free = True
        pool = block.pool
        block = pool.merged(block)
        insort(pool.order, (block.size, block.at, block))

    def empty_cache(self) -> None:
        """Wait for all streams, then give back what has no byte in use."""
        for slot in list(self.away):
            self.give_back(slot)
        for pool in self.pools.values():
            for _, _, block in list(pool.order):
                self._unmap(block)

    # The rules in which segments and expandable memory differ.

    def _pool(self, small: bool) -> _Pool:
        return _Pool(small)

    def _worth_keeping(self, pool: _Pool) -> int:
        return _MIN_BLOCK if pool.small else _SMALL + 1

    def _best(self, order: list[tuple[int, int, _Block]], place: int) -> int:
        """Which of the free blocks is taken; from `place` on they are large enough."""
        return place

    def _grow(self, pool: _Pool, size: int) -> _Block:
        self.segments += 1  # age stands for the address
        segment = _asked_bytes(size)
        self.reserved += segment
        return _Block(self.segments * _ADDRESSES, segment, pool)

    def _unmap(self, block: _Block) -> None:
        if block.before is None and block.next is None:
            block.pool.remove(block)
            self.reserved -= block.size


class _Expandable(_Segments):
    """One range of addresses for each pool, mapped page by page."""

    def _pool(self, small: bool) -> _Pool:
        pool = _Pool(small)
        pool.add(_Block(0, _ADDRESSES, pool, mapped=False))
        return pool

    def _worth_keeping(self, pool: _Pool) -> int:
        return _MIN_BLOCK

    def _best(self, order: list[tuple[int, int, _Block]], place: int) -> int:
        """'get_free_block': a block that could grow counts as large as it could become, so the next larger one goes before it."""
        best = order[place][2]
        while best.next is not None and not best.next.mapped and place + 1 < len(order):
            other = order[place + 1][2]
            if _could_become(other) >= _could_become(best):
                break
            best, place = other, place + 1
        return place

    def _grow(self, pool: _Pool, size: int) -> _Block:
        block = self._lowest(pool, size)
        if not block.mapped:
            block = self._map(block, min(block.size, size))
        while block.size < size:
            assert block.next is not None
            block = self._map(block.next, min(block.next.size, size - block.size))
        pool.remove(block)
        return block

    def _lowest(self, pool: _Pool, size: int) -> _Block:
        """'find_expandable_block': free and unmapped blocks that follow each other, from the lowest unmapped address on."""
        for _, start in pool.gaps:
            if start.before is not None and start.before.free:
                start = start.before
            if _room_from(start, size):
                return start
        raise UsageError(f"the plan needs more than {_ADDRESSES:.0e} bytes: look at seq_len and micro_batch")

    def _map(self, block: _Block, size: int) -> _Block:
        """'map_block': whole pages of the beginning of an unmapped block; the free block that they are part of now."""
        pool = block.pool
        pool.remove(block)
        pages = -(-size // pool.page) * pool.page
        if pages < block.size:
            pool.add(block.cut(pages))
        block.mapped = True
        self.reserved += pages
        block = pool.merged(block)
        pool.add(block)
        return block

    def _unmap(self, block: _Block) -> None:
        pool = block.pool
        begin = -(-block.at // pool.page) * pool.page
        end = (block.at + block.size) // pool.page * pool.page
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.at:
            rest = block.cut(begin - block.at)
            pool.add(block)
            block = rest
        if end < block.at + block.size:
            pool.add(block.cut(end - block.at))
        block.mapped = False
        self.reserved -= block.size
        block = pool.merged(block)
        pool.add(block)


def _room_from(block: _Block | None, size: int) -> bool:
    room = 0
    while room < size and block is not None and block.free:
        room, block = room + block.size, block.next
    return room >= size


def _could_become(block: _Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


def replay(tape: Tape, limit_bytes: int | None = None, *, expandable: bool = True, trace: bool = False) -> Reserved:
    """Play a tape to the allocator.

    Args:
        tape: GPU events.
        limit_bytes: what the process may reserve (`torch.cuda.set_per_process_memory_fraction`, or the card); None: no limit.
        expandable: which rules: `expandable_segments` True or False.
        trace: what is reserved after each event is told too.
    """
    memory = (_Expandable if expandable else _Segments)(limit_bytes)
    after: list[int] = []
    late, before = tape.late, 0
    for part in (slice(tape.steady_from), slice(tape.steady_from, None)):
        before = memory.returns
        for kind, slot, size, stream in zip(tape.kinds[part], tape.slots[part], tape.sizes[part], tape.streams[part]):
            if kind == ALLOC:
                memory.allocate(slot, size, stream)
            elif kind == FREE:
                memory.free(slot, slot in late)
            elif kind == TOUCH:
                memory.touch(slot, size, stream)
            elif kind == RETURN:
                memory.give_back(slot)
            elif kind == EMPTY_CACHE:
                memory.empty_cache()
            if trace:
                after.append(memory.reserved)
    return Reserved(memory.peak, memory.unmet, memory.short, memory.returns - before, tuple(after))


_TRIES = 12


def least_limit(tape: Tape, allocated_bytes: int, *, expandable: bool = True, most_bytes: int | None = None) -> int:
    """The least that a process must be allowed to reserve to play the tape, to about a page; with any more it gets by as well.

    A replay at one limit alone does not tell: where what is given back leaves its gaps is another matter at each, and a tape that plays at
    one may be short by pages at a higher one, where memory is given back later (1B at stage 3 on two cards: 11.752e9 B held it, 11.761e9 did not).

    Args:
        allocated_bytes: the tape's peak: less can never do.
        most_bytes: `unmet_bytes` of a replay without a limit, if that is known.
    """
    most = replay(tape, expandable=expandable).unmet_bytes if most_bytes is None else most_bytes
    limit = allocated_bytes
    for _ in range(_TRIES):
        if limit >= most:
            break
        short = replay(tape, limit, expandable=expandable).short_bytes
        if not short:
            return limit
        limit += short
    return most
