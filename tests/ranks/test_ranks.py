"""Collectives whose failures are symmetric."""

import pytest
import torch

from bigtrain import ranks
from bigtrain.errors import DataError, RanksDisagreeError


def _agree_on_rank():
    try:
        ranks.agree(ranks.rank() // 2, "the half")
    except RanksDisagreeError as error:
        return str(error), error.by_rank
    return None


def _together_with_a_failure_on_rank_1():
    try:
        with ranks.together("reading the file"):
            if ranks.rank() == 1:
                raise DataError("file X is missing")
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def _sums():
    return (
        ranks.sum_across(ranks.rank() + 1),
        ranks.max_across(float(ranks.rank())),
        ranks.broadcast_object(ranks.rank() + 1),
    )


@pytest.mark.parametrize("world", [2, 3])
def test_sum_max_broadcast(rank_pool, world):
    assert rank_pool(world).run(_sums) == [(world * (world + 1) // 2, float(world - 1), 1)] * world


def test_agree_names_every_value(rank_pool):
    answers = rank_pool(3).run(_agree_on_rank)
    assert all(a is not None and a[1] == {0: 0, 1: 0, 2: 1} for a in answers)
    assert "rank 2: 1" in answers[0][0]


def test_one_failure_stops_all(rank_pool):
    first, second = rank_pool(2).run(_together_with_a_failure_on_rank_1)
    assert first[0] == "RanksDisagreeError" and "rank 1: DataError: file X is missing" in first[1]
    assert second == ("DataError", "file X is missing")


def test_single_process_needs_no_group():
    assert not torch.distributed.is_initialized()
    assert ranks.all_gather_object(3) == [3] and ranks.sum_across(2) == 2
