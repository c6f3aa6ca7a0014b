"""Small configs of many model families: deliberately uneven numbers, so that a swapped pair of sizes shows."""

_LATENT = dict(
    num_key_value_heads=6,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=20,
    kv_lora_rank=14,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=10,
)
BASE = dict(
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=131,
)
VISION = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3, image_size=28, patch_size=7)


def _of(model_type, *drop, **more):
    return {k: v for k, v in {"model_type": model_type, **BASE, **more}.items() if k not in drop}


CAUSAL = {
    "llama": _of("llama"),
    "llama-tied-biased": _of("llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=10),
    "mistral": _of("mistral", head_dim=10),
    "ministral": _of("ministral", head_dim=10),
    "seed_oss": _of("seed_oss", head_dim=10, mlp_bias=True),
    "ernie4_5": _of("ernie4_5", use_bias=True, head_dim=10),
    "hunyuan_v1_dense": _of("hunyuan_v1_dense", attention_bias=True, head_dim=10),
    "exaone4": _of("exaone4"),
    "arcee": _of("arcee", mlp_bias=True),
    "qwen2": _of("qwen2"),
    "qwen2-tied": _of("qwen2", tie_word_embeddings=True),
    "qwen3": _of("qwen3", head_dim=10),
    "qwen3-biased": _of("qwen3", attention_bias=True, tie_word_embeddings=True),
    "mixtral": _of("mixtral", num_local_experts=4),
    "qwen2_moe": _of(
        "qwen2_moe", num_experts=4, moe_intermediate_size=20, shared_expert_intermediate_size=28, decoder_sparse_step=2
    ),
    "qwen3_moe": _of("qwen3_moe", num_experts=4, moe_intermediate_size=20, mlp_only_layers=[1], head_dim=10),
    "olmoe": _of("olmoe", num_experts=4),
    "granitemoe": _of("granitemoe", num_local_experts=4),
    "gemma": _of("gemma", head_dim=10),
    "gemma2": _of("gemma2", head_dim=10),
    "gemma3_text": _of("gemma3_text", head_dim=10),
    "phi3": _of("phi3", pad_token_id=0),
    "phi": _of("phi"),
    "olmo2": _of("olmo2"),
    "olmo3": _of("olmo3"),
    "flex_olmo": _of("flex_olmo", num_experts=4, num_experts_per_tok=2, pad_token_id=0),
    "olmo": _of("olmo"),
    "granite": _of("granite"),
    "cohere": _of("cohere"),
    "cohere-qk": _of("cohere", use_qk_norm=True),
    "cohere2": _of("cohere2"),
    "starcoder2": _of("starcoder2"),
    "starcoder2-plain": _of("starcoder2", use_bias=False, tie_word_embeddings=False),
    "smollm3": _of("smollm3", pad_token_id=0),
    "stablelm": _of("stablelm"),
    "glm": _of("glm", head_dim=10, pad_token_id=0),
    "glm4": _of("glm4", head_dim=10, pad_token_id=0),
    "nemotron": _of("nemotron", head_dim=10),
    "deepseek_v3": _of("deepseek_v3", n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=12, **_LATENT),
    "deepseek_v3-no-lora": _of("deepseek_v3", n_group=2, topk_group=1, first_k_dense_replace=2, q_lora_rank=None, **_LATENT),
    "deepseek_v2": _of("deepseek_v2", first_k_dense_replace=1, q_lora_rank=12, mlp_bias=True, **_LATENT),
    "dots1": _of(
        "dots1",
        n_routed_experts=4,
        n_shared_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        first_k_dense_replace=1,
    ),
    "gpt_oss": _of("gpt_oss", num_local_experts=4, head_dim=10),
    "gpt2": dict(model_type="gpt2", n_embd=48, n_layer=3, n_head=6, vocab_size=131, n_positions=37),
    "gpt2-wide": dict(model_type="gpt2", n_embd=48, n_layer=2, n_head=6, vocab_size=131, n_positions=37, n_inner=100),
    "gpt_neox": _of("gpt_neox", "num_key_value_heads"),
    "gptj": dict(model_type="gptj", n_embd=48, n_layer=3, n_head=6, vocab_size=131, n_positions=37, rotary_dim=4),
    "opt": _of(
        "opt",
        "intermediate_size",
        "num_key_value_heads",
        ffn_dim=80,
        max_position_embeddings=37,
        word_embed_proj_dim=48,
    ),
    "opt-350m-like": _of(
        "opt",
        "intermediate_size",
        "num_key_value_heads",
        ffn_dim=80,
        max_position_embeddings=37,
        word_embed_proj_dim=32,
        do_layer_norm_before=False,
    ),
    "falcon": _of("falcon", "intermediate_size", "num_key_value_heads"),
    "falcon-40b-like": _of("falcon", "intermediate_size", "num_key_value_heads", new_decoder_architecture=True, num_kv_heads=2),
    "falcon-rw-like": _of(
        "falcon", "intermediate_size", "num_key_value_heads", multi_query=False, parallel_attn=False, bias=True
    ),
    "bloom": dict(model_type="bloom", hidden_size=48, n_layer=3, n_head=6, vocab_size=131),
}
_T5 = dict(d_model=48, d_kv=10, d_ff=80, num_layers=3, num_decoder_layers=2, num_heads=6, vocab_size=131)
OTHER = {
    "bert": ("AutoModelForMaskedLM", _of("bert", "num_key_value_heads", max_position_embeddings=37)),
    "roberta": ("AutoModelForMaskedLM", _of("roberta", "num_key_value_heads", max_position_embeddings=37)),
    "xlm-roberta": ("AutoModelForMaskedLM", _of("xlm-roberta", "num_key_value_heads", max_position_embeddings=37)),
    "camembert": ("AutoModelForMaskedLM", _of("camembert", "num_key_value_heads", max_position_embeddings=37)),
    "mt5": ("AutoModelForSeq2SeqLM", dict(model_type="mt5", **_T5)),
    "umt5": ("AutoModelForSeq2SeqLM", dict(model_type="umt5", **_T5)),
    "t5": (
        "AutoModelForSeq2SeqLM",
        dict(model_type="t5", **_T5),
    ),
    "t5-gated": (
        "AutoModelForSeq2SeqLM",
        dict(
            model_type="t5",
            d_model=48,
            d_kv=10,
            d_ff=80,
            num_layers=2,
            num_heads=6,
            vocab_size=131,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        ),
    ),
    "vit": ("AutoModelForImageClassification", dict(model_type="vit", num_labels=5, **VISION)),
    "llava": (
        "AutoModelForImageTextToText",
        dict(
            model_type="llava",
            text_config=_of("llama"),
            vision_config=dict(model_type="clip_vision_model", projection_dim=16, **VISION),
        ),
    ),
    "qwen2_vl": (
        "AutoModelForImageTextToText",
        dict(
            model_type="qwen2_vl",
            text_config=_of("qwen2_vl_text", rope_scaling={"type": "mrope", "mrope_section": [2, 1, 1]}),
            vision_config=dict(
                model_type="qwen2_vl", depth=2, embed_dim=24, hidden_size=48, num_heads=3, mlp_ratio=2, patch_size=7
            ),
            tie_word_embeddings=False,
        ),
    ),
    "qwen2_5_vl": (
        "AutoModelForImageTextToText",
        dict(
            model_type="qwen2_5_vl",
            text_config=_of("qwen2_5_vl_text", rope_scaling={"type": "mrope", "mrope_section": [2, 1, 1]}),
            vision_config=dict(
                model_type="qwen2_5_vl",
                depth=2,
                hidden_size=24,
                intermediate_size=40,
                out_hidden_size=48,
                num_heads=3,
                patch_size=7,
            ),
            tie_word_embeddings=True,
        ),
    ),
    "gemma3": (
        "AutoModelForImageTextToText",
        dict(
            model_type="gemma3",
            text_config=_of("gemma3_text", head_dim=10),
            vision_config=dict(model_type="siglip_vision_model", **VISION),
            mm_tokens_per_image=4,
        ),
    ),
}
