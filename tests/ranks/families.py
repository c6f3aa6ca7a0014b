"""Tiny models of many families, with odd sizes so that partitions need padding."""

from __future__ import annotations

from typing import Any

import torch

SMALL = dict(
    hidden_size=36, intermediate_size=58, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3, vocab_size=131,
    max_position_embeddings=64, head_dim=12, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
ODD = SMALL | dict(
    hidden_size=35, intermediate_size=57, num_attention_heads=5, num_key_value_heads=5
)  # with padding on 2, 3, 4 ranks
MOE = dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=22, decoder_sparse_step=1)
VISION = dict(
    hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8,
    projection_dim=24,
)  # fmt: skip


def _qwen2_vl() -> Any:
    import transformers as t

    text = {**SMALL, "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}}
    vision = dict(depth=2, embed_dim=24, hidden_size=36, num_heads=2, patch_size=4, mlp_ratio=2)
    return t.Qwen2VLForConditionalGeneration(t.Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False))


def _llava() -> Any:
    import transformers as t

    config = t.LlavaConfig(
        text_config=t.LlamaConfig(**SMALL),
        vision_config=t.CLIPVisionConfig(**VISION),
        image_token_id=130,
        vision_feature_layer=-1,
    )
    return t.LlavaForConditionalGeneration(config)


def _ernie_vl_moe() -> Any:
    """Its gate is transposed and its experts are split between two lists on load: not a matter of byte ranges alone."""
    import transformers as t

    text = {k: v for k, v in SMALL.items() if k != "head_dim"} | dict(
        moe_num_experts=4, moe_k=2, moe_intermediate_size=[14, 10], moe_num_shared_experts=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
    )  # fmt: skip
    vision = dict(depth=2, hidden_size=24, num_heads=2, intermediate_size=40, patch_size=4)
    return t.Ernie4_5_VLMoeForConditionalGeneration(t.Ernie4_5_VLMoeConfig(text_config=text, vision_config=vision))


FAMILIES: dict[str, Any] = {
    "llama": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "llama_untied": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**{**SMALL, "num_key_value_heads": 1})),
    "llama_odd": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**ODD)),
    "mixtral_odd": lambda t: t.MixtralForCausalLM(t.MixtralConfig(**ODD, num_local_experts=3)),
    "qwen2": lambda t: t.Qwen2ForCausalLM(t.Qwen2Config(**SMALL)),
    "qwen3": lambda t: t.Qwen3ForCausalLM(t.Qwen3Config(**SMALL)),
    "qwen3_moe": lambda t: t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**SMALL, **MOE)),
    "mixtral": lambda t: t.MixtralForCausalLM(t.MixtralConfig(**SMALL, num_local_experts=3)),
    "gemma2": lambda t: t.Gemma2ForCausalLM(t.Gemma2Config(**SMALL, query_pre_attn_scalar=12)),
    "gemma3": lambda t: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**SMALL, query_pre_attn_scalar=12)),
    "phi3": lambda t: t.Phi3ForCausalLM(t.Phi3Config(**SMALL)),
    "gpt2": lambda t: t.GPT2LMHeadModel(t.GPT2Config(n_embd=36, n_layer=2, n_head=3, vocab_size=131, n_positions=64)),
    "gpt_neox": lambda t: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**SMALL)),
    "opt": lambda t: t.OPTForCausalLM(
        t.OPTConfig(
            hidden_size=36, ffn_dim=58, num_hidden_layers=2, num_attention_heads=3, vocab_size=131, word_embed_proj_dim=36,
            max_position_embeddings=64,
        )
    ),
    "t5": lambda t: t.T5ForConditionalGeneration(
        t.T5Config(d_model=36, d_kv=12, d_ff=58, num_layers=2, num_heads=3, vocab_size=131, decoder_start_token_id=0)
    ),
    "bert": lambda t: t.BertForMaskedLM(t.BertConfig(**{k: v for k, v in SMALL.items() if k != "head_dim"})),
    "deepseek_v3": lambda t: t.DeepseekV3ForCausalLM(
        t.DeepseekV3Config(
            **{k: v for k, v in SMALL.items() if k != "head_dim"}, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
            topk_group=1, moe_intermediate_size=22, first_k_dense_replace=1, q_lora_rank=10, kv_lora_rank=10,
            qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=12, n_shared_experts=1,
        )
    ),
    "gpt_oss": lambda t: t.GptOssForCausalLM(
        t.GptOssConfig(**SMALL, num_local_experts=3, num_experts_per_tok=2, layer_types=["full_attention"] * 2)
    ),
    "qwen2_vl": lambda t: _qwen2_vl(),
    "llava": lambda t: _llava(),
    "ernie_vl_moe": lambda t: _ernie_vl_moe(),
    "vit": lambda t: t.ViTForImageClassification(t.ViTConfig(**VISION, num_labels=5)),
    "resnet": lambda t: t.ResNetForImageClassification(
        t.ResNetConfig(embedding_size=9, hidden_sizes=[9, 15], depths=[1, 1], layer_type="basic", num_labels=5)
    ),
}  # fmt: skip
# A parameter without dimensions, which deepspeed.zero.Init itself does not take: build_model only.
WITH_SCALARS: dict[str, Any] = {
    "clip": lambda t: t.CLIPModel(
        t.CLIPConfig(
            text_config={k: SMALL[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")}
            | {"num_attention_heads": 3},
            vision_config=VISION,
            projection_dim=24,
        )
    ),
}
LANGUAGE = tuple(
    name for name in FAMILIES if name not in ("mixtral_odd", "qwen2_vl", "llava", "ernie_vl_moe", "vit", "resnet", "t5")
)


def make(family: str, seed: int = 7, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model of `family` with random values (also in the buffers that are saved)."""
    import transformers

    torch.manual_seed(seed)
    model = (FAMILIES | WITH_SCALARS)[family](transformers)
    with torch.no_grad():
        for tensor in {id(value): value for value in model.state_dict(keep_vars=True).values()}.values():
            if tensor.is_floating_point():  # buffers outside the state dict stay in fp32, as from_pretrained has them
                tensor.data = (torch.randn(tensor.shape) * 0.05).to(dtype)
    model.config.dtype = dtype
    return model.eval()


def save(family: str, folder: str, **kwargs: Any) -> None:
    """Write a tiny checkpoint as transformers does."""
    make(family).save_pretrained(folder, **kwargs)


def inputs(family: str, model: Any) -> dict[str, torch.Tensor]:
    """One small forward's inputs."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 120, (2, 9), generator=generator)
    if family in ("vit", "resnet"):
        size = 16 if family == "vit" else 32
        return {"pixel_values": torch.randn(2, 3, size, size, generator=generator).to(model.dtype)}
    if family == "t5":
        return {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
    return {"input_ids": ids}


def reference_values(folder: str) -> dict[str, torch.Tensor]:
    """What plain transformers gives the model's parameters from a folder, in fp32."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
