"""Causal attention inside the documents of packed rows: the fastest kernels that can do it, and plain ones anywhere."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from bigtrain.errors import DataError
from bigtrain.kernels.cudnn_attention import is_hopper_or_later, packed_attention
from bigtrain.kernels.documents import Documents
from bigtrain.kernels.sinks import flash_with_sinks


def per_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    scale: float,
    dropout: float,
    window: int = 0,
) -> torch.Tensor:
    """Causal attention document by document; [tokens, heads, head_dim] each, any device and dtype."""
    grouped = query.shape[1] != key.shape[1]
    out = []
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
        q, k, v = (x[start:stop].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        narrow = 0 < window < stop - start
        seen = q.new_ones(stop - start, stop - start, dtype=torch.bool).tril().triu(1 - window) if narrow else None
        one = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=not narrow, scale=scale, dropout_p=dropout, enable_gqa=grouped
        )
        out.append(one.squeeze(0).transpose(0, 1))
    return torch.cat(out)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """Variable-length causal flash attention of torch, heads grouped where key has fewer; [tokens, heads, head_dim]."""
    from torch.nn.attention.varlen import varlen_attn

    asked = query.shape[1] != key.shape[1] and _wants_to_be_asked(varlen_attn)
    grouped: dict[str, Any] = {"enable_gqa": True} if asked else {}
    left = window - 1  # keys before the query's own; -1: all
    out = varlen_attn(query, key, value, bounds, bounds, longest, longest, scale=scale, window_size=(left, 0), **grouped)
    return out[0] if isinstance(out, tuple) else out


@functools.cache
def _wants_to_be_asked(attention: Any) -> bool:
    """torch 2.11 groups heads unasked and has no such argument; later versions want to be asked. Reading it takes 28 us."""
    return "enable_gqa" in inspect.signature(attention).parameters


def _dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention over whole rows, by cuDNN where it can; [batch, heads, seq_len, head_dim] in, heads third in what returns."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    grouped = query.shape[1] != key.shape[1]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        )
    return out.transpose(1, 2)


def _dense_is_best(query: torch.Tensor, documents: Documents) -> bool:
    """Whether dense kernels can do these rows and cuDNN is among them, at its best, with no fixed order of sums asked for."""
    if not documents.one_a_row or query.shape[-1] % 8 or torch.are_deterministic_algorithms_enabled():
        return False
    return is_hopper_or_later(query.device.index)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    scale: float,
    path: str = "auto",
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention inside documents on a GPU.

    Args:
        query: [batch, heads, seq_len, head_dim], 16 bits a value; key and value may have fewer heads.
        path: "dense" (rows that are one document each, no window), "ragged" (cuDNN, any documents) or "flash" (torch, any
            documents); "auto" takes the first that can do it. On an H100 cuDNN takes about half of flash attention's time.
        window: tokens that a query sees at most, its own among them; 0: all before it.
        sinks: [heads], a score more in each head's softmax; the dense path has none.

    Returns:
        [batch, seq_len, heads, head_dim].

    Raises:
        DataError: the path asked for cannot do this.
    """
    batch, heads, length, head_dim = query.shape
    if path not in ("auto", "dense", "ragged", "flash"):
        raise DataError(f"attention path {path!r} is unknown; use auto, dense, ragged or flash")
    is_more = bool(window) or sinks is not None
    if path == "dense" and (is_more or not documents.one_a_row):
        raise DataError(
            f"{documents.count} documents in {batch} rows, window {window}: the dense path takes one document a row, and no sinks"
        )
    if path == "dense" or (path == "auto" and not is_more and _dense_is_best(query, documents)):
        return _dense(query, key, value, scale)
    width = value.shape[-1]
    if width < head_dim:  # latent attention: these kernels want one width; columns of zeros add nothing to the others
        value = torch.nn.functional.pad(value, (0, head_dim - width))
    q, k, v = (x.transpose(1, 2).reshape(batch * length, x.shape[1], x.shape[-1]) for x in (query, key, value))
    out = packed_attention(q, k, v, documents, scale, window, sinks) if path in ("auto", "ragged") else None
    if out is None and path == "ragged":
        raise DataError(
            f"cuDNN cannot do attention of {query.dtype} {list(query.shape)}, {key.shape[1]} key heads; see the log"
        )
    if out is None and sinks is not None:
        out = flash_with_sinks(q, k, v, sinks, documents, scale, window)
    if out is None:
        out = _flash(q, k, v, documents.bounds, length, scale, window)
    return out.view(batch, length, heads, head_dim)[..., :width]


def visible(
    query: torch.Tensor, key: torch.Tensor, documents: Documents | None, window: int, causal: bool
) -> torch.Tensor | None:
    """bool [batch or 1, 1, queries, keys], what each query sees; None: all. A query alone comes after all keys, as in generation."""
    (batch, _, length, _), keys = query.shape, key.shape[2]
    if not causal or length == 1:
        return None
    seen = query.new_ones(length, keys, dtype=torch.bool).tril()
    seen = (seen.triu(1 - window) if window else seen)[None, None]
    if documents is not None:
        places = torch.arange(batch * length, device=query.device, dtype=documents.bounds.dtype)
        of = torch.searchsorted(documents.bounds, places, right=True).view(batch, 1, length)
        seen = seen & (of[..., None] == of[..., None, :])
    return seen
