"""How reads are grouped for the disk, and memory that is asked for before it is filled."""

import torch

from bigtrain.memory import heap
from bigtrain.weights.read import Reader, ReadOp, _spans


def ops_at(*places):
    return [ReadOp(file, begin, torch.uint8, torch.empty(length, dtype=torch.uint8)) for file, begin, length in places]


def test_reads_close_together_are_asked_for_as_one():
    ops = ops_at(("a", 0, 10), ("a", 10, 5), ("a", 20, 5), ("b", 30, 5), ("b", 100, 1))
    assert list(_spans(ops, 0)) == [("a", 0, 15), ("a", 20, 25), ("b", 30, 35), ("b", 100, 101)]
    assert list(_spans(ops, 5)) == [("a", 0, 25), ("b", 30, 35), ("b", 100, 101)]
    assert list(_spans([], 5)) == []


def test_populated_memory_keeps_its_values_and_its_neighbours():
    whole = torch.arange(3 << 20, dtype=torch.int32)
    for first, last in [(0, 3 << 20), (1, 1 << 20), (1000, 1500), (7, 7)]:
        heap.populate(whole[first:last].data_ptr(), whole[first:last].nbytes)
    assert torch.equal(whole, torch.arange(3 << 20, dtype=torch.int32))


def test_a_read_fills_exactly_its_destination(tmp_path):
    content = torch.randint(0, 256, (40 << 20,), dtype=torch.uint8)
    file = tmp_path / "f"
    file.write_bytes(content.numpy().tobytes())
    dest = torch.zeros(40 << 20, dtype=torch.uint8)
    pieces = [(3, 5), (5, 20_000_003), (20_000_100, 39_000_001)]  # blocks, cut and joined, at odd places
    for threads in (1, 3):
        dest.zero_()
        with Reader(threads) as reader:
            count = reader.run([ReadOp(str(file), a, torch.uint8, dest[a:b]) for a, b in reversed(pieces)])
        wanted = torch.zeros_like(dest)
        for a, b in pieces:
            wanted[a:b] = content[a:b]
        assert torch.equal(dest, wanted) and count == sum(b - a for a, b in pieces)
