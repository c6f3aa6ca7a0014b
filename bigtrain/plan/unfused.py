"""Reads and writes of transformers' own operations, where one kernel would do with what a block keeps.

Counted operator by operator on transformers 5.24's modules, in bytes of an element of forward and backward together, about a third of it
forward; what a block keeps has had `PASSES` reads and writes already, which is what fused kernels take.
"""

from __future__ import annotations

from bigtrain.plan.family_others import ROBERTA, T5
from bigtrain.plan.inputs import PlanInput

# Reads and writes of what a block keeps, by all that is no matrix product, in forward and backward: fitted (docs/results/plan_accuracy.md).
PASSES = 2.8

# RMSNorm in fp32: cast, square, mean, two products and a cast, 38; backward 92. It keeps 8.
_RMS_NORM = 38 + 92 - PASSES * 8
# Queries and keys turned: two products, halves that change places, a sum, 20; backward 24. Nothing is kept.
_ROTARY = 20 + 24
# An activation and its product with the other half: 10, backward 18. They keep 8.
_GATED = 10 + 18 - PASSES * 8
# Of a token's experts, inputs and results: gathered, masked twice, weighed, sorted back, summed up, 22; backward, with zeros for each that is
# scattered, 60. Both are kept, 4.
_CHOSEN = 22 + 60 - PASSES * 4
# liger-kernel's experts, of a token's experts, in bytes of an element of the width and of the feed-forward width beside `PASSES` of gate and
# up (ops/fused_moe.py): tokens and gradients gathered where they are read, results and gradients of inputs written and summed; what the
# last product reads, gradients of gate and up. Their weights: read in each product, gradients zeroed and written.
_FUSED_CHOSEN, _FUSED_FEED, _FUSED_WEIGHTS = 16, 28 - PASSES * 4, 8
# Families whose gate and up are halves of one product, whose gradients backward joins; liger-kernel copies both before (`ensure_contiguous`).
_HALVES = {"phi3", "glm", "glm4"}
# Families whose queries, keys and values are parts of one product: joined in backward. Slices of it (Phi-3) have a gradient each, as wide as
# the product: zeros, a copy of the part, two sums; and queries and keys are copied for the rotary embedding.
_ONE_PRODUCT, _SLICED = {"gpt2", "gpt_neox", "bloom"}, {"phi3"}
# Families whose positions are learned, or a bias.
NO_ROTARY = {"gpt2", "opt", "bloom", "vit", "bert", *ROBERTA, *T5}


def joined_bytes(plan: PlanInput) -> float:
    """Of one micro step: copies that products of several parts cost, and what liger-kernel's experts move, whatever the kernels."""
    g, kind, liger = plan.geometry, plan.parameters.kind, plan.kernels == "liger"
    whole = g.query + g.key + g.value
    each = (8 + (8 if liger else 0)) * g.ffn if kind in _HALVES else 0
    each += 22 * whole + 4 * (g.query + g.key) if kind in _SLICED else 4 * whole if kind in _ONE_PRODUCT else 0
    found: float = plan.tokens * g.layers * each
    if liger and g.keeps.fused_experts and g.experts:
        blocks = max(0, g.layers - g.dense_layers)
        found += plan.tokens * blocks * g.experts_per_token * (_FUSED_CHOSEN * g.hidden + _FUSED_FEED * g.ffn)
        found += _FUSED_WEIGHTS * sum(p.elems for p in plan.parameters.items if ".experts." in p.name)
    return found


def unfused_bytes(plan: PlanInput) -> float:
    """Of one micro step of the model's blocks, without recomputes, beyond `PASSES` of what they keep."""
    g = plan.geometry
    sparse = max(0, g.layers - g.dense_layers) if g.experts else 0
    # Of one token in one block. nn.LayerNorm and single activations are one kernel each way.
    norms = g.norms * g.hidden + (g.query + g.key if g.keeps.qk_norm else 0) if g.rms else 0
    turned = 0 if plan.parameters.kind in NO_ROTARY else g.query + g.key
    part = (
        0.25 if g.keeps.query else 1.0
    )  # of each head, in most of the families that turn a part (Keeps.query is their copies)
    gated = g.ffn * max(1, g.experts_per_token) + g.shared_ffn if g.gated else 0
    each = _RMS_NORM * norms + _ROTARY * part * turned + _GATED * gated
    found = plan.tokens * g.layers * each
    if sparse:
        found += plan.tokens * sparse * _CHOSEN * g.experts_per_token * g.hidden
        # All experts' weights are read twice and their gradients written, however few tokens there are.
        found += 6 * sum(p.elems for p in plan.parameters.items if ".experts." in p.name)
    return found
