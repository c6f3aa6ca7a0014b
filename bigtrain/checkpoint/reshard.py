"""From slices that were saved to slices that are wanted: pure arithmetic on intervals. Torch-free.

The saver's ranks and ZeRO stage do not appear here: a saved slice says which elements it holds, a wanted slice says which
elements a rank owns now, and the plan is their intersection.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bigtrain.checkpoint.manifest import SavedSlice
from bigtrain.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Elements `[start, stop)` of (`kind`, `param`) that this rank owns; `shape` is that of the whole tensor."""

    param: str
    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """Copy `count` elements from element `source_start` of a saved slice to element `target_start` of wanted slice `wanted`."""

    wanted: int
    rank: int
    saved: SavedSlice
    source_start: int
    target_start: int
    count: int


Index = Mapping[tuple[str, str], Sequence[tuple[int, SavedSlice]]]


def index_slices(slices: Iterable[tuple[int, SavedSlice]]) -> dict[tuple[str, str], list[tuple[int, SavedSlice]]]:
    """Group (rank, slice) pairs by logical tensor, sorted by start, and check that each tensor is covered exactly once.

    Raises:
        CheckpointError: a gap, an overlap, or two slices of one tensor that differ in dtype or shape.
    """
    index: dict[tuple[str, str], list[tuple[int, SavedSlice]]] = defaultdict(list)
    for rank, saved in slices:
        if saved.stop > saved.start:
            index[saved.key].append((rank, saved))
    for (kind, param), held in index.items():
        held.sort(key=lambda pair: pair[1].start)
        position, first = 0, held[0][1]
        for _, saved in held:
            if (saved.dtype, saved.shape) != (first.dtype, first.shape):
                raise CheckpointError(
                    f"{kind} of {param}: slices differ: {first.dtype} {first.shape}, {saved.dtype} {saved.shape}"
                )
            if saved.start != position:
                what = "is missing" if saved.start > position else "is there twice"
                low, high = sorted((position, saved.start))
                raise CheckpointError(f"{kind} of {param}: element range [{low}, {high}) {what}")
            position = saved.stop
        if position != first.numel:
            raise CheckpointError(f"{kind} of {param}: element range [{position}, {first.numel}) is missing")
    return dict(index)


def plan_reads(index: Index, wanted: Sequence[Wanted]) -> list[Read]:
    """The reads that fill `wanted`, in order of (rank, offset) so that files are read forwards.

    Raises:
        CheckpointError: lists every wanted tensor that the checkpoint lacks or holds in another shape.
    """
    reads: list[Read] = []
    problems: list[str] = []
    for position, want in enumerate(wanted):
        if want.stop <= want.start:
            continue
        held = index.get((want.kind, want.param))
        if not held:
            problems.append(f"{want.kind} of {want.param} is not in the checkpoint")
        elif held[0][1].shape != want.shape:
            problems.append(
                f"{want.kind} of {want.param}: shape {held[0][1].shape} in the checkpoint, {want.shape} in the model"
            )
        else:
            reads += _intersect(position, want, held)
    if problems:
        more = f"\n  ... and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise CheckpointError("the checkpoint does not match this run:\n  " + "\n  ".join(problems[:20]) + more)
    return sorted(reads, key=lambda r: (r.rank, r.saved.offset, r.source_start))


def _intersect(position: int, want: Wanted, held: Sequence[tuple[int, SavedSlice]]) -> list[Read]:
    starts = [saved.start for _, saved in held]
    found = []
    for rank, saved in held[max(0, bisect_right(starts, want.start) - 1) :]:
        if saved.start >= want.stop:
            break
        low, high = max(want.start, saved.start), min(want.stop, saved.stop)
        if high > low:
            found.append(
                Read(
                    wanted=position,
                    rank=rank,
                    saved=saved,
                    source_start=low - saved.start,
                    target_start=low - want.start,
                    count=high - low,
                )
            )
    return found
