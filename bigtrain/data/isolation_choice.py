"""Whether documents in one row can be kept apart in a model, and by what: a decision from its config alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bigtrain.errors import DataError

VARLEN = "bigtrain_varlen"
_BY_POSITIONS = ("sdpa", "eager", "flex_attention")  # and VARLEN, which bigtrain chooses itself
# Layers that carry a state from token to token: no attention mask separates documents in them.
_RECURRENT = ("linear_attention", "mamba", "mamba2", "recurrent", "rwkv", "conv")
# Layers whose tokens see others as the attention mask lets them and no further (an index picks among what the mask leaves), or see none.
_BY_MASK = {
    "full_attention", "sliding_attention", "chunked_attention", "reference_sliding_attention", "indexed_attention",
    "deepseek_sparse_attention", "attention", "moe", "mlp", "sparse", "dense",
}  # fmt: skip
# Families that mix tokens beside their attention, which no list of layers tells (read in transformers 5.24).
_BESIDE_MASKS = {
    "blt": "joins bytes to patches that reach from one document into the next",
    "qwen4_exp_text": "hashes each token with those before it and joins keys to blocks, both over the bounds of documents",
}


@dataclass(frozen=True)
class Isolation:
    """How documents are kept apart.

    Attributes:
        method: "position_ids", "document_bounds" or "none needed".
        document_bounds: what to give `StepLoader` and `EvalLoader`.
        why: one line for the log.
    """

    method: str
    document_bounds: bool
    why: str


def isolation_for(model_config: Any, packing: str) -> Isolation:
    """Chooses the method for a model's attention implementation.

    Args:
        model_config: transformers config of the model as built (its `_attn_implementation` is read).
        packing: as in `build_rows`.

    Raises:
        DataError: packed documents cannot be kept apart in this model, for instance a recurrent one.
    """
    if packing != "isolated":
        return Isolation("none needed", False, f"packing {packing}: no attention between documents has to be prevented")
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    layers = {str(kind) for kind in (getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())}
    recurrent = sorted(layers.intersection(_RECURRENT))
    if recurrent or str(getattr(text, "model_type", "")).startswith(("mamba", "rwkv", "falcon_mamba")):
        raise DataError(
            f"{getattr(text, 'model_type', 'this model')} has recurrent layers ({recurrent or 'all'}): their state runs on "
            "from one packed document into the next. Use packing='none' (one document a row) or packing='concatenate'"
        )
    _refuse_beside_masks(str(getattr(text, "model_type", "this model")), layers)
    attention = str(getattr(text, "_attn_implementation", None) or "sdpa")
    if attention in (*_BY_POSITIONS, VARLEN):
        return Isolation("position_ids", False, f"documents in a row are isolated by position_ids ({attention})")
    if "flash" in attention:
        return Isolation("document_bounds", True, f"documents in a row are isolated by cu_seq_lens ({attention})")
    raise DataError(
        f"packing='isolated' is not known to work with attn_implementation={attention!r}; use one of {', '.join(_BY_POSITIONS)}, "
        "a flash attention, or another packing"
    )


def _refuse_beside_masks(kind: str, layers: set[str]) -> None:
    """Falcon-H1 and Zaya carry a state beside attention, DeepSeek V4 joins keys by their place in the row; more may come."""
    others = sorted(layers - _BY_MASK)
    why = f"has layers of which it is not known that they keep to the attention mask ({', '.join(others)})" if others else ""
    if why := _BESIDE_MASKS.get(kind, why):
        raise DataError(
            f"{kind} {why}: packed documents would not be kept apart. Use packing='none' (one document a row) or packing='concatenate'"
        )
