"""The tape and the caching allocator's replay on cases that can be worked out by hand."""

import random

import pytest

from bigtrain.plan.allocator import least_limit, replay
from bigtrain.plan.machine import expandable_segments
from bigtrain.plan.tape import Tape

MIB = 2**20
RULES = [True, False]


def play(*events):
    tape = Tape()
    for kind, *values in events:
        getattr(tape, kind)(*values)
    return tape


def hold(key, mib, stream=0):
    return ("hold", key, mib * MIB, "x", stream)


def after(*events, limit=None, expandable=True):
    """Reserved MiB after each event."""
    return [size / MIB for size in replay(play(*events), limit, expandable=expandable, trace=True).after]


# What both kinds of memory have in common.


@pytest.mark.parametrize("expandable", RULES)
def test_small_requests_share_pages_of_2_mib(expandable):
    assert after(("hold", "a", 100, "x"), expandable=expandable) == [2]
    events = [("hold", i, 600 * 1024, "x") for i in range(4)]  # three fit in 2 MiB
    assert after(*events, expandable=expandable) == [2, 2, 2, 4]


@pytest.mark.parametrize("expandable", RULES)
def test_what_is_freed_is_used_again_split_and_merged(expandable):
    events = [hold("a", 40), ("drop", "a"), hold("b", 12), hold("c", 12), ("drop", "b"), ("drop", "c"), hold("d", 40)]
    assert after(*events, expandable=expandable) == [40] * 7


@pytest.mark.parametrize("expandable", RULES)
def test_streams_do_not_share(expandable):
    assert after(hold("a", 40), ("drop", "a"), hold("b", 40, 1), expandable=expandable) == [40, 40, 80]


@pytest.mark.parametrize("expandable", RULES)
def test_what_another_stream_uses_comes_back_late(expandable):
    events = [hold("a", 40), ("lend", "a"), hold("b", 40), ("drop", "b"), ("returned", "a"), hold("c", 40), hold("d", 40)]
    assert after(*events, expandable=expandable) == [40, 40, 80, 80, 80, 80, 80]
    assert play(*events).ledger().peak_bytes == 80 * MIB  # c and d; a is free for the ledger as soon as it is lent


@pytest.mark.parametrize("expandable", RULES)
def test_at_the_limit_the_allocator_waits_for_other_streams(expandable):
    found = replay(play(hold("a", 40), ("lend", "a"), hold("b", 40), ("returned", "a")), 60 * MIB, expandable=expandable)
    assert (found.peak_bytes, found.short_bytes, found.returns) == (40 * MIB, 0, 1)


def test_returns_are_those_of_the_last_step():
    """What the first step met once is met no more; what two pools take from each other comes back in each step."""
    step = [hold("a", 60), ("drop", "a"), hold("b", 60, 1), ("drop", "b")]
    for steps, returns in ((1, 1), (2, 2)):  # of two steps the second begins at the limit, where the first ended
        tape = play(*step * steps)
        tape.steady_from = (steps - 1) * len(step)
        assert replay(tape, 100 * MIB).returns == returns
    tape = play(*step, *[hold("b", 60, 1), ("drop", "b")])
    tape.steady_from = len(step)
    assert replay(tape, 100 * MIB).returns == 0


@pytest.mark.parametrize("expandable", RULES)
def test_what_is_short_at_the_limit_is_counted(expandable):
    found = replay(play(hold("a", 40), hold("b", 40)), 70 * MIB, expandable=expandable)
    assert (found.short_bytes, found.returns) == (10 * MIB, 1)


# Expandable.


def test_expandable_large_requests_share_pages_of_20_mib():
    assert after(hold("a", 2)) == [20]
    assert after(hold("a", 11), hold("b", 9), hold("c", 1.5)) == [20, 20, 40]
    assert after(hold("a", 33), hold("b", 7)) == [40, 40]  # seven are left of the second page


def test_expandable_the_last_free_block_grows_by_what_lacks():
    # 30 of 40 in use; 25 more end at 55: one more page. Segments: 30 and 26.
    assert after(hold("a", 30), hold("b", 25)) == [40, 60]
    assert after(hold("a", 30), hold("b", 25), expandable=False) == [30, 56]


def test_expandable_a_hole_is_filled_before_the_end_grows():
    # 0-40 a, 40-70 b, free 70-80. a freed: c (35) fits the hole of 40 as well as the end, which could become larger: the hole.
    assert after(hold("a", 40), hold("b", 30), ("drop", "a"), hold("c", 35)) == [40, 80, 80, 80]


def test_expandable_the_end_is_not_taken_where_a_larger_hole_holds_it():
    # Free: 0-40, and 60-80 at the end. d (8) fits the end better, but the end counts as large as it can become.
    events = [hold("a", 40), hold("b", 20), hold("c", 20), ("drop", "a"), ("drop", "c"), hold("d", 8), hold("e", 30),
              hold("f", 20)]  # fmt: skip
    # d 0-8, e 8-38, f 60-80: nothing is mapped.
    assert after(*events) == [40, 60, 80, 80, 80, 80, 80, 80]
    assert after(*events, hold("g", 2)) == [40, 60, 80, 80, 80, 80, 80, 80, 80]  # 38-40


def test_expandable_the_smallest_rest_is_of_use():
    # b leaves 0.5 of a page: c begins there. Segments keep a rest up to 1 MiB with its block, and c gets 22 of its own.
    events = [hold("a", 20), ("drop", "a"), hold("b", 19.5), hold("c", 20.5)]
    assert after(*events) == [20, 20, 20, 40]
    assert after(*events, expandable=False) == [20, 20, 20, 42]


def test_expandable_whole_pages_are_given_back_and_filled_again():
    # 0-50 a, 50-60 b, 60-110 c (to 120). Freed: 0-50: pages 0-40 go, 40-50 stay; c: 60-110 free: all to 120 goes.
    events = [hold("a", 50), hold("b", 10), hold("c", 50), ("drop", "a"), ("drop", "c"), ("empty_cache",)]
    assert after(*events) == [60, 60, 120, 120, 120, 20]
    # d (45) starts at 0, the lowest where free and unmapped together are large enough: pages 0-40 come back, 45 of 50 are used.
    assert after(*events, hold("d", 45))[-1] == 60
    # e (55) does not fit before b: behind it, from 60 to 115.
    assert after(*events, hold("e", 55))[-1] == 80


def test_expandable_at_its_limit():
    events = [hold("a", 40), hold("b", 10), ("drop", "a"), hold("c", 60)]
    # Without: 0-40 free, b 40-50, 50-60 free; c begins at 50 and maps 60-120.
    assert after(*events) == [40, 60, 60, 120]
    # At 90: 60 + 60 is too much; pages 0-40 go back, 20 stay; 20 + 60 fits; c 50-110 maps 60-120.
    assert after(*events, limit=90 * MIB) == [40, 60, 60, 80]
    found = replay(play(*events), 70 * MIB)
    assert (found.returns, found.short_bytes) == (1, 10 * MIB)


def test_the_least_limit():
    events = [hold("a", 40), hold("b", 10), ("drop", "a"), hold("c", 60)]
    tape = play(*events)
    assert tape.ledger().peak_bytes == 70 * MIB
    assert least_limit(tape, 70 * MIB) == 80 * MIB
    assert least_limit(tape, 70 * MIB, expandable=False) == 70 * MIB
    assert not replay(tape, 80 * MIB).short_bytes and replay(tape, 79 * MIB).short_bytes


# Segments.


def test_segments_by_size():
    assert after(hold("a", 2), expandable=False) == [20]
    assert after(hold("a", 11), expandable=False) == [12]


def test_segments_a_hole_in_the_middle_fragments():
    events = [hold("a", 60), ("drop", "a"), hold("b", 20), hold("c", 20), hold("d", 20), ("drop", "b"), ("drop", "d"),
              hold("e", 40)]  # fmt: skip
    assert after(*events, expandable=False)[-1] == 100


def test_segments_at_their_limit_are_given_back_whole():
    events = [hold("a", 40), ("drop", "a"), hold("b", 60)]
    assert after(*events, limit=70 * MIB, expandable=False) == [40, 40, 60]
    kept = [hold("a", 40), hold("b", 40), ("drop", "a"), ("empty_cache",), hold("c", 60)]
    assert after(*kept, expandable=False) == [40, 80, 80, 40, 100]


# Any tape.


def wild(seed, count=400):
    rng, tape, held = random.Random(seed), Tape(), []
    for i in range(count):
        chance = rng.random()
        if held and chance < 0.1:
            key = held.pop(rng.randrange(len(held)))
            tape.lend(key)
            tape.returned(key) if rng.random() < 0.5 else None
        elif held and chance < 0.45:
            tape.drop(held.pop(rng.randrange(len(held))))
        elif chance < 0.46:
            tape.empty_cache()
        else:
            tape.hold(i, rng.choice([100, 5000, 10**6, 3 * 10**6, 4 * 10**7]) * rng.randint(1, 4), "x", rng.randint(0, 1))
            held.append(i)
    return tape


@pytest.mark.parametrize("expandable", RULES)
@pytest.mark.parametrize("seed", range(20))
def test_reserved_is_never_less_than_allocated(seed, expandable):
    tape = wild(seed)
    ledger = tape.ledger()
    found = replay(tape, expandable=expandable, trace=True)
    assert found.peak_bytes >= ledger.peak_bytes and max(found.after) == found.peak_bytes
    assert sum(ledger.rows.values()) == ledger.peak_bytes
    limit = least_limit(tape, ledger.peak_bytes, expandable=expandable)
    assert ledger.peak_bytes <= limit <= found.peak_bytes + 40 * MIB
    assert not replay(tape, limit, expandable=expandable).short_bytes


@pytest.mark.parametrize("env, said", [
    ({}, True), ({"PYTORCH_CUDA_ALLOC_CONF": ""}, True), ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, False),
    ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False),
    ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128, expandable_segments: True"}, True),
])  # fmt: skip
def test_which_rules_by_what_the_user_has_set(env, said):
    assert expandable_segments(env) is said


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


@pytest.mark.parametrize("expandable", RULES)
@pytest.mark.parametrize("seed", range(20))
def test_a_temporary_is_an_allocation_that_is_freed_at_once(seed, expandable):
    rng = random.Random(seed)
    touched, apart = wild(seed), wild(seed)
    for tape in (touched, apart):
        rng.seed(seed)
        for i in range(200):
            size, stream = rng.choice([300, 10**6, 3 * 10**7]) * rng.randint(1, 5), rng.randint(0, 1)
            if tape is touched:
                tape.touch(size, "t", stream)
            else:
                tape.hold("t", size, "t", stream)
                tape.drop("t")
            if i % 3 == 0:
                tape.hold(("more", i), size // 2, "x", stream)
                tape.drop(("more", i - 30))
    one, other = touched.ledger(), apart.ledger()
    assert (one.peak_bytes, one.rows, one.final_bytes) == (other.peak_bytes, other.rows, other.final_bytes)
    for limit in (None, one.peak_bytes, 2 * one.peak_bytes):
        found, wanted = (replay(tape, limit, expandable=expandable) for tape in (touched, apart))
        assert (found.peak_bytes, found.short_bytes) == (wanted.peak_bytes, wanted.short_bytes)
