"""The tape and the caching allocator's replay on cases that can be worked out by hand."""

import random

import pytest

from bigtrain.plan.allocator import reserved_bytes
from bigtrain.plan.tape import Tape

MIB = 2**20


def play(*events):
    tape = Tape()
    for kind, *values in events:
        getattr(tape, kind)(*values)
    return tape


def test_small_and_large_segments():
    assert reserved_bytes(play(("hold", "a", 100, "x")))[0] == 2 * MIB
    assert reserved_bytes(play(("hold", "a", 2 * MIB, "x")))[0] == 20 * MIB
    assert reserved_bytes(play(("hold", "a", 11 * MIB, "x")))[0] == 12 * MIB
    assert reserved_bytes(play(("hold", "a", 600 * 1024, "x"), ("hold", "b", 600 * 1024, "x")))[0] == 2 * MIB


def test_a_freed_segment_is_used_again_and_split():
    events = [("hold", "a", 40 * MIB, "x"), ("drop", "a"), ("hold", "b", 20 * MIB, "x"), ("hold", "c", 20 * MIB, "x")]
    assert reserved_bytes(play(*events))[0] == 40 * MIB


def test_neighbours_merge_when_freed():
    events = [("hold", "a", 40 * MIB, "x"), ("drop", "a"), ("hold", "b", 12 * MIB, "x"), ("hold", "c", 12 * MIB, "x"),
              ("drop", "b"), ("drop", "c"), ("hold", "d", 40 * MIB, "x")]  # fmt: skip
    assert reserved_bytes(play(*events))[0] == 40 * MIB


def test_a_hole_in_the_middle_fragments():
    events = [("hold", "a", 60 * MIB, "x"), ("drop", "a"), ("hold", "b", 20 * MIB, "x"), ("hold", "c", 20 * MIB, "x"),
              ("hold", "d", 20 * MIB, "x"), ("drop", "b"), ("drop", "d"), ("hold", "e", 40 * MIB, "x")]  # fmt: skip
    assert reserved_bytes(play(*events))[0] == 100 * MIB


def test_streams_do_not_share():
    events = [("hold", "a", 40 * MIB, "x", 0), ("drop", "a"), ("hold", "b", 40 * MIB, "x", 1)]
    assert reserved_bytes(play(*events))[0] == 80 * MIB


def test_at_its_limit_the_allocator_gives_cached_segments_back():
    events = [("hold", "a", 40 * MIB, "x"), ("drop", "a"), ("hold", "b", 60 * MIB, "x")]
    assert reserved_bytes(play(*events), 70 * MIB) == (60 * MIB, False)
    assert reserved_bytes(play(*events), 50 * MIB)[1] is True


def test_empty_cache_returns_whole_segments_only():
    events = [("hold", "a", 40 * MIB, "x"), ("hold", "b", 40 * MIB, "x"), ("drop", "a"), ("empty_cache",),
              ("hold", "c", 60 * MIB, "x")]  # fmt: skip
    assert reserved_bytes(play(*events))[0] == 100 * MIB


@pytest.mark.parametrize("seed", range(20))
def test_reserved_is_never_less_than_allocated(seed):
    rng, tape, held = random.Random(seed), Tape(), []
    for i in range(400):
        if held and rng.random() < 0.45:
            tape.drop(held.pop(rng.randrange(len(held))))
        else:
            tape.hold(
                i, rng.choice([100, 5000, 10**6, 3 * 10**6, 4 * 10**7]) * rng.randint(1, 4), "x", rng.randint(0, 1)
            )
            held.append(i)
    ledger = tape.ledger()
    assert reserved_bytes(tape)[0] >= ledger.peak_bytes
    assert sum(ledger.rows.values()) == ledger.peak_bytes


def test_ledger_names_the_phase_of_the_peak():
    tape = play(("phase", "one"), ("hold", "a", 1024, "x"), ("phase", "two"), ("hold", "b", 2048, "y"), ("drop", "b"),
                ("phase", "three"))  # fmt: skip
    ledger = tape.ledger()
    assert (ledger.peak_bytes, ledger.peak_phase, ledger.final_bytes) == (3072, "two", 1024)
    assert ledger.rows == {"x": 1024, "y": 2048}
    assert ledger.by_phase == {"one": 1024, "two": 3072, "three": 1024}


def test_holding_a_key_twice_is_a_fault_of_the_simulation():
    with pytest.raises(AssertionError, match="held already"):
        play(("hold", "a", 1, "x"), ("hold", "a", 1, "x"))
