"""How much disk a run will take, against a count step by step."""

import itertools

import pytest

from bigtrain.plan.disk import SPARE_BYTES, Writes, saves_to_come


def _by_hand(there: int, saves: int, keep: int | None, checkpoint: int, model: int) -> int:
    """Most bytes beyond those of the beginning, save by save."""
    held, most = there, 0
    for _ in range(saves):
        held += 1
        most = max(most, (held - there) * checkpoint)
        held = held if keep is None else min(held, keep)
    return max(most, (held - there) * checkpoint + model)


def test_the_peak_is_that_of_a_run_save_by_save():
    for there, saves, keep in itertools.product(range(4), range(6), (None, 1, 2, 3)):
        if keep is not None and there > keep:
            continue
        for model in (0, 7, 300):
            writes = Writes(checkpoint_bytes=100, model_bytes=model, saves=saves, keep=keep, there=there)
            assert writes.peak_bytes - SPARE_BYTES == _by_hand(there, saves, keep, 100, model), (there, saves, keep, model)


@pytest.mark.parametrize(
    "start,steps,every,want", [(0, 10, None, 0), (0, 10, 5, 2), (0, 11, 5, 3), (5, 11, 5, 2), (11, 11, 5, 0), (0, 3, 50, 1)]
)
def test_saves_to_come(start, steps, every, want):
    by_hand = {s for s in range(start + 1, steps + 1) if every and (s % every == 0 or s == steps)}
    assert saves_to_come(start, steps, every) == want == len(by_hand)


def test_what_is_said():
    gib = 2**30
    writes = Writes(checkpoint_bytes=10 * gib, model_bytes=2 * gib, saves=5, keep=2, there=0)
    assert writes.too_much(10 * gib, "/out").startswith("a checkpoint of this run takes 10.06 GiB and /out has 10.00 GiB free")
    assert writes.too_much(11 * gib, "/out") is None
    said = writes.too_many(11 * gib, "/out")
    assert "writes up to 3 more checkpoint(s) of 10.00 GiB at a time and a model of 2.00 GiB: 30.06 GiB" in said
    assert writes.too_many(31 * gib, "/out") is None
    only_model = Writes(checkpoint_bytes=10 * gib, model_bytes=2 * gib, saves=0, keep=None, there=0)
    assert "the exported model of this run takes 2.06 GiB" in only_model.too_much(gib, "/out")
    nothing = Writes(checkpoint_bytes=10 * gib, model_bytes=0, saves=0, keep=None, there=0)
    assert nothing.too_much(0, "/out") is None
