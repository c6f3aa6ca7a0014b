"""Families with a layout of their own: GPT-2 kin, OPT, Falcon, BLOOM, encoders, T5, image and vision-language models.

Checked against the classes of transformers 5.24 on the meta device, name by name (tests/unit/plan/test_families.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bigtrain.plan.family_decoders import DECODERS, decoder_body
from bigtrain.plan.family_defaults import DEFAULTS, LLAVA_TOWER, OTHER_NAMES
from bigtrain.plan.parameters import Parameter, Values, head_dim, linear, norm, not_counted, plain, under

Model = Callable[[Values], list[Parameter]]


def values(config: Mapping[str, Any], kind: str | None = None) -> Values:
    """A (sub-)config by its class's own keys, with its family's defaults."""
    kind = kind or str(config.get("model_type"))
    names = OTHER_NAMES.get(kind, {})
    given = {names[k]: v for k, v in config.items() if k in names and v is not None}
    if kind in T5 and config.get("num_decoder_layers") is None:  # the class takes num_layers, before another name changes that
        given["num_decoder_layers"] = config.get("num_layers", DEFAULTS[kind]["num_layers"])
    return Values({**{k: v for k, v in config.items() if k not in names}, **given}, DEFAULTS.get(kind, {}))


def _conv1d(name: str, inputs: int, outputs: int) -> list[Parameter]:
    """GPT-2's transposed linear layer: weight `[in, out]`, always with a bias."""
    return plain(f"{name}.weight", inputs, outputs) + plain(f"{name}.bias", outputs)


def _ln(name: str, d: int) -> list[Parameter]:
    return norm(name, d, bias=True)


def _gpt2(c: Values) -> list[Parameter]:
    d, f = c["n_embd"], c.get("n_inner") or 4 * c["n_embd"]
    items = linear("wte", c["vocab_size"], d) + linear("wpe", c["n_positions"], d)
    for i in range(c["n_layer"]):
        block = _ln("ln_1", d) + _conv1d("attn.c_attn", d, 3 * d) + _conv1d("attn.c_proj", d, d)
        block += _ln("ln_2", d) + _conv1d("mlp.c_fc", d, f) + _conv1d("mlp.c_proj", f, d)
        items += under(f"h.{i}", block, block=i)
    return under("transformer", items + _ln("ln_f", d)) + linear("lm_head", c["vocab_size"], d)


def _gptj(c: Values) -> list[Parameter]:
    d, f = c["n_embd"], c.get("n_inner") or 4 * c["n_embd"]
    items = linear("wte", c["vocab_size"], d)
    for i in range(c["n_layer"]):
        block = _ln("ln_1", d)
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            block += linear(f"attn.{name}", d, d)
        block += linear("mlp.fc_in", f, d, True) + linear("mlp.fc_out", d, f, True)
        items += under(f"h.{i}", block, block=i)
    return under("transformer", items + _ln("ln_f", d)) + linear("lm_head", c["vocab_size"], d, True)


def _gpt_neox(c: Values) -> list[Parameter]:
    d, f, bias = c["hidden_size"], c["intermediate_size"], c.flag("attention_bias", True)
    items = linear("embed_in", c["vocab_size"], d)
    for i in range(c["num_hidden_layers"]):
        block = _ln("input_layernorm", d) + _ln("post_attention_layernorm", d)
        block += linear("attention.query_key_value", 3 * d, d, bias) + linear("attention.dense", d, d, bias)
        block += linear("mlp.dense_h_to_4h", f, d, True) + linear("mlp.dense_4h_to_h", d, f, True)
        items += under(f"layers.{i}", block, block=i)
    return under("gpt_neox", items + _ln("final_layer_norm", d)) + linear("lm_head", c["vocab_size"], d)


# OPT's positions start at 2 (padding): class OPTLearnedPositionalEmbedding.
_OPT_POSITION_OFFSET = 2


def _opt(c: Values) -> list[Parameter]:
    d, f, bias = c["hidden_size"], c["ffn_dim"], c.flag("enable_bias", True)
    word = c["word_embed_proj_dim"] if c.get("word_embed_proj_dim") else d
    affine, before = c.flag("layer_norm_elementwise_affine", True), c.flag("do_layer_norm_before", True)
    ln = _ln if affine else (lambda name, width: [])
    items = linear("embed_tokens", c["vocab_size"], word)
    items += linear("embed_positions", c["max_position_embeddings"] + _OPT_POSITION_OFFSET, d)
    if word != d:
        items += linear("project_out", word, d) + linear("project_in", d, word)
    if before and not c.flag("_remove_final_layer_norm"):
        items += ln("final_layer_norm", d)
    for i in range(c["num_hidden_layers"]):
        block = [p for name in ("k_proj", "v_proj", "q_proj", "out_proj") for p in linear(f"self_attn.{name}", d, d, bias)]
        block += ln("self_attn_layer_norm", d) + linear("fc1", f, d, bias) + linear("fc2", d, f, bias)
        items += under(f"layers.{i}", block + ln("final_layer_norm", d), block=i)
    return under("model.decoder", items) + linear("lm_head", c["vocab_size"], word)


def _falcon_block(c: Values) -> list[Parameter]:
    d, heads, bias = c["hidden_size"], c["num_attention_heads"], c.flag("bias")
    f, head, new = c.get("ffn_hidden_size") or 4 * d, d // heads, c.flag("new_decoder_architecture")
    qkv = 3 * d
    if new:
        qkv = (heads + 2 * (c.get("num_kv_heads") or heads)) * head
    elif c.flag("multi_query", True):
        qkv = d + 2 * head
    block = linear("self_attention.query_key_value", qkv, d, bias) + linear("self_attention.dense", d, d, bias)
    block += linear("mlp.dense_h_to_4h", f, d, bias) + linear("mlp.dense_4h_to_h", d, f, bias)
    if not c.flag("parallel_attn", True):
        return block + _ln("post_attention_layernorm", d) + _ln("input_layernorm", d)
    norms = c.get("num_ln_in_parallel_attn")
    if norms == 2 or (norms is None and new):
        return block + _ln("ln_attn", d) + _ln("ln_mlp", d)
    return block + _ln("input_layernorm", d)


def _falcon(c: Values) -> list[Parameter]:
    d = c["hidden_size"]
    items = linear("word_embeddings", c["vocab_size"], d)
    for i in range(c["num_hidden_layers"]):
        items += under(f"h.{i}", _falcon_block(c), block=i)
    return under("transformer", items + _ln("ln_f", d)) + linear("lm_head", c["vocab_size"], d)


def _bloom(c: Values) -> list[Parameter]:
    d = c["hidden_size"]
    items = linear("word_embeddings", c["vocab_size"], d) + _ln("word_embeddings_layernorm", d)
    for i in range(c["n_layer"]):
        block = _ln("input_layernorm", d) + linear("self_attention.query_key_value", 3 * d, d, True)
        block += linear("self_attention.dense", d, d, True) + _ln("post_attention_layernorm", d)
        block += linear("mlp.dense_h_to_4h", 4 * d, d, True) + linear("mlp.dense_4h_to_h", d, 4 * d, True)
        items += under(f"h.{i}", block, block=i)
    return under("transformer", items + _ln("ln_f", d)) + linear("lm_head", c["vocab_size"], d)


def _bert_layer(c: Values) -> list[Parameter]:
    d, f = c["hidden_size"], c["intermediate_size"]
    block = [p for name in ("query", "key", "value") for p in linear(f"attention.self.{name}", d, d, True)]
    block += linear("attention.output.dense", d, d, True) + _ln("attention.output.LayerNorm", d)
    return block + linear("intermediate.dense", f, d, True) + linear("output.dense", d, f, True) + _ln("output.LayerNorm", d)


def _bert_body(c: Values, embedding_order: tuple[str, ...]) -> list[Parameter]:
    d, items = c["hidden_size"], []
    sizes = {"word": c["vocab_size"], "position": c["max_position_embeddings"], "token_type": c["type_vocab_size"]}
    for name in embedding_order:
        items += _ln("LayerNorm", d) if name == "LayerNorm" else linear(f"{name}_embeddings", sizes[name], d)
    items = under("embeddings", items)
    for i in range(c["num_hidden_layers"]):
        items += under(f"encoder.layer.{i}", _bert_layer(c), block=i)
    return items


def _bert(c: Values) -> list[Parameter]:
    d, v = c["hidden_size"], c["vocab_size"]
    head = plain("bias", v) + linear("transform.dense", d, d, True) + _ln("transform.LayerNorm", d)
    head += linear("decoder", v, d, not c.flag("tie_word_embeddings"))  # a tied one takes `bias`
    body = _bert_body(c, ("word", "position", "token_type", "LayerNorm"))
    return under("bert", body) + under("cls.predictions", head)


def _roberta(c: Values, head_first: bool = False) -> list[Parameter]:
    d, v = c["hidden_size"], c["vocab_size"]
    head = plain("bias", v) + linear("dense", d, d, True) + _ln("layer_norm", d)
    head += linear("decoder", v, d, not c.flag("tie_word_embeddings"))  # a tied one takes `bias`
    head, body = under("lm_head", head), under("roberta", _bert_body(c, ("word", "token_type", "LayerNorm", "position")))
    return head + body if head_first else body + head


def t5_is_gated(c: Values) -> bool:
    """`is_gated_act`, which older files have, stands over what the class makes of `feed_forward_proj`."""
    return c.flag("is_gated_act", str(c.get("feed_forward_proj", "relu")).startswith("gated"))


def _t5_attention(c: Values, name: str, with_bias: bool) -> list[Parameter]:
    d, inner = c["d_model"], c["num_heads"] * c["d_kv"]
    items = [p for n in ("q", "k", "v") for p in linear(n, inner, d)] + linear("o", d, inner)
    if with_bias:
        items += linear("relative_attention_bias", c["relative_attention_num_buckets"], c["num_heads"])
    return under(name, items) + norm("layer_norm", d)


def _t5_stack(c: Values, layers: int, decoder: bool, first_block: int, every: bool) -> list[Parameter]:
    d, f, items = c["d_model"], c["d_ff"], []
    inputs = ("wi_0", "wi_1") if t5_is_gated(c) else ("wi",)
    for i in range(layers):
        parts = [_t5_attention(c, "SelfAttention", with_bias=every or i == 0)]
        if decoder:
            parts.append(_t5_attention(c, "EncDecAttention", with_bias=False))
        feed = [p for n in inputs for p in linear(n, f, d)] + linear("wo", d, f)
        parts.append(under("DenseReluDense", feed) + norm("layer_norm", d))
        for j, part in enumerate(parts):
            items += under(f"block.{i}.layer.{j}", part, block=first_block + i)
    return items + norm("final_layer_norm", d)


def _t5(c: Values, every: bool = False) -> list[Parameter]:
    """`every`: each block has its own relative positions, not the first one for all."""
    layers = c["num_layers"]
    decoders = c["num_decoder_layers"]
    items = linear("shared", c["vocab_size"], c["d_model"])
    items += under("encoder", _t5_stack(c, layers, False, 0, every)) + under(
        "decoder", _t5_stack(c, decoders, True, layers, every)
    )
    return items + linear("lm_head", c["vocab_size"], c["d_model"])


def _vit(c: Values) -> list[Parameter]:
    d, f, patch, channels = c["hidden_size"], c["intermediate_size"], c["patch_size"], c["num_channels"]
    wide = c["num_attention_heads"] * head_dim(c)
    items = plain("embeddings.cls_token", 1, 1, d)
    items += plain("embeddings.position_embeddings", 1, (c["image_size"] // patch) ** 2 + 1, d)
    items += plain("embeddings.patch_embeddings.projection.weight", d, channels, patch, patch)
    items += plain("embeddings.patch_embeddings.projection.bias", d)
    for i in range(c["num_hidden_layers"]):
        block = [p for n in ("q", "k", "v") for p in linear(f"attention.{n}_proj", wide, d, c.flag("qkv_bias", True))]
        block += linear("attention.o_proj", d, wide, True) + _ln("layernorm_before", d) + _ln("layernorm_after", d)
        block += linear("mlp.fc1", f, d, True) + linear("mlp.fc2", d, f, True)
        items += under(f"layers.{i}", block, block=i)
    labels = c.get("num_labels") or len(c.get("id2label") or {}) or 2
    return under("vit", items + _ln("layernorm", d)) + linear("classifier", labels, d, True)


def _tower_block(c: Values, order: tuple[str, ...]) -> list[Parameter]:
    d, f = c["hidden_size"], c["intermediate_size"]
    parts = {
        "attn": [p for n in ("k_proj", "v_proj", "q_proj", "out_proj") for p in linear(f"self_attn.{n}", d, d, True)],
        "mlp": linear("mlp.fc1", f, d, True) + linear("mlp.fc2", d, f, True),
        "norm1": _ln("layer_norm1", d),
        "norm2": _ln("layer_norm2", d),
    }
    return [p for part in order for p in parts[part]]


def _clip_vision(c: Values) -> list[Parameter]:
    d, patch = c["hidden_size"], c["patch_size"]
    items = plain("class_embedding", d) + plain("patch_embedding.weight", d, c["num_channels"], patch, patch)
    items = under("embeddings", items + linear("position_embedding", (c["image_size"] // patch) ** 2 + 1, d))
    items += _ln("pre_layrnorm", d)
    for i in range(c["num_hidden_layers"]):
        items += under(f"encoder.layers.{i}", _tower_block(c, ("attn", "norm1", "mlp", "norm2")))
    return items + _ln("post_layernorm", d)


def _siglip_vision(c: Values) -> list[Parameter]:
    d, f, patch = c["hidden_size"], c["intermediate_size"], c["patch_size"]
    items = plain("patch_embedding.weight", d, c["num_channels"], patch, patch) + plain("patch_embedding.bias", d)
    items = under("embeddings", items + linear("position_embedding", (c["image_size"] // patch) ** 2, d))
    for i in range(c["num_hidden_layers"]):
        items += under(f"encoder.layers.{i}", _tower_block(c, ("norm1", "attn", "norm2", "mlp")))
    items += _ln("post_layernorm", d)
    if not c.flag("vision_use_head", True):
        return items
    head = plain("probe", 1, 1, d) + plain("attention.in_proj_weight", 3 * d, d) + plain("attention.in_proj_bias", 3 * d)
    head += linear("attention.out_proj", d, d, True) + _ln("layernorm", d)
    return items + under("head", head + linear("mlp.fc1", f, d, True) + linear("mlp.fc2", d, f, True))


_TOWERS: dict[str, Model] = {"clip_vision_model": _clip_vision, "siglip_vision_model": _siglip_vision}


def _qwen_vision(c: Values, second: bool) -> list[Parameter]:
    """Vision tower of Qwen2-VL (`second`: of Qwen2.5-VL, which has RMSNorm and a gated MLP)."""
    d, out = (c["hidden_size"], c["out_hidden_size"]) if second else (c["embed_dim"], c["hidden_size"])
    channels = int(c.get("in_channels") or c.get("in_chans") or 3)
    items = plain("patch_embed.proj.weight", d, channels, c["temporal_patch_size"], c["patch_size"], c["patch_size"])
    for i in range(c["depth"]):
        block = norm("norm1", d, bias=not second) + norm("norm2", d, bias=not second)
        block += linear("attn.qkv", 3 * d, d, True) + linear("attn.proj", d, d, True)
        if second:
            f = c["intermediate_size"]
            block += [p for n in ("gate_proj", "up_proj") for p in linear(f"mlp.{n}", f, d, True)]
            block += linear("mlp.down_proj", d, f, True)
        else:
            f = d * c["mlp_ratio"]
            block += linear("mlp.fc1", f, d, True) + linear("mlp.fc2", d, f, True)
        items += under(f"blocks.{i}", block)
    merged = d * c["spatial_merge_size"] ** 2
    items += norm("merger.ln_q", d, bias=not second)
    return items + linear("merger.mlp.0", merged, merged, True) + linear("merger.mlp.2", out, merged, True)


_TEXT = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text", "gemma3": "gemma3_text"}


def text_values(config: Mapping[str, Any]) -> Values:
    """The language model's values of a vision-language config, nested or (older files) flat."""
    nested = config.get("text_config") or {}
    text = nested or {k: v for k, v in config.items() if k != "vision_config"}
    # LLaVA takes any language model; the others have their own, whatever the nested config calls it.
    kind = _TEXT.get(str(config.get("model_type"))) or str(nested.get("model_type") or "llama")
    return values({**text, "model_type": kind}, kind)


def text_is_tied(config: Mapping[str, Any]) -> bool:
    """Whether a vision-language config's language model says that it is tied, which then holds for the whole."""
    return config.get("model_type") != "gemma3" and text_values(config).flag("tie_word_embeddings")


def vision_language(config: Mapping[str, Any]) -> list[Parameter]:
    """LLaVA, Gemma 3, Qwen2-VL and Qwen2.5-VL; the caller drops a tied head.

    Raises:
        UsageError: LLaVA is made of parts that are not counted.
    """
    kind, c = str(config["model_type"]), text_values(config)
    text_kind, vision = str(c.get("model_type")), dict(config.get("vision_config") or {})
    if text_kind not in DECODERS:
        raise not_counted(f"model_type '{kind}' with a language model '{text_kind}' is not known to the planner.")
    d = c["hidden_size"]
    if kind in ("qwen2_vl", "qwen2_5_vl"):
        tower = under("visual", _qwen_vision(values(vision, f"{kind}_vision"), kind == "qwen2_5_vl"))
    else:
        tower = _tower_and_projector(kind, config, vision, d)
    body = under("language_model", decoder_body(DECODERS[text_kind], c))
    return under("model", tower + body) + linear("lm_head", c["vocab_size"], d)


def _tower_and_projector(kind: str, config: Mapping[str, Any], vision: Mapping[str, Any], d: int) -> list[Parameter]:
    usual = "clip_vision_model" if kind == "llava" else "siglip_vision_model"
    tower_kind = str(vision.get("model_type") or usual)
    if tower_kind not in _TOWERS:
        raise not_counted(f"model_type '{kind}' with a vision tower '{tower_kind}' is not known to the planner.")
    v = values(vision or (LLAVA_TOWER if kind == "llava" else {}), tower_kind)
    if kind == "llava":
        layers, bias = config.get("vision_feature_layer"), bool(config.get("multimodal_projector_bias", True))
        seen = v["hidden_size"] * (len(layers) if isinstance(layers, list | tuple) else 1)
        join = linear("linear_1", d, seen, bias) + linear("linear_2", d, d, bias)
    else:
        join = plain("mm_input_projection_weight", v["hidden_size"], d) + norm("mm_soft_emb_norm", v["hidden_size"])
    return under("vision_tower", _TOWERS[tower_kind](v)) + under("multi_modal_projector", join)


ROBERTA = ("roberta", "xlm-roberta", "camembert")
T5 = ("t5", "mt5", "umt5")
VISION_LANGUAGE = ("llava", "qwen2_vl", "qwen2_5_vl", "gemma3")

MODELS: dict[str, Model] = {
    "gpt2": _gpt2,
    "gptj": _gptj,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "falcon": _falcon,
    "bloom": _bloom,
    "bert": _bert,
    "roberta": _roberta,
    "xlm-roberta": partial(_roberta, head_first=True),
    "camembert": partial(_roberta, head_first=True),
    "t5": _t5,
    "mt5": _t5,
    "umt5": partial(_t5, every=True),
    "vit": _vit,
}
# The matrix that a tied model shares with its input embedding.
HEADS = {"bert": "cls.predictions.decoder.weight", **dict.fromkeys(ROBERTA, "lm_head.decoder.weight")}
