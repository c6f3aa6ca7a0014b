"""Optimizer state that the optimizer itself keeps on the host and streams through the GPU (bigtrain/optim/stream.py)."""

from __future__ import annotations

from bigtrain.plan.flat import slice_elems
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.states import LAYOUTS
from bigtrain.plan.tape import Tape

# optim/stream.py: CHUNK_BYTES, BUFFERS; optim/pieces.py: GATHER_ELEMS.
CHUNK_BYTES, BUFFERS, GATHER_ELEMS = 128 << 20, 4, 1 << 25


def bytes_per_elem(plan: PlanInput) -> float:
    """Of state: the 16 missing bits of the weight, and the moments."""
    layout = LAYOUTS[plan.optimizer]
    return layout.remainder + layout.moments


def hold_buffers(plan: PlanInput, tape: Tape) -> None:
    """On the GPU: the chunks of state on their way, and one chunk's gradients side by side."""
    if not plan.streams:
        return
    chunk = min(GATHER_ELEMS, CHUNK_BYTES / bytes_per_elem(plan))
    tape.hold("streamed", BUFFERS * chunk * bytes_per_elem(plan), "optimizer state, on its way")
    tape.hold("streamed grads", 2 * plan.told.grad_bytes // 2 * chunk, "optimizer state, on its way")


def host_bytes(plan: PlanInput) -> float:
    """Page-locked memory of one rank, of exactly the size of its state; what stays on the GPU has its place there too."""
    return bytes_per_elem(plan) * slice_elems(plan.trained_elems, plan.world_size)


def seconds(plan: PlanInput, h2d_bytes_s: float, d2h_bytes_s: float) -> float:
    """What one step's traffic adds to it: up and down at once. One rank at stages 1 and 2 hides it behind forward and backward."""
    if plan.world_size == 1 and plan.settings.stage in (1, 2):
        return 0.0
    return plan.settings.ratio * host_bytes(plan) / min(h2d_bytes_s, d2h_bytes_s)
