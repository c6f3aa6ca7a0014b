"""The sizes that decide activations, read from a Hugging Face config: one decoder stack and its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bigtrain.plan.family_others import ROBERTA, T5, VISION_LANGUAGE, text_values, values
from bigtrain.plan.parameters import Values

_LAYER_NORM = {
    "gpt2", "gptj", "gpt_neox", "opt", "falcon", "bloom", "bert", *ROBERTA, "vit", "phi", "starcoder2", "stablelm",
    "nemotron",
}  # fmt: skip
_PLAIN_MLP = {
    "gpt2", "gptj", "gpt_neox", "opt", "falcon", "bloom", "bert", *ROBERTA, "vit", *T5, "arcee", "phi", "starcoder2",
    "nemotron",
}  # fmt: skip
_FOUR_NORMS = {"gemma2", "gemma3_text", "glm4"}
_ONE_NORM = {"cohere", "cohere2", "phi", "gptj"}
_QK_NORM = {
    "qwen3", "qwen3_moe", "olmoe", "olmo2", "olmo3", "flex_olmo", "gemma3_text", "hunyuan_v1_dense", "exaone4", "dots1",
}  # fmt: skip
# Bytes that a block keeps for backward with transformers' own modules and sdpa, per token: (per hidden, per query,
# per key/value, per feed-forward element). Counted with torch's saved_tensors_hooks on transformers 5.24
# (tests/unit/plan/test_activations.py counts again).
KEPT: dict[str, tuple[int, int, int, int]] = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "smollm3", "granite"), (16, 4, 4, 8)),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), (16, 4, 4, 8)),
    "qwen3": (16, 10, 10, 8),
    "gemma": (20, 4, 4, 8),
    "gemma3_text": (36, 12, 12, 8),
    "phi3": (20, 4, 6, 8),
    "phi": (6, 4, 4, 10),
    "olmo": (12, 4, 4, 8),
    "olmo2": (20, 12, 12, 8),
    "cohere": (14, 4, 4, 8),
    "cohere2": (14, 4, 4, 8),
    "stablelm": (8, 6, 4, 8),
    "glm4": (28, 6, 4, 8),
    "nemotron": (8, 6, 4, 4),
    "starcoder2": (8, 4, 4, 4),
    "gpt_neox": (12, 4, 4, 4),
    "gptj": (4, 4, 4, 10),
    "opt": (12, 4, 4, 2),
}
# Classes without sdpa: the attention matrix itself is kept, in fp32 and in bf16.
_EAGER_ATTENTION = {"gemma2", "gpt_oss", "bloom"}
# Families whose classes drop activations by default (config keys differ; 0.1 in each default).
_DROPOUT_KEYS = ("resid_pdrop", "hidden_dropout_prob", "hidden_dropout", "dropout_rate", "dropout")
_DROPOUT_BY_DEFAULT = {"gpt2", "bert", *ROBERTA, *T5, "opt"}


@dataclass(frozen=True)
class Geometry:
    """Sizes of a stack of equal blocks (elements, not bytes).

    Attributes:
        hidden: width of the residual stream.
        query, key, value: width of all query, key and value heads together.
        heads: number of query heads.
        ffn: width of the feed-forward part; of one expert in a sparse block.
        experts, experts_per_token: 0 for a dense model.
        shared_ffn: width of experts that every token uses.
        layers: number of blocks; `dense_layers` of them have no experts (and `dense_ffn` as width).
        vocab: columns of the logits; 0 without a head over a vocabulary.
        gated: the feed-forward part has a gate (SwiGLU, GeGLU).
        rms: the norms are RMSNorm computed in fp32 by PyTorch operations; otherwise nn.LayerNorm.
        norms: norms per block. qk_norm: queries and keys are normed too.
        dropout: bytes of masks are kept. soft_cap: logits go through tanh.
        kept: bytes a block keeps, by part (see `KEPT`); None: by the general rules.
        eager: attention keeps its matrix.
        exact: False when activations are an estimate: the family was not counted, or only shapes are known.
    """

    hidden: int
    query: int
    key: int
    value: int
    heads: int
    ffn: int
    layers: int
    vocab: int
    gated: bool = True
    rms: bool = True
    norms: int = 2
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    dropout: bool = False
    soft_cap: bool = False
    kept: tuple[int, int, int, int] | None = None
    eager: bool = False
    exact: bool = True

    def is_dense(self, block: int) -> bool:
        return self.experts == 0 or block < self.dense_layers


def _first(c: Values, *keys: str, default: int | None = None) -> int:
    for key in keys:
        if c.get(key):
            return int(c.get(key))
    return int(default) if default is not None else c[keys[0]]


def _attention_widths(c: Values, heads: int, hidden: int) -> tuple[int, int, int]:
    if c.get("kv_lora_rank"):
        qk = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
        return heads * qk, heads * qk, heads * c["v_head_dim"]
    head = _first(c, "head_dim", "d_kv", default=hidden // heads)
    kv = _first(c, "num_key_value_heads", default=heads) * head
    if c.get("model_type") == "falcon" and c.flag("multi_query", True) and not c.flag("new_decoder_architecture"):
        kv = head
    return heads * head, kv, kv


def _experts(c: Values, ffn: int) -> dict[str, Any]:
    count = _first(c, "n_routed_experts", "num_experts", "num_local_experts", default=0)
    if not count:
        return {"ffn": ffn}
    width = _first(c, "moe_intermediate_size", default=ffn)
    shared = _first(c, "shared_expert_intermediate_size", default=0)
    if c.get("n_shared_experts"):
        shared = width * c["n_shared_experts"]
    return {
        "ffn": width,
        "experts": count,
        "experts_per_token": _first(c, "num_experts_per_tok", default=2),
        "shared_ffn": shared,
        "dense_layers": int(c.get("first_k_dense_replace") or 0) or len(c.get("mlp_only_layers") or []),
        "dense_ffn": ffn,
    }


def geometry(config: Mapping[str, Any]) -> Geometry:
    """Sizes of the language model (of a vision-language model too: images are counted as their text tokens)."""
    c = text_values(config) if config.get("model_type") in VISION_LANGUAGE else values(config)
    kind = str(c.get("model_type"))
    hidden = _first(c, "hidden_size", "n_embd", "d_model")
    heads = _first(c, "num_attention_heads", "n_head", "num_heads")
    layers = _first(c, "num_hidden_layers", "n_layer", "num_layers")
    if kind in T5:
        layers += _first(c, "num_decoder_layers", default=layers)
    ffn = _first(c, "intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", default=4 * hidden)
    query, key, value = _attention_widths(c, heads, hidden)
    gated = kind not in _PLAIN_MLP or str(c.get("feed_forward_proj", "")).startswith("gated")
    dropout = next((c.get(k) for k in _DROPOUT_KEYS if c.get(k) is not None), 0.1 if kind in _DROPOUT_BY_DEFAULT else 0)
    return Geometry(
        hidden=hidden, query=query, key=key, value=value, heads=heads, layers=layers,
        vocab=0 if kind == "vit" else c["vocab_size"],
        gated=gated,
        rms=kind not in _LAYER_NORM,
        norms=4 if kind in _FOUR_NORMS else 1 if kind in _ONE_NORM else 2,
        qk_norm=kind in _QK_NORM or c.flag("use_qk_norm"),
        dropout=bool(dropout),
        soft_cap=bool(c.get("final_logit_softcapping", kind == "gemma2")),
        kept=KEPT.get(kind),
        eager=kind in _EAGER_ATTENTION,
        exact=kind in KEPT,
        **_experts(c, ffn),
    )  # fmt: skip


def geometry_of_shapes(parameters: Any) -> Geometry:
    """A stand-in when only shapes are known: the widest matrices decide, and activations are an estimate."""
    blocks = {p.block for p in parameters.items if p.block is not None}
    matrices = [p.shape for p in parameters.items if len(p.shape) == 2]
    vectors = [p.shape[0] for p in parameters.items if len(p.shape) == 1]
    sides = [side for shape in matrices for side in shape]
    hidden = max(set(vectors), key=vectors.count) if vectors else min(sides, default=1)
    vocab = max((s[0] for s in matrices if s[1] == hidden and s[0] >= 8 * hidden), default=0)
    ffn = max((side for side in sides if side != vocab), default=4 * hidden)
    return Geometry(
        hidden=hidden, query=hidden, key=hidden, value=hidden, heads=max(1, hidden // 64), ffn=ffn,
        layers=max(1, len(blocks)), vocab=vocab, rms=False, exact=False,
    )  # fmt: skip
