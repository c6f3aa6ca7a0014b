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
# Families whose positions are learned, or a bias.
NO_ROTARY = {"gpt2", "opt", "bloom", "vit", "bert", *ROBERTA, *T5}


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
