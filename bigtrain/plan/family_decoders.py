"""Decoder-only families: the parameters of one block each, and what stands before and after the blocks.

Checked against the classes of transformers 5.24 on the meta device, name by name (tests/unit/plan/test_families.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bigtrain.plan.parameters import Parameter, Values, head_dim, kv_heads, linear, norm, plain, under

Block = Callable[[Values, int], list[Parameter]]


def _attention(c: Values, qkv: bool = False, out: bool = False, out_name: str = "o_proj") -> list[Parameter]:
    d, q, kv = c["hidden_size"], c["num_attention_heads"] * head_dim(c), kv_heads(c) * head_dim(c)
    return [
        *linear("q_proj", q, d, qkv),
        *linear("k_proj", kv, d, qkv),
        *linear("v_proj", kv, d, qkv),
        *linear(out_name, d, q, out),
    ]


def _qk_norm_per_head(c: Values) -> list[Parameter]:
    return [*norm("q_norm", head_dim(c)), *norm("k_norm", head_dim(c))]


def _qk_norm_whole(c: Values) -> list[Parameter]:
    return [*norm("q_norm", c["num_attention_heads"] * head_dim(c)), *norm("k_norm", kv_heads(c) * head_dim(c))]


def _swiglu(c: Values, width: int | None = None, bias: bool = False) -> list[Parameter]:
    d, f = c["hidden_size"], width or c["intermediate_size"]
    return [*linear("gate_proj", f, d, bias), *linear("up_proj", f, d, bias), *linear("down_proj", d, f, bias)]


def _fused_swiglu(c: Values) -> list[Parameter]:
    d, f = c["hidden_size"], c["intermediate_size"]
    return [*linear("gate_up_proj", 2 * f, d), *linear("down_proj", d, f)]


def _two_linears(c: Values, first: str, second: str, width: int, bias: bool) -> list[Parameter]:
    d = c["hidden_size"]
    return [*linear(first, width, d, bias), *linear(second, d, width, bias)]


def _experts(c: Values, count: int, width: int) -> list[Parameter]:
    d = c["hidden_size"]
    return [*plain("experts.gate_up_proj", count, 2 * width, d), *plain("experts.down_proj", count, d, width)]


def _two_norms(c: Values, bias: bool = False) -> list[Parameter]:
    d = c["hidden_size"]
    return [*norm("input_layernorm", d, bias=bias), *norm("post_attention_layernorm", d, bias=bias)]


def _four_norms(c: Values) -> list[Parameter]:
    d = c["hidden_size"]
    return [
        *_two_norms(c),
        *norm("pre_feedforward_layernorm", d),
        *norm("post_feedforward_layernorm", d),
    ]


def _attn(items: list[Parameter]) -> list[Parameter]:
    return under("self_attn", items)


def _mlp(items: list[Parameter]) -> list[Parameter]:
    return under("mlp", items)


def _llama(c: Values, i: int) -> list[Parameter]:
    bias = c.flag("attention_bias")
    return [*_attn(_attention(c, bias, bias)), *_mlp(_swiglu(c, bias=c.flag("mlp_bias"))), *_two_norms(c)]


def _plain_llama(c: Values, i: int) -> list[Parameter]:
    return [*_attn(_attention(c)), *_mlp(_swiglu(c)), *_two_norms(c)]


def _qwen2(c: Values, i: int) -> list[Parameter]:
    return [*_attn(_attention(c, qkv=True)), *_mlp(_swiglu(c)), *_two_norms(c)]


def _qwen3(c: Values, i: int) -> list[Parameter]:
    bias = c.flag("attention_bias")
    return [*_attn(_attention(c, bias, bias) + _qk_norm_per_head(c)), *_mlp(_swiglu(c)), *_two_norms(c)]


def _seed_oss(c: Values, i: int) -> list[Parameter]:
    attention = _attention(c, c.flag("attention_bias", True), c.flag("attention_out_bias"))
    return [*_attn(attention), *_mlp(_swiglu(c, bias=c.flag("mlp_bias"))), *_two_norms(c)]


def _ernie4_5(c: Values, i: int) -> list[Parameter]:
    bias = c.flag("use_bias")
    return [*_attn(_attention(c, bias, bias)), *_mlp(_swiglu(c, bias=bias)), *_two_norms(c)]


def _hunyuan(c: Values, i: int) -> list[Parameter]:
    bias, head = c.flag("attention_bias"), head_dim(c)
    attention = _attention(c, bias, bias) + norm("query_layernorm", head) + norm("key_layernorm", head)
    return [*_attn(attention), *_mlp(_swiglu(c)), *_two_norms(c)]


def _mixtral(c: Values, i: int) -> list[Parameter]:
    experts = c["num_local_experts"]
    mlp = linear("gate", experts, c["hidden_size"]) + _experts(c, experts, c["intermediate_size"])
    return [*_attn(_attention(c)), *_mlp(mlp), *_two_norms(c)]


def is_sparse(c: Values, i: int) -> bool:
    """Whether block `i` of a Qwen MoE holds experts (its config can keep some blocks dense)."""
    return i not in (c.get("mlp_only_layers") or []) and (i + 1) % c["decoder_sparse_step"] == 0


def _qwen2_moe(c: Values, i: int) -> list[Parameter]:
    d, experts = c["hidden_size"], c["num_experts"]
    mlp = _swiglu(c)
    if is_sparse(c, i):
        mlp = [
            *linear("gate", experts, d),
            *_experts(c, experts, c["moe_intermediate_size"]),
            *under("shared_expert", _swiglu(c, c["shared_expert_intermediate_size"])),
            *linear("shared_expert_gate", 1, d),
        ]
    return [*_attn(_attention(c, qkv=c.flag("qkv_bias", True))), *_mlp(mlp), *_two_norms(c)]


def _qwen3_moe(c: Values, i: int) -> list[Parameter]:
    bias, experts = c.flag("attention_bias"), c["num_experts"]
    mlp = _swiglu(c)
    if is_sparse(c, i):
        mlp = _experts(c, experts, c["moe_intermediate_size"]) + linear("gate", experts, c["hidden_size"])
    return [*_attn(_attention(c, bias, bias) + _qk_norm_per_head(c)), *_mlp(mlp), *_two_norms(c)]


def _olmo_experts(c: Values) -> list[Parameter]:
    experts = c["num_experts"]
    return _mlp(linear("gate", experts, c["hidden_size"]) + _experts(c, experts, c["intermediate_size"]))


def _olmoe(c: Values, i: int) -> list[Parameter]:
    bias, d = c.flag("attention_bias"), c["hidden_size"]
    norms = norm("q_norm", d) + norm("k_norm", d // c["num_attention_heads"] * kv_heads(c))  # whatever head_dim says
    return [*_attn(_attention(c, bias, bias) + norms), *_olmo_experts(c), *_two_norms(c)]


def _granitemoe(c: Values, i: int) -> list[Parameter]:
    bias, experts = c.flag("attention_bias"), c["num_local_experts"]
    moe = linear("router", experts, c["hidden_size"]) + _experts(c, experts, c["intermediate_size"])
    return [*_attn(_attention(c, bias, bias)), *_two_norms(c), *under("block_sparse_moe", moe)]


def _gemma(c: Values, i: int) -> list[Parameter]:
    bias = c.flag("attention_bias")
    return [*_attn(_attention(c, bias, bias)), *_mlp(_swiglu(c)), *_two_norms(c)]


def _gemma2(c: Values, i: int) -> list[Parameter]:
    bias = c.flag("attention_bias")
    return [*_attn(_attention(c, bias, bias)), *_mlp(_swiglu(c)), *_four_norms(c)]


def _gemma3(c: Values, i: int) -> list[Parameter]:
    bias = c.flag("attention_bias")
    return [*_attn(_attention(c, bias, bias) + _qk_norm_per_head(c)), *_mlp(_swiglu(c)), *_four_norms(c)]


def _phi3(c: Values, i: int) -> list[Parameter]:
    d, q, kv = c["hidden_size"], c["num_attention_heads"] * head_dim(c), kv_heads(c) * head_dim(c)
    return [*_attn(linear("o_proj", d, q) + linear("qkv_proj", q + 2 * kv, d)), *_mlp(_fused_swiglu(c)), *_two_norms(c)]


def _phi(c: Values, i: int) -> list[Parameter]:
    attention = _attention(c, True, True, "dense")
    if c.flag("qk_layernorm"):
        h = head_dim(c)
        attention += norm("q_layernorm", h, bias=True) + norm("k_layernorm", h, bias=True)
    mlp = _two_linears(c, "fc1", "fc2", c["intermediate_size"], True)
    return [*_attn(attention), *_mlp(mlp), *norm("input_layernorm", c["hidden_size"], bias=True)]


def _later_norms(c: Values) -> list[Parameter]:
    return [*norm("post_attention_layernorm", c["hidden_size"]), *norm("post_feedforward_layernorm", c["hidden_size"])]


def _olmo2(c: Values, i: int) -> list[Parameter]:
    bias = c.flag("attention_bias")
    return [*_attn(_attention(c, bias, bias) + _qk_norm_whole(c)), *_mlp(_swiglu(c)), *_later_norms(c)]


def _flex_olmo(c: Values, i: int) -> list[Parameter]:
    bias = c.flag("attention_bias")
    return [*_attn(_attention(c, bias, bias) + _qk_norm_whole(c)), *_olmo_experts(c), *_later_norms(c)]


def _exaone4(c: Values, i: int) -> list[Parameter]:
    return [*_attn(_attention(c) + _qk_norm_per_head(c)), *_mlp(_swiglu(c)), *_later_norms(c)]


def _olmo(c: Values, i: int) -> list[Parameter]:
    bias = c.flag("attention_bias")
    return [*_attn(_attention(c, bias, bias)), *_mlp(_swiglu(c))]


def _cohere(c: Values, i: int, may_norm: bool = True) -> list[Parameter]:
    bias, attention = c.flag("attention_bias"), []
    if may_norm and c.flag("use_qk_norm"):
        attention = norm("q_norm", c["num_attention_heads"], head_dim(c)) + norm("k_norm", kv_heads(c), head_dim(c))
    attention = _attention(c, bias, bias) + attention
    return [*_attn(attention), *_mlp(_swiglu(c)), *norm("input_layernorm", c["hidden_size"])]


def _starcoder2(c: Values, i: int) -> list[Parameter]:
    bias = c.flag("use_bias", True)
    mlp = _two_linears(c, "c_fc", "c_proj", c["intermediate_size"], bias)
    return [*_attn(_attention(c, bias, bias)), *_mlp(mlp), *_two_norms(c, bias=True)]


def _stablelm(c: Values, i: int) -> list[Parameter]:
    attention = _attention(c, qkv=c.flag("use_qkv_bias"))
    if c.flag("qk_layernorm"):
        for name, heads in (("q_layernorm", c["num_attention_heads"]), ("k_layernorm", kv_heads(c))):
            attention += [p for h in range(heads) for p in norm(f"{name}.norms.{h}", head_dim(c))]
    norms = norm("input_layernorm", c["hidden_size"], bias=True)
    if not c.flag("use_parallel_residual"):
        norms = _two_norms(c, bias=True)
    return [*_attn(attention), *_mlp(_swiglu(c)), *norms]


def _glm(c: Values, i: int) -> list[Parameter]:
    return [*_attn(_attention(c, qkv=c.flag("attention_bias", True))), *_mlp(_fused_swiglu(c)), *_two_norms(c)]


def _glm4(c: Values, i: int) -> list[Parameter]:
    d = c["hidden_size"]
    return [*_glm(c, i), *norm("post_self_attn_layernorm", d), *norm("post_mlp_layernorm", d)]


def _nemotron(c: Values, i: int, norm_bias: bool = True) -> list[Parameter]:
    bias = c.flag("attention_bias")
    mlp = _two_linears(c, "up_proj", "down_proj", c["intermediate_size"], c.flag("mlp_bias"))
    return [*_attn(_attention(c, bias, bias)), *_mlp(mlp), *_two_norms(c, bias=norm_bias)]


def _latent_attention(c: Values) -> list[Parameter]:
    d, heads, bias = c["hidden_size"], c["num_attention_heads"], c.flag("attention_bias")
    query = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    rank, value = c["kv_lora_rank"], c["v_head_dim"]
    queries = linear("q_proj", heads * query, d)
    if c.get("q_lora_rank"):
        low = c["q_lora_rank"]
        queries = linear("q_a_proj", low, d, bias) + norm("q_a_layernorm", low) + linear("q_b_proj", heads * query, low)
    return [
        *queries,
        *linear("kv_a_proj_with_mqa", rank + c["qk_rope_head_dim"], d, bias),
        *norm("kv_a_layernorm", rank),
        *linear("kv_b_proj", heads * (c["qk_nope_head_dim"] + value), rank),
        *linear("o_proj", d, heads * value, bias),
    ]


def _deepseek_mlp(c: Values, i: int, bias: bool = False) -> list[Parameter]:
    d, mlp = c["hidden_size"], _swiglu(c, bias=bias)
    if i >= int(c.get("first_k_dense_replace") or 0):
        width = c["moe_intermediate_size"]
        mlp = [
            *_experts(c, c["n_routed_experts"], width),
            *linear("gate", c["n_routed_experts"], d),
            *under("shared_experts", _swiglu(c, width * c["n_shared_experts"], bias)),
        ]
    return _mlp(mlp)


def _deepseek_v2(c: Values, i: int) -> list[Parameter]:
    return [*_attn(_latent_attention(c)), *_deepseek_mlp(c, i, c.flag("mlp_bias")), *_two_norms(c)]


def _deepseek_v3(c: Values, i: int) -> list[Parameter]:
    return [*_attn(_latent_attention(c)), *_deepseek_mlp(c, i), *_two_norms(c)]


def _dots1(c: Values, i: int) -> list[Parameter]:
    bias = c.flag("attention_bias")
    return [*_attn(_attention(c, bias, bias) + _qk_norm_per_head(c)), *_deepseek_mlp(c, i), *_two_norms(c)]


def _gpt_oss(c: Values, i: int) -> list[Parameter]:
    d, f, experts, bias = (
        c["hidden_size"],
        c["intermediate_size"],
        c["num_local_experts"],
        c.flag("attention_bias", True),
    )
    moe = [
        *linear("router", experts, d, True),
        *plain("experts.gate_up_proj", experts, d, 2 * f),
        *plain("experts.gate_up_proj_bias", experts, 2 * f),
        *plain("experts.down_proj", experts, f, d),
        *plain("experts.down_proj_bias", experts, d),
    ]
    attention = plain("sinks", c["num_attention_heads"]) + _attention(c, bias, bias)
    return [*_attn(attention), *_mlp(moe), *_two_norms(c)]


@dataclass(frozen=True)
class Decoder:
    """A family whose model is `embed_tokens`, blocks, a final norm and `lm_head`, under `model.`."""

    block: Block
    final_norm: str | None = "norm"
    final_bias: bool = False
    head_bias: bool = False


def _without_head_dim(block: Block) -> Block:
    """The class takes hidden size over heads, whatever the config says."""
    return lambda c, i: block(c.without("head_dim"), i)


DECODERS: dict[str, Decoder] = {
    "llama": Decoder(_llama),
    "mistral": Decoder(_plain_llama),
    "ministral": Decoder(_plain_llama),
    "seed_oss": Decoder(_seed_oss),
    "ernie4_5": Decoder(_ernie4_5),
    "hunyuan_v1_dense": Decoder(_hunyuan),
    "exaone4": Decoder(_exaone4),
    "arcee": Decoder(partial(_nemotron, norm_bias=False)),
    "qwen2": Decoder(_qwen2),
    "qwen2_vl_text": Decoder(_without_head_dim(_qwen2)),
    "qwen2_5_vl_text": Decoder(_without_head_dim(_qwen2)),
    "qwen3": Decoder(_qwen3),
    "mixtral": Decoder(_mixtral),
    "qwen2_moe": Decoder(_qwen2_moe),
    "qwen3_moe": Decoder(_qwen3_moe),
    "olmoe": Decoder(_olmoe),
    "granitemoe": Decoder(_granitemoe),
    "gemma": Decoder(_gemma),
    "gemma2": Decoder(_gemma2),
    "gemma3_text": Decoder(_gemma3),
    "phi3": Decoder(_phi3),
    "phi": Decoder(_phi, final_norm="final_layernorm", final_bias=True, head_bias=True),
    "olmo": Decoder(_olmo, final_norm=None),
    "olmo2": Decoder(_olmo2),
    "olmo3": Decoder(_olmo2),
    "flex_olmo": Decoder(_flex_olmo),
    "granite": Decoder(_llama),
    "smollm3": Decoder(_llama),
    "cohere": Decoder(_cohere),
    "cohere2": Decoder(partial(_cohere, may_norm=False)),
    "starcoder2": Decoder(_starcoder2, final_bias=True),
    "stablelm": Decoder(_without_head_dim(_stablelm), final_bias=True),
    "glm": Decoder(_glm),
    "glm4": Decoder(_glm4),
    "nemotron": Decoder(_nemotron, final_bias=True),
    "deepseek_v2": Decoder(_deepseek_v2),
    "deepseek_v3": Decoder(_deepseek_v3),
    "dots1": Decoder(_dots1),
    "gpt_oss": Decoder(_gpt_oss),
}


def decoder_body(family: Decoder, c: Values) -> list[Parameter]:
    """`embed_tokens`, the blocks and the final norm, without a prefix."""
    d = c["hidden_size"]
    items = linear("embed_tokens", c["vocab_size"], d)
    for i in range(c["num_hidden_layers"]):
        items += under(f"layers.{i}", family.block(c, i), block=i)
    return items + (norm(family.final_norm, d, bias=family.final_bias) if family.final_norm else [])


def decoder_model(family: Decoder, c: Values) -> list[Parameter]:
    """The causal language model with its own head; the caller drops a tied head."""
    head = linear("lm_head", c["vocab_size"], c["hidden_size"], family.head_bias)
    return under("model", decoder_body(family, c)) + head
