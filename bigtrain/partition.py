"""Who owns which elements under ZeRO: plain arithmetic on Python integers (no overflow, no torch).

Stage 3 (DeepSpeed 0.19.8, `partition_parameters.py: _aligned_size, _partition_param`): every parameter is flattened, padded
to a multiple of the number of ranks, and rank r owns the contiguous slice `[r * s, (r + 1) * s)` with `s = ceil(numel / N)`.

Stages 1 and 2 (`stage_1_and_2.py: flatten_dense_tensors_aligned`): the parameters of one optimizer group are laid one after
another, the whole is padded to a multiple of `ALIGNMENT * N`, and rank r owns one contiguous slice of it, which may cut
parameters in two.

All quantities are counts of elements; ranges are half open. Padding belongs to the last ranks and holds no value.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

ALIGNMENT = 2  # elements per rank; `nccl_start_alignment_factor` in DeepSpeed's stage_1_and_2.py (2 elements of 2 bytes)


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` elements of parameter `index`, from its element `start`, at element `offset` of the owner's flat partition."""

    index: int
    start: int
    offset: int
    length: int


def _check(numel: int, world: int, rank: int = 0) -> None:
    if world < 1 or not 0 <= rank < world or numel < 0:
        raise ValueError(f"no partition of {numel} elements for rank {rank} of {world}")


def partition_size(numel: int, world: int) -> int:
    """Elements of one rank's partition of a parameter at stage 3, padding included: ceil(numel / world)."""
    _check(numel, world)
    return -(-numel // world)


def owned_range(numel: int, rank: int, world: int) -> tuple[int, int]:
    """`(start, stop)`: the real elements (no padding) of a parameter that `rank` owns at stage 3; may be empty."""
    _check(numel, world, rank)
    size = partition_size(numel, world)
    return min(rank * size, numel), min((rank + 1) * size, numel)


def parameter_pieces(numels: Sequence[int], rank: int, world: int) -> list[Piece]:
    """Stage 3: `rank`'s partitions of several parameters laid one after another (as in an optimizer sub-group).

    Each partition takes `partition_size` elements of the flat buffer; the padding at its end is not part of a piece.
    """
    pieces, offset = [], 0
    for index, numel in enumerate(numels):
        start, stop = owned_range(numel, rank, world)
        if stop > start:
            pieces.append(Piece(index, start, offset, stop - start))
        offset += partition_size(numel, world)
    return pieces


def group_partition_size(
    numels: Sequence[int], world: int, alignment: int = ALIGNMENT, gaps: Sequence[int] | None = None
) -> int:
    """Stages 1 and 2: elements of one rank's partition of a group, padding included."""
    total = sum(numels) + sum(gaps or ())
    _check(total, world)
    return -(-total // (alignment * world)) * alignment


def group_pieces(
    numels: Sequence[int], rank: int, world: int, alignment: int = ALIGNMENT, gaps: Sequence[int] | None = None
) -> list[Piece]:
    """Stages 1 and 2: what `rank` owns of a group whose parameters have `numels` elements, in the order of the group.

    `gaps` are the elements of padding after each parameter (`zero_optimization.parameter_alignment`; none by default).
    """
    size = group_partition_size(numels, world, alignment, gaps)
    _check(sum(numels), world, rank)
    taken = list(accumulate(numel + gap for numel, gap in zip(numels, gaps or [0] * len(numels))))
    firsts = [0, *taken[:-1]]
    begin, end = rank * size, (rank + 1) * size
    pieces: list[Piece] = []
    index = bisect_right(taken, begin)
    while index < len(numels) and firsts[index] < end:
        first = firsts[index]
        low, high = max(begin, first), min(end, first + numels[index])
        if high > low:
            pieces.append(Piece(index, low - first, low - begin, high - low))
        index += 1
    return pieces


def last_share(numels: Sequence[int], share: float) -> list[int]:
    """Indices of the fewest last parameters that hold at least `share` (0 to 1) of all elements, in ascending order.

    In a model's order these are the ones whose gradients backward completes first.
    """
    wanted, first = share * sum(numels), len(numels)
    while first > 0 and wanted > 0:
        first -= 1
        wanted -= numels[first]
    return list(range(first, len(numels)))
