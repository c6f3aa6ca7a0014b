"""Sizes that a config.json may leave out: the defaults of the config classes of transformers 5.24, and other names of keys.

Checked against those classes by tests/unit/plan/test_families.py. False and absent values are left out, except tying.
"""

from __future__ import annotations

from typing import Any


def _decoder(
    hidden: int, ffn: int, layers: int, heads: int, vocab: int, *, kv: int | None = None, tied: bool = False, **more: Any
) -> dict[str, Any]:
    """`kv` None: without the key there are as many key/value heads as query heads."""
    sizes = {
        "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
        "vocab_size": vocab, "tie_word_embeddings": tied, **more,
    }  # fmt: skip
    return sizes if kv is None else {**sizes, "num_key_value_heads": kv}


def _encoder(hidden: int = 768, ffn: int = 3072, layers: int = 12, heads: int = 12, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**sizes, **more}


_BERT = _encoder(tie_word_embeddings=True, max_position_embeddings=512, type_vocab_size=2)
_T5 = {"tie_word_embeddings": True, "d_model": 512, "d_kv": 64, "relative_attention_num_buckets": 32}
_TOWER = {"image_size": 224, "num_channels": 3}
_QWEN_TOWER = {
    "hidden_size": 3584, "patch_size": 14, "num_heads": 16, "depth": 32, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "in_channels": 3,
}  # fmt: skip

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _decoder(4096, 11008, 32, 32, 32000),
    "mistral": _decoder(4096, 14336, 32, 32, 32000, kv=8),
    "ministral": _decoder(4096, 14336, 32, 32, 32000, kv=8),
    "seed_oss": _decoder(4096, 27648, 64, 80, 155136, kv=8, head_dim=128, attention_bias=True),
    "ernie4_5": _decoder(1024, 3072, 18, 16, 103424, kv=2, tied=True, head_dim=128),
    "hunyuan_v1_dense": _decoder(4096, 11008, 32, 32, 290943),
    "exaone4": _decoder(4096, 16384, 32, 32, 102400, kv=32),
    "arcee": _decoder(2560, 18432, 32, 32, 32000),
    "qwen2": _decoder(4096, 22016, 32, 32, 151936, kv=32),
    "qwen2_vl_text": _decoder(8192, 29568, 80, 64, 152064, kv=8),
    "qwen2_5_vl_text": _decoder(8192, 29568, 80, 64, 152064, kv=8),
    "qwen3": _decoder(4096, 22016, 32, 32, 151936, kv=32, head_dim=128),
    "mixtral": _decoder(4096, 14336, 32, 32, 32000, kv=8, num_local_experts=8, num_experts_per_tok=2),
    "qwen2_moe": _decoder(
        2048, 5632, 24, 16, 151936, kv=16, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632, decoder_sparse_step=1, qkv_bias=True,
    ),
    "qwen3_moe": _decoder(
        2048, 6144, 24, 32, 151936, kv=4, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        decoder_sparse_step=1,
    ),
    "olmoe": _decoder(2048, 2048, 16, 16, 50304, num_experts=64, num_experts_per_tok=8),
    "granitemoe": _decoder(4096, 11008, 32, 32, 32000, num_local_experts=8, num_experts_per_tok=2),
    "gemma": _decoder(3072, 24576, 28, 16, 256000, kv=16, tied=True, head_dim=256),
    "gemma2": _decoder(2304, 9216, 26, 8, 256000, kv=4, tied=True, head_dim=256),
    "gemma3_text": _decoder(2304, 9216, 26, 8, 262208, kv=4, tied=True, head_dim=256),
    "phi3": _decoder(3072, 8192, 32, 32, 32064),
    "phi": _decoder(2048, 8192, 24, 32, 51200),
    "olmo2": _decoder(4096, 11008, 32, 32, 50304),
    "olmo3": _decoder(4096, 11008, 32, 32, 50304),
    "flex_olmo": _decoder(4096, 11008, 32, 32, 100352, num_experts=7, num_experts_per_tok=5),
    "olmo": _decoder(4096, 11008, 32, 32, 50304),
    "granite": _decoder(4096, 11008, 32, 32, 32000),
    "cohere": _decoder(8192, 22528, 40, 64, 256000, tied=True),
    "cohere2": _decoder(8192, 22528, 40, 64, 256000, tied=True),
    "starcoder2": _decoder(3072, 12288, 30, 24, 49152, kv=2, tied=True, use_bias=True),
    "smollm3": _decoder(2048, 11008, 36, 16, 128256, kv=4, tied=True),
    "stablelm": _decoder(2560, 6912, 32, 32, 50304, kv=32),
    "glm": _decoder(4096, 13696, 40, 32, 151552, kv=2, head_dim=128, attention_bias=True),
    "glm4": _decoder(4096, 13696, 40, 32, 151552, kv=2, head_dim=128, attention_bias=True),
    "nemotron": _decoder(6144, 24576, 32, 48, 256000),
    "deepseek_v2": _decoder(
        4096, 11008, 32, 32, 102400, moe_intermediate_size=1407, n_routed_experts=64, n_shared_experts=2, q_lora_rank=1536,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    ),
    "dots1": _decoder(4608, 10944, 62, 32, 152064, kv=32, moe_intermediate_size=1408),
    "deepseek_v3": _decoder(
        7168, 18432, 61, 128, 129280, num_experts_per_tok=8, moe_intermediate_size=2048, n_routed_experts=256,
        n_shared_experts=1, first_k_dense_replace=3, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128,
    ),
    "gpt_oss": _decoder(
        2880, 2880, 36, 64, 201088, kv=8, head_dim=64, attention_bias=True, num_local_experts=128, num_experts_per_tok=4,
    ),
    "gpt2": {"vocab_size": 50257, "tie_word_embeddings": True, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},
    "gpt_neox": _decoder(6144, 24576, 44, 64, 50432, attention_bias=True),
    "gptj": {
        "vocab_size": 50400, "tie_word_embeddings": False, "n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048,
    },
    "opt": {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50272, "tie_word_embeddings": True,
        "ffn_dim": 3072, "do_layer_norm_before": True, "enable_bias": True, "max_position_embeddings": 2048,
    },
    "falcon": {
        "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65024, "tie_word_embeddings": True,
        "multi_query": True, "parallel_attn": True,
    },
    "bloom": {"hidden_size": 64, "vocab_size": 250880, "tie_word_embeddings": True, "n_layer": 2, "n_head": 8},
    "bert": {**_BERT, "vocab_size": 30522},
    "roberta": {**_BERT, "vocab_size": 50265},
    "xlm-roberta": {**_BERT, "vocab_size": 30522},
    "camembert": {**_BERT, "vocab_size": 30522},
    "t5": {**_T5, "vocab_size": 32128, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "feed_forward_proj": "relu"},
    "mt5": {**_T5, "vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu"},
    "umt5": {**_T5, "vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu"},
    "vit": _encoder(qkv_bias=True, patch_size=16, **_TOWER),
    "clip_vision_model": _encoder(patch_size=32, **_TOWER),
    "siglip_vision_model": _encoder(patch_size=16, **_TOWER),
    "qwen2_vl_vision": {**_QWEN_TOWER, "embed_dim": 1280, "mlp_ratio": 4},
    "qwen2_5_vl_vision": {**_QWEN_TOWER, "intermediate_size": 3420, "out_hidden_size": 3584},
}  # fmt: skip

# LlavaConfig's own vision tower, where its config says nothing of one.
LLAVA_TOWER = _encoder(1024, 4096, 24, 16, patch_size=14, image_size=336)

# Keys that some config.json has in place of the class's own (`attribute_map`; `n_embed` in __post_init__): theirs stands.
_SPARSE = {"num_experts": "num_local_experts"}
_GPT = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
_T5_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "head_dim": "d_kv",
}
OTHER_NAMES: dict[str, dict[str, str]] = {
    "mixtral": _SPARSE,
    "qwen3_moe": {
        "num_local_experts": "num_experts"
    },  # its attribute_map has them the other way round, which files notice only with both
    "gpt_oss": _SPARSE,
    "olmoe": {"num_local_experts": "num_experts"},
    "flex_olmo": {"num_local_experts": "num_experts"},
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts"},
    "dots1": {"num_local_experts": "n_routed_experts"},
    "gpt2": {**_GPT, "max_position_embeddings": "n_positions"},
    "gptj": {**_GPT, "max_position_embeddings": "n_positions"},
    "falcon": {"n_embed": "hidden_size"},
    "bloom": {"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    "t5": _T5_NAMES,
    "mt5": _T5_NAMES,
    "umt5": _T5_NAMES,
}
