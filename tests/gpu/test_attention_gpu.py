"""Attention of packed rows on a GPU: every path against fp32 attention document by document."""

from __future__ import annotations

import pytest
import torch

from bigtrain.data.isolation import _Seen, _window_sign, varlen_attention
from bigtrain.kernels import cudnn_graphs
from bigtrain.kernels.cudnn_attention import packed_attention, why_not
from bigtrain.kernels.cudnn_graphs import Shape
from bigtrain.kernels.documents import Documents
from bigtrain.models.recompute import runner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HEADS, KEY_HEADS, WIDTH, ROW = 6, 2, 128, 1024
SCALE = WIDTH**-0.5
LAYOUTS = {
    "whole rows": [[ROW], [ROW]],
    "mixed": [[70, 230, 724], [1000, 24]],
    "many": [[1, 2, 3, 58] * 16, [128] * 8],
    "short and rest": [[16, 1008], [ROW]],
}


def _need_cudnn(places: int = 8, window: int = 0) -> None:
    reason = why_not(Shape(places, 2 * ROW, ROW, HEADS, KEY_HEADS, WIDTH, torch.bfloat16, SCALE, 0, window))
    if reason:
        pytest.skip(reason)


def _positions(layout: list[list[int]]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in layout]).cuda()


def _inputs(width: int = WIDTH) -> list[torch.Tensor]:
    """query, key, value [batch, heads, seq_len, width] as views of [batch, seq_len, heads, width], and a gradient."""
    torch.manual_seed(0)
    made = [torch.randn(2, ROW, n, width, device="cuda", dtype=torch.bfloat16) for n in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    return [x.transpose(1, 2).requires_grad_() for x in made[:3]] + [made[3]]


def _results(path: str, layout: list[list[int]], window: int = 0, width: int = WIDTH) -> tuple[torch.Tensor, ...]:
    query, key, value, grad = _inputs(width)
    mask = _window_sign(_Seen(window, packed=True, causal=True)) if window else None
    out, _ = varlen_attention(
        torch.nn.Module(), query, key, value, mask, scaling=SCALE, position_ids=_positions(layout), is_causal=True, attention_path=path
    )  # fmt: skip
    return out.detach(), *torch.autograd.grad(out, (query, key, value), grad)


def _reference(layout: list[list[int]], window: int = ROW, width: int = WIDTH) -> tuple[torch.Tensor, ...]:
    query, key, value, grad = (x.detach().float() for x in _inputs(width))
    parts = [x.requires_grad_() for x in (query, key, value)]
    seen = [torch.block_diag(*(torch.ones(n, n).tril().triu(1 - window) for n in row)).bool() for row in layout]
    mask = torch.stack(seen)[:, None].cuda()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=mask, scale=SCALE, enable_gqa=True)
    out = out.transpose(1, 2)
    return out.detach(), *torch.autograd.grad(out, parts, grad)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", ["auto", "dense", "ragged", "flash"])
def test_every_path_equals_fp32_within_bf16(path, layout):
    rows = LAYOUTS[layout]
    if path == "dense" and layout != "whole rows":
        pytest.skip("the dense path takes one document a row")
    if path == "ragged":
        _need_cudnn(sum(map(len, rows)))
    for mine, expected in zip(_results(path, rows), _reference(rows)):
        assert not mine.isnan().any()
        # Probabilities, their gradients and results are rounded to bf16, 2**-9 each of its size; a leak between documents is 0.1
        # and more. Measured on an H100: 2e-3 forward and 4e-3 in gradients, cuDNN as flash attention.
        assert (mine.float() - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.parametrize("layout", ["whole rows", "mixed", "many"])
@pytest.mark.parametrize("window", [2, 64, 200])
@pytest.mark.parametrize("path, width", [("ragged", WIDTH), ("flash", WIDTH), ("auto", 256)])
def test_a_window_sees_exactly_its_tokens(path, width, window, layout):
    rows = LAYOUTS[layout]
    if path == "ragged":
        _need_cudnn(sum(map(len, rows)), window)
    for mine, expected in zip(_results(path, rows, window, width), _reference(rows, window, width)):
        assert not mine.isnan().any()
        # As above. One token more or less in a window of 200 changes results by 7e-2 of their norm, in smaller ones by more.
        assert (mine.float() - expected).norm() <= 1e-2 * expected.norm()


def test_a_document_changes_no_other():
    _need_cudnn()
    bounds = torch.tensor([0, 70, 300, 1024, 1100, 2048], dtype=torch.int32, device="cuda")
    torch.manual_seed(0)
    tensors = [torch.randn(2048, n, WIDTH, device="cuda", dtype=torch.bfloat16) for n in (HEADS, KEY_HEADS, KEY_HEADS)]
    before = packed_attention(*tensors, Documents(bounds, ROW), SCALE)
    for one in tensors:
        one[300:1024] = 30 * torch.randn_like(one[300:1024])
    after = packed_attention(*tensors, Documents(bounds, ROW), SCALE)
    same = (before == after).flatten(1).all(1)
    assert same[:300].all() and same[1024:].all() and not same[300:1024].any()


def _three_documents():
    """(documents of 2,048 tokens; queries, keys and values; a gradient of the result)."""
    documents = Documents(torch.tensor([0, 100, 1024, 2048], dtype=torch.int32, device="cuda"), ROW)
    torch.manual_seed(0)
    tensors = [
        torch.randn(2048, n, WIDTH, device="cuda", dtype=torch.bfloat16).requires_grad_() for n in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    return documents, tensors, torch.randn(2048, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)


def test_recomputation_and_another_stream_give_the_same():
    _need_cudnn()
    documents, tensors, grad = _three_documents()

    def attend(*x):
        return packed_attention(*(one * 1 for one in x), documents, SCALE)

    expected = torch.autograd.grad(attend(*tensors), tensors, grad)
    again = torch.autograd.grad(torch.utils.checkpoint.checkpoint(attend, *tensors, use_reentrant=False), tensors, grad)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        third = torch.autograd.grad(attend(*tensors), tensors, grad)
    torch.cuda.current_stream().wait_stream(other)
    for one in (again, third):
        for mine, theirs in zip(one, expected):
            assert (mine - theirs).norm() <= 4e-3 * theirs.norm()  # queries' gradients are summed in no fixed order


def test_a_selective_recompute_keeps_what_cudnn_gave(monkeypatch):
    """Its graphs run once forward and once backward; with full recomputation forward runs twice. Gradients are the same."""
    _need_cudnn()
    documents, tensors, grad = _three_documents()
    runs, run = [], cudnn_graphs._Plan.run
    monkeypatch.setattr(cudnn_graphs._Plan, "run", lambda self, given: (runs.append(len(given)), run(self, given))[1])

    def attend(*x):
        return packed_attention(*(one * 1 for one in x), documents, SCALE)

    found = {}
    for policy in ("selective", "full"):
        runs.clear()
        found[policy] = torch.autograd.grad(runner(policy, 1)(attend, *tensors), tensors, grad), len(runs)
    assert (found["selective"][1], found["full"][1]) == (2, 3)
    for mine, theirs in zip(found["selective"][0], found["full"][0]):
        assert (mine - theirs).norm() <= 4e-3 * theirs.norm()  # queries' gradients are summed in no fixed order
