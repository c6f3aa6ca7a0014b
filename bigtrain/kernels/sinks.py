"""Attention with sinks, by the fused kernels of attention without them.

A sink is a score that each head adds to the sum of its softmax and to nothing else: a key that every query sees, whose value
is zero. With `s` of a query's scores and `z` its head's sink, the result without a sink times exp(lse(s) - lse(s, z)) is
the result with it. A fused backward makes probabilities anew as exp(score - statistic) and takes from their gradients
the sum of gradient times result; given the result and the statistic *with* the sink, what it gives are the gradients of queries,
keys and values with the sink, and nothing of the scores has to be held. That of the sink itself is minus its probability times
the same sum, since its value is zero.

Sinks: G. Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023), learned as in gpt-oss (2025).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from bigtrain.kernels.documents import Documents


def with_sinks(out: torch.Tensor, stats: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Result and statistics of attention as they are with sinks.

    Args:
        out: [tokens, heads, head_dim], attention without sinks.
        stats: fp32 [tokens, heads], the logarithm of the sum of exponentials of each query's scores.
        sinks: fp32 [heads].

    Returns:
        New tensors of the same shapes and dtypes: a policy of recomputing may hold those that came in.
    """
    joined = torch.logaddexp(stats, sinks)
    factor = (stats - joined).exp().unsqueeze(-1)
    # Into a tensor of 16 bits: the product would be one of 32, twice as large as the result.
    return torch.mul(out, factor, out=torch.empty_like(out)), joined


def sinks_gradient(grad: torch.Tensor, out: torch.Tensor, joined: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """fp32 [heads], from the gradient of the result, the result and the statistics with sinks."""
    along = (grad * out).sum(-1, dtype=torch.float32)
    return -((sinks - joined).exp() * along).sum(0)


class _Flash(torch.autograd.Function):
    """torch's variable-length flash attention, causal inside each document; [tokens, heads, head_dim]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor,
        bounds: torch.Tensor,
        longest: int,
        scale: float,
        window: int,
    ) -> torch.Tensor:
        lengths = (bounds, bounds, longest, longest, 0.0, True)
        how = {"scale": scale, "window_size_left": window - 1, "window_size_right": 0}
        out, stats, state, unused, _ = torch.ops.aten._flash_attention_forward(query, key, value, *lengths, False, **how)
        single = sinks.detach().to(torch.float32, copy=True)
        out, joined = with_sinks(out, stats.T, single)
        # As the kernel gave them, [heads, tokens], is how its backward reads them.
        ctx.save_for_backward(query, key, value, out, joined.T.contiguous(), state, unused, single)
        ctx.lengths, ctx.how, ctx.dtype = lengths, how, sinks.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, stats, state, unused, sinks = ctx.saved_tensors
        grads = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), query, key, value, out, stats, *ctx.lengths, state, unused, **ctx.how
        )
        return *grads, sinks_gradient(grad, out, stats.T, sinks).to(ctx.dtype), None, None, None, None


def flash_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    documents: Documents,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """Causal attention inside each document by torch's flash attention.

    Args:
        query: [tokens, heads, head_dim] on a GPU, 16 bits a value; key and value may have fewer heads.
        sinks: [heads].
        documents: of the flattened micro batch.
        scale: factor of the products of query and key.
        window: tokens that a query sees at most, its own among them; 0: all before it.

    Returns:
        [tokens, heads, head_dim].
    """
    return _Flash.apply(query, key, value, sinks, documents.bounds, documents.longest, scale, window)


def plain_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention on any device and with any mask, by sdpa with a key more: it holds a dense mask of fp32 scores.

    Args:
        query: [batch, heads, queries, head_dim]; key and value may have fewer heads.
        sinks: [heads].
        mask: [batch or 1, heads or 1, queries, keys], bool (True: seen) or added to the scores; None: every key is seen.

    Returns:
        [batch, queries, heads, head_dim of value].
    """
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    bias = query.new_zeros(1, 1, queries, keys)
    if mask is not None:
        mask = mask[..., :keys]
        bias = (
            torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else mask
        )
    batch = bias.shape[0]
    column = sinks.to(query.dtype).view(1, heads, 1, 1).expand(batch, heads, queries, 1)
    scores = torch.cat([bias.to(query.dtype).expand(batch, heads, queries, keys), column], dim=-1)
    key, value = (torch.nn.functional.pad(one, (0, 0, 0, 1)) for one in (key, value))
    grouped = heads != key.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=scores, scale=scale, dropout_p=dropout, enable_gqa=grouped
    )
    return out.transpose(1, 2)
