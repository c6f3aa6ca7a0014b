"""Slice arithmetic, exhaustively on small integers and beyond 2^31 elements."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigtrain import partition


@pytest.mark.parametrize("world", range(1, 7))
def test_stage3_partitions_cover_each_element_once(world):
    for numel in range(0, 40):
        owned = [element for rank in range(world) for element in range(*partition.owned_range(numel, rank, world))]
        assert owned == list(range(numel))


def test_known_values():
    assert partition.partition_size(10, 4) == 3
    assert [partition.owned_range(10, r, 4) for r in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [partition.owned_range(2, r, 4) for r in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]
    assert partition.group_partition_size([5, 7], 2) == 6
    assert partition.group_pieces([5, 7], 1, 2) == [partition.Piece(1, 1, 0, 6)]
    assert partition.parameter_pieces([5, 2], 1, 3) == [partition.Piece(0, 2, 0, 2), partition.Piece(1, 1, 2, 1)]


def test_more_than_two_to_the_31_elements():
    numel, world = 2**31 * 5 + 3, 4
    ranges = [partition.owned_range(numel, rank, world) for rank in range(world)]
    assert ranges[0][0] == 0 and ranges[-1][1] == numel
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    pieces = [piece for rank in range(world) for piece in partition.group_pieces([3, numel], rank, world)]
    assert sum(piece.length for piece in pieces) == numel + 3


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 6), st.sampled_from([1, 2, 4]))
def test_group_pieces_cover_each_element_once(numels, world, alignment):
    size = partition.group_partition_size(numels, world, alignment)
    assert size % alignment == 0 and 0 <= size * world - sum(numels) < alignment * world
    seen = []
    for rank in range(world):
        pieces = partition.group_pieces(numels, rank, world, alignment)
        for piece in pieces:
            position = rank * size + piece.offset
            assert sum(numels[: piece.index]) + piece.start == position
            assert piece.offset + piece.length <= size
            seen += [(piece.index, piece.start + i) for i in range(piece.length)]
    assert seen == [(index, element) for index, numel in enumerate(numels) for element in range(numel)]


def test_gaps_between_parameters_belong_to_no_piece():
    numels, gaps, world = [5, 3, 8], [3, 5, 0], 2
    pieces = [partition.group_pieces(numels, rank, world, gaps=gaps) for rank in range(world)]
    size = partition.group_partition_size(numels, world, gaps=gaps)
    positions = [rank * size + piece.offset for rank in range(world) for piece in pieces[rank]]
    assert size == 12 and positions == [0, 8, 16] and [p.length for own in pieces for p in own] == [5, 3, 8]


@pytest.mark.parametrize("arguments", [(-1, 2), (4, 0)])
def test_impossible_partitions_are_refused(arguments):
    with pytest.raises(ValueError, match="no partition"):
        partition.partition_size(*arguments)
