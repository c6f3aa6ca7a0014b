"""Gradients that leave the GPU during backward and come back, a chunk at a time, to their update.

As soon as backward has completed a parameter's gradient, its norm is taken and the gradient goes down to its place in page-locked
host memory; its memory on the GPU is free again while backward goes on. Under accumulation the sum so far comes up for the next
micro batch's gradient, is added to as autograd would (old += new, in the gradient's dtype: the same bits), and goes down again. The
norms stay on the device, so that the clipping factor is known without reading a gradient twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bigtrain.memory.pinned import HostMemory
from bigtrain.optim.lanes import COMPUTE, DOWN, UP, UPDATE, Lanes
from bigtrain.optim.pieces import runs
from bigtrain.plan.constants import GRADIENT_AREAS, GRADIENTS_IN_FLIGHT_BYTES


@dataclass(eq=False)
class Area:
    """Room for one chunk of gradients on the device; `free` marks the end of its last use."""

    room: torch.Tensor
    free: Any


@dataclass(eq=False)
class Place:
    """Where one parameter's gradient lies in host memory.

    Attributes:
        host: flat.
        norm: on the device, 0-d: of what lies there.
        stored: mark of the copy that put it there; None while there is nothing of this step.
    """

    host: torch.Tensor
    norm: torch.Tensor
    stored: Any = None
    filled: bool = False


class SpilledGradients:
    """Gradients in host memory, each parameter's whole, side by side in the order given.

    Args:
        params: whose gradients leave, in the order in which they follow each other in the flat partitions.
        lanes: of the stream of updates.
        chunk_elems: the most gradients that one update takes.
        pin: page-lock the memory.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], lanes: Lanes, *, chunk_elems: int, pin: bool = True):
        device, dtype = params[0].device, params[0].dtype
        total = sum(p.numel() for p in params)
        self._memory = HostMemory({"gradients": (total, dtype)}, pin)
        whole = self._memory.tensors["gradients"]
        norms = torch.zeros(len(params), device=device, dtype=torch.float32 if device.type == "cuda" else torch.float64)
        self._lanes, self._device, self._chunk_elems = lanes, device, chunk_elems
        self._places: dict[torch.Tensor, Place] = {}
        at = 0
        for i, param in enumerate(params):
            self._places[param] = Place(whole[at : at + param.numel()], norms[i])
            at += param.numel()
        self._storage = whole.untyped_storage().data_ptr()
        self._flight: deque[tuple[Any, tuple[torch.Tensor, ...]]] = deque()
        self._areas: list[Area] = []
        self._read: Any = None

    @property
    def host_bytes(self) -> int:
        """Of page-locked memory."""
        return self._memory.tensors["gradients"].nbytes

    @property
    def holds_sums(self) -> bool:
        """True between the micro batches of a step: sums so far lie on the host."""
        return any(place.filled for place in self._places.values())

    # ------------------------------------------------------------ backward

    @torch.no_grad()
    def leave(self, param: torch.nn.Parameter, norm_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Take the gradient that autograd has just completed; nothing happens for a parameter whose gradient stays.

        Args:
            param: `.grad` is None afterwards.
            norm_of: of a gradient, as a 0-d tensor.
        """
        place, fresh = self._places.get(param), param.grad
        if place is None or fresh is None:
            return
        param.grad = None
        lanes, total = self._lanes, fresh
        if place.filled:
            total = torch.empty_like(fresh)
        lanes.wait(UPDATE, lanes.mark(COMPUTE))
        if place.filled:
            self._bring_sum(place, total)

        def complete() -> None:
            if total is not fresh:
                total.add_(fresh)
            place.norm.copy_(norm_of(total))

        lanes.run(UPDATE, complete)
        lanes.wait(DOWN, lanes.mark(UPDATE))
        if self._read is not None:
            lanes.wait(DOWN, self._read)
        lanes.run(DOWN, lambda: _copy(place.host, total.view(-1)))
        place.stored, place.filled = lanes.mark(DOWN), True
        self._hold(place.stored, (total,) if total is fresh else (total, fresh))

    def _bring_sum(self, place: Place, total: torch.Tensor) -> None:
        lanes = self._lanes
        lanes.wait(UP, lanes.mark(COMPUTE))  # the memory of `total` was COMPUTE's until now
        lanes.wait(UP, place.stored)
        lanes.run(UP, lambda: _copy(total.view(-1), place.host))
        lanes.wait(UPDATE, lanes.mark(UP))

    def _hold(self, mark: Any, tensors: tuple[torch.Tensor, ...]) -> None:
        """Keep memory in use until COMPUTE, whose it is, has waited for `mark`.

        Not by `Lanes.keep`: a program that is ahead of its device would find none of it free.
        """
        self._flight.append((mark, tensors))
        while len(self._flight) > 1 and sum(t.nbytes for _, ts in self._flight for t in ts) > GRADIENTS_IN_FLIGHT_BYTES:
            self._lanes.wait(COMPUTE, self._flight.popleft()[0])

    def settle(self) -> None:
        """At the end of a step's last backward: COMPUTE goes on when all gradients are on the host and the norms are known."""
        if self._flight:
            self._lanes.wait(COMPUTE, self._flight[-1][0])
            self._flight.clear()

    def take(self, param: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(gradient in host memory, its norm on the device) of this step, once; None if there is none on the host.

        Only `bring` may read the gradient: what is asked of the lanes may not be done yet. Call after `settle`.
        """
        place = self._places.get(param)
        if place is None or not place.filled:
            return None
        place.filled = False
        return place.host, place.norm

    # ------------------------------------------------------------ the update

    def owns(self, grad: torch.Tensor) -> bool:
        """Whether it is a view of this host memory."""
        return grad.untyped_storage().data_ptr() == self._storage

    def expect(self) -> None:
        """Before a step's first `bring`: all gradients must have arrived on the host."""
        self._lanes.wait(UP, self._lanes.mark(DOWN))

    def bring(self, grads: list[torch.Tensor]) -> tuple[list[torch.Tensor], Area | None]:
        """The gradients of a chunk with those from the host on the device, where UPDATE may read them.

        Returns:
            They, and the area that they lie in: who uses them sets its `free`; None if none came from the host.
        """
        if not any(map(self.owns, grads)):
            return grads, None
        lanes, area = self._lanes, self._next_area(grads[0].dtype)
        lanes.wait(UP, area.free)
        here, copies, at = [], [], 0
        for grad in grads:
            if self.owns(grad):
                here.append(area.room[at : at + grad.numel()])
                copies.append((here[-1], grad))
                at += grad.numel()
            else:
                here.append(grad)

        def work() -> None:
            for to, source in copies:
                _copy(to, source)

        lanes.run(UP, work)
        self._read = lanes.mark(UP)
        lanes.wait(UPDATE, self._read)
        return runs(here), area

    def _next_area(self, dtype: torch.dtype) -> Area:
        if len(self._areas) < GRADIENT_AREAS:
            area = Area(torch.empty(self._chunk_elems, dtype=dtype, device=self._device), self._lanes.mark(COMPUTE))
        else:
            area = self._areas.pop(0)
        self._areas.append(area)
        return area


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source, non_blocking=True)
