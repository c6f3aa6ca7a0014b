"""What the operations of each family's block keep for backward, beside the products that all families have.

Counted with torch's saved_tensors_hooks on transformers 5.24's own modules; tests/unit/plan/test_activations.py counts again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Literal

from bigtrain.plan.family_others import ROBERTA, T5
from bigtrain.plan.parameters import Values

# sdpa, sdpa with a dense mask (packed rows where no kernel keeps documents apart), kernels that keep documents and sliding windows by
# themselves, single operations although there is sdpa, and kernels that are compiled for the model, counted as sdpa.
Attention = Literal["sdpa", "masked", "varlen", "eager", "flex"]

# Families for whose blocks liger-kernel 0.8.5 has kernels (transformers/monkey_patch.py `MODEL_TYPE_TO_APPLY_LIGER_FN`), of those
# that the plan knows. Nemotron is on its list too, with a loss alone.
LIGER_KINDS = frozenset({
    "llama", "mistral", "ministral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "gemma3", "phi3", "granite",
    "smollm3", "glm4", "olmo2", "olmo3", "deepseek_v2", "deepseek_v3", "gpt_oss", "exaone4", "hunyuan_v1_dense", "llava", "qwen2_vl",
    "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text",
})  # fmt: skip

# Whose routed experts are bigtrain's on a GPU with fused kernels (kernels/experts.py), gate included; where norms of queries and keys, or the
# experts' gate without these, stay transformers' own.
_GROUPED_EXPERTS = {
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "granitemoe", "dots1", "deepseek_v2", "deepseek_v3", "gpt_oss",
}  # fmt: skip
_OWN_QK_NORM = {"olmo2", "olmo3", "hunyuan_v1_dense"}
_OWN_EXPERTS = {"gpt_oss"}

# Families whose blocks with a sliding window turn queries by another base.
TWO_TABLES = {"gemma3_text", "gemma3"}
# Families for whose gate and up, halves of one product, liger-kernel makes copies: the product stays until the last one of the block.
HALVES = {"phi3", "glm4"}
# Families whose blocks end in a norm, which backward comes to when everything of the block is there.
NORM_LAST = {"gemma2", "gemma3_text", "gemma3", "glm4", "olmo2", "olmo3", "flex_olmo", "exaone4"}


def liger_for(kind: str | None, device: str = "cuda") -> dict[str, Any]:
    """What `plan_input` is told where liger-kernel is asked for: as kernels/attach.py `use_liger` does, without it bigtrain's loss alone.

    None: a model of unknown family.
    """
    known = device == "cuda" and (kind is None or kind in LIGER_KINDS)
    return {"kernels": "liger"} if known else {"kernels": "hf", "chunks_loss": True}


# Rows of other lengths find no compiled kernel where they differ from the rows before (torch 2.11: NoValidChoicesError for 120 tokens after 256).
_COMPILED_ROWS = 128


def takes_compiled(seq_len: int | None, selective: bool, dropout: float) -> bool:
    """Whether compiled attention can be taken unasked. It has no dropout, and does not run where each operator is looked at (`selective`)."""
    return (seq_len or 0) % _COMPILED_ROWS == 0 and not selective and not dropout


def attention_of(
    asked: str,
    packing: str,
    device: str,
    kind: str | None = None,
    transformers: str | None = None,
    *,
    seq_len: int | None = None,
    selective: bool = False,
    dropout: float = 0.0,
) -> Attention:
    """Of a run's flags and its model's type. On GPUs variable-length kernels are taken unasked, but for families without sdpa.

    Args:
        transformers: its version; None: the installed one's.
        selective: the policy of recomputing is. dropout: in attention.
    """
    if asked == "flex_attention":
        return "flex"
    if asked == "auto" and device != "cpu" and kind in _FUSED:
        fused = _FUSED[kind]
        return fused if (takes_compiled(seq_len, selective, dropout) if fused == "flex" else not dropout) else "eager"
    if asked == "eager" or (asked in ("auto", "sdpa") and (kind in _MATRIX or not _has_sdpa(kind, transformers))):
        return "eager"
    if device != "cpu" and asked != "sdpa":
        return "varlen"
    return "masked" if packing == "isolated" else "sdpa"


def _has_sdpa(kind: str | None, transformers: str | None) -> bool:
    since = _SDPA_SINCE.get(kind or "")
    if since is None:
        return True
    if transformers is None:
        try:
            transformers = metadata.version("transformers")
        except metadata.PackageNotFoundError:
            return True
    return tuple(map(int, transformers.split(".")[:2])) >= since


@dataclass(frozen=True)
class Keeps:
    """Bytes of one token, for each element of a width.

    Attributes:
        hidden: norms and inputs of linear layers, of the residual stream's width. norm: of one RMSNorm and its output, where it is computed
            in fp32: its input and what it multiplies with its weight.
        query, key: of these widths, beyond queries, keys, values and attention's output.
        spared: of `query`, where liger-kernel turns queries: it leaves them in the layout that the next product reads attention's output in.
        qk_norm: norms of queries and keys, of their widths.
        head: of one head's width (rotary tables that each block makes for itself).
        token: whatever the widths of the block.
        activation: of the feed-forward width, beyond the activation's output; its backward makes as much as `derivative` in passing.
        router: of the residual stream's width, in a sparse block.
        groups_experts: bigtrain's kernels can run this family's routed experts. fused_experts: they do, and keep gate and up alone. own_experts, own_qk_norm: liger-kernel leaves these as they are.
        matrix: for each head and key, where attention is made of single operations; 0: it goes through sdpa. Beside it a forward holds
            `scores_passing` at most; `capped` of it are there because tanh keeps its own result, and `handed_on` stays until the next
            block has returned, whatever is kept.
        causal_masks: of all tokens of a row for each token, made once for all blocks by a model whose attention is single operations.
        mask: for each key (a mask that each block makes for itself). scores: for each head and key, of a bias that the model makes for all.
        window: tokens that a sliding window sees, where it is a dense mask in longer rows, here of all blocks; 0: it is none.
        masked: sdpa is given a dense mask, which it keeps, and keys and values repeated for each head of queries.
        plain: sdpa finds no fused kernel on any device. bias: what it adds to the scores has a gradient.
        unseen: attention's kernel is part of something compiled, so that its result cannot be kept by itself.
        masks: dropouts of the residual stream's width. feed_mask: one behind the activation. attention_dropout: one in attention.
    """

    hidden: int = 16
    norm: int = 8
    query: int = 0
    key: int = 0
    spared: int = 0
    qk_norm: int = 0
    head: int = 0
    token: int = 0
    activation: int = 2
    derivative: int = 0
    router: int = 0
    groups_experts: bool = False
    fused_experts: bool = False
    own_experts: bool = False
    own_qk_norm: bool = False
    matrix: int = 0
    scores_passing: int = 0
    capped: int = 0
    handed_on: int = 0
    causal_masks: int = 0
    mask: int = 0
    scores: int = 0
    window: int = 0
    masked: bool = False
    plain: bool = False
    bias: bool = False
    unseen: bool = False
    masks: int = 0
    feed_mask: bool = False
    attention_dropout: bool = False


_BERT = ("bert", *ROBERTA)
# nn.LayerNorm keeps its input and its output is a linear layer's input, 4 bytes; LlamaRMSNorm keeps an fp32 copy and the
# normalised value too, 8. A rotary embedding of part of a head makes another layout, in which attention's output is copied.
_LAYER_NORM, RMS = Keeps(hidden=8), Keeps(hidden=16)
_T5 = Keeps(hidden=20, bias=True, feed_mask=True)
FAMILIES: dict[str, Keeps] = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "smollm3", "granite", "arcee", "seed_oss"), RMS),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "mixtral", "granitemoe"), RMS),
    **dict.fromkeys(("gpt2", "opt", "bloom", "starcoder2", "vit", *_BERT), _LAYER_NORM),
    **dict.fromkeys(("qwen3", "qwen3_moe", "olmoe", "hunyuan_v1_dense", "exaone4"), Keeps(qk_norm=6)),
    "dots1": Keeps(qk_norm=6, router=4),
    "qwen2_moe": Keeps(router=2),  # the shared expert's output, for its gate
    "ernie4_5": Keeps(head=8),
    "glm": Keeps(query=2, head=2),
    "glm4": Keeps(hidden=28, query=2, head=2),
    "gemma": Keeps(hidden=20, norm=10),
    "gemma2": Keeps(hidden=36, norm=10),
    "gemma3_text": Keeps(hidden=36, norm=10, qk_norm=8),
    "phi": Keeps(hidden=4, query=2),
    "phi3": Keeps(query=4, key=2, spared=2),
    "olmo": Keeps(hidden=12, norm=6),
    **dict.fromkeys(("olmo2", "olmo3", "flex_olmo"), Keeps(hidden=20, norm=10, qk_norm=8)),
    **dict.fromkeys(("cohere", "cohere2"), Keeps(hidden=14, norm=14)),
    "stablelm": Keeps(hidden=8, query=2),
    "nemotron": Keeps(hidden=8, query=2),
    "gpt_neox": Keeps(hidden=8, query=4, key=2),
    "gptj": Keeps(hidden=4),
    "falcon": _LAYER_NORM,
    "gpt_oss": Keeps(hidden=20, norm=10, activation=8),  # its own gated activation clamps both inputs
    "deepseek_v2": Keeps(query=2, router=4),
    "deepseek_v3": Keeps(query=2, router=4),
    **dict.fromkeys(("t5", "mt5"), _T5),
    "umt5": replace(_T5, mask=8),
}
# Classes without sdpa, or with more in it than a product: the matrix is kept as softmax's output in fp32, in bf16, capped.
_MATRIX = {"gemma2": 6, "bloom": 6, "gpt_oss": 2}
# Of these, what a run on GPUs takes unasked: kernels for packed rows, which know sinks (kernels/sinks.py), or compiled ones, which cap.
_FUSED: dict[str, Attention] = {"gpt_oss": "varlen", "gemma2": "flex"}
# Classes that have had sdpa since this version of transformers.
_SDPA_SINCE = {"gptj": (5, 24)}
# The same where a class that has sdpa is told to do without.
_EAGER, _EAGER_IN_BF16 = 6, {"gpt2": 2, "falcon": 2}
# Beside these, a forward holds scores in bf16 and an fp32 copy of them; these classes have names for more of their steps.
_PASSING, _PASSING_IN_BF16, _PASSING_OF = 4, 2, {"bloom": 6, "gpt_oss": 4, "falcon": 4, "gptj": 2}
_EAGER_IS_ESTIMATED = {"falcon", "gptj", "deepseek_v2", "deepseek_v3"}
# Bytes that an activation keeps beyond its output: one operation of torch's its input or nothing, those made of several more.
ACTIVATIONS = {
    **dict.fromkeys(("gelu", "gelu_pytorch_tanh", "silu", "swish", "mish", "relu2", "relu6", "leaky_relu", "hardswish"), 2),
    **dict.fromkeys(("relu", "sigmoid", "tanh", "linear"), 0),
    **dict.fromkeys(("gelu_10", "quick_gelu"), 4),
    "gelu_python": 6,
    **dict.fromkeys(("gelu_new", "gelu_accurate", "gelu_python_tanh"), 8),
    "gelu_fast": 14,
}  # fmt: skip
# torch's pow: the power below, times the exponent, times the gradient, each a tensor; one of them is the result.
_DERIVATIVES = {"relu2": 4}
_ACTIVATION_KEYS = {
    **dict.fromkeys(("gpt2", "gptj", "opt"), "activation_function"),
    **dict.fromkeys(("gemma2", "gemma3_text"), "hidden_activation"),
    "falcon": "activation",
}  # fmt: skip
_ACTIVATION_BY_DEFAULT = {
    **dict.fromkeys(("gpt2", "gptj", "phi"), "gelu_new"),
    **dict.fromkeys(("nemotron", "arcee"), "relu2"),
    "opt": "relu",
}
# With use_parallel_residual: one input for two norms, one norm.
_PARALLEL = {"gpt_neox": 6, "stablelm": 4}
# The class's sliding window; which blocks have it is in layer_types, where there is such a list.
_FROM_LAYER = {"qwen2", "qwen3"}  # with use_sliding_window, from max_window_layers on
_WINDOWS = {
    **dict.fromkeys(("mistral", "ministral", "gemma3_text", "cohere2", "olmo3", "exaone4"), 4096),
    **dict.fromkeys(("phi3", "mixtral", "starcoder2"), 0),
}  # fmt: skip
# Of so many blocks the last sees all, where the config does not list them.
_WHOLE_EVERY = {"gemma3_text": 6, "cohere2": 4, "olmo3": 4, "exaone4": 4}
_OWN_ACTIVATION = {"bloom", "gpt_oss"}
# (key, the class's default, dropouts of a block) on the residual stream's width.
_RESIDUAL: dict[str, tuple[str, float, int]] = {
    "gpt2": ("resid_pdrop", 0.1, 2),
    **dict.fromkeys(("gptj", "phi", "phi3"), ("resid_pdrop", 0.0, 2)),
    **dict.fromkeys(("gpt_neox", "bloom"), ("hidden_dropout", 0.0, 2)),
    **dict.fromkeys(("stablelm", "falcon"), ("hidden_dropout", 0.0, 1)),
    "starcoder2": ("residual_dropout", 0.0, 2),
    "seed_oss": ("residual_dropout", 0.1, 2),
    "opt": ("dropout", 0.1, 2),
    **dict.fromkeys(_BERT, ("hidden_dropout_prob", 0.1, 2)),
    "vit": ("hidden_dropout_prob", 0.0, 2),
    **dict.fromkeys(T5, ("dropout_rate", 0.1, 2)),
}
# (key, the class's default) of attention's dropout, where it is not ("attention_dropout", 0).
_ATTENTION: dict[str, tuple[str, float]] = {
    "gpt2": ("attn_pdrop", 0.1),
    "gptj": ("attn_pdrop", 0.0),
    "seed_oss": ("attention_dropout", 0.1),
    **dict.fromkeys(_BERT, ("attention_probs_dropout_prob", 0.1)),
    "vit": ("attention_probs_dropout_prob", 0.0),
    **dict.fromkeys(T5, ("dropout_rate", 0.1)),
}


def activation(kind: str, c: Values) -> str:
    """The name of the feed-forward activation, as transformers calls it; "" where the family has its own."""
    if kind in T5:
        name = str(c.get("feed_forward_proj", "relu"))
        made = "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
        return str(c.get("dense_act_fn") or made)  # older files have that, too, and it stands
    if kind in _OWN_ACTIVATION:
        return ""
    return str(c.get(_ACTIVATION_KEYS.get(kind, "hidden_act")) or _ACTIVATION_BY_DEFAULT.get(kind, "silu"))


def keeps(kind: str, c: Values, attention: Attention) -> Keeps:
    """What a block of this config keeps."""
    found = _variant(kind, c, FAMILIES.get(kind, RMS))
    if name := activation(kind, c):
        found = replace(found, activation=ACTIVATIONS.get(name, 2), derivative=_DERIVATIVES.get(name, 0))
    key, default, masks = _RESIDUAL.get(kind, ("", 0.0, 0))
    attention_key, attention_default = _ATTENTION.get(kind, ("attention_dropout", 0.0))
    dropped = bool(masks and c.get(key, default))
    matrix = _MATRIX.get(kind, _EAGER_IN_BF16.get(kind, _EAGER) if attention == "eager" else 0)
    passing = _PASSING_OF.get(kind, _PASSING_IN_BF16 if matrix == 2 else _PASSING)
    capped = 2 if kind == "gemma2" and c.get("attn_logit_softcapping", 50.0) else 0
    if attention in ("flex", "varlen"):  # their kernels cap scores themselves, and sinks change only what comes out
        matrix = passing = capped = 0
    # Falcon drops in attention with ALiBi only, where it then drops the residual stream too: rare enough to be left out.
    in_attention = kind != "falcon" and bool(c.get(attention_key, attention_default))
    return replace(
        found,
        groups_experts=kind in _GROUPED_EXPERTS and activation(kind, c) in ("", "silu", "swish"),
        own_experts=kind in _OWN_EXPERTS,
        own_qk_norm=kind in _OWN_QK_NORM,
        masks=masks if dropped else 0,
        feed_mask=found.feed_mask and dropped,
        matrix=matrix + capped,
        scores_passing=passing if matrix else 0,
        capped=capped,
        handed_on=2 if matrix and kind == "bloom" else 0,
        causal_masks=_causal_masks(kind, c) if matrix else 0,
        window=0 if attention == "varlen" else _window(kind, c),
        masked=attention == "masked",
        unseen=attention == "flex",
        attention_dropout=in_attention,
    )


def are_counted(kind: str, c: Values, attention: Attention) -> bool:
    """Whether `keeps` is of this family's own modules. T5's source and target may differ in length: that is an estimate."""
    if kind not in FAMILIES or kind in T5 or (attention == "eager" and kind in _EAGER_IS_ESTIMATED):
        return False
    return kind in _OWN_ACTIVATION or activation(kind, c) in ACTIVATIONS


def _variant(kind: str, c: Values, row: Keeps) -> Keeps:
    """Families whose config chooses between orders of operations."""
    if kind == "falcon":
        return _falcon(c)
    if kind == "cohere" and c.flag("use_qk_norm"):
        return replace(row, qk_norm=12)
    if kind in _PARALLEL and c.flag("use_parallel_residual", kind == "gpt_neox"):
        return replace(row, hidden=_PARALLEL[kind])
    if c.get("kv_lora_rank"):
        low = int(c.get("q_lora_rank") or 0) + c["kv_lora_rank"]
        return replace(row, token=8 * low)  # RMSNorms on the way
    return row


def windows(kind: str, c: Values, layers: int) -> tuple[int, ...]:
    """Tokens that a query of each block sees at most, for blocks with a sliding window."""
    size, types = _window(kind, c), c.get("layer_types")
    if not size:
        return ()
    if types:
        return (size,) * list(types).count("sliding_attention")
    if kind in _FROM_LAYER:
        first = c.get("max_window_layers")
        return (size,) * max(0, layers - (28 if first is None else int(first)))
    pattern = c.get("sliding_window_pattern", _WHOLE_EVERY.get(kind, 0))
    every = pattern if isinstance(pattern, int) else len(pattern or "")  # EXAONE's is a word, LLLG
    return (size,) * (layers - layers // every if every else layers)


def _window(kind: str, c: Values) -> int:
    types = c.get("layer_types")
    if kind in _FROM_LAYER:  # their classes drop the size without the flag, whatever layer_types says
        return int(c.get("sliding_window", 4096) or 0) if c.flag("use_sliding_window") else 0
    if "sliding_attention" not in types if types else kind not in _WINDOWS:
        return 0
    return int(c.get("sliding_window", _WINDOWS.get(kind, 0)) or 0)


def _causal_masks(kind: str, c: Values) -> int:
    """One, and another of a sliding window where blocks of both kinds take turns."""
    if kind in _BERT or kind in T5 or kind == "vit":
        return 0
    types = c.get("layer_types")
    return len(set(types)) if types else 2 if kind in ("gemma2", "gpt_oss", *_WHOLE_EVERY) else 1


def _falcon(c: Values) -> Keeps:
    new, rotary = c.flag("new_decoder_architecture"), not c.flag("alibi")
    shared, norms = c.flag("parallel_attn", True), c.get("num_ln_in_parallel_attn")  # shared: both parts read one input
    norms = 2 if norms == 2 or (norms is None and new) or not shared else 1
    row = Keeps(hidden=2 + 2 * norms if shared else 8, mask=2 if rotary else 0, scores=0 if rotary else 2)
    if new:
        return row
    if c.flag("multi_query", True):
        return replace(row, mask=0, plain=True)  # one key for many queries, without saying so to sdpa
    return replace(row, query=2, key=2) if rotary else row
