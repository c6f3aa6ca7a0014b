"""8-bit moments under another partition.

Moments of 8 bits are codes with one scale for each block of 256 elements, and the blocks lie on the flat partitions of the run
that saved. Where this run's partitions are cut elsewhere, the codes are decoded with the saver's scales and encoded again in this
run's blocks. A block that lies as before comes back bit for bit; any other value moves by half a step between codes at most.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from bigtrain.checkpoint.reshard import Index, Read, Wanted, plan_reads
from bigtrain.checkpoint.slices import LocalSlice
from bigtrain.optim import arithmetic
from bigtrain.optim.table import BLOCK_ELEMS

# kind of the codes: (kind of their scales, whether the codes are signed)
MOMENTS = {"state1": ("absmax1", True), "state2": ("absmax2", False)}
SCALES = {scale for scale, _ in MOMENTS.values()}
Piece = tuple[str, tuple[int, ...], int, int, int]


@dataclass
class _Decoding:
    """Codes of one saved slice, the scales of the blocks they lie in, and where their values go."""

    values: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    skip: int  # elements of the first block that lie before the first code


@dataclass
class Reblock:
    """One moment of one flat tensor. `slices` is what to read; `finish`, once it was read, fills the optimizer's state."""

    state: dict[str, Any]
    kind: str
    values: torch.Tensor
    slices: list[LocalSlice] = field(default_factory=list)
    decodings: list[_Decoding] = field(default_factory=list)

    def finish(self) -> None:
        """Decode, and encode in this run's blocks."""
        scale_kind, signed = MOMENTS[self.kind]
        codes, _, _ = arithmetic.code_tables(signed, torch.device("cpu"))
        for d in self.decodings:
            scales = d.scales.repeat_interleave(BLOCK_ELEMS)[d.skip : d.skip + d.codes.numel()]
            torch.mul(codes[d.codes.int()], scales, out=d.values)
        if self.state[self.kind].dtype == torch.float32:
            self.state[self.kind].view(-1).copy_(self.values)
            return
        index, scale = arithmetic.encode(self.values, signed)
        self.state[self.kind].view(-1).copy_(index)
        self.state[scale_kind].view(-1).copy_(scale)


def in_place(index: Index, own_name: str, pieces: Iterable[Piece], exact: bool) -> bool:
    """True if the saved moments of this flat tensor can be read as they are.

    Args:
        index: what the checkpoint holds.
        own_name: of the flat tensor.
        pieces: as for `reblock`.
        exact: the optimizer keeps fp32 moments for a tensor of this size.

    Returns:
        Whether they are of the kind that the optimizer keeps here, and, if codes, cut as the saver's of that name.
    """
    return all(
        (read.saved.dtype == "F32") == exact
        and read.saved.flat in (None, (own_name, offset + read.target_start - read.source_start))
        for kind in MOMENTS
        for (name, shape, start, offset, count) in pieces
        for read in _reads(index, kind, name, shape, start, count)
    )


def reblock(
    state: dict[str, Any], flat: torch.Tensor, pieces: Iterable[Piece], index: Index, fp32_below_elems: int
) -> list[Reblock]:
    """Make the 8-bit state of one flat tensor anew, and plan what fills it.

    Args:
        state: the optimizer's dict for `flat`.
        flat: the flat tensor.
        pieces: (parameter, full shape, first element, offset in `flat`, number of elements).
        index: what the checkpoint holds.
        fp32_below_elems: the optimizer keeps fp32 moments for tensors of fewer elements.
    """
    out = []
    pieces, n = list(pieces), flat.numel()
    device = next((t.device for t in state.values() if isinstance(t, torch.Tensor) and t.dim() > 0), flat.device)
    for kind, (scale_kind, _) in MOMENTS.items():
        if not any((kind, name) in index for name, *_ in pieces):
            continue
        exact = n < fp32_below_elems
        state[kind] = torch.zeros(flat.shape, dtype=torch.float32 if exact else torch.uint8, device=device)
        if not exact:
            state[scale_kind] = torch.zeros(-(-n // BLOCK_ELEMS), dtype=torch.float32, device=device)
        made = Reblock(state, kind, torch.zeros(n))
        for name, shape, start, offset, count in pieces:
            for read in _reads(index, kind, name, shape, start, count):
                begin = offset + read.target_start
                _plan_read(made, read, made.values[begin : begin + read.count], index)
        out.append(made)
    return out


def _reads(index: Index, kind: str, name: str, shape: tuple[int, ...], start: int, count: int) -> list[Read]:
    if (kind, name) not in index:
        return []
    return plan_reads(index, [Wanted(param=name, kind=kind, shape=shape, start=start, stop=start + count)])


def _plan_read(made: Reblock, read: Read, values: torch.Tensor, index: Index) -> None:
    """Add one stretch of a saved slice: fp32 values as they are, or codes with the scales of their blocks."""
    saved, first = read.saved, read.saved.start + read.source_start

    def part(tensor: torch.Tensor) -> LocalSlice:
        return LocalSlice(param=saved.param, kind=saved.kind, shape=saved.shape, start=first, tensor=tensor)

    if saved.dtype == "F32":
        made.slices.append(part(values))
        return
    assert saved.flat is not None  # `check_layout` has seen to it
    owner, at = saved.flat
    begin = at + read.source_start
    low, high = begin // BLOCK_ELEMS, -(-(begin + read.count) // BLOCK_ELEMS)
    scale_kind = MOMENTS[made.kind][0]
    codes, scales = torch.empty(read.count, dtype=torch.uint8), torch.empty(high - low)
    shape = index[(scale_kind, owner)][0][1].shape
    made.slices += [part(codes), LocalSlice(param=owner, kind=scale_kind, shape=shape, start=low, tensor=scales)]
    made.decodings.append(_Decoding(values, codes, scales, begin - low * BLOCK_ELEMS))
