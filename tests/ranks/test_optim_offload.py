"""offload_optimizer with the split optimizers: the same bits as without, nothing in fp32 kept beside them."""

import pytest
import torch

from bigtrain import optim
from bigtrain.engine import Engine
from bigtrain.models import build_model
from bigtrain.zero import flat
from tests.ranks.tiny import TinyLM, config, rows

SAMPLES = 6


def _run(optimizer, stage, offload, steps):
    cfg = config(stage, bf16=True, micro=1, accumulation=1)
    if offload:
        cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    model = build_model(lambda: TinyLM(width=34), ds_config=cfg, seed=1)
    engine = Engine(model, ds_config=cfg, optimizer=optimizer, learning_rate=1e-2, max_grad_norm=0.5, hang_s=None)
    found = [engine.train_step(rows(s, SAMPLES)[engine.rank :: engine.world_size]) for s in range(steps)]
    inner = engine.deepspeed.basic_optimizer
    masters = [inner.master(p) for p in inner.state]
    held = sum(t.nbytes for s in inner.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    elems = sum(p.numel() for p in inner.state)
    expected = sum(optim.state_bytes(optimizer, p.numel()) for p in inner.state)
    fp32 = [m.dtype for m in flat.masters(engine.deepspeed.optimizer)]
    told = engine.deepspeed.optimizer
    offloaded = bool(getattr(told, "cpu_offload", False) or getattr(told, "offload_optimizer", False))
    says = engine.summary()["offload_optimizer"]
    engine.close()
    return [(r.loss, r.grad_norm) for r in found], masters, (held, expected, elems), fp32, (says, offloaded)


def _compare(optimizer, stage):
    plain, host = _run(optimizer, stage, False, 4), _run(optimizer, stage, True, 4)
    same = all(torch.equal(a, b) for a, b in zip(plain[1], host[1], strict=True))
    return plain[0] == host[0], same, host[2:]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["adamw_split", "adamw_split_bf16", "adamw_split_8bit"])
def test_offload_changes_no_bit_and_keeps_nothing_more(rank_pool, optimizer, stage, world):
    for same_losses, same_masters, (sizes, masters, (says, told)) in rank_pool(world).run(_compare, optimizer, stage):
        held, expected, elems = sizes
        assert same_losses and same_masters
        assert held == expected and elems > 0
        assert all(dtype == torch.bfloat16 for dtype in masters)  # the model's own weights
        assert says and not told
