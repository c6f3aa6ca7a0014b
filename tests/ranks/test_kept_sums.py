"""Sums of gradients that keep their memory from step to step: the same bits, one buffer, and none where nothing is summed."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bigtrain.engine import Engine
from bigtrain.engine.sums import KeptSums
from bigtrain.models import build_model
from bigtrain.run.shortage import held_bytes
from tests.ranks.late import Late, stream_late
from tests.ranks.tiny import VOCAB, Block, TinyLM, config, rows, share, whole_weights

PARTS = (2, 3, 2, 1, 2, 2)  # micro batches of each step
SPOILT = 2


class Sometimes(TinyLM):
    """Its last block is left out in every other step, whose forward does not wait for the block's update, then."""

    used = True

    def __init__(self):
        super().__init__(width=34)
        self.late = nn.ModuleList([Block(VOCAB, dropout=0.0)])

    def forward(self, input_ids, labels):
        logits = super().forward(input_ids)["logits"]
        if self.used:
            logits = self.late[0](logits.to(self.head.weight.dtype)).float()
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)}


def _engine(optimizer, where):
    cfg = {**config(2), "data_types": {"grad_accum_dtype": "fp32"}}
    if where:
        cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    model = build_model(Sometimes, ds_config=cfg, seed=1)
    engine = Engine(model, ds_config=cfg, optimizer=optimizer, learning_rate=1e-2, max_grad_norm=0.5, hang_s=None)
    if where == "late":
        stream_late(engine, Late())
    return engine


def _train(optimizer, where, keep):
    """Steps of several and of one micro batch, one that is discarded, an evaluation; (curve, weights, buffers seen in each step)."""
    gpu_only, KeptSums.on_gpu_only = KeptSums.on_gpu_only, not keep
    try:
        engine = _engine(optimizer, where)
        sums = engine._reduction._kept_sums
        spoil, model = [False], engine.module  # asked for once: asking waits for the update
        next(model.parameters()).register_hook(lambda g: g * math.nan if spoil[0] else None)
        curve, buffers = [], []
        for step, parts in enumerate(PARTS):
            spoil[0] = step == SPOILT
            model.used = step % 2 == 0
            batches = share(rows(step, 12), engine.rank, engine.world_size, parts)
            result = engine.train_step(batches)
            curve.append((result.loss, result.grad_norm if result.applied else None, result.applied))
            buffers.append([kept.flat_partition.data_ptr() for kept in sums._kept.values()])
            if not where:  # out of memory in the next forward, they are not called activations
                held = held_bytes(model, engine, torch.device("cpu"))["gradients"]
                assert held == sum(kept.flat_partition.nbytes for kept in sums._kept.values())
            if step == 1:
                curve.append(engine.evaluate(share(rows(50, 12), engine.rank, engine.world_size, 1)).loss)
        weights = whole_weights(model)
        engine.close()
        return curve, weights, buffers
    finally:
        KeptSums.on_gpu_only = gpu_only


@pytest.mark.parametrize("where", ["", "host", "late"])
@pytest.mark.parametrize("world", [1, 2])
def test_the_same_bits_from_one_buffer(rank_pool, world, where):
    optimizer = {"": "adamw_torch", "host": "adamw", "late": "adamw_split"}[where]
    given, kept = (rank_pool(world).run(_train, optimizer, where, keep) for keep in (False, True))
    for (curve, weights, none), (other, others, buffers) in zip(given, kept, strict=True):
        assert [applied for *_, applied in (c for c in curve if isinstance(c, tuple))] == [
            s != SPOILT for s in range(len(PARTS))
        ]
        assert curve == other
        assert all(torch.equal(weights[n], others[n]) for n in weights)
        assert not any(none)
        several, one = buffers[:3], buffers[3]
        assert several[0] and several == [several[0]] * 3 and one == []
        assert buffers[4] and buffers[4] == buffers[5]
