"""Bytes that a block's operations move, beside its products and fused attention: read and written, in forward and backward together.

Counted operator by operator on transformers 5.24's modules (a dispatch mode over a forward and a backward) and read off liger-kernel's
kernels, in bytes of an element in bf16; about a third of it is forward's. Kernels read and write each tensor once.
"""

from __future__ import annotations

from bigtrain.plan.family_others import ROBERTA, T5
from bigtrain.plan.geometry import Geometry
from bigtrain.plan.inputs import PlanInput

# Of products: inputs and results in forward, and twice as much in backward.
_IO = 6
# RMSNorm in fp32: cast, square, mean, two products and a cast, 38; backward 92. nn.LayerNorm and liger-kernel's: one kernel each way.
_RMS_NORM, _NORM = 38 + 92, 4 + 6
# What a block adds to the residual stream twice, and its gradient; a gradient of an input that is read once more.
_STREAM, _READ_AGAIN = 4 * 6, 6
# Dropout: with a mask of one byte each way.
_DROPOUT = 5 + 5
# Queries and keys turned: two products, halves that change places, a sum, 20; backward 24. liger-kernel: in place. Of a quarter of each
# head: 11, and 22 to cut and join them, in backward with zeros for each part.
_ROTARY, _FUSED_ROTARY, _PART_ROTARY = 20 + 24, 4 + 4, 80
# An activation, its product with the other half, and what an activation made of several operations adds for each byte that it keeps
# beyond one of torch's own (gelu_new: eight operations, 6 bytes more). liger-kernel: one kernel each way.
_ACTIVATION, _PRODUCT, _OPERATIONS, _FUSED_GATED = 4 + 6, 6 + 12, 14, 6 + 10
# Scores of attention by operations, forward and backward, by what is kept of them (family_kept.py `matrix`), as traced on an H200 (bloom-1b7,
# gemma-2-2b, gpt-oss): a mask that is broadcast runs at 1.5 TB/s and a cast to fp32 at 1.9, which counts as more bytes here, a softmax of fp32 at
# 2.9. Softmax of bf16 with a sink beside each row (joined, so that rows lie at odd places: 0.7 TB/s); softmax in fp32; a cap before it. And
# what products read and write of them.
_SCORES, _SCORES_OF_PRODUCTS = {2: (71, 35), 6: (38, 38), 8: (49, 50)}, (4, 8)
# Bloom's gelu: 20 operations of its own, forward and backward.
_OWN_GELU = {"bloom": (42, 88)}
# Of a token's experts, inputs and results: gathered, masked twice, weighed, sorted back, summed up, 22; backward, with zeros for each that is
# scattered, 60; and of all experts' weights, which are read twice and their gradients written, however few tokens there are.
_CHOSEN, _WEIGHTS = 22 + 60, 6
# bigtrain's experts (kernels/experts.py): tokens, their gradients and tokens again gathered, results and gradients of inputs summed; the gate
# forward, again and back.
_GROUPED_CHOSEN, _GROUPED_FEED = 16, 22
# Families whose gate and up are halves of one product, whose gradients backward joins; liger-kernel copies both before (`ensure_contiguous`).
_HALVES = {"phi3", "glm", "glm4"}
# Families whose queries, keys and values are parts of one product: joined in backward. Slices of it (Phi-3) have a gradient each, as wide as
# the product: zeros, a copy of the part, two sums; and queries and keys are copied for the rotary embedding.
_ONE_PRODUCT, _SLICED = {"gpt2", "gpt_neox", "bloom", "falcon"}, {"phi3"}
# Families whose positions are learned, or a bias.
NO_ROTARY = {"gpt2", "opt", "bloom", "vit", "bert", *ROBERTA, *T5}


def moved_bytes(plan: PlanInput, forward: float = 1.0, backward: float = 1.0) -> float:
    """Of one micro step of the model's blocks.

    Args:
        forward, backward: how often each runs; `forward` is 2 where all blocks are recomputed. Of what is not known by direction a third
            is forward's.
    """
    g, liger = plan.geometry, plan.kernels == "liger"
    each = _of_stream(plan, liger) + _of_attention(plan, liger) + _of_feed_forward(plan, g.is_dense(0), liger)
    found: float = plan.tokens * (g.layers * each + 2 * _bias_elems(plan) + _IO * _rows_of_products(plan))
    if g.experts:
        sparse = max(0, g.layers - g.dense_layers)
        found += plan.tokens * sparse * (_of_feed_forward(plan, False, liger) - _of_feed_forward(plan, g.is_dense(0), liger))
        found += _WEIGHTS * sum(p.elems for p in plan.parameters.items if ".experts." in p.name)
    ahead, back = _by_direction(plan)
    return found * (forward + 2 * backward) / 3 + plan.tokens * g.layers * (forward * ahead + backward * back)


def _by_direction(plan: PlanInput) -> tuple[float, float]:
    """A token's bytes in one block, forward and backward: scores by operations, and an activation made of many."""
    g = plan.geometry
    ahead, back = _OWN_GELU.get(plan.parameters.kind or "", (0.0, 0.0))
    ahead, back = ahead * g.ffn, back * g.ffn
    if g.keeps.matrix:
        scores = plan.seq_len * g.heads
        dropped = _DROPOUT / 2 if g.keeps.attention_dropout else 0
        ahead += scores * (_SCORES[g.keeps.matrix][0] + _SCORES_OF_PRODUCTS[0] + dropped)
        back += scores * (_SCORES[g.keeps.matrix][1] + _SCORES_OF_PRODUCTS[1] + dropped)
    return ahead, back


def _of_stream(plan: PlanInput, liger: bool) -> float:
    """A token's bytes in one block, as those below: norms, residual sums, dropout."""
    g = plan.geometry
    norm = _RMS_NORM if g.rms and not liger else _NORM
    return g.hidden * (g.norms * norm + _STREAM + g.keeps.masks * _DROPOUT)


def _of_attention(plan: PlanInput, liger: bool) -> float:
    """Without its products and a fused kernel."""
    g, kind = plan.geometry, plan.parameters.kind
    turned, whole = g.query + g.key, g.query + g.key + g.value
    found = 0.0
    if g.keeps.qk_norm:
        found += (_NORM if liger and not g.keeps.own_qk_norm else _RMS_NORM) * turned
    if kind not in NO_ROTARY:
        part = g.keeps.query and kind not in _SLICED  # copies that families make which turn a part of each head
        found += turned * (_FUSED_ROTARY if liger else _PART_ROTARY if part else _ROTARY)
    if kind in _SLICED:
        found += 22 * whole + 4 * turned
    else:
        found += 4 * whole if kind in _ONE_PRODUCT else 2 * _READ_AGAIN * g.hidden
    return found


def _of_feed_forward(plan: PlanInput, dense: bool, liger: bool) -> float:
    g, halves = plan.geometry, plan.parameters.kind in _HALVES
    width, found = _width(g, dense), 0.0
    if not dense and g.keeps.fused_experts:
        found, width = g.experts_per_token * (_GROUPED_CHOSEN * g.hidden + _GROUPED_FEED * g.ffn), g.shared_ffn
    elif not dense:
        found = _CHOSEN * g.experts_per_token * g.hidden
    if plan.parameters.kind in _OWN_GELU:
        return found
    if g.gated and liger:
        found += _FUSED_GATED * width
    else:
        operations = _OPERATIONS * max(0, g.keeps.activation - 2)
        found += (_ACTIVATION + operations + (_PRODUCT if g.gated else 0)) * width
    if halves:
        return found + (8 + (8 if liger else 0)) * width
    return found + (_READ_AGAIN * g.hidden if g.gated and dense else 0)


def _width(g: Geometry, dense: bool) -> int:
    return (g.dense_ffn or g.ffn) if dense else g.ffn * g.experts_per_token + g.shared_ffn


def _bias_elems(plan: PlanInput) -> int:
    """Of the blocks' linear layers: a bias's gradient is a sum over all rows of its layer's."""

    def count() -> int:
        items = (p for p in plan.parameters.items if p.block is not None and p.name.endswith(".bias"))
        return sum(p.elems for p in items if "norm" not in p.name and ".ln_" not in p.name)

    return plan.parameters.fact("biases", count)


def _rows_of_products(plan: PlanInput) -> int:
    """Elements that one token's products in the blocks read and write, each once."""
    g = plan.geometry

    def count() -> int:
        total = 0
        for p in plan.parameters.items:
            if p.block is not None and len(p.shape) > 1:
                total += sum(p.shape[-2:]) * (g.experts_per_token if len(p.shape) > 2 else 1)
        return total

    return plan.parameters.fact(("rows", g), count)
