"""The batch solver, exhaustively on small integers and by property on large ones."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigtrain.config import RunValues, resolve
from bigtrain.config.batch import ACCUMULATION, GLOBAL, MICRO, BatchError, Given, nearest_valid, solve_batch
from bigtrain.errors import ConfigError

small = st.integers(1, 64)
maybe = st.none() | st.integers(1, 512)


def file(value):
    return None if value is None else Given(value, "file")


def test_every_small_case_is_solved_or_refused():
    for m, a, t, ranks in itertools.product([None, 1, 2, 3], [None, 1, 2, 3], [None, *range(1, 13)], range(1, 5)):
        fits = [
            (x, y)
            for x in range(1, 13)
            for y in range(1, 13)
            if m in (None, x) and a in (None, y) and t in (None, x * y * ranks)
        ]
        try:
            batch = solve_batch(file(m), file(a), file(t), ranks)
        except BatchError:
            # With the global batch alone DeepSpeed's order (no accumulation) always fits when any pair does.
            assert not fits, (m, a, t, ranks)
        else:
            assert batch.micro * batch.accumulation * ranks == batch.total
            assert m in (None, batch.micro) and a in (None, batch.accumulation) and t in (None, batch.total)


@settings(deadline=None)
@given(small, small, small)
def test_any_two_give_the_third(m, a, ranks):
    t = m * a * ranks
    for known in ((m, a, None), (m, None, t), (None, a, t), (m, a, t)):
        batch = solve_batch(*map(file, known), ranks)
        assert (batch.micro, batch.accumulation, batch.total) == (m, a, t)


@settings(deadline=None)
@given(maybe, maybe, st.integers(1, 512), small)
def test_the_choice_offered_is_valid(m, a, t, ranks):
    try:
        solve_batch(file(m), file(a), file(t), ranks)
    except BatchError as error:
        nm, na, nt = nearest_valid(file(m), file(a), Given(t, "file"), ranks)
        assert solve_batch(Given(nm, ""), Given(na, ""), Given(nt, ""), ranks).total == nt
        assert f"{GLOBAL} {nt}, {MICRO} {nm}, {ACCUMULATION} {na}" in str(error)


def test_B02_variants():
    base = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    done = resolve({**base, "train_batch_size": 12}, world_size=3).config
    assert (done[MICRO], done[ACCUMULATION], done[GLOBAL]) == (4, 1, 12)
    done = resolve(base, world_size=3).config
    assert (done[MICRO], done[ACCUMULATION], done[GLOBAL]) == (1, 1, 3)
    with pytest.raises(ConfigError, match="ranks 2 \\(launcher\\)"):
        resolve({**base, "train_batch_size": 3}, world_size=2)
    with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu 2 \\(flag --per_device_train_batch_size\\)"):
        resolve({**base, "train_batch_size": 6}, run=RunValues(micro_batch=2), world_size=2)


def test_groups_that_share_rows_do_not_multiply_the_batch():
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "tensor_parallel": {"autotp_size": 2}}
    assert resolve(config, world_size=4, run=RunValues(micro_batch=3)).config[GLOBAL] == 6


@pytest.mark.parametrize("field", ["micro_batch", "accumulation", "global_batch"])
def test_flags_below_one_are_refused(field):
    with pytest.raises(ConfigError, match="at least 1"):
        resolve({"zero_optimization": {"stage": 2}}, run=RunValues(**{field: 0}))


@pytest.mark.parametrize("field, key", [("micro_batch", MICRO), ("accumulation", ACCUMULATION), ("global_batch", GLOBAL)])
def test_rows_beyond_any_run_are_refused(field, key):
    """`bigtrain config resolve --micro_batch 999999999999999999999` wrote it into the file."""
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    with pytest.raises(ConfigError, match=rf"{key} {10**21} \(flag .*more than any run has"):
        resolve(config, run=RunValues(**{field: 10**21}))
    with pytest.raises(ConfigError, match=rf"{key} {10**21} \(file\).*more than any run has"):
        resolve({**config, key: 10**21})
    assert resolve(config, run=RunValues(**{field: 2**40})).config[GLOBAL] == 2**40


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("weight_decay", -1.0),
        ("adam_beta2", 1.0),
        ("total_steps", 0),
    ],
)
def test_flags_that_no_run_can_have_are_refused(field, value):
    with pytest.raises(ConfigError, match="out of range"):
        resolve({"zero_optimization": {"stage": 2}}, run=RunValues(**{field: value}))
