"""A recording of what is allocated and freed, phase by phase, and the ledger that is read off it.

The simulation writes a tape; the ledger (what is held, and when it is most) and the allocator replay (what is reserved
for it) both read it. Nothing here knows about models.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

# PyTorch's allocators hand out multiples of 512 B on the GPU (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize).
ROUND_BYTES = 512

ALLOC, FREE, PHASE, EMPTY_CACHE, RETURN, TOUCH = 0, 1, 2, 3, 4, 5


@dataclass(frozen=True)
class Ledger:
    """What a tape amounts to.

    Attributes:
        peak_bytes: most bytes held at any moment.
        peak_phase: the phase in which that was first so.
        rows: row -> bytes held at that moment; sums to `peak_bytes` exactly.
        by_phase: phase -> most bytes held during it, in order of first appearance.
        final_bytes: bytes held at the end.
    """

    peak_bytes: int
    peak_phase: str
    rows: dict[str, int]
    by_phase: dict[str, int]
    final_bytes: int


# kind, slot, bytes, row or phase.
Event = tuple[int, int, int, str]


class Tape:
    """Events in order. Bytes are rounded up to the allocator's unit when they are written.

    A column of each kind of value, all as long as there are events: a search writes millions of them, and as tuples they would keep
    Python's garbage collector busy. A slot is what was allocated, by the number of the event that did it.
    """

    def __init__(self, unit: int = ROUND_BYTES):
        self.unit = unit
        self.kinds: list[int] = []
        self.slots: list[int] = []
        self.sizes: list[int] = []
        self.names: list[str] = []
        self.streams: list[int] = []
        self._open: dict[Hashable, int] = {}
        self.steady_from = 0  # the event at which the last step begins; before it lie start-up and the first step
        self.late: set[int] = set()  # slots whose memory comes back after they are freed, with `returned`
        self._away: dict[Hashable, int] = {}

    @property
    def events(self) -> list[Event]:
        """All of them, as tuples."""
        return list(zip(self.kinds, self.slots, self.sizes, self.names))

    def add(self, kind: int, slot: int, size: int, name: str, stream: int = 0) -> None:
        """Write one event."""
        self.kinds.append(kind)
        self.slots.append(slot)
        self.sizes.append(size)
        self.names.append(name)
        self.streams.append(stream)

    def phase(self, name: str) -> None:
        """Everything from here on belongs to `name`."""
        self.add(PHASE, -1, 0, name)

    def hold(self, key: Hashable, size: float, row: str, stream: int = 0) -> None:
        """Allocate `size` bytes under `key` until `drop(key)`; nothing happens for size 0.

        `stream` matters to what is reserved only: the caching allocator keeps a pool for every CUDA stream.
        """
        if key in self._open:
            raise AssertionError(f"'{key}' is held already")
        if size <= 0:
            return
        self._open[key] = slot = len(self.kinds)
        self.kinds.append(ALLOC)
        self.slots.append(slot)
        self.sizes.append(-(-int(size) // self.unit) * self.unit)
        self.names.append(row)
        self.streams.append(stream)

    def drop(self, *keys: Hashable) -> None:
        """Free what is held under these keys; unknown keys (size 0) are fine."""
        for key in keys:
            slot = self._open.pop(key, None)
            if slot is not None:  # as `add`, written out: most of a search passes here and through `hold`
                self.kinds.append(FREE)
                self.slots.append(slot)
                self.sizes.append(self.sizes[slot])
                self.names.append(self.names[slot])
                self.streams.append(0)

    def lend(self, *keys: Hashable) -> None:
        """Free what another stream still uses (`record_stream`): it counts as free, but nothing else gets it before `returned`.

        Matters to what is reserved only; unknown keys (size 0) are fine.
        """
        for key in keys:
            slot = self._open.get(key)
            if slot is not None:
                self.returned(key)  # of a step before
                self.drop(key)
                self.late.add(slot)
                self._away[key] = slot

    def returned(self, *keys: Hashable) -> None:
        """The other stream has passed what it was lent under these keys."""
        for key in keys:
            slot = self._away.pop(key, None)
            if slot is not None:
                self.add(RETURN, slot, self.sizes[slot], self.names[slot])

    def touch(self, size: float, row: str, stream: int = 0) -> None:
        """Allocate and free at once: a temporary."""
        if size > 0:
            self.slots.append(len(self.kinds))
            self.kinds.append(TOUCH)
            self.sizes.append(-(-int(size) // self.unit) * self.unit)
            self.names.append(row)
            self.streams.append(stream)

    def empty_cache(self) -> None:
        """`torch.cuda.empty_cache()`: matters to what is reserved only."""
        self.add(EMPTY_CACHE, -1, 0, "")

    def take_over(self, other: Tape) -> None:
        """Hold what another tape holds at its end."""
        for key, slot in other._open.items():
            self.hold(key, other.sizes[slot], other.names[slot])

    def holds(self, key: Hashable) -> bool:
        return key in self._open

    def ledger(self) -> Ledger:
        """Read the tape: peak, its phase, and what was held at the peak."""
        held = peak = 0
        peak_at, phase, peak_phase = 0, "", ""
        by_phase: dict[str, int] = {}
        for at, (kind, size, name) in enumerate(zip(self.kinds, self.sizes, self.names)):
            if kind in (ALLOC, TOUCH):
                held += size
                if held > by_phase.get(phase, -1):
                    by_phase[phase] = held
                    if held > peak:
                        peak, peak_at, peak_phase = held, at + 1, phase
                if kind == TOUCH:
                    held -= size
            elif kind == FREE:
                held -= size
            elif kind == PHASE:
                phase = name
                by_phase[phase] = max(held, by_phase.get(phase, 0))
        return Ledger(peak, peak_phase, self.held_rows(peak_at, in_passing=True), by_phase, held)

    def segments(self) -> list[tuple[str, list[Event]]]:
        """(phase, its events) in order; a phase that comes again is a segment of its own."""
        found: list[tuple[str, list[Event]]] = []
        for event in self.events:
            if event[0] == PHASE:
                found.append((event[3], []))
            elif found:
                found[-1][1].append(event)
        return found

    def held_rows(self, until: int, in_passing: bool = False) -> dict[str, int]:
        """What is held after so many events; `in_passing`: and a temporary, if the last of them is one."""
        rows: dict[str, int] = {}
        for at, (kind, size, row) in enumerate(zip(self.kinds[:until], self.sizes, self.names), 1):
            if kind in (ALLOC, TOUCH):
                rows[row] = rows.get(row, 0) + (size if kind == ALLOC or (in_passing and at == until) else 0)
            elif kind == FREE:
                rows[row] -= size
        return {row: size for row, size in rows.items() if size}
