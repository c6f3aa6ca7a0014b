"""Routed experts by bigtrain's grouped products, as a GPU runs them, under ZeRO: losses and weights of transformers' own."""

import pytest
import torch

from tests.ranks.tiny import config

STEPS = 4  # ZeRO-3 gathers by its trace from the third on
CONFIGS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 40},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "head_dim": 8},
}
SHAPE = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "pad_token_id": 3,
}


def _trained(kind, stage, grouped):
    """(losses, all weights in the end)."""
    from bigtrain import zero
    from bigtrain.engine import Engine
    from bigtrain.kernels.experts import use_grouped_experts
    from bigtrain.models import build_model, enable_activation_checkpointing

    cfg = config(stage, bf16=False, micro=2, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}))
    model = build_model({"model_type": kind, **SHAPE, **CONFIGS[kind]}, ds_config=cfg, seed=5, dtype=torch.float32)
    if grouped:
        assert use_grouped_experts(model) == 2
    enable_activation_checkpointing(model)
    engine = Engine(model.train(), ds_config=cfg, learning_rate=1e-2)
    losses, weights = [], {}
    for step in range(STEPS):
        ids = torch.randint(0, 59, (2, 9), generator=torch.Generator().manual_seed(10 * step + engine.rank))
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    for name, p in engine.module.named_parameters():
        with zero.gathered([p]):
            weights[name] = p.detach().clone()
    engine.close()
    return losses, weights


def _both(kind, stage):
    return [_trained(kind, stage, grouped) for grouped in (False, True)]


@pytest.mark.parametrize("kind, stage", [("mixtral", 3), ("gpt_oss", 3), ("gpt_oss", 2)])
def test_training_is_that_of_transformers_experts(rank_pool, kind, stage):
    for (losses, weights), (mine, found) in rank_pool(2).run(_both, kind, stage):
        assert mine == pytest.approx(losses, rel=1e-5)
        for name, one in weights.items():
            # Adam's first steps are the learning rate in size, whatever the gradient's: where that is nearly zero, rounding decides its sign.
            assert (found[name] - one).norm() <= 1e-3 * one.norm(), name
