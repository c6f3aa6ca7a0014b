"""Stage 0: sums of gradients reach the update as the fp32 numbers that they are."""

import pytest
import torch

from bigtrain.engine import Engine
from bigtrain.engine.master import MasterOptimizer
from bigtrain.models import build_model
from tests.ranks.tiny import TinyLM, config, rows, share


def _sums(parts):
    """(this rank's sum before the reduction, the mean that the update gets) of one step."""
    cfg = config(0)
    model = build_model(lambda: TinyLM(width=34), ds_config=cfg, seed=1)
    engine = Engine(model, ds_config=cfg, optimizer="adamw_torch", learning_rate=1e-2, hang_s=None)
    given, asked, step = [], MasterOptimizer.get_grads_for_reduction, MasterOptimizer.step

    def ask(self):
        given.append(self.flat.clone())
        return asked(self)

    def update(self, closure=None):
        given.append(self.flat.clone())
        return step(self, closure)

    MasterOptimizer.get_grads_for_reduction, MasterOptimizer.step = ask, update
    try:
        engine.train_step(share(rows(0, 12), engine.rank, engine.world_size, parts))
    finally:
        MasterOptimizer.get_grads_for_reduction, MasterOptimizer.step = asked, step
    engine.close()
    return given[0], given[-1]


@pytest.mark.parametrize("world", [1, 2])
def test_the_mean_over_ranks_is_not_rounded(rank_pool, world):
    seen = rank_pool(world).run(_sums, 3)
    mean = torch.stack([own for own, _ in seen]).sum(0) / world
    assert not torch.equal(mean, mean.bfloat16().float())
    assert all(torch.equal(taken, mean) for _, taken in seen)
