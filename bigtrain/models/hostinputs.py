"""Inputs of recomputed blocks, and results that they keep, in pinned host memory, copied there and back beside the computation."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from bigtrain.models.replay import checkpointed
from bigtrain.plan.constants import pieces


class HostInputs:
    """Runs blocks as full checkpointing does, and keeps the first argument of each that has a gradient, by place or by name, on the host until its backward.

    The way down starts when the block starts and takes place beside its forward. On the way up the input of a block is asked for
    when the block after it begins its own recompute, so that it is there in time. Both copies run on a stream of their own
    (torch.autograd.graph.save_on_cpu copies on the stream of the computation and waits). What is on a CPU already stays as it is.

    The host launches blocks faster than the GPU computes them, and memory that the copies read or write is free for others only
    once they have taken place. So it is held back: in forward to two blocks ahead of the copies, in backward to one. Otherwise a
    forward launched at once would hold the inputs of all blocks.

    Attributes:
        around: makes of a block's function the one that runs; in its forward that may `send` what is kept beside the input.
    """

    def __init__(self) -> None:
        self.around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function
        self._sides: dict[torch.device, torch.cuda.Stream] = {}
        # The tensor of each number (0 is the input) of the block before.
        self._last: dict[int, weakref.ref[OnHost]] = {}
        self._down: deque[tuple[int, torch.cuda.Event]] = deque()
        self._block = self._sent = 0

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self._block, self._sent = self._block + 1, 0
        if not any(self._leaves(a) for a in args) and (name := next((k for k, a in kwargs.items() if self._leaves(a)), None)):
            # autograd saves what comes by place; what comes by name would stay where it is, with the function that runs again
            function, args = _by_place(function, name), (kwargs.pop(name), *args)
        places = [(a.data_ptr(), a.shape) for a in args if self._leaves(a)][:1]

        def pack(tensor: torch.Tensor) -> Any:
            # Other arguments, such as positions, are the same tensor for every block: nothing is gained by copies of them.
            # Told by its place: autograd keeps this function, and so would keep a tensor that it names.
            return self._send(tensor, 0) if (tensor.data_ptr(), tensor.shape) in places else tensor

        # Inside of the block the hooks of `checkpoint` are in force: these see the arguments alone.
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            return checkpointed(self.around(function), *args, **kwargs)

    def _leaves(self, argument: Any) -> bool:
        """Whether this argument of a block is one to be kept on the host."""
        return isinstance(argument, torch.Tensor) and _is_on_card(argument) and argument.requires_grad

    def send(self, tensor: torch.Tensor) -> Any:
        """What to keep of a result of the block that runs: little ones, such as seeds, stay where they are."""
        if not _is_on_card(tensor) or tensor.nbytes < _WORTH_COPYING:
            return tensor.detach()
        self._sent += 1
        return self._send(tensor, self._sent)

    def _send(self, tensor: torch.Tensor, number: int) -> OnHost:
        if tensor.device not in self._sides:
            self._sides[tensor.device] = torch.cuda.Stream(tensor.device)
        while self._down and self._down[0][0] <= self._block - 2:
            self._down.popleft()[1].synchronize()
        sent = OnHost(tensor, self._sides[tensor.device], self._last.get(number))
        self._last[number] = weakref.ref(sent)
        self._down.append((self._block, sent.gone))
        return sent


def _by_place(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function with the argument of this name as the first."""
    return lambda first, *args, **kwargs: function(*args, **{name: first}, **kwargs)


_WORTH_COPYING = 2**16


def _is_on_card(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _unpack(packed: Any) -> torch.Tensor:
    return packed.take() if isinstance(packed, OnHost) else packed


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A view with the dimensions as they lie in memory: attention gives [batch, heads, tokens, width] that lies as [batch, tokens, ...]."""
    return tensor.permute(_order(tensor))


def _order(tensor: torch.Tensor) -> list[int]:
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensor's values in one dimension, in parts that page-locked memory holds with little rounding; views, if they follow each other."""
    size = tensor.element_size()
    return tensor.detach().reshape(-1).split([piece // size for piece in pieces(tensor.numel() * size)])


class OnHost:
    """One tensor on the host.

    Args:
        tensor: it, on a GPU. No reference to it is kept.
        side: the stream of the copies.
        before: the one of the same number of the block before, whose backward comes next.

    Attributes:
        gone: the copy to the host has taken place.
    """

    def __init__(self, tensor: torch.Tensor, side: torch.cuda.Stream, before: weakref.ref[OnHost] | None):
        self._device, self._side, self._before = tensor.device, side, before
        self._coming: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self._order, lies = _order(tensor), in_memory_order(tensor)
        self._shape, self._dtype = lies.shape, tensor.dtype
        parts = parts_of(lies)
        self._host = [torch.empty_like(part, device="cpu", pin_memory=True) for part in parts]
        side.wait_stream(torch.cuda.current_stream(self._device))  # until the tensor has been computed
        with torch.cuda.stream(side):
            for host, part in zip(self._host, parts):
                host.copy_(part, non_blocking=True)
        for part in parts[:1]:
            part.record_stream(side)  # its memory is not given to anybody else before it has been read
        self.gone = side.record_event()

    def fetch(self) -> None:
        """Start the way up, if it has not been started."""
        if self._coming is not None:
            return
        coming = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        # What had this memory before may still be in use by work that is queued.
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):  # after the way down: the same stream
            for part, host in zip(parts_of(coming), self._host):
                part.copy_(host, non_blocking=True)
        coming.record_stream(self._side)  # a backward that is given up leaves it without having waited
        self._coming, self._arrived = coming, self._side.record_event()

    def take(self) -> torch.Tensor:
        """The tensor, on the device, laid out as it was; and the next one that will be asked for is sent for."""
        self.fetch()
        assert self._coming is not None and self._arrived is not None
        torch.cuda.current_stream(self._device).wait_event(self._arrived)
        self._arrived.synchronize()
        before = self._before() if self._before is not None else None
        if before is not None:
            before.fetch()
        out, self._coming = self._coming, None
        return out.permute([self._order.index(d) for d in range(out.dim())])
