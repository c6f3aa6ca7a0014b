"""What a block keeps for backward, counted on the real classes with torch's saved-tensor hooks (bf16, sdpa, CPU)."""

import functools
import json

import pytest
import torch
import transformers

from bigtrain import shapes
from bigtrain.models import tile_mlp
from bigtrain.plan import plan_input
from bigtrain.plan.activations import FUSED_LOSS_CHUNKS, FUSED_LOSS_ELEMS, block_bytes, fused_loss_rows
from bigtrain.plan.device import Run, device_tape, sharding
from bigtrain.plan.families import supported
from bigtrain.plan.family_kept import ACTIVATIONS
from bigtrain.plan.geometry import geometry
from bigtrain.plan.tape import Tape
from tests.unit.plan.family_configs import CAUSAL, OTHER

LENGTHS = (64, 160)  # what grows with the square of the length shows in the second
SIZES = dict(
    hidden_size=192, intermediate_size=512, num_attention_heads=6, num_key_value_heads=2, head_dim=48, ffn_dim=512,
    word_embed_proj_dim=192, n_embd=192, n_inner=512, n_head=6, max_position_embeddings=256, n_positions=256,
    moe_intermediate_size=160, shared_expert_intermediate_size=224, d_model=192, d_kv=32, d_ff=512,
)  # fmt: skip
LATENT = dict(
    kv_lora_rank=48, q_lora_rank=80, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32, num_key_value_heads=6
)  # fmt: skip
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")
IMAGE = dict(image_size=56, patch_size=7)
ALL = {**{name: ("AutoModelForCausalLM", config) for name, config in CAUSAL.items()}, **OTHER}
# Counted as its language model, gemma3_text: the whole wants to be told which tokens are images.
NOT_COUNTED = {"gemma3"}
NAMES = sorted(set(ALL) - NOT_COUNTED)
NO_DROPOUT = {
    **dict.fromkeys(("attn_pdrop", "resid_pdrop", "attention_dropout", "residual_dropout", "dropout", "hidden_dropout"), 0.0),
    **dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob", "dropout_rate"), 0.0),
}
DROPOUT = dict.fromkeys(NO_DROPOUT, 0.1)
DROPS_BY_DEFAULT = {"gpt2", "seed_oss", "opt", "bert", "roberta", "xlm-roberta", "camembert", "t5", "t5-gated", "mt5"}
VARIANTS = [
    *((name, NO_DROPOUT, "sdpa") for name in sorted(DROPS_BY_DEFAULT)),
    *((name, DROPOUT, "sdpa") for name in ("llama", "qwen3", "gptj", "phi", "phi3", "gpt_neox", "bloom", "stablelm", "starcoder2")),
    *((name, DROPOUT, "sdpa") for name in ("opt", "gemma2", "gpt_oss", "deepseek_v3", "mixtral", "vit")),
    ("falcon", {"hidden_dropout": 0.1}, "sdpa"),
    *((name, {"alibi": True}, "sdpa") for name in ("falcon", "falcon-40b-like", "falcon-rw-like")),
    ("gpt_neox", {"use_parallel_residual": False}, "sdpa"),
    ("stablelm", {"use_parallel_residual": True}, "sdpa"),
    ("gemma2", {"attn_logit_softcapping": None}, "sdpa"),
    ("deepseek_v3", {"v_head_dim": 16}, "sdpa"),
    *((name, {}, "eager") for name in ("gpt2", "llama", "gpt_neox", "phi3", "qwen3", "olmo2", "mixtral")),
    *((name, {}, "masked") for name in ("llama", "phi3", "qwen3", "mixtral", "gpt_neox", "gpt_oss")),
    ("gpt2", NO_DROPOUT, "masked"),
    *((name, {"sliding_window": 32}, "sdpa") for name in ("mistral", "gemma3_text", "cohere2", "olmo3", "phi3", "starcoder2")),
    ("mistral", {"sliding_window": None}, "sdpa"),
    ("gemma3_text", {"hidden_activation": "relu"}, "sdpa"),
]  # fmt: skip


def sized(name, layers, **more):
    config = {**ALL[name][1], **more}
    if "text_config" in config:
        rope = {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}} if "qwen" in name else {}
        text = {key: SIZES.get(key, value) for key, value in config["text_config"].items()}
        return {**config, "text_config": {**text, **rope, "num_hidden_layers": layers}}
    sizes = {**SIZES, **(IMAGE if name == "vit" else {}), **(LATENT if "kv_lora_rank" in config else {})}
    sizes = {key: value for key, value in sizes.items() if key not in more and config.get(key) is not None}
    sparse = {"num_experts_per_tok": 2, "decoder_sparse_step": 1} if {"num_experts", "num_local_experts"} & set(config) else {}
    return {**config, **sparse, **sizes, **{depth: layers for depth in DEPTHS if depth in config}, "decoder_start_token_id": 0}


@functools.lru_cache(maxsize=2)  # the two depths of one test, for both of its lengths: a forward pass changes nothing in them
def built(name, config, attention, tile):
    config = json.loads(config)
    model_class = getattr(transformers, ALL[name][0])
    has_sdpa = config["model_type"] not in ("gemma2", "gpt_oss", "bloom")
    hf = transformers.AutoConfig.for_model(**config)
    how = "eager" if attention == "eager" or not has_sdpa else "sdpa"
    model = model_class.from_config(hf, dtype=torch.bfloat16, attn_implementation=how).train()
    if tile:
        tile_mlp(model, tile)
    return model


def kept_bytes(name, config, tokens, attention, tile=0):
    """Bytes of all distinct storages that autograd keeps in one forward pass, without the parameters."""
    model = built(name, json.dumps(config), attention, tile)
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    seen = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = (storage.nbytes(), x)
        return x

    ids = torch.randint(3, 100, (1, tokens))
    inputs = {"input_ids": ids, **({"labels": ids} if "Seq2Seq" in ALL[name][0] else {"use_cache": False})}
    if attention == "masked":  # a row of two documents
        inputs["position_ids"] = torch.arange(tokens)[None] % (tokens // 2)
    if name == "vit":
        inputs = {"pixel_values": torch.randn(1, 3, IMAGE["image_size"], IMAGE["image_size"], dtype=torch.bfloat16)}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = model(**inputs)
    assert out.logits is not None
    return sum(size for size, _ in seen.values())


def counted_and_planned(name, tokens, more, attention="sdpa", tile=0):
    """Of one block; of one of the encoder's and one of the decoder's."""
    three, two = (kept_bytes(name, sized(name, layers, **more), tokens, attention, tile) for layers in (3, 2))
    counted = three - two
    g = geometry(sized(name, 3, **more), attention)
    blocks = (0, 3) if g.cross_from else (2,)
    return counted, sum(block_bytes(g, tokens, block=block, seq_len=tokens, device="cpu", tile=tile).kept for block in blocks)


def lengths(name):
    return ((IMAGE["image_size"] // IMAGE["patch_size"]) ** 2 + 1,) if name == "vit" else LENGTHS


# Per-head statistics and small fp32 copies of norm weights are left out: under 1 % of a block this narrow.
NEAR = 0.012


@pytest.mark.parametrize("name", NAMES)
def test_kept_bytes_of_a_block_are_what_autograd_keeps(name):
    for tokens in lengths(name):
        counted, planned = counted_and_planned(name, tokens, {})
        assert planned == pytest.approx(counted, rel=NEAR)


@pytest.mark.parametrize("name", ("llama", "qwen3", "gemma2", "phi3", "gpt_neox", "gpt2", "starcoder2", "olmo2", "glm4"))
def test_of_a_feed_forward_part_in_tiles_its_input_alone_is_kept(name):
    for tokens in LENGTHS:
        counted, planned = counted_and_planned(name, tokens, NO_DROPOUT if name == "gpt2" else {}, tile=48)
        assert planned == pytest.approx(counted, rel=NEAR)


@pytest.mark.parametrize("name, more, attention", VARIANTS)
def test_kept_bytes_follow_the_config(name, more, attention):
    """Dropout on and off, other orders of operations, attention without a fused kernel."""
    for tokens in lengths(name):
        counted, planned = counted_and_planned(name, tokens, more, attention)
        assert planned == pytest.approx(counted, rel=NEAR)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_kept_bytes_of_an_activation(activation):
    for name, more in (("gpt2", {"activation_function": activation, **NO_DROPOUT}), ("llama", {"hidden_act": activation})):
        counted, planned = counted_and_planned(name, LENGTHS[0], more)
        assert planned == counted


def test_every_family_that_the_planner_names_is_counted():
    kinds = {ALL[name][1]["model_type"] for name in NAMES} | {
        c["text_config"]["model_type"] for _, c in OTHER.values() if "text_config" in c
    }
    assert set(supported()) - kinds == NOT_COUNTED
    exact = {ALL[name][1]["model_type"] for name in NAMES if geometry(sized(name, 2)).exact}
    assert kinds - exact - {"qwen2_vl_text", "qwen2_5_vl_text"} == {"t5", "mt5", "umt5"}
    assert not geometry({**sized("llama", 2), "hidden_act": "unheard_of"}).exact


def test_plain_llama_blocks_are_counted_to_the_byte():
    counted, planned = counted_and_planned("llama", 64, {})
    assert planned == counted


def test_dropout_in_attention_keeps_matrices_on_cpus_only():
    """A GPU's kernels draw again in backward; there a mask of the residual stream takes a byte an element, not two."""
    g, dropped = geometry(sized("gpt2", 2, **NO_DROPOUT)), geometry(sized("gpt2", 2))
    on = {device: [block_bytes(x, 4096, seq_len=2048, device=device).kept for x in (g, dropped)] for device in ("cpu", "cuda")}
    assert on["cuda"][1] - on["cuda"][0] == 2 * 4096 * 192
    assert on["cpu"][1] - on["cpu"][0] > 12 * 4096 * 2048 * 6
    assert on["cpu"][0] == on["cuda"][0]


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
    run.losses._fused_loss()
    assert tape.ledger().peak_bytes == 2 * t * g.hidden + 2 * g.vocab * g.hidden + 2 * 2048 * g.vocab


@pytest.mark.parametrize("name", ["granite-3-2b", "command-r7b", "gemma-2-2b"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_scaled_and_capped_logits_go_in_chunks(name, stage):
    """They were planned, and computed, whole: without liger-kernel, at stage 3, and Granite's with it."""
    ds_config = {"zero_optimization": {"stage": stage}}
    kinds = [
        plan_input(shapes.config_dict(name), ds_config=ds_config, **how).loss_kind
        for how in ({"kernels": "liger"}, {"chunks_loss": True}, {"chunks_loss": True, "device": "cpu"}, {})
    ]
    assert kinds == ["fused", "fused", "chunked", "full"]


@pytest.mark.parametrize("name, kind", [("llama-3b", "fused"), ("qwen2.5-vl-7b", "fused"), ("t5", "full")])
def test_a_model_that_keeps_its_own_loss_is_planned_with_all_logits(name, kind):
    config = {"model_type": name} if name == "t5" else shapes.config_dict(name)
    plan = plan_input(config, kernels="liger", ds_config={"zero_optimization": {"stage": 3}})
    assert plan.loss_kind == kind and plan.but(loss="chunked").loss_kind == "chunked"
    assert plan.but(stage=2).loss_kind == "fused"


def test_the_plan_of_scores_has_no_more_parts_the_longer_its_rows_are():
    """Scores were cut into tensors of the stream's size: 5.7 s for a plan of 405B with rows of 65,536 tokens, instead of 0.2."""
    short, long = (plan_input(shapes.config_dict("llama-8b"), seq_len=tokens, attention="eager") for tokens in (4096, 131_072))
    assert len(device_tape(long).kinds) <= 1.2 * len(device_tape(short).kinds)


def test_liger_kernels_rotary_embedding_spares_phi_3_a_copy_of_attentions_output():
    """An H200 kept 24 MiB less of each block of 4,096 tokens than planned; queries and keys are copies of parts of one product."""
    g = geometry({**shapes.config_dict("phi-3-mini"), "sliding_window": None})
    t, d, heads = 4096, 3072, 32
    kept = {kernels: block_bytes(g, t, kernels, seq_len=t).attention for kernels in ("hf", "liger")}
    assert kept["liger"] == 2 * t * (3 * d + d) + 4 * t * heads + 4 * t * d
    assert kept["hf"] - kept["liger"] == 2 * t * d


def test_gemma_3_has_rotary_tables_for_both_of_its_bases():
    run = {}
    for name in ("gemma-3-1b", "qwen3-1.7b"):
        plan = plan_input(shapes.config_dict(name), seq_len=4096)
        tape = Tape()
        run[name] = Run(plan, tape, sharding(plan, tape))._rotary_bytes()
    assert run == {"gemma-3-1b": 2 * 4 * 4096 * 256, "qwen3-1.7b": 4 * 4096 * 128}
