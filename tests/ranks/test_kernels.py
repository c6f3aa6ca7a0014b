"""The chunked loss inside DeepSpeed: ZeRO 0 to 3, tied and untied head, accumulation."""

import contextlib

import deepspeed
import pytest
import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from bigtrain import ranks, zero
from bigtrain.kernels import cross_entropy
from bigtrain.kernels.attach import use_chunked_loss

CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "cohere2": (Cohere2Config, Cohere2ForCausalLM, {"logit_scale": 0.3, "pad_token_id": None}),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {"final_logit_softcapping": 0.7, "head_dim": 8, "pad_token_id": None, "attn_implementation": "eager"},
    ),
}


def _train(kind, tied, stage, chunked):
    cross_entropy.CHUNK_LOGITS["cpu"] = 97 * 7
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 20000},
    }
    config_class, model_class, more = CLASSES[kind]
    shape = config_class(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=tied, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config) if stage == 3 else contextlib.nullcontext():
        model = model_class(shape)
    for param in model.parameters():
        with zero.gathered([param], modifier_rank=0):
            if param.numel():
                param.data.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel())) * 0.1)
    if chunked:
        assert use_chunked_loss(model).kind == "chunked"
    engine = zero.initialize(model, config, torch.optim.SGD(model.parameters(), lr=1.0))
    losses, norms = [], []
    for micro in range(6):
        ids = torch.randint(0, 97, (2, 13), generator=torch.Generator().manual_seed(10 * micro + ranks.rank()))
        labels = ids.clone()
        labels[0, : 3 + micro] = -100
        loss = engine(input_ids=ids, labels=labels, num_items_in_batch=31).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    whole = []
    for param in engine.module.parameters():
        with zero.gathered([param]):
            whole.append(param.detach().clone().flatten())
    engine.destroy()
    return losses, norms, torch.cat(whole)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind, tied", [("llama", True), ("llama", False), ("qwen2", True), ("qwen2", False)])
def test_chunked_loss_trains_like_the_models_own(rank_pool, stage, kind, tied):
    _is_the_models_own(rank_pool, stage, kind, tied)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind, tied", [("cohere2", True), ("gemma2", False)])
def test_so_it_does_where_the_model_scales_or_caps_its_logits(rank_pool, stage, kind, tied):
    _is_the_models_own(rank_pool, stage, kind, tied)


def _is_the_models_own(rank_pool, stage, kind, tied):
    pool = rank_pool(2)
    for ours, theirs in zip(pool.run(_train, kind, tied, stage, True), pool.run(_train, kind, tied, stage, False)):
        # fp32 in another order of sums
        assert ours[0] == pytest.approx(theirs[0], rel=2e-6)
        assert ours[1] == pytest.approx(theirs[1], rel=1e-5)
        assert (ours[2] - theirs[2]).abs().max() < 2e-6
