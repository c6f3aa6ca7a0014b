"""Sample order and step plan: pure arithmetic, checked exhaustively on small numbers and by properties."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigtrain.data.order import SampleOrder, StepPlan, plan_eval, plan_steps
from bigtrain.errors import DataError


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 16, 17, 97, 100, 1000])
def test_each_epoch_is_a_permutation(n):
    order = SampleOrder(n, seed=7)
    for epoch in range(3):
        assert sorted(order.row(epoch * n + i) for i in range(n)) == list(range(n))


@given(st.integers(1, 500), st.integers(-5, 2**70), st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_any_seed_and_epoch_is_a_permutation(n, seed, epoch):
    order = SampleOrder(n, seed)
    assert sorted(order.row(epoch * n + i) for i in range(n)) == list(range(n))


def test_order_is_pinned():
    """A changed order would silently change every resumed run: these values must never change."""
    pinned = [2, 9, 7, 6, 4, 5, 0, 3, 8, 1, 8, 9, 0, 5, 1, 7, 3, 6, 2, 4]
    assert [SampleOrder(10, 42).row(p) for p in range(20)] == pinned


def test_epochs_and_seeds_differ_and_unshuffled_keeps_the_order():
    first = [SampleOrder(100, 1).row(p) for p in range(100)]
    assert first != [SampleOrder(100, 1).row(100 + p) for p in range(100)]
    assert first != [SampleOrder(100, 2).row(p) for p in range(100)]
    assert first != sorted(first)
    assert [SampleOrder(3, 1, shuffle=False).row(p) for p in range(5)] == [0, 1, 2, 0, 1]


def test_rows_are_spread_evenly_over_places():
    """Over 2,000 epochs of 6 rows each row is at each place about 333 times.

    Bound: chi-square with 25 degrees of freedom exceeds 60 with probability 1e-4; the seed is fixed, so no flakes.
    """
    order, n, epochs = SampleOrder(6, 3), 6, 2000
    counts = [[0] * n for _ in range(n)]
    for position in range(n * epochs):
        counts[position % n][order.row(position)] += 1
    expected = epochs / n
    assert sum((c - expected) ** 2 / expected for row in counts for c in row) < 60


def test_huge_data_sets_cost_no_memory():
    order = SampleOrder(10**12, 5)
    assert len({order.row(p) for p in range(1000)}) == 1000


def test_bad_order_is_refused():
    with pytest.raises(DataError, match="0 rows"):
        SampleOrder(0)
    with pytest.raises(DataError, match="negative"):
        SampleOrder(3).row(-1)


def _global_batch(plan, step):
    """Positions of a step in training order: micro step, then rank."""
    return [p for a in range(plan.accumulation) for rank in range(plan.world_size) for p in plan.positions(step, rank, a)]


@pytest.mark.parametrize("split", [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1), (1, 1, 4)])
def test_B56_every_split_of_a_global_batch_has_the_same_rows_in_the_same_order(split):
    micro, accumulation, world = split
    plan = plan_steps(10, micro, accumulation, world, epochs=3)
    assert plan.steps == 8
    for step in range(plan.steps):
        assert _global_batch(plan, step) == list(range(step * 4, step * 4 + 4))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(64, 300), st.integers(0, 9))
@settings(max_examples=50, deadline=None)
def test_positions_partition_every_step(micro, accumulation, world, n_rows, step):
    plan = plan_steps(n_rows, micro, accumulation, world, max_steps=10)
    whole = plan.global_batch
    assert _global_batch(plan, step) == list(range(step * whole, (step + 1) * whole))


def test_B48_nine_samples_on_two_ranks_give_both_the_same_steps():
    plan = plan_steps(9, 1, 1, 2)
    assert plan.steps == 5  # the last step is filled from the next epoch: rule in plan_steps
    order = SampleOrder(9, 0)
    rows = [[order.row(p) for step in range(5) for p in plan.positions(step, rank, 0)] for rank in (0, 1)]
    assert len(rows[0]) == len(rows[1]) == 5
    assert set(rows[0]) | set(rows[1]) == set(range(9))
    assert "epochs run on into each other" in plan.describe()


@pytest.mark.parametrize(("epochs", "steps"), [(1.0, 3), (1.1, 3), (1.2, 3), (1.25, 4), (0.01, 1), (2, 5), (3.0, 8)])
def test_steps_round_up_without_floating_point_surprises(epochs, steps):
    assert plan_steps(10, 2, 2, 1, epochs=epochs).steps == steps


def test_max_steps_wins_over_epochs():
    assert plan_steps(10, 2, 1, 1, epochs=100, max_steps=7).steps == 7
    assert plan_steps(10, 2, 1, 1, epochs=2, max_steps=-1).steps == 10
    assert plan_steps(10, 2, 1, 1, max_steps=10).epochs == 2.0


def test_a_resumed_run_goes_on_at_its_row_with_another_global_batch():
    """12 of 40 rows were used by 3 steps of 4; the rest of the epoch goes to steps of 6, no row twice, none passed over."""
    plan = plan_steps(40, 3, 1, 2, epochs=1, done=(3, 12))
    assert plan.steps == 3 + 5 and plan.position(3) == 12 and plan.epochs == 42 / 40
    used = [p for step in range(3, plan.steps) for rank in range(2) for p in plan.positions(step, rank, 0)]
    assert used == list(range(12, 42))
    assert plan_steps(40, 2, 1, 2, epochs=1, done=(3, 12)) == plan_steps(40, 2, 1, 2, epochs=1)
    assert plan_steps(40, 3, 1, 2, epochs=0.25, done=(3, 12)).steps == 3  # nothing is left of what was asked for
    assert plan_steps(40, 3, 1, 2, max_steps=5, done=(3, 12)).steps == 5
    with pytest.raises(DataError, match="resumed after step 3, but max_steps is 2"):
        plan_steps(40, 3, 1, 2, max_steps=2, done=(3, 12))


@pytest.mark.parametrize("rows", [0, 3])
def test_B61_too_little_data_is_an_error_with_all_the_numbers(rows):
    with pytest.raises(DataError) as caught:
        plan_steps(rows, 1, 2, 2, epochs=5, n_samples=77)
    for number in ("77 samples", f"{rows} rows", "takes 4", "1 (micro batch)", "2 (accumulation)", "2 (ranks)"):
        assert number in str(caught.value)
    with pytest.raises(DataError, match="too little data"):
        plan_steps(rows, 1, 2, 2, max_steps=10)
    assert plan_steps(4, 1, 2, 2).steps == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"max_steps": 0},
        {"max_steps": -2},
        {"epochs": 0},
        {"epochs": float("nan")},
        {"epochs": float("inf")},
        {"epochs": -1.0},
        {"micro_batch": 0},
        {"accumulation": 1.5},
        {"world_size": True},
    ],
)
def test_B61_zero_steps_are_never_a_plan(bad):
    with pytest.raises(DataError):
        plan_steps(**({"n_rows": 10, "micro_batch": 1, "accumulation": 1, "world_size": 1} | bad))


@pytest.mark.parametrize("n", range(1, 12))
@pytest.mark.parametrize("world", [1, 2, 3])
def test_B48_evaluation_has_equal_counts_and_every_row_once(n, world):
    plan = plan_eval(n, 2, world)
    seen = [row for b in range(plan.batches) for rank in range(world) for row in plan.rows(b, rank)]
    assert [row for row in seen if row is not None] == list(range(n))
    assert len(seen) == plan.batches * world * 2


def test_evaluation_without_rows_is_refused():
    with pytest.raises(DataError, match="0 rows"):
        plan_eval(0, 2, 1)


def test_order_imports_no_torch():
    import subprocess
    import sys

    code = "import sys, bigtrain.data.order; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_plan_is_plain_data():
    assert plan_steps(4, 1, 2, 2) == StepPlan(4, 1, 2, 2, 1)


def test_an_epoch_ends_in_the_step_that_takes_its_last_row():
    plan = plan_steps(10, 4, 1, 1, epochs=3)  # positions 0 4 8 12 16 20 24 28 32
    assert [step for step in range(plan.steps + 1) if plan.ends_epoch(step)] == [3, 5, 8]
    later = plan.resumed(3, 12)
    assert [step for step in range(3, plan.steps + 1) if later.ends_epoch(step)] == [3, 5, 8]
    larger = plan_steps(10, 8, 1, 1, epochs=3, done=(1, 4))  # positions 4 12 20 28 36
    assert [step for step in range(1, larger.steps + 1) if larger.ends_epoch(step)] == [2, 3, 5]
    for batch, ended in (
        (8, [3, 5, 8]),
        (2, [5, 8]),
        (None, [3, 5, 8]),
    ):  # step 3 took 8 rows, of which the epoch's last; or began behind it
        later = plan.resumed(3, 12, batch)
        assert [step for step in range(3, plan.steps + 1) if later.ends_epoch(step)] == ended
    smaller = plan_steps(10, 1, 1, 1, epochs=2, done=(3, 12))
    assert not smaller.ends_epoch(3) and smaller.resumed(3, 12, 4).ends_epoch(3)
