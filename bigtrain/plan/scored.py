"""Products of attention: FLOP of large products that take as long.

Fused kernels reach a share of a large product's rate that depends on the width of a head, and less backward than forward. Traced on an H200
(launch/bench_trace.py, 4 rows of 4,096 tokens, cuDNN): heads of 64 (StableLM 2 1.6B) 374 TFLOP/s forward and 272 backward, of 96 (Phi-3 mini) 442
and 311, where backward counts as twice forward. Of 128, by kernels alone (docs/log.md, 28 November; its line names no card), 597 and 362;
heads of 256 go through flash attention, taken for as fast as with 128 there: 307 and 207.
"""

from __future__ import annotations

from itertools import pairwise

from bigtrain.plan.inputs import PlanInput

# Of 784 TFLOP/s, forward and backward, by the width of a head.
_SHARES = {64: (0.477, 0.347), 128: (0.761, 0.462), 256: (0.392, 0.264)}
# Of these, what compiled kernels (flex_attention) reach with heads wider than 128: 139 and 67 TFLOP/s (Gemma 2 2B, traced on an H200).
_COMPILED_WIDE = (0.45, 0.32)
# With a dense bias (Falcon's ALiBi) kernels skip nothing, and reach this part of their rate: 236 and 184 TFLOP/s of 374 and 272.
_BIASED = 0.65
# GPT-J multiplies queries and keys in fp32, without tensor cores: half of forward's products and of backward's.
_FP32, _FP32_SHARE = {"gptj"}, 0.066


def attention_flops(plan: PlanInput, products_share: float, forward: float, backward: float) -> float:
    """Of one micro step's blocks.

    Args:
        products_share: part of a large product's rate that products of a model's sizes reach.
        forward, backward: how often each runs; `forward` is 2 where all blocks are recomputed.
    """
    g = plan.geometry
    one = 2.0 * plan.tokens * g.query
    if g.keeps.matrix or g.keeps.plain:  # products of all scores, also those that the mask hides
        each = one * 2 * g.layers * plan.seq_len
        slow = products_share / _FP32_SHARE if plan.parameters.kind in _FP32 else 1.0
        return (forward + 2 * backward) * each * (1 + slow) / 2 / products_share
    ahead, back = _shares(g.query // max(1, g.heads))
    if g.keeps.unseen and g.query // max(1, g.heads) > 128:
        ahead, back = ahead * _COMPILED_WIDE[0], back * _COMPILED_WIDE[1]
    each = one * g.attended(plan.seq_len)
    if g.keeps.scores:
        each, ahead, back = one * 2 * g.layers * plan.seq_len, ahead * _BIASED, back * _BIASED
    return each * (forward / ahead + 2 * backward / back)


def _shares(width: int) -> tuple[float, float]:
    """Forward's and backward's for heads of this width; between those known along a line, below in proportion."""
    known = sorted(_SHARES)
    if width <= known[0]:
        ahead, back = _SHARES[known[0]]
        return ahead * width / known[0], back * width / known[0]
    for low, high in pairwise(known):
        if width <= high:
            part = (width - low) / (high - low)
            (a, b), (c, d) = _SHARES[low], _SHARES[high]
            return a + part * (c - a), b + part * (d - b)
    return _SHARES[known[-1]]
