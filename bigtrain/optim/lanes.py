"""Where streamed work runs: named lanes in which work is done in order, and marks by which one lane waits for another.

On a CUDA device a lane is a stream and a mark an event. On a CPU there is one thread, and everything is done when it is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

UP, UPDATE, DOWN, GATHER, COMPUTE = "up", "update", "down", "gather", "compute"


class Lanes(Protocol):
    """What a schedule needs. COMPUTE is the lane of forward and backward; the others belong to the schedule."""

    def run(self, lane: str, work: Callable[[], None]) -> None:
        """Do `work` in `lane`, after everything asked of it before."""

    def mark(self, lane: str) -> Any:
        """A mark that is reached when everything asked of `lane` so far is done."""

    def wait(self, lane: str, mark: Any) -> None:
        """Let `lane` go on only when `mark` is reached."""

    def keep(self, tensor: torch.Tensor, lane: str) -> None:
        """Memory of `tensor`, which belongs to COMPUTE, is used in `lane`: not to be given to others before it is done there."""

    def finish(self) -> None:
        """Return when everything asked of every lane is done."""


class InPlace:
    """One thread: whatever is asked for is done at once."""

    def run(self, lane: str, work: Callable[[], None]) -> None:
        work()

    def mark(self, lane: str) -> None:
        return None

    def wait(self, lane: str, mark: None) -> None:
        return None

    def keep(self, tensor: torch.Tensor, lane: str) -> None:
        return None

    def finish(self) -> None:
        return None


class Streams:
    """CUDA streams: one for each direction of the bus, the update and what ranks give each other; the current one for forward and backward."""

    def __init__(self, device: torch.device):
        self._device = device
        self._streams = {lane: torch.cuda.Stream(device) for lane in (UP, UPDATE, DOWN, GATHER)}

    def _stream(self, lane: str) -> Any:
        return self._streams[lane] if lane in self._streams else torch.cuda.current_stream(self._device)

    def run(self, lane: str, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream(lane)) if lane in self._streams else contextlib.nullcontext():
            work()

    def mark(self, lane: str) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream(lane))
        return event

    def wait(self, lane: str, mark: torch.cuda.Event) -> None:
        self._stream(lane).wait_event(mark)

    def keep(self, tensor: torch.Tensor, lane: str) -> None:
        if tensor.is_cuda:
            tensor.record_stream(self._stream(lane))

    def finish(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
        torch.cuda.current_stream(self._device).synchronize()


def lanes_for(device: torch.device) -> Lanes:
    """The lanes of a device."""
    return Streams(device) if device.type == "cuda" else InPlace()
