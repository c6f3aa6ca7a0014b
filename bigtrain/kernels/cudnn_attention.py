"""Causal attention of packed documents by cuDNN: the kernels of dense attention, over documents of any lengths.

cuDNN has had such kernels for Hopper cards and later since 9.6: tensors of [tokens, heads, head_dim] with an offset and a
length for each document ("ragged", THD), heads grouped without copies. torch reaches them only for dense batches; its
`aten._cudnn_attention_forward` with cumulative lengths takes 65 ms a call and gives wrong gradients (torch 2.11). The
library `nvidia-cudnn-frontend` (module `cudnn`, extra `gpu`) builds such graphs in the cuDNN that torch brings; see
`cudnn_graphs`.

A graph belongs to a `Shape`. The number of documents differs from micro batch to micro batch, so a graph has a power of
two of places for them, and places left over hold documents of length 0 after the last token. Graphs are kept; a call is a
dictionary lookup, the outputs' allocation and one execute on the current stream, without a device sync.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from bigtrain.kernels.cudnn_graphs import Graphs, Shape
from bigtrain.kernels.documents import Documents
from bigtrain.kernels.sinks import sinks_gradient, with_sinks

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)
# Grouped heads over ragged tensors, and workspaces by the number of tokens, came with 9.6; backward of 9.10.0 and 9.10.1 is broken.
OLDEST_CUDNN = 90600
BROKEN_CUDNN = (91000, 91001)


_graphs: dict[Shape, Graphs | None] = {}
_building = threading.Lock()  # a backward that recomputes builds in autograd's thread
_said: set[str] = set()


@functools.cache
def is_hopper_or_later(device: int) -> bool:
    """Whether cuDNN's attention is faster than flash attention 2 on this card."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def why_not(shape: Shape) -> str | None:
    """Why there is no cuDNN graph of this shape, as far as can be told without building it; None when there may be one."""
    if shape.dtype not in DTYPES:
        return f"{shape.dtype} is not bfloat16 or float16"
    # Kernels write gradients in whole blocks of 16 columns, and workspaces are counted in blocks of 64 tokens.
    if shape.head_dim > 128 or shape.head_dim % 16:
        return f"head_dim {shape.head_dim} is over 128 or not a multiple of 16"
    if shape.tokens % 64:
        return f"{shape.tokens} tokens are not a multiple of 64"
    if shape.longest < 2 or shape.heads % shape.key_heads:
        return f"rows of {shape.longest} tokens, {shape.heads} heads over {shape.key_heads}"
    if not is_hopper_or_later(shape.device):
        return f"{torch.cuda.get_device_name(shape.device)} is older than Hopper"
    try:
        version = int(importlib.import_module("cudnn").backend_version())
    except Exception as error:  # not installed, or its cuDNN cannot be loaded: the reason is what is of use
        return f"nvidia-cudnn-frontend cannot be used ({type(error).__name__}: {error}); pip install -c constraints.txt -e '.[gpu]'"
    if version < OLDEST_CUDNN or version in BROKEN_CUDNN:
        return f"cuDNN {version} is older than {OLDEST_CUDNN} or has broken gradients"
    return None


def _say_once(what: str) -> None:
    if what not in _said:
        _said.add(what)
        logger.warning("packed attention keeps to torch's flash attention: %s", what)


def _build(shape: Shape) -> Graphs | None:
    """Both graphs of a shape; None (and one warning per reason) when cuDNN has none."""
    reason = why_not(shape)
    if reason is None:
        try:
            with torch.cuda.device(shape.device):
                return Graphs(shape)
        except Exception as error:  # the library raises its own types, RuntimeError and ValueError
            reason = f"cuDNN cannot build {shape} ({type(error).__name__}: {error})"
    _say_once(reason)
    return None


def _shape(query: torch.Tensor, key: torch.Tensor, places: int, longest: int, scale: float, window: int) -> Shape:
    tokens, heads, width = query.shape
    return Shape(places, tokens, longest, heads, key.shape[1], width, query.dtype, scale, query.device.index, window)


def graphs_for(query: torch.Tensor, key: torch.Tensor, documents: Documents, scale: float, window: int = 0) -> Graphs | None:
    """The graphs for [tokens, heads, head_dim] tensors on a GPU, built at their first use; None where cuDNN cannot."""
    shape = _shape(query, key, documents.places, documents.longest, scale, window)
    try:
        return _graphs[shape]
    except KeyError:
        with _building:
            if shape not in _graphs:
                _graphs[shape] = _build(shape)
        return _graphs[shape]


# Forward is an operator of torch, and not only a function, so that a policy of recomputing sees it by its name and keeps what it
# gave (models/recompute.py). Defined by hand: `torch.library.custom_op` takes some tens of microseconds a call for what is not needed here.
_library = torch.library.Library("bigtrain", "FRAGMENT")
_library.define(
    "packed_attention(Tensor query, Tensor key, Tensor value, Tensor lengths, Tensor at_query, Tensor at_key, Tensor at_stats, "
    "int longest, float scale, int window) -> (Tensor, Tensor)"
)


@torch.library.impl(_library, "packed_attention", "CompositeExplicitAutograd")
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    at_query: torch.Tensor,
    at_key: torch.Tensor,
    at_stats: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, fp32 statistics [tokens, heads]) of contiguous tensors whose graphs have been built."""
    graphs = _graphs[_shape(query, key, lengths.numel(), longest, scale, window)]
    assert graphs is not None
    out = torch.empty_like(query)
    stats = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    with torch.cuda.device(graphs.shape.device):
        graphs.follow_stream()
        graphs.forward.run((lengths, lengths, at_query, at_key, at_stats, query, key, value, out, stats))
    return out, stats


@torch.library.register_fake("bigtrain::packed_attention", lib=_library)
def _given(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)


class _Packed(torch.autograd.Function):
    """Causal attention inside each document; [tokens, heads, head_dim]."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, sinks: Any, documents: Documents, graphs: Graphs) -> torch.Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        shape = graphs.shape
        lengths, width = documents.lengths(), shape.heads * shape.head_dim
        at = (documents.offsets(width), documents.offsets(shape.key_heads * shape.head_dim), documents.offsets(shape.heads))
        out, stats = _operator(query, key, value, lengths, *at, shape.longest, shape.scale, shape.window)
        single = None if sinks is None else sinks.detach().to(torch.float32, copy=True)
        if single is not None:
            out, stats = with_sinks(out, stats, single)
            ctx.dtype = sinks.dtype
        ctx.save_for_backward(query, key, value, out, stats, single)
        ctx.graphs, ctx.small = graphs, (lengths, lengths, *at)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors
        grad, grads = grad.contiguous(), tuple(torch.empty_like(one) for one in saved[:3])
        ctx.graphs.follow_stream()  # autograd has set the device and its stream
        ctx.graphs.backward.run((*ctx.small, *saved, grad, *grads))
        of_sinks = None if sinks is None else sinks_gradient(grad, saved[3], saved[4], sinks).to(ctx.dtype)
        return *grads, of_sinks, None, None


_operator = torch.ops.bigtrain.packed_attention.default


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    scale: float,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Causal attention inside each document by cuDNN.

    Args:
        query: [tokens, heads, head_dim] on a GPU; key and value may have fewer heads, of which `heads` is a multiple.
        documents: of the flattened micro batch; the last ends at the last token.
        scale: factor of the products of query and key.
        window: tokens that a query sees at most, its own among them; 0: all before it.
        sinks: [heads], a score more in each head's softmax; None: there is none.

    Returns:
        [tokens, heads, head_dim]; None where cuDNN cannot do it (logged once), while torch compiles and where deterministic
        algorithms are asked for: gradients of queries are summed in no fixed order.
    """
    if torch.compiler.is_compiling() or torch.are_deterministic_algorithms_enabled():
        return None
    graphs = graphs_for(query, key, documents, scale, window)
    return None if graphs is None else _Packed.apply(query, key, value, sinks, documents, graphs)
