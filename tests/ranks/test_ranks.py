"""Collectives whose failures are symmetric."""

import pytest
import torch

from bigtrain import ranks
from bigtrain.errors import DataError, RanksDisagreeError
from bigtrain.models import build_model
from bigtrain.weights import export_model
from bigtrain.zero import gathered
from tests.ranks.tiny import config


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


def _layer():
    return torch.nn.Linear(12, 12)


def _exchange():
    return ranks.max_across(ranks.rank())


# What rank 0 does while the other asks for the largest rank, and what both are told of it.
ALONE = {
    "export": (lambda model, out: export_model(model, out, dtype="float32"), "export_model() (planning the export to"),
    "gather": (lambda model, out: gathered([model.weight]).__enter__(), "bigtrain.zero.gathered(), before step 1"),
    "build": (lambda model, out: build_model(_layer), "build_model() (reading the model's config)"),
    "object": (lambda model, out: ranks.broadcast_object("x" * 1000), "broadcast_object() (an exchange of values)"),
    "number": (lambda model, out: ranks.max_across(0.5), "max_across() (numbers)"),
}


def _called_alone(out):
    model = build_model(_layer, ds_config=config(3, bf16=False, micro=4), dtype=torch.float32)
    said = {}
    for name, (do, _) in ALONE.items():
        try:
            said[name] = str(do(model, out) if ranks.is_main() else _exchange())
        except RanksDisagreeError as error:
            said[name] = str(error)
    try:
        gathered([model.weight if ranks.is_main() else model.bias]).__enter__()
    except RanksDisagreeError as error:
        said["other weights"] = str(error)
    return said, _exchange()


def test_ranks_that_meet_in_different_calls_are_told_both_and_can_go_on(rank_pool, tmp_path):
    """gloo aborted, hung, or took the bytes of one call for those of another."""
    for said, largest in rank_pool(2).run(_called_alone, str(tmp_path / "out"), limit_s=60.0):
        assert "got other weights" in said.pop("other weights") and largest == 1
        for name, text in said.items():
            assert f"rank 0: {ALONE[name][1]}" in text and "called at test_ranks.py:" in text.splitlines()[1], text
            assert "rank 1: max_across() (whole numbers), called at test_ranks.py:" in text, text


def test_single_process_needs_no_group():
    assert not torch.distributed.is_initialized()
    assert ranks.all_gather_object(3) == [3] and ranks.sum_across(2) == 2
