"""Optimizer state that the optimizer itself keeps on the host and streams through the GPU (bigtrain/optim/stream.py)."""

from __future__ import annotations

import math

from bigtrain.plan.flat import slice_elems
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.states import LAYOUTS
from bigtrain.plan.tape import Tape

# optim/stream.py: CHUNK_BYTES; optim/pieces.py: GATHER_ELEMS.
CHUNK_BYTES, GATHER_ELEMS = 128 << 20, 1 << 25
# Both directions of the bus at once move less than each alone: 44 of 53 GB/s measured on an H100 (PCIe gen5).
BOTH_WAYS = 0.83
# optim/spill.py: IN_FLIGHT_BYTES, AREAS.
IN_FLIGHT_BYTES, AREAS = 512 << 20, 4
# Chunks in flight beside those that came up early.
IN_FLIGHT = 4


def bytes_per_elem(plan: PlanInput) -> float:
    """Of state: the 16 missing bits of the weight, and the moments."""
    layout = LAYOUTS[plan.optimizer]
    return layout.remainder + layout.moments


def chunk_elems(plan: PlanInput) -> float:
    """Elements whose state is one chunk."""
    return min(GATHER_ELEMS, CHUNK_BYTES / bytes_per_elem(plan))


def hold_buffers(plan: PlanInput, tape: Tape) -> None:
    """On the GPU: the chunks of state on their way, and one chunk's gradients side by side."""
    if not plan.streams:
        return
    chunk = chunk_elems(plan)
    tape.hold("streamed", buffers_used(plan) * chunk * bytes_per_elem(plan), "optimizer state, on its way")
    tape.hold("streamed grads", 2 * plan.told.grad_bytes // 2 * chunk, "optimizer state, on its way")
    tape.hold("returning", min(AREAS * 2 * chunk, plan.leaving_bytes), "gradients, on their way")


def host_bytes(plan: PlanInput) -> float:
    """Page-locked memory of one rank, of exactly the size of its state; what stays on the GPU has its place there too."""
    return bytes_per_elem(plan) * slice_elems(plan.trained_elems, plan.world_size)


def chunks(plan: PlanInput) -> int:
    """Of one rank's state, without what stays on the GPU."""
    return math.ceil(plan.settings.ratio * slice_elems(plan.trained_elems, plan.world_size) / chunk_elems(plan))


def buffers_used(plan: PlanInput) -> int:
    """Buffers are made as they are needed: never more than there are chunks."""
    return min(plan.settings.buffers, chunks(plan))


def early_bytes(plan: PlanInput) -> float:
    """What comes up during backward already: as much as there are buffers for."""
    return buffers_used(plan) * chunk_elems(plan) * bytes_per_elem(plan)


def seconds(plan: PlanInput, h2d_bytes_s: float, d2h_bytes_s: float, forward_s: float) -> float:
    """What one step's traffic adds to it: up and down at once, less what came up early.

    One rank at stages 1 and 2 hides it behind the next forward, which takes `forward_s`; with more ranks, and at stage 3, the
    step waits for it.
    """
    moved = max(0.0, update_bytes(plan) - early_bytes(plan)) / (BOTH_WAYS * min(h2d_bytes_s, d2h_bytes_s))
    hides = plan.world_size == 1 and plan.settings.stage in (1, 2)
    return max(0.0, moved - forward_s) if hides else moved


def update_bytes(plan: PlanInput) -> float:
    """What comes up the bus for one update: state, and the gradients that left."""
    return plan.settings.ratio * host_bytes(plan) + plan.leaving_bytes


def leaving_s(plan: PlanInput, h2d_bytes_s: float, d2h_bytes_s: float, backward_s: float) -> float:
    """What gradients that leave add to one step's backwards, which take `backward_s` each: they go down beside it.

    From the second micro batch on the sums so far come up at the same time.
    """
    down = plan.leaving_bytes / d2h_bytes_s
    both = plan.leaving_bytes / (BOTH_WAYS * min(h2d_bytes_s, d2h_bytes_s))
    return max(0.0, down - backward_s) + (plan.accumulation - 1) * max(0.0, both - backward_s)


def buffers_that_help(plan: PlanInput, h2d_bytes_s: float, d2h_bytes_s: float, forward_s: float) -> int:
    """The least number of buffers with which the traffic costs no time, as `seconds` counts it."""
    hides = plan.world_size == 1 and plan.settings.stage in (1, 2)
    hidden = forward_s * BOTH_WAYS * min(h2d_bytes_s, d2h_bytes_s) if hides else 0.0
    early = max(0.0, update_bytes(plan) - hidden)
    return min(chunks(plan), math.ceil(early / (chunk_elems(plan) * bytes_per_elem(plan))) + IN_FLIGHT)
