"""Memory that is saved without a bit of difference: gradients that are never copied, sums that are not needed."""

import math

import pytest
import torch
from torch import nn

from bigtrain.engine import Engine
from bigtrain.engine.reduction import Reduction
from tests.ranks.test_engine_loops import Shared
from tests.ranks.tiny import VOCAB, TinyLM, config, rows, share, whole_weights


def _train(alone: bool, accumulation: int, optimizer: str):
    original = Reduction._nobody_to_reduce_with
    if not alone:
        Reduction._nobody_to_reduce_with = lambda self: False
    try:
        torch.manual_seed(0)
        cfg = {**config(2, accumulation=accumulation), "data_types": {"grad_accum_dtype": "bf16"}, "gradient_clipping": 0.5}
        engine = Engine(TinyLM(width=34), ds_config=cfg, optimizer=optimizer, learning_rate=1e-3)
        assert engine._reduction.alone is alone
        results = [engine.train_step(share(rows(s, 12), 0, 1, accumulation)) for s in range(4)]
        weights = whole_weights(engine.module)
        engine.close()
        return [(r.loss, r.grad_norm) for r in results], weights
    finally:
        Reduction._nobody_to_reduce_with = original


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_split"])
def test_same_losses_norms_and_weights(rank_pool, optimizer, accumulation):
    (mine, weights), *_ = rank_pool(1).run(_train, True, accumulation, optimizer)
    (theirs, others), *_ = rank_pool(1).run(_train, False, accumulation, optimizer)
    assert mine == theirs
    assert all(torch.equal(weights[n], others[n]) for n in weights)


def _sums(stage: int, dtype: str):
    torch.manual_seed(0)
    cfg = {**config(stage), "data_types": {"grad_accum_dtype": dtype}, "gradient_clipping": 0.5}
    engine = Engine(TinyLM(width=34), ds_config=cfg, optimizer="adamw_torch", learning_rate=1e-3, hang_s=None)
    results = [engine.train_step(share(rows(s, 12), engine.rank, engine.world_size, 1)) for s in range(4)]
    weights = whole_weights(engine.module)
    engine.close()
    return [(r.loss, r.grad_norm) for r in results], weights


def _changing_steps(as_given: bool):
    """Steps of one micro batch and of several, sums in fp32; `as_given`: also where there is nothing to sum."""
    original = Reduction._dtypes_of_sums
    if as_given:
        Reduction._dtypes_of_sums = lambda self: None
    try:
        torch.manual_seed(0)
        cfg = {**config(2), "data_types": {"grad_accum_dtype": "fp32"}, "gradient_clipping": 0.5}
        engine = Engine(TinyLM(width=34), ds_config=cfg, optimizer="adamw_split", learning_rate=1e-3, hang_s=None)
        results, how = [], []
        for step, parts in enumerate((1, 2, 1, 1, 3)):
            results.append(engine.train_step(share(rows(step, 12), engine.rank, engine.world_size, parts)))
            how.append((engine._reduction.alone, engine._reduction.optimizer.gradient_accumulation_dtype))
        weights = whole_weights(engine.module)
        engine.close()
        return [(r.loss, r.grad_norm) for r in results], weights, how
    finally:
        Reduction._dtypes_of_sums = original


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_of_one_micro_batch_needs_no_sum_whatever_sums_are_in(rank_pool, world):
    given, saved = (rank_pool(world).run(_changing_steps, as_given) for as_given in (True, False))
    for (curve, weights, how), (other, others, saving) in zip(given, saved):
        assert how == [(False, torch.float32)] * 5
        assert saving == [
            (parts == 1 and world == 1, torch.bfloat16 if parts == 1 else torch.float32) for parts in (1, 2, 1, 1, 3)
        ]
        assert curve == other
        assert all(torch.equal(weights[n], others[n]) for n in weights)


@pytest.mark.parametrize("stage", [2, 3])
def test_one_micro_step_needs_no_fp32_sum(rank_pool, stage):
    mine, theirs = (rank_pool(2).run(_sums, stage, dtype) for dtype in ("bf16", "fp32"))
    for (curve, weights), (other, others) in zip(mine, theirs):
        assert curve == other
        assert all(torch.equal(weights[n], others[n]) for n in weights)


class _Mixed(TinyLM):
    """An unused module, a module that only some micro batches use, a frozen one; weights that several places share."""

    def __init__(self):
        super().__init__(width=34)
        self.extra, self.unused = nn.Linear(34, VOCAB, bias=False), nn.Linear(3, 5)
        self.head.weight = self.embed.weight
        self.blocks[0].up.requires_grad_(False)

    def forward(self, input_ids, labels=None):
        out = super().forward(input_ids, labels)
        if input_ids[0, 0] % 2:
            out["loss"] = out["loss"] + self.extra(self.embed(input_ids)).float().square().mean()
        return out


def _summed(straight: bool, optimizer: str, poison: bool):
    """Steps of three micro batches with sums in fp32; (losses and norms, weights, how), of a step whose second micro batch is poisoned
    what it says of that."""
    original = Reduction._nobody_to_reduce_with
    if not straight:
        Reduction._nobody_to_reduce_with = lambda self: False
    try:
        torch.manual_seed(0)
        cfg = {**config(2, accumulation=3), "data_types": {"grad_accum_dtype": "fp32"}, "gradient_clipping": 0.5}
        engine = Engine(_Mixed(), ds_config=cfg, optimizer=optimizer, learning_rate=1e-3, nonfinite_limit=3, hang_s=None)
        results = []
        for step in range(4):
            handle = None
            if poison and step == 1:
                calls = iter((1.0, math.nan, 1.0))
                handle = engine.module.blocks[1].down.weight.register_hook(lambda g: g * next(calls))  # noqa: B023
            result = engine.train_step(share(rows(step, 12), 0, 1, 3))
            if handle is not None:
                handle.remove()
            results.append((result.loss, str(result.grad_norm), result.applied, result.reason))
        weights = whole_weights(engine.module)
        how = engine._reduction.straight
        engine.close()
        return results, weights, how
    finally:
        Reduction._nobody_to_reduce_with = original


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_split", "adamw_split_8bit", "adamw_8bit", "muon"])
def test_one_rank_adds_gradients_to_wider_sums_without_buckets(rank_pool, optimizer, poison):
    (mine, weights, straight), *_ = rank_pool(1).run(_summed, True, optimizer, poison)
    (theirs, others, buckets), *_ = rank_pool(1).run(_summed, False, optimizer, poison)
    assert straight and not buckets
    assert mine == theirs and [applied for _, _, applied, _ in mine] == [True, not poison, True, True]
    assert all(torch.equal(weights[n], others[n]) for n in weights)


def _norm_of_a_shared_weight(reentrant: bool) -> tuple[float, bool]:
    torch.manual_seed(0)
    cfg = {**config(2, accumulation=2), "data_types": {"grad_accum_dtype": "fp32"}}
    engine = Engine(Shared(reentrant).bfloat16(), ds_config=cfg, optimizer="adamw_torch", learning_rate=1e-3, hang_s=None)
    for micro in range(2):
        engine.backward(engine(torch.randn(4, 12, generator=torch.Generator().manual_seed(micro)).bfloat16()))
    norm, straight = engine.step().grad_norm, engine._reduction.straight
    engine.close()
    return norm, straight


def test_a_gradient_that_comes_in_two_parts_is_added_twice(rank_pool):
    """Without buckets nothing has to be refused: reentrant checkpoints give a weight's gradient in parts."""
    (whole, _), (parts, straight) = (rank_pool(1).run(_norm_of_a_shared_weight, reentrant)[0] for reentrant in (False, True))
    assert straight and parts == pytest.approx(
        whole, rel=0.01
    )  # bf16: autograd rounds the sum of two parts, the engine each part
