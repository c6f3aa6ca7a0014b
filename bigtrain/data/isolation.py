"""How documents in one row are kept apart in attention, for each attention implementation of transformers.

What transformers does with packed rows (read in masking_utils.py and modeling_flash_attention_utils.py, 5.17 and 5.24):

* sdpa, eager, flex: without an attention mask and *without a cache*, `find_packed_sequence_indices` sees where
  `position_ids` do not go up by one and masks across documents, row by row, at any batch size. With `use_cache=True`, the
  default of most configs, a cache object is made even in training and the packing is silently ignored. For sdpa the mask
  is dense: seq_len**2 bytes a row, and fast causal kernels are out.
* flash attention: `position_ids` count at batch size 1 only; larger micro batches attend across documents silently. With
  `cu_seq_lens_q/k` and `max_length_q/k` in the call it is right at any batch size (`StepLoader(document_bounds=True)`).
* `bigtrain_varlen`, registered here: document bounds from `position_ids` for any micro batch and no dense mask; torch's
  variable-length flash attention on CUDA, one causal sdpa call per document elsewhere.
"""

from __future__ import annotations

import importlib.util
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bigtrain.errors import DataError

VARLEN = "bigtrain_varlen"
_BY_POSITIONS = ("sdpa", "eager", "flex_attention", VARLEN)
# Layers that carry a state from token to token: no attention mask separates documents in them.
_RECURRENT = ("linear_attention", "mamba", "mamba2", "recurrent", "rwkv", "conv")


def cumulative_lengths(position_ids: torch.Tensor) -> torch.Tensor:
    """Bounds of documents in a flattened micro batch.

    Args:
        position_ids: int [batch, seq_len]; a document starts at each row's begin and wherever positions do not go up by one.

    Returns:
        int32 [documents + 1] on the same device, from 0 to batch * seq_len.
    """
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = torch.diff(position_ids, dim=-1) != 1
    end = torch.tensor([position_ids.numel()], device=position_ids.device)
    return torch.cat([starts.flatten().nonzero().flatten(), end]).to(torch.int32)


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
    attention = str(getattr(text, "_attn_implementation", None) or "sdpa")
    if attention in _BY_POSITIONS:
        return Isolation("position_ids", False, f"documents in a row are isolated by position_ids ({attention})")
    if "flash" in attention:
        return Isolation("document_bounds", True, f"documents in a row are isolated by cu_seq_lens ({attention})")
    raise DataError(
        f"packing='isolated' is not known to work with attn_implementation={attention!r}; use one of {list(_BY_POSITIONS)}, "
        "a flash attention, or another packing"
    )


def prepare_isolation(model: torch.nn.Module, packing: str) -> Isolation:
    """Makes a transformers model honour packed rows; call it once after building, before the first forward.

    Switches `config.use_cache` off, without which packed positions are ignored. Modules without a `config` that do not
    come from transformers are left alone: what they do with `position_ids` is theirs.

    Raises:
        DataError: see `isolation_for`; also when the model's forward takes no `position_ids`.
    """
    config = getattr(model, "config", None)
    if packing != "isolated" or config is None or not hasattr(config, "model_type"):
        return Isolation("none needed", False, f"packing {packing}: nothing to prepare in {type(model).__name__}")
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise DataError(
            f"{type(model).__name__}.forward takes no position_ids, so packed documents cannot be told apart; use "
            "packing='none' or packing='concatenate'"
        )
    choice = isolation_for(config, packing)
    config.use_cache = False
    if hasattr(config, "get_text_config"):
        config.get_text_config().use_cache = False
    return choice


class _BoundsCache:
    """Document bounds of the position_ids last seen: every layer asks for the same, and finding them syncs the device."""

    def __init__(self) -> None:
        self._seen: Callable[[], torch.Tensor | None] = lambda: None
        self._version = -1
        self._bounds: torch.Tensor | None = None

    def of(self, position_ids: torch.Tensor) -> torch.Tensor:
        if self._seen() is not position_ids or self._version != position_ids._version or self._bounds is None:
            self._bounds = cumulative_lengths(position_ids)
            self._seen, self._version = weakref.ref(position_ids), position_ids._version
        return self._bounds


_bounds_cache = _BoundsCache()


def _per_document(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, scale: float, dropout: float
) -> torch.Tensor:
    """Causal attention document by document; [tokens, heads, head_dim] each, any device and dtype."""
    grouped = query.shape[1] != key.shape[1]
    out = []
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
        q, k, v = (x[start:stop].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        one = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, dropout_p=dropout, enable_gqa=grouped
        )
        out.append(one.squeeze(0).transpose(0, 1))
    return torch.cat(out)


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    """Variable-length causal flash attention of torch, heads grouped where key has fewer; [tokens, heads, head_dim]."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 groups heads unasked and has no such argument; later versions want to be asked
    asked = query.shape[1] != key.shape[1] and "enable_gqa" in inspect.signature(varlen_attn).parameters
    grouped: dict[str, Any] = {"enable_gqa": True} if asked else {}
    out = varlen_attn(query, key, value, bounds, bounds, longest, longest, scale=scale, window_size=(-1, 0), **grouped)
    return out[0] if isinstance(out, tuple) else out


def _bounds_in(kwargs: dict[str, Any], batch: int, length: int) -> torch.Tensor | None:
    """Document bounds from the attention call's arguments; None when they do not tell any."""
    if kwargs.get("cu_seq_lens_q") is not None:
        return kwargs["cu_seq_lens_q"]
    positions = kwargs.get("position_ids")
    if positions is None or positions.ndim != 2 or positions.shape[-1] != length:
        return None
    return _bounds_cache.of(positions if positions.shape[0] == batch else positions.expand(batch, -1))


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers attention interface: causal attention inside documents only, without a dense mask.

    Args:
        query: [batch, heads, seq_len, head_dim]; key and value may have fewer heads (grouped).
        attention_mask: when given (padded generation, for instance), sdpa takes over.
        kwargs: `position_ids` [batch, seq_len], or `cu_seq_lens_q` of the flattened batch.

    Returns:
        [batch, seq_len, heads, head_dim], and None for the attention weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch, _, length, head_dim = query.shape
    bounds = _bounds_in(kwargs, batch, length)
    causal = kwargs.get("is_causal") is not False and getattr(module, "is_causal", True)
    if attention_mask is not None or bounds is None or key.shape[2] != length or not causal:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    scale = scaling if scaling is not None else head_dim**-0.5
    q, k, v = (x.transpose(1, 2).reshape(batch * length, x.shape[1], x.shape[-1]) for x in (query, key, value))
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and head_dim <= 256 and not dropout:
        out = _flash(q, k, v, bounds, length, scale)
    else:
        out = _per_document(q, k, v, bounds, scale, dropout if module.training else 0.0)
    return out.reshape(batch, length, query.shape[1], head_dim), None


def _separates_documents_only(mask_function: Callable[..., Any], whole_window: bool) -> bool:
    """Whether a transformers mask is nothing but "causal, and within a document": what `varlen_attention` does itself.

    The masks are closures without a name of their own, so they are told by where they were made. One that is not known
    counts as something else, which costs a dense mask and never a wrong one.
    """
    from transformers.masking_utils import causal_mask_function

    if mask_function is causal_mask_function:
        return True
    maker = getattr(mask_function, "__qualname__", "").split(".")[0]
    inner = inspect.getclosurevars(mask_function).nonlocals
    if maker == "packed_sequence_mask_function":
        return True
    if maker == "sliding_window_overlay":
        return whole_window
    if maker == "remap_positions_for_packed_sequence":
        return _separates_documents_only(inner["mask_function"], whole_window)
    if maker == "and_masks":
        return all(_separates_documents_only(one, whole_window) for one in inner["mask_functions"])
    return False


def has_varlen() -> bool:
    """Whether this torch brings variable-length flash attention (2.10 and later)."""
    return importlib.util.find_spec("torch.nn.attention.varlen") is not None


def register_varlen() -> str:
    """Adds `bigtrain_varlen` to transformers; returns the name to pass as `attn_implementation`.

    Layers whose mask is more than causal (a sliding window shorter than the row, blocks of image tokens) keep sdpa's dense
    mask, as does anything called with an attention mask.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    def mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        window = kwargs.get("local_size")
        whole_window = window is None or window >= kwargs.get("kv_length", 0)
        function = kwargs.get("mask_function", causal_mask_function)
        is_square = kwargs.get("q_length") == kwargs.get("kv_length")
        if kwargs.get("attention_mask") is None and is_square and _separates_documents_only(function, whole_window):
            return None
        return sdpa_mask(*args, **kwargs)

    AttentionInterface.register(VARLEN, varlen_attention)
    AttentionMaskInterface.register(VARLEN, mask)
    return VARLEN
