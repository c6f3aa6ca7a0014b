"""What the host's thread launches for a block, forward and backward together: kernels, and calls of liger-kernel's functions.

Counted by operation; torch.profiler saw on an H200: Llama 58 kernels (58 counted), Qwen2.5 64 (64), Qwen3 68 (68), OPT 65 (64), GPT-2 68 (70),
StableLM 107 (107), Pythia 89 (94), Gemma 2 97 (98), Gemma 3 90 (78). What each takes of the host is fitted to runs (docs/log.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from bigtrain.plan.geometry import Geometry
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.moved import NO_ROTARY

# A weight: three products, and its gradient's copy or sum. A bias: a sum over rows, and that copy.
_WEIGHT, _BIAS = 4, 2
# Norms, with their gradient's copy: one kernel forward and two or three backward; RMSNorm by operations (cast, square, mean, root, products).
_NORM, _RMS_NORM = 5, 24
# A fused attention with the layouts around it; by operations (mask, casts, softmax, dropout, repeated keys and values).
_ATTENTION, _SCORES = 5, 35
# Queries and keys turned: liger-kernel's kernel and two copies each way; by operations; of a part of each head.
_FUSED_ROTARY, _ROTARY, _PART_ROTARY = 6, 30, 46
# An activation and its product with the other half; for each byte kept beyond one of torch's own, as many operations as that takes.
_ACTIVATION, _PRODUCT, _FUSED_GATED, _OPERATIONS = 2, 3, 2, 3
# Sums of the residual stream, and of gradients of what several products read. A dropout: both ways.
_STREAM, _DROPOUT = 7, 2
# Routing, sorting, products in groups: transformers' and bigtrain's (kernels/experts.py).
_EXPERTS, _GROUPED_EXPERTS = 60, 36
# In operations (`Rates.operation_s`): what a block takes whatever it launches (modules, hooks, views), one kernel, and one call of
# liger-kernel's functions, which are Python.
_OF_BLOCK, _OF_KERNEL, _OF_CALL = 82, 0.74, 16.5


@dataclass(frozen=True)
class Launched:
    """Of one block, forward and backward: kernels, and calls of liger-kernel's functions."""

    kernels: int
    calls: int

    @property
    def operations(self) -> float:
        """How many small operations of autograd take the host's thread as long."""
        return _OF_BLOCK + _OF_KERNEL * self.kernels + _OF_CALL * self.calls


def launched(plan: PlanInput) -> Launched:
    """Of the first block; `Launched(0, 0)` without blocks."""
    if not plan.parameters.blocks:
        return Launched(0, 0)
    return plan.parameters.fact(("launched", plan.geometry, plan.kernels), lambda: _launched(plan))


def _launched(plan: PlanInput) -> Launched:
    g, kind, liger = plan.geometry, plan.parameters.kind, plan.kernels == "liger"
    items = [plan.parameters.items[i] for i in next(iter(plan.parameters.blocks.values()))]
    kernels = sum(_WEIGHT if len(p.shape) > 1 else _BIAS for p in items if "norm" not in p.name and ".ln_" not in p.name)
    kernels += _STREAM + g.keeps.masks * _DROPOUT + (_SCORES if g.keeps.matrix else _ATTENTION)
    kernels += (_GROUPED_EXPERTS if g.keeps.fused_experts else _EXPERTS) if g.experts else 0
    norms = g.norms + (2 if g.keeps.qk_norm else 0)
    fused_norms = norms if liger and not g.keeps.own_qk_norm else g.norms if liger or not g.rms else 0
    kernels += fused_norms * _NORM + (norms - fused_norms) * _RMS_NORM
    calls = fused_norms if liger else 0
    if kind not in NO_ROTARY:
        kernels += _FUSED_ROTARY if liger else _PART_ROTARY if g.keeps.query else _ROTARY
        calls += liger
    kernels += _of_activation(g, liger)
    return Launched(kernels, calls + (liger and g.gated))


def _of_activation(g: Geometry, liger: bool) -> int:
    if g.gated and liger:
        return _FUSED_GATED
    return _ACTIVATION + _OPERATIONS * max(0, g.keeps.activation - 2) + (_PRODUCT if g.gated else 0)
