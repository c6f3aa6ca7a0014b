"""Sizes of a model config that no model can have: named before anything is counted.

The classes of transformers 5.24 refuse these too: in their config, when they are built, or in the first forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bigtrain.errors import UsageError
from bigtrain.plan.parameters import Values

# May be left out or null, but then have a meaning; 0 is none of them.
_POSITIVE = (
    "head_dim", "d_kv", "num_key_value_heads", "num_kv_heads", "num_decoder_layers", "n_inner", "ffn_hidden_size",
    "word_embed_proj_dim", "max_position_embeddings", "n_positions",
)  # fmt: skip
# 0 is another way to say that there is none.
_WHOLE = (
    "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "moe_intermediate_size",
    "shared_expert_intermediate_size", "first_k_dense_replace", "q_lora_rank", "kv_lora_rank", "sliding_window", "max_window_layers",
    "num_labels", "num_ln_in_parallel_attn", "in_channels", "in_chans",
)  # fmt: skip
_SECTIONS: dict[str, type | tuple[type, ...]] = {
    "architectures": (list, tuple), "mlp_only_layers": (list, tuple), "layer_types": (list, tuple),
    "id2label": Mapping, "text_config": Mapping, "vision_config": Mapping,
}  # fmt: skip
# Their config classes want it whatever head_dim says; the others' heads may then have any width.
_ALWAYS_DIVIDE = {
    "llama", "arcee", "gemma2", "gemma3_text", "deepseek_v2", "qwen2_vl_text", "qwen2_5_vl_text", "stablelm", "gpt2", "gptj",
    "gpt_neox", "opt", "falcon", "bloom", "bert", "roberta", "xlm-roberta", "camembert",
}  # fmt: skip


def refuse_wrong_types(config: Mapping[str, Any]) -> None:
    """Values that may be left out, of a config or a part of one.

    Raises:
        UsageError: one of them is there and is no size, no list or no object.
    """
    for key, least in (*((key, 1) for key in _POSITIVE), *((key, 0) for key in _WHOLE)):
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            what = "a positive whole number" if least else "a whole number of at least 0"
            raise UsageError(f"the model config has {key} = {value!r}: {what} is needed, or leave it out")
    pattern = config.get("sliding_window_pattern")
    if (
        pattern is not None
        and not isinstance(pattern, str)
        and (isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1)
    ):
        raise UsageError(
            f"the model config has sliding_window_pattern = {pattern!r}: a positive whole number or letters are needed, or leave it out"
        )
    for key, kinds in _SECTIONS.items():
        value = config.get(key)
        if value is not None and not isinstance(value, kinds):
            what = "an object, {...}," if kinds is Mapping else "a list"
            raise UsageError(f"the model config has {key} = {value!r}: {what} is needed, or leave it out")
    names = config.get("architectures")
    if not all(isinstance(name, str) for name in names or ()):
        raise UsageError(f"the model config has architectures = {names!r}: names of classes are needed, or leave it out")


def refuse_impossible(c: Values) -> None:
    """Heads and experts of a language model that contradict each other.

    Raises:
        UsageError: with the sizes, and which to change.
    """
    problem = next(_problems(c), None)
    if problem:
        raise UsageError(f"the model config (model_type '{c.get('model_type')}') has {problem}")


def _problems(c: Values) -> Iterator[str]:
    kind = str(c.get("model_type"))
    hidden_name, heads_name = (
        _name(c, "hidden_size", "n_embd", "d_model"),
        _name(c, "num_attention_heads", "n_head", "num_heads"),
    )
    hidden, heads = c[hidden_name], c[heads_name]
    own_width = c.get("head_dim") or c.get("d_kv") or c.get("kv_lora_rank")
    if hidden % heads and (kind in _ALWAYS_DIVIDE or not own_width):
        yield f"{heads_name} = {heads} for {hidden_name} = {hidden}: the heads must divide it; change one of the two"
    kv_name, kv = ("num_kv_heads" if kind == "falcon" else "num_key_value_heads"), None
    if not c.get("kv_lora_rank"):  # a latent attention has a key for each head
        kv = c.get(kv_name)
    if kv and heads % kv:
        yield f"{kv_name} = {kv} for {heads_name} = {heads}: each key and value serves a whole number of heads; give a divisor"
    experts_name = _name(c, "n_routed_experts", "num_experts", "num_local_experts")
    experts, chosen = c.get(experts_name), c.get("num_experts_per_tok")
    if experts and chosen is not None and not 1 <= chosen <= experts:
        yield f"num_experts_per_tok = {chosen} of {experts_name} = {experts}: a token goes to 1 to {experts} of them"


def _name(c: Values, *names: str) -> str:
    """The one that the config or its family has."""
    return next((name for name in names if c.get(name) is not None), names[0])
