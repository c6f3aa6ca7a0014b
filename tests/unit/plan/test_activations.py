"""What a block keeps for backward, counted on the real classes with torch's saved-tensor hooks (bf16, sdpa, CPU)."""

import dataclasses

import pytest
import torch
import transformers

from bigtrain import shapes
from bigtrain.plan import plan_input
from bigtrain.plan.activations import FUSED_LOSS_CHUNKS, FUSED_LOSS_ELEMS, block_bytes, fused_loss_rows
from bigtrain.plan.device import Run, sharding
from bigtrain.plan.geometry import KEPT, geometry
from bigtrain.plan.tape import Tape
from tests.unit.plan.family_configs import CAUSAL

TOKENS = 64
SIZES = dict(
    hidden_size=192, intermediate_size=512, num_attention_heads=6, num_key_value_heads=2, head_dim=32, ffn_dim=512,
    word_embed_proj_dim=192, n_embd=192, n_inner=512, max_position_embeddings=128, n_positions=128,
)  # fmt: skip
KINDS = sorted(kind for kind in KEPT if kind in CAUSAL)


def sized(kind, layers):
    config = {key: SIZES.get(key, value) for key, value in CAUSAL[kind].items()}
    depth = "n_layer" if "n_layer" in config else "num_hidden_layers"
    return {**config, depth: layers}


def kept_bytes(config):
    """Bytes of all distinct storages that autograd keeps in one forward pass, without the parameters."""
    hf = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(hf, dtype=torch.bfloat16, attn_implementation="sdpa").train()
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    seen = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = (storage.nbytes(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = model(input_ids=torch.randint(3, 100, (1, TOKENS)), use_cache=False)
    assert out.logits is not None
    return sum(size for size, _ in seen.values())


@pytest.mark.parametrize("kind", KINDS)
def test_kept_bytes_of_a_block_are_what_autograd_keeps(kind):
    counted = (kept_bytes(sized(kind, 4)) - kept_bytes(sized(kind, 2))) / 2
    planned = block_bytes(geometry(sized(kind, 4)), TOKENS).kept
    # Per-head statistics and small fp32 copies of norm weights are left out: under 1 % of a block this narrow.
    assert planned == pytest.approx(counted, rel=0.012)


def test_plain_llama_blocks_are_counted_to_the_byte():
    counted = (kept_bytes(sized("llama", 4)) - kept_bytes(sized("llama", 2))) / 2
    assert block_bytes(geometry(sized("llama", 4)), TOKENS).kept == counted


def test_chunks_of_the_fused_loss():
    assert [fused_loss_rows(128_256, t) for t in (4096, 16_384, 32_768, 131_072)] == [2048, 2048, 2048, 8192]
    assert [fused_loss_rows(v, 16_384) for v in (32_000, 151_936, 256_000)] == [8192, 1792, 1024]
    assert [fused_loss_rows(1000, t) for t in (0, 1, 300)] == [1, 1, 300]
    for vocab in (97, 50_257, 128_256, 262_144):
        for tokens in (1, 1000, 4096, 40_000, 262_144):
            rows = fused_loss_rows(vocab, tokens)
            assert -(-tokens // rows) <= FUSED_LOSS_CHUNKS
            assert rows * vocab <= max(FUSED_LOSS_ELEMS, tokens * vocab // FUSED_LOSS_CHUNKS) + 256 * vocab


@pytest.mark.parametrize("stage", [2, 3])
def test_bytes_of_the_fused_loss_are_those_of_its_tensors(stage):
    """kernels/cross_entropy.py `_in_chunks`: gradients of hidden states and head, and one chunk of logits; backward adds nothing."""
    plan = plan_input(
        shapes.config_dict("llama-3b"), micro_batch=4, kernels="liger", ds_config={"zero_optimization": {"stage": stage}}
    )
    assert plan.loss_kind == "fused"
    t, g, tape = plan.tokens, plan.geometry, Tape()
    run = Run(plan, tape, sharding(plan, tape))
    run.micro, run.last = 0, True
    tape.phase("loss")
    run.shards.start_backward = lambda *_: None
    run._grad = lambda i: None
    run._fused_loss()
    assert tape.ledger().peak_bytes == 2 * t * g.hidden + 2 * g.vocab * g.hidden + 2 * 2048 * g.vocab


@pytest.mark.parametrize("name, kind", [("llama-3b", "fused"), ("qwen2.5-vl-7b", "full")])
def test_a_model_that_keeps_its_own_loss_is_planned_with_all_logits(name, kind):
    plan = plan_input(shapes.config_dict(name), kernels="liger", ds_config={"zero_optimization": {"stage": 3}})
    assert plan.loss_kind == kind and plan.but(loss="chunked").loss_kind == "chunked"
    capped = plan.but(geometry=dataclasses.replace(plan.geometry, soft_cap=True))
    assert capped.loss_kind == "full" and capped.but(stage=2).loss_kind == "fused"
