"""Gradients as pieces: tensors that in this order cover a flat partition, wherever they lie in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from bigtrain.plan.constants import GATHER_ELEMS


def cut(pieces: Sequence[torch.Tensor], limit: int) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Flat gradient chunks with their offsets, each starting at a multiple of 256, as views that follow each other.

    Args:
        pieces: contiguous tensors that follow each other in the partition.
        limit: elements of a chunk at most; a multiple of 256.
    """
    found = runs([p.reshape(-1) for p in pieces if p.numel()])
    if len(found) > 1:
        limit = min(limit, GATHER_ELEMS)
    waiting: list[torch.Tensor] = []
    start = filled = 0
    for run in found:
        while run.numel():
            part, run = run[: limit - filled], run[limit - filled :]
            waiting.append(part)
            filled += part.numel()
            if filled == limit:
                yield start, waiting
                start, filled, waiting = start + filled, 0, []
    if waiting:
        yield start, waiting


def joined(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of views that follow each other; a copy only if there are several."""
    return grads[0] if len(grads) == 1 else torch.cat(list(grads))


def runs(pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Flat pieces, neighbours joined that also follow each other in memory (views of one buffer)."""
    found: list[torch.Tensor] = []
    for piece in pieces:
        last = found[-1] if found else None
        if (
            last is not None
            and last.dtype == piece.dtype
            and last.untyped_storage().data_ptr() == piece.untyped_storage().data_ptr()
            and last.storage_offset() + last.numel() == piece.storage_offset()
        ):
            found[-1] = last.as_strided((last.numel() + piece.numel(),), (1,))
        else:
            found.append(piece)
    return found
