"""Attention of packed rows on a GPU: every path against fp32 attention document by document."""

from __future__ import annotations

import pytest
import torch

from bigtrain.data.isolation import _Seen, _window_sign, prepare_isolation, varlen_attention
from bigtrain.kernels import cudnn_graphs
from bigtrain.kernels.cudnn_attention import packed_attention, why_not
from bigtrain.kernels.cudnn_graphs import Shape
from bigtrain.kernels.documents import Documents
from bigtrain.kernels.sinks import plain_with_sinks
from bigtrain.models import enable_activation_checkpointing
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


def _sinks() -> torch.Tensor:
    """As much as a key or two of scores of about 1 in size; nothing; nearly all of the sum."""
    return torch.tensor([0.3, -0.8, 1.5, 0.0, -20.0, 8.0], device="cuda", dtype=torch.bfloat16).requires_grad_()


def _results(
    path: str, layout: list[list[int]], window: int = 0, width: int = WIDTH, sinks: bool = False
) -> tuple[torch.Tensor, ...]:
    query, key, value, grad = _inputs(width)
    more = {"s_aux": _sinks()} if sinks else {}
    mask = _window_sign(_Seen(window, packed=True, causal=True)) if window else None
    out, _ = varlen_attention(
        torch.nn.Module(), query, key, value, mask, scaling=SCALE, position_ids=_positions(layout), is_causal=True, attention_path=path, **more
    )  # fmt: skip
    return out.detach(), *torch.autograd.grad(out, (query, key, value, *more.values()), grad)


def _reference(layout: list[list[int]], window: int = ROW, width: int = WIDTH, sinks: bool = False) -> tuple[torch.Tensor, ...]:
    query, key, value, grad = (x.detach().float() for x in _inputs(width))
    parts = [x.requires_grad_() for x in (query, key, value)]
    seen = [torch.block_diag(*(torch.ones(n, n).tril().triu(1 - window) for n in row)).bool() for row in layout]
    mask = torch.stack(seen)[:, None].cuda()
    if sinks:
        parts.append(_sinks().detach().float().requires_grad_())
        out = plain_with_sinks(*parts, mask, SCALE)
    else:
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


@pytest.mark.parametrize("layout", ["whole rows", "mixed", "many"])
@pytest.mark.parametrize(
    "path, width, window", [("ragged", WIDTH, 0), ("ragged", WIDTH, 64), ("flash", 64, 0), ("flash", 64, 64), ("auto", 256, 0)]
)
def test_sinks_are_a_score_more(path, width, window, layout):
    rows = LAYOUTS[layout]
    if path == "ragged":
        _need_cudnn(sum(map(len, rows)), window)
    found, expected = _results(path, rows, window, width, sinks=True), _reference(rows, window or ROW, width, sinks=True)
    for mine, theirs in zip(found, expected):
        assert not mine.isnan().any()
        # As above, and the result is rounded once more. Without sinks it is another by half of its norm.
        assert (mine.float() - theirs).norm() <= 1e-2 * theirs.norm()
    without = _results(path, rows, window, width)
    assert (without[0].float() - expected[0]).norm() > 0.2 * expected[0].norm()


@pytest.mark.parametrize("policy", ["selective", "attention", "full", "offload"])
@pytest.mark.parametrize("path", ["ragged", "flash"])
def test_recomputed_blocks_have_the_sinks_of_forward(path, policy):
    if path == "ragged":
        _need_cudnn()
    query, key, value, grad = _inputs()
    positions = _positions(LAYOUTS["mixed"])

    def attend(*x):
        q, k, v, sinks = (one * 1 for one in x)
        return varlen_attention(
            torch.nn.Module(), q, k, v, None, scaling=SCALE, position_ids=positions, attention_path=path, s_aux=sinks
        )[0]

    inputs = [query, key, value, _sinks()]
    expected = torch.autograd.grad(attend(*inputs), inputs, grad)
    for mine, theirs in zip(torch.autograd.grad(runner(policy, 1)(attend, *inputs), inputs, grad), expected):
        assert (mine - theirs).norm() <= 4e-3 * theirs.norm()  # queries' gradients are summed in no fixed order


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


def _gemma2(attention: str):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        sliding_window=64, attn_logit_softcapping=0.5, query_pre_attn_scalar=1, attn_implementation=attention,
    )  # fmt: skip
    return Gemma2ForCausalLM(config).cuda().train()


@pytest.mark.parametrize("policy", [None, "full", "attention"])
def test_capped_scores_by_compiled_kernels_are_those_of_single_operations(policy):
    """What a run on a GPU takes for Gemma 2: packed documents, windows, fewer and longer rows after others; fp32."""
    eager, flex = _gemma2("eager"), _gemma2("flex_attention")
    for model in (eager, flex):
        prepare_isolation(model, "isolated")
    if policy:
        enable_activation_checkpointing(flex, None, None, policy)
    for rows in ([[200, 56], [256]], [[3, 90, 163], [128, 128]], [[100, 156]], [[300, 84]]):
        ids = torch.randint(256, (len(rows), sum(rows[0])), device="cuda")
        found = []
        for model in (eager, flex):
            model.zero_grad()
            logits = model(input_ids=ids, position_ids=_positions(rows)).logits
            logits.pow(2).sum().backward()
            found.append((logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])))
        for mine, theirs in zip(*found):
            # fp32 in another order; the cap of 0.5 changes logits by several percent (below).
            assert (mine - theirs).norm() <= 1e-4 * theirs.norm()
    eager.config.attn_logit_softcapping = None
    for block in eager.model.layers:
        block.self_attn.attn_logit_softcapping = None
    assert (eager(input_ids=ids, position_ids=_positions(rows)).logits - logits).norm() > 1e-2 * logits.norm()
