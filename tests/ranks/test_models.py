"""Models built at every stage and world size have the values of a plain build, bit for bit."""

import pytest
import torch

from tests.ranks import zoo

ZERO3 = {"zero_optimization": {"stage": 3}}


def _stage(stage):
    return {"zero_optimization": {"stage": stage}}


def _build_and_compare(name, stage, limit_bytes, dtype, overrides):
    from bigtrain import zero
    from bigtrain.models import build_model, window

    window.Window.__init__.__kwdefaults__["limit_bytes"] = limit_bytes
    try:
        state = torch.get_rng_state()
        model = build_model(zoo.source(name), ds_config=_stage(stage), seed=7, dtype=dtype, **overrides)
        assert torch.equal(state, torch.get_rng_state())
    finally:
        window.Window.__init__.__kwdefaults__["limit_bytes"] = window.DEFAULT_LIMIT_BYTES
    partitioned = sum(zero.is_partitioned(p) for p in model.parameters())
    total = sum(1 for _ in model.parameters())
    reference = zoo.plain(name, 7, dtype, **overrides)
    from bigtrain.models import tied_groups

    return zoo.differences(model, reference), partitioned, total, tied_groups(model) == tied_groups(reference)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", zoo.ALL)
def test_B09_B10_B13_values_equal_a_plain_build(rank_pool, world, name):
    """A window of 1 byte parks every parameter after each operation: the hardest case of the mechanism."""
    for answer in rank_pool(world).run(_build_and_compare, name, 3, 1, torch.bfloat16, {}):
        assert answer[0] == [] and answer[1] == answer[2] > 0 and answer[3]
