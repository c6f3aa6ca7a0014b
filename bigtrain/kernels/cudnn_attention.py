"""Causal attention of packed documents by cuDNN: the kernels of dense attention, over documents of any lengths.

cuDNN has had such kernels for Hopper cards and later since 9.6: tensors of [tokens, heads, head_dim] with an offset and a
length for each document ("ragged", THD), heads grouped without copies. torch reaches them only for dense batches; its
`aten._cudnn_attention_forward` with cumulative lengths takes 65 ms a call and gives wrong gradients (torch 2.11). The
library `nvidia-cudnn-frontend` (module `cudnn`, extra `gpu`) builds such graphs in the cuDNN that torch brings.

A graph belongs to a `Shape`. The number of documents differs from micro batch to micro batch, so a graph has a power of
two of places for them, and places left over hold documents of length 0 after the last token. Graphs are kept; a call is a
dictionary lookup, the outputs' allocation and one execute on the current stream, without a device sync.

Sources: the graph API's documentation and tests in https://github.com/NVIDIA/cudnn-frontend (test/python/sdpa), 1.22.
"""

from __future__ import annotations

import importlib
import logging
import threading
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)
# Grouped heads over ragged tensors, and workspaces by the number of tokens, came with 9.6; backward of 9.10.0 and 9.10.1 is broken.
OLDEST_CUDNN = 90600
BROKEN_CUDNN = (91000, 91001)


class Shape(NamedTuple):
    """What a graph is built for. `places`: documents it has room for; `longest`: tokens of none exceed this."""

    places: int
    tokens: int
    longest: int
    heads: int
    key_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    device: int


def places_for(documents: int) -> int:
    """Places in the graph for so many documents: the next power of two, so that few graphs serve all micro batches."""
    return 1 << max(documents - 1, 0).bit_length()


class Documents:
    """Where the documents of a flattened micro batch begin, and the tensors kernels want of it: made once for all layers.

    Attributes:
        bounds: int32 [documents + 1], from 0 to the number of tokens.
        longest: no document has more tokens; a bound known without asking the device, such as the row length.
        one_a_row: every row of the micro batch is one document, so that dense kernels do.
    """

    def __init__(self, bounds: torch.Tensor, longest: int, one_a_row: bool = False):
        self.bounds, self.longest, self.one_a_row = bounds, longest, one_a_row
        self.count = bounds.numel() - 1
        self.places = places_for(self.count)
        self._padded: torch.Tensor | None = None
        self._lengths: torch.Tensor | None = None
        self._offsets: dict[int, torch.Tensor] = {}

    def _all_places(self) -> torch.Tensor:
        """int64 [places + 1]: bounds, with the places left over at the end of the last document."""
        if self._padded is None:
            rest = self.bounds[-1:].expand(self.places - self.count)
            self._padded = torch.cat([self.bounds, rest]).to(torch.int64)
        return self._padded

    def lengths(self) -> torch.Tensor:
        """int32 [places]: tokens of each document, 0 in places left over."""
        if self._lengths is None:
            self._lengths = torch.diff(self._all_places()).to(torch.int32)
        return self._lengths

    def offsets(self, elements: int) -> torch.Tensor:
        """int64 [places + 1]: where each document begins in a tensor with so many elements a token."""
        if elements not in self._offsets:
            self._offsets[elements] = self._all_places() * elements
        return self._offsets[elements]


class _Plan:
    """A built graph: how to run it with device pointers in the order of its tensors' numbers."""

    def __init__(self, graph: Any, tensors: int, handle: int):
        modes = importlib.import_module("cudnn").heur_mode
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([modes.A, modes.FALLBACK])
        graph.check_support()
        graph.build_plans()
        self._graph, self._handle = graph, handle
        self.workspace = max(int(graph.get_workspace_size()), 1)
        # Pointers in a list spare a dictionary and a Python loop a call; not every version of the library has it.
        order: list[int] = getattr(graph, "_get_variant_pack_uids_sorted", list)()
        self.takes_list = [int(uid) for uid in order] == list(range(tensors))

    def run(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Queues the graph's kernels on the current stream; tensors in the order of their numbers."""
        room = torch.empty(self.workspace, dtype=torch.uint8, device=tensors[0].device)
        pointers = [tensor.data_ptr() for tensor in tensors]
        if self.takes_list:
            self._graph._execute_with_ptrs(pointers, room.data_ptr(), self._handle)
        else:
            self._graph.execute(dict(enumerate(pointers)), room.data_ptr(), self._handle)


class _Build:
    """One graph of a shape while it is put together; tensors are numbered in the order they are declared."""

    def __init__(self, cudnn: Any, shape: Shape, handle: int):
        self.cudnn, self.shape, self.numbered = cudnn, shape, 0
        self.io = cudnn.data_type.BFLOAT16 if shape.dtype == torch.bfloat16 else cudnn.data_type.HALF
        single = cudnn.data_type.FLOAT
        self.graph = cudnn.pygraph(io_data_type=self.io, intermediate_data_type=single, compute_data_type=single, handle=handle)

    def _sizes(self, heads: int, width: int) -> tuple[list[int], list[int]]:
        """Dimensions and strides of a [tokens, heads, width] tensor seen as [places, heads, longest, width]."""
        longest = self.shape.longest
        return [self.shape.places, heads, longest, width], [longest * heads * width, width, heads * width, 1]

    def _number(self) -> int:
        self.numbered += 1
        return self.numbered - 1

    def per_document(self, extra: int, kind: str) -> Any:
        dims = [self.shape.places + extra, 1, 1, 1]
        return self.graph.tensor(
            dim=dims, stride=[1, 1, 1, 1], data_type=getattr(self.cudnn.data_type, kind), uid=self._number()
        )

    def ragged(self, heads: int, width: int, offsets: Any, single: bool = False) -> Any:
        dim, stride = self._sizes(heads, width)
        kind = self.cudnn.data_type.FLOAT if single else self.io
        tensor = self.graph.tensor(dim=dim, stride=stride, data_type=kind, uid=self._number())
        tensor.set_ragged_offset(offsets)
        return tensor

    def output(self, tensor: Any, heads: int, width: int, offsets: Any, single: bool = False) -> None:
        dim, stride = self._sizes(heads, width)
        tensor.set_uid(self._number()).set_output(True).set_dim(dim).set_stride(stride)
        tensor.set_data_type(self.cudnn.data_type.FLOAT if single else self.io)
        tensor.set_ragged_offset(offsets)

    def lengths_and_offsets(self) -> tuple[dict[str, Any], Any, Any, Any]:
        """Numbers 0 to 4: lengths of queries and keys, offsets of query, key and statistics."""
        lengths = {"seq_len_q": self.per_document(0, "INT32"), "seq_len_kv": self.per_document(0, "INT32")}
        return lengths, *(self.per_document(1, "INT64") for _ in range(3))

    def mask(self) -> dict[str, Any]:
        """Causal inside each document; attn_scale has to be a Python float."""
        return {
            "attn_scale": float(self.shape.scale),
            "use_padding_mask": True,
            "diagonal_alignment": self.cudnn.diagonal_alignment.TOP_LEFT,
            "diagonal_band_right_bound": 0,
        }


def _forward_graph(cudnn: Any, shape: Shape, handle: int) -> tuple[Any, int]:
    """Tensors: lengths twice, offsets of query, key, statistics; query, key, value; out, statistics."""
    build, heads, width = _Build(cudnn, shape, handle), shape.heads, shape.head_dim
    lengths, at_query, at_key, at_stats = build.lengths_and_offsets()
    query = build.ragged(heads, width, at_query)
    key, value = (build.ragged(shape.key_heads, width, at_key) for _ in range(2))
    out, stats = build.graph.sdpa(
        name="packed", q=query, k=key, v=value, generate_stats=True, **lengths, **build.mask()
    )  # fmt: skip
    build.output(out, heads, width, at_query)
    build.output(stats, heads, 1, at_stats, single=True)
    return build.graph, build.numbered


def _backward_graph(cudnn: Any, shape: Shape, handle: int) -> tuple[Any, int]:
    """Tensors: as forward, then the gradient of out; gradients of query, key and value."""
    build, heads, width = _Build(cudnn, shape, handle), shape.heads, shape.head_dim
    lengths, at_query, at_key, at_stats = build.lengths_and_offsets()
    query = build.ragged(heads, width, at_query)
    key, value = (build.ragged(shape.key_heads, width, at_key) for _ in range(2))
    out = build.ragged(heads, width, at_query)
    stats = build.ragged(heads, 1, at_stats, single=True)
    grad = build.ragged(heads, width, at_query)
    # Without these two the workspace is that of a dense batch of places x longest tokens.
    most = {"max_total_seq_len_q": shape.tokens, "max_total_seq_len_kv": shape.tokens}
    grads = build.graph.sdpa_backward(
        name="packed_backward", q=query, k=key, v=value, o=out, dO=grad, stats=stats, **most, **lengths, **build.mask()
    )
    for one, count, at in zip(grads, (heads, shape.key_heads, shape.key_heads), (at_query, at_key, at_key)):
        build.output(one, count, width, at)
    return build.graph, build.numbered


class Graphs:
    """Forward and backward of one shape, built together so that a backward that cannot be built is known before forward."""

    def __init__(self, shape: Shape):
        cudnn = importlib.import_module("cudnn")
        self.shape, self.handle = shape, _handle(shape.device)
        self.forward = _Plan(*_forward_graph(cudnn, shape, self.handle), self.handle)
        self.backward = _Plan(*_backward_graph(cudnn, shape, self.handle), self.handle)

    def follow_stream(self) -> None:
        """Puts what runs next on the caller's stream."""
        stream = torch.cuda.current_stream(self.shape.device).cuda_stream
        if _streams.get(self.shape.device) != stream:
            importlib.import_module("cudnn").set_stream(handle=self.handle, stream=stream)
            _streams[self.shape.device] = stream


_graphs: dict[Shape, Graphs | None] = {}
_handles: dict[int, int] = {}
_streams: dict[int, int] = {}
_building = threading.Lock()  # a backward that recomputes builds in autograd's thread
_said: set[str] = set()


def _handle(device: int) -> int:
    """This process's own cuDNN handle of a device."""
    if device not in _handles:
        with torch.cuda.device(device):
            _handles[device] = int(importlib.import_module("cudnn").create_handle())
    return _handles[device]


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
    if torch.cuda.get_device_capability(shape.device) < (9, 0):
        return f"{torch.cuda.get_device_name(shape.device)} is older than Hopper"
    try:
        version = int(importlib.import_module("cudnn").backend_version())
    except Exception as error:  # not installed, or its cuDNN cannot be loaded: the reason is what is of use
        return f"nvidia-cudnn-frontend cannot be used ({type(error).__name__}: {error}); pip install 'bigtrain[gpu]'"
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


def graphs_for(query: torch.Tensor, key: torch.Tensor, documents: Documents, scale: float) -> Graphs | None:
    """The graphs for [tokens, heads, head_dim] tensors on a GPU, built at their first use; None where cuDNN cannot."""
    tokens, heads, width = query.shape
    shape = Shape(
        documents.places, tokens, documents.longest, heads, key.shape[1], width, query.dtype, scale, query.device.index
    )
    try:
        return _graphs[shape]
    except KeyError:
        with _building:
            if shape not in _graphs:
                _graphs[shape] = _build(shape)
        return _graphs[shape]


class _Packed(torch.autograd.Function):
    """Causal attention inside each document; [tokens, heads, head_dim]."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, documents: Documents, graphs: Graphs) -> torch.Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        tokens, heads, _ = query.shape
        out = torch.empty_like(query)
        stats = torch.empty(tokens, heads, dtype=torch.float32, device=query.device)
        lengths, width = documents.lengths(), heads * graphs.shape.head_dim
        at = (documents.offsets(width), documents.offsets(key.shape[1] * graphs.shape.head_dim), documents.offsets(heads))
        with torch.cuda.device(graphs.shape.device):
            graphs.follow_stream()
            graphs.forward.run((lengths, lengths, *at, query, key, value, out, stats))
        ctx.save_for_backward(query, key, value, out, stats)
        ctx.graphs, ctx.small = graphs, (lengths, lengths, *at)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        grads = tuple(torch.empty_like(one) for one in saved[:3])
        ctx.graphs.follow_stream()  # autograd has set the device and its stream
        ctx.graphs.backward.run((*ctx.small, *saved, grad.contiguous(), *grads))
        return *grads, None, None


def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, scale: float
) -> torch.Tensor | None:
    """Causal attention inside each document by cuDNN.

    Args:
        query: [tokens, heads, head_dim] on a GPU; key and value may have fewer heads, of which `heads` is a multiple.
        documents: of the flattened micro batch; the last ends at the last token.
        scale: factor of the products of query and key.

    Returns:
        [tokens, heads, head_dim]; None where cuDNN cannot do it (logged once), while torch compiles and where deterministic
        algorithms are asked for: gradients of queries are summed in no fixed order.
    """
    if torch.compiler.is_compiling() or torch.are_deterministic_algorithms_enabled():
        return None
    graphs = graphs_for(query, key, documents, scale)
    return None if graphs is None else _Packed.apply(query, key, value, documents, graphs)
