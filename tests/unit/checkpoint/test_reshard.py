"""The plan from saved to wanted slices, exhaustively on small integers."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigtrain.checkpoint.manifest import Commit, RankManifest, SavedSlice, parse_commit, parse_manifest
from bigtrain.checkpoint.reshard import Wanted, index_slices, plan_reads
from bigtrain.errors import CheckpointError


def cut(numel: int, world: int) -> list[tuple[int, int]]:
    size = -(-numel // world)
    return [(min(r * size, numel), min((r + 1) * size, numel)) for r in range(world)]


def saved_by(numel: int, cuts: list[tuple[int, int]]) -> list[tuple[int, SavedSlice]]:
    return [
        (r, SavedSlice(param="w", kind="master", dtype="F32", shape=(numel,), start=a, stop=b, offset=0))
        for r, (a, b) in enumerate(cuts)
    ]


@pytest.mark.parametrize("numel", range(1, 14))
def test_every_element_arrives_once_at_any_world_size(numel):
    for have, want in itertools.product(range(1, 6), repeat=2):
        index = index_slices(saved_by(numel, cut(numel, have)))
        for start, stop in cut(numel, want):
            got: list[int | None] = [None] * (stop - start)
            for read in plan_reads(index, [Wanted(param="w", kind="master", shape=(numel,), start=start, stop=stop)]):
                for k in range(read.count):
                    assert got[read.target_start + k] is None
                    got[read.target_start + k] = read.saved.start + read.source_start + k
            assert got == list(range(start, stop))


@given(st.integers(1, 60), st.data())
def test_any_cuts(numel, data):
    points = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=6))})
    index = index_slices(saved_by(numel, list(itertools.pairwise(points))))
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    reads = plan_reads(index, [Wanted(param="w", kind="master", shape=(numel,), start=start, stop=stop)])
    assert sum(r.count for r in reads) == stop - start


def test_gap_overlap_and_difference_are_refused():
    for cuts, word in (([(0, 3), (4, 8)], "missing"), ([(0, 5), (4, 8)], "twice"), ([(0, 7)], "missing")):
        with pytest.raises(CheckpointError, match=word):
            index_slices(saved_by(8, cuts))
    odd = [
        *saved_by(8, [(0, 4)]),
        (1, SavedSlice(param="w", kind="master", dtype="BF16", shape=(8,), start=4, stop=8, offset=0)),
    ]
    with pytest.raises(CheckpointError, match="differ"):
        index_slices(odd)


def test_all_mismatches_are_named_at_once():
    index = index_slices(saved_by(8, [(0, 8)]))
    with pytest.raises(CheckpointError) as error:
        plan_reads(
            index,
            [
                Wanted(param="w", kind="master", shape=(4, 2), start=0, stop=8),
                Wanted(param="v", kind="master", shape=(8,), start=0, stop=8),
            ],
        )
    assert "shape (8,) in the checkpoint, (4, 2) in the model" in str(error.value)
    assert "master of v is not in the checkpoint" in str(error.value)


def test_manifest_and_commit_survive_the_trip_and_refuse_what_does_not_fit():
    slice_ = SavedSlice(param="w", kind="master", dtype="F32", shape=(8,), start=0, stop=8, offset=64, xxh3=("ab",))
    whole = RankManifest(rank=0, world_size=1, data_name="d.safetensors", data_bytes=96, slices=(slice_,), state={"a": 1})
    assert parse_manifest(whole.to_json(), "m") == whole
    damage = (
        (b'"stop":8', b'"stop":9'),
        (b'"bytes":96', b'"bytes":95'),
        (b'"F32"', b'"F33"'),
        (b'"version":1', b'"version":2'),
        (b'"name":"d', b'"name":"../d'),
        (b'"start":0', b'"start":-1'),
        (b'["ab"]', b"[]"),
    )
    for old, new in damage:
        assert old in whole.to_json()
        with pytest.raises(CheckpointError):
            parse_manifest(whole.to_json().replace(old, new), "m")
    files = {"run.json": (3, "a"), "rank-00000-of-00001.json": (4, "b")}
    commit = Commit(step=4, world_size=1, files=files)
    assert parse_commit(commit.to_json(), "c") == commit
    with pytest.raises(CheckpointError, match="lists"):
        parse_commit(Commit(step=4, world_size=2, files=files).to_json(), "c")
