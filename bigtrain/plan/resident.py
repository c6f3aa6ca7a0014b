"""A run on CPUs has one memory: what the device's tape and the host's hold together, and what malloc keeps of it.

glibc maps blocks from a threshold on (`bigtrain.zero.startup.map_blocks` sets it) and unmaps them when they are freed. Smaller ones come
out of the heap, which grows to the most that was ever needed at once and stays so: what is freed waits there for further small
blocks. After the build and after the start of the engine bigtrain returns the heap's free pages (`bigtrain.memory.heap.give_back`); during
training nothing does. So twice the tokens may hold a few MB less: tensors that grow past the threshold are mapped, and gone when freed.
"""

from __future__ import annotations

from collections.abc import Iterable

from bigtrain.plan.constants import MALLOC_MMAP_BYTES
from bigtrain.plan.tape import ALLOC, FREE, TOUCH, Event, Tape

KEPT_ROW = "heap that malloc keeps"
# Phases of the device's tape that begin with what the host does in the phase of that name.
_BEFORE = {"build": "build"}
# ... and that end with it: the host's copies are made while everything on the device is there.
_AFTER = {"build": "load", "start-up": "start-up", "bucket flush": "backward", "optimizer step": "optimizer step",
          "checkpoint save": "checkpoint save", "export": "export"}  # fmt: skip
# The heap's free pages go back when these phases end.
_TRIMMED = ("build", "start-up")


def one_memory(device: Tape, host: Tape) -> Tape:
    """Both tapes as one, in the order of time."""
    waiting: dict[str, list[list[Event]]] = {}
    for name, events in host.segments():
        waiting.setdefault(name, []).append(events)
    tape = Tape()
    heap = _Heap(tape)
    for name, events in device.segments():
        tape.phase(name)
        for part in (_next(waiting, _BEFORE.get(name)), events, _next(waiting, _AFTER.get(name))):
            heap.play(part)
        if name in _TRIMMED:
            heap.trim()
    return tape


def _next(waiting: dict[str, list[list[Event]]], name: str | None) -> list[Event]:
    segments = waiting.get(name or "", [])
    return segments.pop(0) if segments else []


class _Heap:
    """Small blocks that are freed stay, until other small blocks take their place."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.kept = 0

    def play(self, events: Iterable[Event]) -> None:
        for kind, slot, size, row in events:
            small = size < MALLOC_MMAP_BYTES
            if kind in (ALLOC, TOUCH):
                if small:
                    self._keep(-min(size, self.kept))
                self.tape.add(ALLOC, slot, size, row)
            if kind in (FREE, TOUCH):
                self.tape.add(FREE, slot, size, row)
                if small:
                    self._keep(size)

    def trim(self) -> None:
        self._keep(-self.kept)

    def _keep(self, more: int) -> None:
        if more:
            self.kept += more
            self.tape.add(ALLOC if more > 0 else FREE, -1, abs(more), KEPT_ROW)
