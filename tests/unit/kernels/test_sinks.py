"""Sinks by kernels that know none, against softmax over a score more. On a card: tests/gpu/test_attention_gpu.py."""

from __future__ import annotations

import pytest
import torch

from bigtrain.kernels.sinks import plain_with_sinks, sinks_gradient, with_sinks

HEADS, KEY_HEADS, TOKENS, WIDTH, SCALE = 4, 2, 13, 8, 0.4


def _inputs(dtype=torch.float64):
    """query, key, value [1, heads, tokens, head_dim], sinks, a gradient of the result [1, tokens, heads, head_dim]."""
    torch.manual_seed(0)
    made = [torch.randn(1, heads, TOKENS, WIDTH, dtype=dtype) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    made.append(
        torch.tensor([-9.0, 0.0, 0.7, 12.0], dtype=dtype)
    )  # nothing of the sum, as much as a key or two, nearly all of it
    return [one.requires_grad_() for one in made], torch.randn(1, TOKENS, HEADS, WIDTH, dtype=dtype)


def _by_definition(query, key, value, sinks, mask):
    key, value = (one.repeat_interleave(HEADS // KEY_HEADS, 1) for one in (key, value))
    scores = (query @ key.transpose(2, 3) * SCALE).masked_fill(~mask, float("-inf"))
    with_one_more = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, -1, TOKENS, 1)], -1)
    return (with_one_more.softmax(-1)[..., :-1] @ value).transpose(1, 2)


def _tril(window=TOKENS):
    return torch.ones(TOKENS, TOKENS).tril().triu(1 - window).bool()


@pytest.mark.parametrize("added", [False, True], ids=["bool", "added to scores"])
@pytest.mark.parametrize("window", [TOKENS, 3])
def test_plain_is_softmax_with_a_score_more(window, added):
    inputs, grad = _inputs()
    mask = _tril(window)[None, None]
    expected = _by_definition(*inputs, mask)
    given = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf")) if added else mask
    mine = plain_with_sinks(*inputs, given, SCALE)
    assert (mine - expected).abs().max() <= 1e-14
    for one, other in zip(*(torch.autograd.grad(out, inputs, grad) for out in (mine, expected))):
        assert (one - other).abs().max() <= 1e-13


def test_plain_without_a_mask_sees_all():
    inputs, _ = _inputs()
    assert (plain_with_sinks(*inputs, None, SCALE) - _by_definition(*inputs, torch.ones_like(_tril()))).abs().max() <= 1e-14


def test_a_fused_kernel_without_sinks_gives_result_and_gradients_with_them():
    """torch's flash attention for CPUs, forward and backward, as the GPUs' kernels are used: only the result and the statistics differ."""
    inputs, grad = _inputs()
    query, key, value, sinks = inputs
    expected = _by_definition(*inputs, _tril())
    gradients = torch.autograd.grad(expected, inputs, grad)
    with torch.no_grad():
        wide = [query, *(one.repeat_interleave(HEADS // KEY_HEADS, 1) for one in (key, value))]
        out, stats = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*wide, 0.0, True, scale=SCALE)
        mine, joined = with_sinks(out[0].transpose(0, 1), stats[0].T.to(torch.float64), sinks)
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.transpose(1, 2), *wide, mine.transpose(0, 1)[None], joined.T[None].to(stats.dtype), 0.0, True, scale=SCALE
        )
        of_sinks = sinks_gradient(grad[0], mine, joined, sinks)
    narrow = [one.view(1, KEY_HEADS, -1, TOKENS, WIDTH).sum(2) for one in found[1:]]
    assert (mine - expected[0]).abs().max() <= 1e-13
    # sinks_gradient sums in fp32, 2**-24 of each of the terms.
    for one, other, most in zip((found[0], *narrow, of_sinks), gradients, (1e-13, 1e-13, 1e-13, 1e-6)):
        assert (one - other).abs().max() <= most * other.abs().max()


def test_what_came_in_is_left_as_it_was():
    """A policy of recomputing holds what the kernel gave, and gives it again."""
    out, stats = torch.ones(3, 2, 4), torch.zeros(3, 2)
    mine, joined = with_sinks(out, stats, torch.zeros(2))
    assert out.eq(1).all() and stats.eq(0).all()
    assert mine.eq(0.5).all() and (joined == torch.tensor(2.0).log()).all()


def test_sixteen_bits_stay_sixteen_bits():
    out = torch.ones(3, 2, 4, dtype=torch.bfloat16)
    mine, joined = with_sinks(out, torch.zeros(3, 2), torch.zeros(2))
    assert (mine.dtype, joined.dtype) == (torch.bfloat16, torch.float32)
    assert sinks_gradient(out, mine, joined, torch.zeros(2)).tolist() == [-3.0, -3.0]  # 3 tokens, a half of 4 times a half
