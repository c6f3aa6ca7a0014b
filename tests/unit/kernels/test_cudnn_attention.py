"""Attention of packed rows by cuDNN: all that can be told without a GPU. What cuDNN computes: tests/gpu/test_attention_gpu.py."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types

import pytest
import torch

from bigtrain.kernels import cudnn_attention, cudnn_graphs
from bigtrain.kernels.cudnn_attention import packed_attention, why_not
from bigtrain.kernels.cudnn_graphs import Shape
from bigtrain.kernels.documents import Documents, places_for
from bigtrain.models.recompute import runner

SHAPE = Shape(8, 16384, 4096, 24, 8, 128, torch.bfloat16, 128**-0.5, 0)


def _documents(lengths, longest):
    return Documents(torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32), longest)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(cudnn_attention, "is_hopper_or_later", lambda device: True)
    monkeypatch.setattr(cudnn_attention, "_graphs", {})
    monkeypatch.setattr(cudnn_attention, "_said", set())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def _library(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "cudnn", types.SimpleNamespace(backend_version=lambda: version))


def test_few_graphs_serve_all_numbers_of_documents():
    assert [places_for(n) for n in (1, 2, 3, 4, 5, 8, 9, 40, 64)] == [1, 2, 4, 4, 8, 8, 16, 64, 64]
    assert len({places_for(n) for n in range(1, 1025)}) == 11


def test_places_left_over_are_empty_and_at_the_end():
    documents = _documents([3, 1, 4, 2, 6], 8)
    assert (documents.count, documents.places) == (5, 8)
    assert documents.lengths().tolist() == [3, 1, 4, 2, 6, 0, 0, 0] and documents.lengths().dtype == torch.int32
    assert documents.offsets(10).tolist() == [0, 30, 40, 80, 100, 160, 160, 160, 160]
    assert documents.offsets(10).dtype == torch.int64  # 2**31 elements are 700,000 tokens of 24 heads of 128


def test_offsets_are_made_once_for_all_layers():
    documents = _documents([3, 5], 8)
    assert documents.offsets(24) is documents.offsets(24) and documents.lengths() is documents.lengths()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "float32"),
        ({"head_dim": 256}, "head_dim 256"),
        ({"head_dim": 72}, "head_dim 72"),
        ({"tokens": 4095}, "4095 tokens"),
        ({"longest": 1}, "rows of 1"),
        ({"key_heads": 7}, "24 heads over 7"),
    ],
)
def test_shapes_cudnn_has_no_kernel_for_are_told(hopper, monkeypatch, change, reason):
    _library(monkeypatch, 92000)
    assert why_not(SHAPE) is None
    assert reason in why_not(SHAPE._replace(**change))


def test_cards_and_libraries_without_the_kernels_are_told(hopper, monkeypatch):
    _library(monkeypatch, 90501)
    assert "90501 is older than 90600" in why_not(SHAPE)
    _library(monkeypatch, 91001)
    assert "broken gradients" in why_not(SHAPE)
    monkeypatch.setitem(sys.modules, "cudnn", None)  # what an absent module looks like to import
    assert "pip install -c constraints.txt -e '.[gpu]'" in why_not(SHAPE)
    monkeypatch.setattr(cudnn_attention, "is_hopper_or_later", lambda device: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    assert why_not(SHAPE) == "A100 is older than Hopper"


def test_a_graph_that_cannot_be_built_is_tried_once_and_said_once(hopper, monkeypatch, caplog):
    _library(monkeypatch, 92000)
    tried = []

    def refuse(shape):
        tried.append(shape)
        raise RuntimeError("No valid engine configs")

    monkeypatch.setattr(cudnn_attention, "Graphs", refuse)
    query, key = torch.empty(64, 4, 16, dtype=torch.bfloat16), torch.empty(64, 2, 16, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert packed_attention(query, key, key, _documents([30, 34], 64), 0.25) is None
    assert tried == [Shape(2, 64, 64, 4, 2, 16, torch.bfloat16, 0.25, None)]
    assert [r.message for r in caplog.records if "No valid engine configs" in r.message] == [caplog.records[0].message]
    assert len(caplog.records) == 1


def test_one_graph_for_micro_batches_with_as_many_places(hopper, monkeypatch):
    monkeypatch.setattr(cudnn_attention, "_build", lambda shape: object())
    query, key = torch.empty(64, 4, 16, dtype=torch.bfloat16), torch.empty(64, 2, 16, dtype=torch.bfloat16)
    first = cudnn_attention.graphs_for(query, key, _documents([10, 20, 34], 64), 0.25)
    assert cudnn_attention.graphs_for(query, key, _documents([16, 16, 16, 16], 64), 0.25) is first
    for documents, scale in ((_documents([60, 4], 64), 0.25), (_documents([10, 20, 34], 64), 0.5)):
        assert cudnn_attention.graphs_for(query, key, documents, scale) is not first


def test_a_fixed_order_of_sums_and_the_compiler_keep_flash_attention(hopper, monkeypatch):
    monkeypatch.setattr(cudnn_attention, "graphs_for", lambda *a: pytest.fail("a graph was asked for"))
    tensors = (torch.empty(64, 2, 16),) * 3
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert packed_attention(*tensors, _documents([64], 64), 0.25) is None
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert packed_attention(*tensors, _documents([64], 64), 0.25) is None


def _seen(tokens, window):
    """Causal; the last `window` tokens, or all."""
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return mask.triu(1 - window) if window else mask


class _OnTheHost:
    """Does what the graphs are declared to do, from nothing but the tensors they are given, in their order."""

    def __init__(self, shape):
        self.shape, self.forwards = shape, 0
        self.heads, self.key_heads, self.width, self.scale = shape.heads, shape.key_heads, shape.head_dim, shape.scale
        self.forward = types.SimpleNamespace(run=lambda tensors: self._run(tensors, backward=False))
        self.backward = types.SimpleNamespace(run=lambda tensors: self._run(tensors, backward=True))

    def follow_stream(self):
        pass

    def _part(self, tensor, offset, length, heads):
        return tensor.view(-1)[offset : offset + length * heads * self.width].view(length, heads, self.width)

    def _run(self, tensors, backward):
        lengths, key_lengths, at_query, at_key, at_stats, query, key, value, out, stats, *rest = tensors
        assert torch.equal(lengths, key_lengths) and at_stats[-1] == stats.numel()
        assert all(one.is_contiguous() for one in tensors)
        self.forwards += not backward
        for length, q, k in zip(lengths.tolist(), at_query.tolist(), at_key.tolist()):
            mine, theirs = (q, length, self.heads), (k, length, self.key_heads)
            parts = [self._part(*x).transpose(0, 1)[None] for x in ((query, *mine), (key, *theirs), (value, *theirs))]
            with torch.enable_grad():
                parts = [x.detach().requires_grad_() for x in parts]
                result = torch.nn.functional.scaled_dot_product_attention(
                    *parts, attn_mask=_seen(length, self.shape.window), scale=self.scale, enable_gqa=True
                )
            if not backward:
                self._part(out, *mine).copy_(result[0].transpose(0, 1))
                stats.fill_(7.0)
                continue
            assert (stats == 7.0).all()
            wanted = torch.autograd.grad(result, parts, self._part(rest[0], *mine).transpose(0, 1)[None])
            for target, source, place in zip(rest[1:], wanted, (mine, theirs, theirs)):
                self._part(target, *place).copy_(source[0].transpose(0, 1))


def _on_the_host(monkeypatch, documents, tokens, heads, key_heads, width, window):
    shape = Shape(documents.places, tokens, documents.longest, heads, key_heads, width, torch.float64, 0.3, None, window)
    graphs = _OnTheHost(shape)
    monkeypatch.setitem(cudnn_attention._graphs, shape, graphs)
    return graphs


@pytest.mark.parametrize("window", [0, 3])
def test_tensors_reach_the_graphs_in_the_order_they_were_declared(hopper, monkeypatch, window):
    """Against one attention over all tokens with a mask; queries that are not contiguous, recomputation included."""
    lengths, heads, key_heads, width = [3, 1, 7, 5, 16], 4, 2, 8
    documents = _documents(lengths, 16)
    graphs = _on_the_host(monkeypatch, documents, 32, heads, key_heads, width, window)
    query, key, value = (torch.randn(32, n, width, dtype=torch.float64) for n in (heads, key_heads, key_heads))
    query = torch.cat([query, query], dim=2)[..., :width].requires_grad_()
    key, value = key.requires_grad_(), value.requires_grad_()
    grad = torch.randn(32, heads, width, dtype=torch.float64)

    mask = torch.block_diag(*(_seen(n, window) for n in lengths)).bool()
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (query, key, value)), attn_mask=mask, scale=0.3, enable_gqa=True
    )[0].transpose(0, 1)
    wanted = torch.autograd.grad(expected, (query, key, value), grad)

    def once(q, k, v):
        return packed_attention(q, k, v, documents, 0.3, window)

    def recomputed(q, k, v):
        return torch.utils.checkpoint.checkpoint(once, q, k, v, use_reentrant=False)

    kept = [functools.partial(runner(policy, 1), once) for policy in ("selective", "attention", "offload")]
    for run, forwards in ((once, 1), (recomputed, 2), *((run, 1) for run in kept)):
        graphs.forwards = 0
        out = run(query, key, value)
        for mine, theirs in zip((out, *torch.autograd.grad(out, (query, key, value), grad)), (expected, *wanted)):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)  # other order of sums in float64
        assert graphs.forwards == forwards


def test_the_operator_tells_what_it_gives_without_a_graph():
    """For whoever traces with tensors that hold nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        query, key, small = (
            torch.empty(64, 4, 16, dtype=torch.bfloat16),
            torch.empty(64, 2, 16),
            torch.empty(3, dtype=torch.int64),
        )
        out, stats = torch.ops.bigtrain.packed_attention(query, key, key, small, small, small, small, 64, 0.5, 0)
    assert (out.shape, out.dtype, stats.shape, stats.dtype) == (query.shape, query.dtype, (64, 4), torch.float32)


def test_the_library_accepts_the_graphs():
    """With nvidia-cudnn-frontend and a cuDNN it finds, no GPU needed up to the choice of kernels."""
    cudnn = pytest.importorskip("cudnn")
    try:
        cudnn.backend_version()
    except RuntimeError as error:
        pytest.skip(f"no cuDNN beside it: {error}")
    without_device = types.SimpleNamespace(
        data_type=cudnn.data_type,
        diagonal_alignment=cudnn.diagonal_alignment,
        pygraph=lambda handle, **kinds: cudnn.pygraph(sm_version=90, **kinds),
    )
    for make, tensors in ((cudnn_graphs._forward_graph, 10), (cudnn_graphs._backward_graph, 14)):
        for shape in (
            SHAPE,
            SHAPE._replace(window=512),
            SHAPE._replace(dtype=torch.float16, head_dim=64, key_heads=24, places=1),
        ):
            graph, numbered = make(without_device, shape, 0)
            assert numbered == tensors
            graph.validate()
            graph.build_operation_graph()
