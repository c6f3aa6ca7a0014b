"""One rank at stage 2: gradients that are never copied give the very same training as DeepSpeed's buckets."""

import pytest
import torch

from bigtrain.engine import Engine
from bigtrain.reduction import Reduction
from tests.ranks.tiny import TinyLM, config, rows, share, whole_weights


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
