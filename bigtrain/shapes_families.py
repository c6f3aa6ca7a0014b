"""Shapes of single models of families that have no row of sizes of their own in `shapes`."""

from __future__ import annotations

from typing import Any

_BF16 = {"torch_dtype": "bfloat16"}


def _named(architecture: str, model_type: str, **values: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **values, **_BF16}


def _qwen3_moe(layers: int) -> dict[str, Any]:
    """Blocks of Qwen3 30B-A3B, of which 48 are the whole model."""
    return _named(
        "Qwen3MoeForCausalLM", "qwen3_moe", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, vocab_size=151936, hidden_act="silu",
        max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1000000.0, tie_word_embeddings=False, attention_bias=False,
    )  # fmt: skip


def _deepseek_v2_lite(layers: int) -> dict[str, Any]:
    """Blocks of DeepSeek V2 Lite, of which 27 are the whole model; the first has no experts."""
    return _named(
        "DeepseekV2ForCausalLM", "deepseek_v2", hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408,
        num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
        first_k_dense_replace=1, topk_method="greedy", n_group=1, topk_group=1, routed_scaling_factor=1.0, norm_topk_prob=False,
        vocab_size=102400, hidden_act="silu", max_position_embeddings=163840, rms_norm_eps=1e-6, rope_theta=10000.0,
        tie_word_embeddings=False, attention_bias=False, bos_token_id=100000, eos_token_id=100001,
    )  # fmt: skip


def _gpt_oss(layers: int) -> dict[str, Any]:
    """Blocks of gpt-oss 20B, of which 24 are the whole model."""
    return _named(
        "GptOssForCausalLM", "gpt_oss", hidden_size=2880, intermediate_size=2880, num_hidden_layers=layers, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4, vocab_size=201088, hidden_act="silu",
        max_position_embeddings=131072, sliding_window=128, layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        rms_norm_eps=1e-5, rope_theta=150000.0, tie_word_embeddings=False, attention_bias=True, eos_token_id=200002,
        pad_token_id=199999,
    )  # fmt: skip


FURTHER: dict[str, dict[str, Any]] = {
    "gpt2-xl": _named(
        "GPT2LMHeadModel", "gpt2", n_embd=1600, n_layer=48, n_head=25, n_positions=1024, vocab_size=50257,
        activation_function="gelu_new", attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1, layer_norm_epsilon=1e-5,
        tie_word_embeddings=True, bos_token_id=50256, eos_token_id=50256,
    ),
    "opt-1.3b": _named(
        "OPTForCausalLM", "opt", hidden_size=2048, ffn_dim=8192, num_hidden_layers=24, num_attention_heads=32, vocab_size=50272,
        word_embed_proj_dim=2048, max_position_embeddings=2048, activation_function="relu", do_layer_norm_before=True, dropout=0.1,
        tie_word_embeddings=True, bos_token_id=2, eos_token_id=2, pad_token_id=1,
    ),
    "gemma-2-2b": _named(
        "Gemma2ForCausalLM", "gemma2", hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, vocab_size=256000, hidden_activation="gelu_pytorch_tanh", max_position_embeddings=8192,
        query_pre_attn_scalar=256, sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0, rms_norm_eps=1e-6,
        rope_theta=10000.0, tie_word_embeddings=True, bos_token_id=2, eos_token_id=1, pad_token_id=0,
    ),
    "granite-3-2b": _named(
        "GraniteForCausalLM", "granite", hidden_size=2048, intermediate_size=8192, num_hidden_layers=40, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=49155, hidden_act="silu", max_position_embeddings=4096, embedding_multiplier=12.0,
        attention_multiplier=0.015625, residual_multiplier=0.22, logits_scaling=8.0, rms_norm_eps=1e-5, rope_theta=10000.0,
        tie_word_embeddings=True, attention_bias=False, mlp_bias=False, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    ),
    "stablelm-2-1.6b": _named(
        "StableLmForCausalLM", "stablelm", hidden_size=2048, intermediate_size=5632, num_hidden_layers=24, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=100352, hidden_act="silu", max_position_embeddings=4096, partial_rotary_factor=0.25,
        use_qkv_bias=True, layer_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False, bos_token_id=100257,
        eos_token_id=100257,
    ),
    "falcon-rw-1b": _named(
        "FalconForCausalLM", "falcon", hidden_size=2048, num_hidden_layers=24, num_attention_heads=32, vocab_size=50304, alibi=True,
        multi_query=False, parallel_attn=False, bias=True, new_decoder_architecture=False, layer_norm_epsilon=1e-5,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    ),
    "olmo-2-1b": _named(
        "Olmo2ForCausalLM", "olmo2", hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=16, vocab_size=100352, hidden_act="silu", max_position_embeddings=4096, rms_norm_eps=1e-6,
        rope_theta=500000.0, tie_word_embeddings=False, attention_bias=False, eos_token_id=100257, pad_token_id=100277,
    ),
    "smollm3-3b": _named(
        "SmolLM3ForCausalLM", "smollm3", hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
        num_key_value_heads=4, vocab_size=128256, hidden_act="silu", max_position_embeddings=65536, rms_norm_eps=1e-6,
        rope_theta=5000000.0, tie_word_embeddings=True, attention_bias=False, mlp_bias=False, bos_token_id=128000,
        eos_token_id=128012, pad_token_id=128004,
    ),
    "starcoder2-3b": _named(
        "Starcoder2ForCausalLM", "starcoder2", hidden_size=3072, intermediate_size=12288, num_hidden_layers=30,
        num_attention_heads=24, num_key_value_heads=2, vocab_size=49152, hidden_act="gelu_pytorch_tanh",
        max_position_embeddings=16384, sliding_window=4096, use_bias=True, norm_epsilon=1e-5, rope_theta=999999.44,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    ),
    "qwen3-30b-a3b-8-blocks": _qwen3_moe(8),
    "qwen3-30b-a3b": _qwen3_moe(48),
    "phi-2": _named(
        "PhiForCausalLM", "phi", hidden_size=2560, intermediate_size=10240, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=51200, hidden_act="gelu_new", max_position_embeddings=2048, partial_rotary_factor=0.4,
        rope_theta=10000.0, resid_pdrop=0.1, embd_pdrop=0.0, attention_dropout=0.0, qk_layernorm=False, layer_norm_eps=1e-5,
        tie_word_embeddings=False, bos_token_id=50256, eos_token_id=50256,
    ),
    "bloom-1b7": _named(
        "BloomForCausalLM", "bloom", hidden_size=2048, n_layer=24, n_head=16, vocab_size=250880, layer_norm_epsilon=1e-5,
        attention_dropout=0.0, hidden_dropout=0.0, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=3,
    ),
    "gpt-j-6b": _named(
        "GPTJForCausalLM", "gptj", n_embd=4096, n_layer=28, n_head=16, rotary_dim=64, n_positions=2048, vocab_size=50400,
        activation_function="gelu_new", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, layer_norm_epsilon=1e-5,
        tie_word_embeddings=False, bos_token_id=50256, eos_token_id=50256,
    ),
    "nemotron-mini-4b": _named(
        "NemotronForCausalLM", "nemotron", hidden_size=3072, intermediate_size=9216, num_hidden_layers=32, num_attention_heads=24,
        num_key_value_heads=8, head_dim=128, vocab_size=256000, hidden_act="relu2", max_position_embeddings=4096,
        partial_rotary_factor=0.5, rope_theta=10000.0, norm_eps=1e-5, tie_word_embeddings=False, attention_bias=False,
        mlp_bias=False, bos_token_id=2, eos_token_id=3,
    ),
    "olmo-3-7b": _named(
        "Olmo3ForCausalLM", "olmo3", hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=100278, hidden_act="silu", max_position_embeddings=65536, sliding_window=4096,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 8, rms_norm_eps=1e-6,
        rope_theta=500000.0, tie_word_embeddings=False, attention_bias=False, eos_token_id=100257, pad_token_id=100277,
    ),
    "command-r7b": _named(
        "Cohere2ForCausalLM", "cohere2", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=256000, hidden_act="silu", max_position_embeddings=132096,
        sliding_window=4096, layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 8,
        logit_scale=0.25, layer_norm_eps=1e-5, rope_theta=50000.0, tie_word_embeddings=True, attention_bias=False, bos_token_id=5,
        eos_token_id=255001, pad_token_id=0,
    ),
    "glm-4-9b": _named(
        "Glm4ForCausalLM", "glm4", hidden_size=4096, intermediate_size=13696, num_hidden_layers=40, num_attention_heads=32,
        num_key_value_heads=2, head_dim=128, vocab_size=151552, hidden_act="silu", max_position_embeddings=32768,
        partial_rotary_factor=0.5, rope_theta=10000.0, rms_norm_eps=1e-5, tie_word_embeddings=False, attention_bias=False,
        eos_token_id=[151329, 151336, 151338], pad_token_id=151329,
    ),
    "ernie-4.5-0.3b": _named(
        "Ernie4_5ForCausalLM", "ernie4_5", hidden_size=1024, intermediate_size=3072, num_hidden_layers=18, num_attention_heads=16,
        num_key_value_heads=2, head_dim=128, vocab_size=103424, hidden_act="silu", max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_theta=500000.0, tie_word_embeddings=True, use_bias=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    ),
    "deepseek-v2-lite-8-blocks": _deepseek_v2_lite(8),
    "deepseek-v2-lite": _deepseek_v2_lite(27),
    "gpt-oss-20b-6-blocks": _gpt_oss(6),
    "gpt-oss-20b": _gpt_oss(24),
}  # fmt: skip
