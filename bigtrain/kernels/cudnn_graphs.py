"""The two graphs of cuDNN behind `cudnn_attention`: causal attention of ragged tensors, forward and backward.

A ragged tensor is [tokens, heads, width] in memory and [places, heads, longest, width] to cuDNN, with an offset in elements
for each place; how long each document is stands in a tensor of its own ("padding mask"). Building takes cuDNN some tenths
of a second or more; running asks for nothing but pointers.

Sources: the graph API's documentation and tests in https://github.com/NVIDIA/cudnn-frontend (test/python/sdpa), 1.22.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch


class Shape(NamedTuple):
    """What a graph is built for. `places`: documents it has room for; `longest`: tokens of none exceed this; `window`: tokens
    that a query sees at most, its own among them (0: all before it)."""

    places: int
    tokens: int
    longest: int
    heads: int
    key_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    device: int
    window: int = 0


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
        band = {"diagonal_band_left_bound": self.shape.window} if self.shape.window else {}
        return {
            **band,
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


_handles: dict[int, int] = {}
_streams: dict[int, int] = {}  # the stream each handle is on


def _handle(device: int) -> int:
    """This process's own cuDNN handle of a device."""
    if device not in _handles:
        with torch.cuda.device(device):
            _handles[device] = int(importlib.import_module("cudnn").create_handle())
    return _handles[device]
