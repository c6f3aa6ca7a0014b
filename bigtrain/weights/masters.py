"""The fp32 masters of an engine as the source of an export, where its files hold more bits than the model's weights."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from bigtrain import partition, ranks
from bigtrain.weights.layout import Layout
from bigtrain.weights.slots import Piece, Slot
from bigtrain.zero.flat import MasterOf


@dataclass
class Masters:
    """Tensors that are written from their masters.

    Attributes:
        own: name of the tensor -> this rank's part of the master, None if it has none; every rank has the same names.
        whole: names of those whose master every rank holds whole (stage 0).
    """

    own: dict[str, Piece | None] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)

    def owned_piece(self, slot: Slot, name: str) -> Piece | None:
        """What this rank writes of a tensor in `own`."""
        piece = self.own[name]
        if piece is None or name not in self.whole:
            return piece
        start, stop = partition.owned_range(slot.numel, ranks.rank(), ranks.world_size())
        return Piece(start, piece.flat[start:stop]) if stop > start else None

    def gather(self, slot: Slot, name: str) -> torch.Tensor:
        """All of a tensor in `own`, on every rank; collective unless every rank holds it whole."""
        piece = self.own[name]
        if name in self.whole and piece is not None:
            return piece.flat.view(slot.shape)
        flat = torch.zeros(slot.numel, dtype=torch.float32, device=ranks.device())
        if piece is not None:
            flat[piece.start : piece.start + piece.flat.numel()].copy_(piece.flat)
        if ranks.is_distributed():
            dist.all_reduce(flat.view(torch.int32))  # one rank has each element, the others 0; sums of bits leave -0.0 as it is
        return flat.view(slot.shape)


def masters_for(layout: Layout, master_of: MasterOf | None) -> Masters:
    """Which tensors of an export to take from masters: those in another float type than the model's, of fewer bits than fp32.

    Rounding a bf16 weight to fp16, or widening it, would give other values than the master that training updates; a checkpoint
    holds the master, and its export the same bytes. A tensor whose masters are not all at hand (swapped to NVMe) is taken from
    the weight. All ranks call it.
    """
    if master_of is None:
        return Masters()
    wanted = {source: layout.dtypes[part.name] for shard in layout.shards for part in shard.parts for source in part.sources}
    finer = {
        name: slot
        for name, slot in layout.slots.items()
        if name in wanted and slot.dtype.is_floating_point and slot.dtype.itemsize < 4 and wanted[name] != slot.dtype
    }
    mine = {name: piece for name, slot in finer.items() if (piece := _piece(slot, master_of)) is not None}
    held = {name: piece.flat.numel() for name, piece in mine.items()}
    counts = ranks.all_gather_object(held, "which masters an export is written from")
    out = Masters()
    for name, slot in finer.items():
        each = [count.get(name, 0) for count in counts]
        if slot.numel and (sum(each) == slot.numel or all(count == slot.numel for count in each)):
            out.own[name] = mine.get(name)
            if len(each) > 1 and all(count == slot.numel for count in each):
                out.whole.add(name)
    return out


def _piece(slot: Slot, master_of: MasterOf) -> Piece | None:
    found = master_of(slot.tensor)
    if found is None:
        return None
    start, flat = found
    count = max(0, min(flat.numel(), slot.numel - start))  # without the padding of a partition
    return Piece(start, flat[:count]) if count else None
