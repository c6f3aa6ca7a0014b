"""What a run leaves open, decided by the memory there is: gradients that leave the GPU, buffers of streamed state, recomputed blocks.

The program runs what is decided here, and whoever says beforehand what it will do says the same.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import Any

from bigtrain.plan.blocks import least_blocks
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.predict import predict
from bigtrain.plan.roofline import Rates, forward_s
from bigtrain.plan.spilled import least_share
from bigtrain.plan.streamed import buffers_that_help

SPARE_SHARE = 0.9  # of a card, beside the margin of every plan: memory that is only useful must not bring a run near the edge


def settled(
    plan: PlanInput, gpu: int | None, host: int | None, rates: Rates | None, *, share: bool, buffers: bool, blocks: bool
) -> PlanInput:
    """The plan with what it leaves open filled in.

    Args:
        plan: for now with no gradients leaving, the least buffers, all blocks recomputed, where these are open.
        gpu, host: bytes of one card and of one host; None: no limit.
        share: of the gradients that leave the GPU in backward: the least that fits.
        buffers: for streamed state: as many as hide its traffic and as the card holds.
        blocks: to recompute: as few as fit; all where not even that does, or where the plan does not know them.
    """
    if share:
        plan = plan.but(offload_gradients=least_share(plan, gpu, host))
    if buffers:  # before the blocks: a GiB of them hides more than a block's recompute costs
        plan = plan.but(buffers=_spare_buffers(plan, gpu, host, rates))
    if blocks and plan.blocks_are_all:
        found = least_blocks(plan, gpu, host)
        plan = found.input if found is not None else plan
    return plan


def buffers_are_open(config: Mapping[str, Any]) -> bool:
    """Whether this ds_config leaves the number of buffers to the plan."""
    block = (config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    return bool(block) and block.get("buffer_count") is None


def buffers_wanted(plan: PlanInput, rates: Rates | None) -> int:
    """So many that the traffic of streamed state costs no time."""
    rates = rates or Rates()
    return buffers_that_help(plan, rates.h2d_bytes_s, rates.d2h_bytes_s, forward_s(plan, rates))


def _spare_buffers(plan: PlanInput, gpu: int | None, host: int | None, rates: Rates | None) -> int:
    least = plan.settings.buffers
    if gpu is None or not plan.streams:
        return least
    room = int(SPARE_SHARE * gpu)

    def too_many(count: int) -> bool:
        return not predict(plan.but(buffers=count), reserve=False).fits(room, host)

    return least + bisect.bisect_left(range(least + 1, buffers_wanted(plan, rates) + 1), True, key=too_many)
