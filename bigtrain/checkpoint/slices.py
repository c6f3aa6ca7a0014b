"""The tensors of a running engine as named flat slices: the only form in which saving and loading see them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from bigtrain.checkpoint.reshard import Wanted
from bigtrain.partition import owned_range


@dataclass(frozen=True, kw_only=True)
class LocalSlice:
    """Elements `[start, start + tensor.numel())` of logical tensor (`kind`, `param`), held by this rank.

    Attributes:
        tensor: 1-D, contiguous view of the live state; loading writes into it.
        shape: of the whole logical tensor.
        replicated: every rank holds the same elements, so that ranks share the writing.
        flat: (name of the flat tensor, position in it) of the first element, where other state is kept by blocks of that tensor.
        rounded: of another dtype than what is saved; loading rounds. Never saved.
        volatile: may change before the next optimizer update (buffers); is copied when a save starts.
    """

    param: str
    kind: str
    shape: tuple[int, ...]
    start: int
    tensor: torch.Tensor
    replicated: bool = False
    volatile: bool = False
    rounded: bool = False
    flat: tuple[str, int] | None = None

    @property
    def stop(self) -> int:
        """End of the element range."""
        return self.start + self.tensor.numel()

    def wanted(self) -> Wanted:
        """What a load has to bring."""
        return Wanted(param=self.param, kind=self.kind, shape=self.shape, start=self.start, stop=self.stop)

    def cut(self, begin: int, end: int) -> LocalSlice:
        """Local elements `[begin, end)` of this slice."""
        flat = None if self.flat is None else (self.flat[0], self.flat[1] + begin)
        return replace(self, start=self.start + begin, tensor=self.tensor[begin:end], flat=flat)


def share_of(slices: list[LocalSlice], rank: int, world: int) -> list[LocalSlice]:
    """What `rank` writes: its own slices, and its part of those that every rank holds. Empty slices are dropped."""
    kept = []
    for s in slices:
        if s.replicated:
            s = s.cut(*owned_range(s.tensor.numel(), rank, world))
        if s.tensor.numel():
            kept.append(s)
    return kept


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
