"""Decisions: the same rows give the same verdict, and the message names what happened."""

import math

from hypothesis import given
from hypothesis import strategies as st

from bigtrain import guards
from bigtrain.engine.agreement import fold, unfold
from bigtrain.guards import UNKNOWN, NonFiniteCount, RankStep
from bigtrain.ranks import pack, unpack

NAMES = ["embed.weight", "head.weight"]


def test_finite_rows_are_applied_with_the_sum_of_losses_and_tokens():
    verdict = guards.judge([RankStep(0.25, 3, UNKNOWN, 0), RankStep(0.5, 4, UNKNOWN, 0)], 7, NAMES)
    assert verdict == guards.Verdict(True, 0.75, 7)


def test_B37_the_reason_names_rank_step_and_parameter():
    rows = [RankStep(0.25, 3, UNKNOWN, 0), RankStep(math.nan, 4, 1, 0), RankStep(math.inf, 1, UNKNOWN, 0)]
    verdict = guards.judge(rows, 7, NAMES)
    assert not verdict.apply and math.isnan(verdict.loss)
    assert verdict.reason == (
        "step 7: not finite on rank 1: loss nan, first parameter with a non-finite gradient: head.weight; rank 2: loss inf"
    )


def test_B37_stops_after_the_limit_in_a_row_only():
    count = NonFiniteCount(2)
    assert [count.note(applied) for applied in (False, True, False, False)] == [False, False, False, True]
    assert (count.in_a_row, count.total) == (2, 3)


def test_differences_are_named_with_every_value():
    differences = guards.differing([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1}])
    assert differences == {"b": [2, 3, None]}
    assert list(guards.differing([{"layers.2": 1, "layers.10": 1}, {"layers.2": 2, "layers.10": 2}])) == [
        "layers.2",
        "layers.10",
    ]
    assert "b: rank 0 2, rank 1 3, rank 2 None" in guards.report_differences(differences, 4)
    many = {f"p{i:02}": [0, 1] for i in range(20)}
    assert "and 8 more" in guards.report_differences(many, 4)


def test_freezing_and_unfreezing_are_told_apart():
    assert guards.changed_freezing([True, False], [True, False], NAMES) == ""
    text = guards.changed_freezing([True, False], [False, True], NAMES)
    assert "True on head.weight" in text and "False on embed.weight" in text
    assert "head.weight left the model" in guards.changed_freezing([True], [True], NAMES, gone=["head.weight"])


@given(st.floats(allow_nan=False), st.integers(-1, 2**20), st.integers(0, 2**40 - 1))
def test_what_ranks_send_arrives_exactly(value, index, order):
    assert unpack(pack(value)) == value
    assert unfold(fold(index, order)) == (index, order)
