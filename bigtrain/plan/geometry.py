"""The sizes that decide activations, read from a Hugging Face config: one decoder stack and its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bigtrain.plan.family_decoders import is_sparse
from bigtrain.plan.family_kept import RMS, Attention, Keeps, are_counted, keeps, windows
from bigtrain.plan.family_others import ROBERTA, T5, VISION_LANGUAGE, t5_is_gated, text_values, values
from bigtrain.plan.impossible import refuse_impossible
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
        norms: norms per block. soft_cap: logits go through tanh.
        windows: tokens that a query sees at most, of each block with a sliding window.
        keeps: what the operations of a block keep. latent: width of a latent attention's keys that come with its values.
        cross_from: the first block that also attends to an encoder; 0: none does.
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
    experts: int = 0
    experts_per_token: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    soft_cap: bool = False
    windows: tuple[int, ...] = ()
    keeps: Keeps = RMS
    latent: int = 0
    cross_from: int = 0
    exact: bool = True

    def is_dense(self, block: int) -> bool:
        return self.experts == 0 or block < self.dense_layers

    def attended(self, seq_len: int) -> float:
        """Twice the tokens that a query sees on average in a row of causal attention, summed over the blocks: layers x seq_len
        without windows. A dense mask hides a window, and spares nothing."""
        windows = () if self.keeps.window else self.windows
        return attended(self.layers, seq_len, windows)

    @property
    def unlike(self) -> tuple[int, ...]:
        """One block of each sort."""
        return tuple(sorted({0, self.dense_layers, self.cross_from}))


def attended(layers: int, seq_len: int, windows: Sequence[int]) -> float:
    """`Geometry.attended`: a window of w in rows of s tokens leaves w (2 - w / s) of s."""
    narrow = [w for w in windows if w < seq_len]
    return (layers - len(narrow)) * seq_len + sum(w * (2 - w / seq_len) for w in narrow)


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
        "dense_layers": _dense_layers(c),
        "dense_ffn": ffn,
    }


def _dense_layers(c: Values) -> int:
    """Blocks without experts, taken as the first ones."""
    if c.get("decoder_sparse_step"):
        return sum(not is_sparse(c, i) for i in range(c["num_hidden_layers"]))
    return int(c.get("first_k_dense_replace") or 0)


def geometry(config: Mapping[str, Any], attention: Attention = "sdpa") -> Geometry:
    """Sizes of the language model (of a vision-language model too: images are counted as their text tokens).

    Raises:
        UsageError: heads or experts contradict each other.
    """
    c = text_values(config) if config.get("model_type") in VISION_LANGUAGE else values(config)
    refuse_impossible(c)
    kind = str(c.get("model_type"))
    hidden = _first(c, "hidden_size", "n_embd", "d_model")
    heads = _first(c, "num_attention_heads", "n_head", "num_heads")
    layers = _first(c, "num_hidden_layers", "n_layer", "num_layers")
    encoders = layers if kind in T5 else 0
    if kind in T5:
        layers += c["num_decoder_layers"]
    ffn = _first(c, "intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", default=4 * hidden)
    query, key, value = _attention_widths(c, heads, hidden)
    gated = t5_is_gated(c) if kind in T5 else kind not in _PLAIN_MLP
    return Geometry(
        hidden=hidden, query=query, key=key, value=value, heads=heads, layers=layers,
        vocab=0 if kind == "vit" else c["vocab_size"],
        gated=gated,
        rms=kind not in _LAYER_NORM,
        norms=4 if kind in _FOUR_NORMS else 1 if kind in _ONE_NORM else 2,
        soft_cap=bool(c.get("final_logit_softcapping", kind == "gemma2")),
        windows=windows(kind, c, layers),
        keeps=keeps(kind, c, attention),
        latent=heads * c["qk_nope_head_dim"] if c.get("kv_lora_rank") else 0,
        cross_from=encoders,
        exact=are_counted(kind, c, attention),
        **_experts(c, ffn),
    )  # fmt: skip


def windows_of(text: Mapping[str, Any]) -> tuple[int, ...]:
    """`Geometry.windows` of a language model's own config, of whatever type it is."""
    return windows(str(text.get("model_type")), Values(text, {}), int(text.get("num_hidden_layers") or 0))


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
        layers=max(1, len(blocks)), vocab=vocab, rms=False, keeps=Keeps(hidden=8), exact=False,
    )  # fmt: skip
