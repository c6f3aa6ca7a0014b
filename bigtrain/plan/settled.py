"""What a run leaves open, decided by the memory there is: gradients that leave the GPU, buffers of streamed state, recomputed blocks.

The program runs what is decided here, and whoever says beforehand what it will do says the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigtrain.plan.blocks import blocks_needed, least_blocks
from bigtrain.plan.constants import GPU_MARGIN
from bigtrain.plan.device import MICRO_STEP
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.judge import judge
from bigtrain.plan.predict import Plan, beside_the_tape, quick
from bigtrain.plan.roofline import Rates, forward_s, step_time
from bigtrain.plan.spilled import least_share
from bigtrain.plan.streamed import MOST_PARTS, buffers_that_help, bytes_per_elem, chunk_elems

SPARE_SHARE = 0.9  # of a card, beside the margin of every plan: memory that is only useful must not bring a run near the edge


def settled(
    plan: PlanInput, gpu: int | None, host: int | None, rates: Rates | None, *, share: bool, buffers: bool, blocks: bool
) -> PlanInput:
    """The plan with what it leaves open filled in.

    Where buffers and blocks compete for a card, what is faster goes first: a GiB of buffers hides traffic once a step, a GiB of
    results saves a recompute in each micro step.

    Args:
        plan: for now with no gradients leaving, the least buffers, all blocks recomputed, where these are open.
        gpu, host: bytes of one card and of one host; None: no limit.
        share: of the gradients that leave the GPU in backward: the least that fits.
        buffers: for streamed state: as many as hide its traffic and as the card holds.
        blocks: to recompute: as few as fit; all where not even that does, or where the plan does not know them.
    """
    if share:
        plan = plan.but(offload_gradients=least_share(plan, gpu, host))
    blocks = blocks and plan.blocks_are_all
    most = _spare_buffers(plan, gpu, host, rates) if buffers else plan
    if not blocks:
        return most
    found = _fewest_blocks(most, gpu, host)
    if most == plan or not found.recomputed_blocks:
        return found
    least = with_most_buffers(with_fewest_blocks(plan, gpu, host), quick(plan), gpu, rates)
    if step_time(found, rates).total_s <= step_time(least, rates).total_s:
        return found
    other = _spare_buffers(_fewest_blocks(plan, gpu, host), gpu, host, rates)
    return min(found, other, key=lambda p: step_time(p, rates).total_s)


def buffers_are_open(config: Mapping[str, Any]) -> bool:
    """Whether this ds_config leaves the number of buffers to the plan."""
    block = (config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    return bool(block) and block.get("buffer_count") is None


def buffers_wanted(plan: PlanInput, rates: Rates | None) -> int:
    """So many that the traffic of streamed state costs no time."""
    rates = rates or Rates()
    return buffers_that_help(plan, rates.h2d_bytes_s, rates.d2h_bytes_s, forward_s(plan, rates))


def _fewest_blocks(plan: PlanInput, gpu: int | None, host: int | None) -> PlanInput:
    found = least_blocks(plan, gpu, host)
    return found.input if found is not None else plan


def _spare_buffers(plan: PlanInput, gpu: int | None, host: int | None, rates: Rates | None) -> PlanInput:
    if gpu is None or not plan.streams:
        return plan
    most = with_most_buffers(plan, quick(plan), gpu, rates).settings.buffers
    low, high, room, step = plan.settings.buffers, most + 1, int(SPARE_SHARE * gpu), 1
    while high - low > 1:  # mostly the first one, or one of the next, unless the peak is in no micro step
        guess = max(high - step, low + 1)
        if quick(plan.but(buffers=guess)).fits(room, host):
            low, step = guess, max(1, (high - guess) // 2)
        else:
            high, step = guess, 2 * step
    return plan.but(buffers=low)


def with_fewest_blocks(plan: PlanInput, gpu: int | None, host: int | None) -> PlanInput:
    """The plan, which fits, with no more blocks recomputed than `settled` would say: quicker to tell."""
    if plan.checkpointing == "none":
        return plan
    none = judge(plan.but(checkpointing="none"), gpu, host)
    return none.input if none.fits else plan.but(checkpoint_blocks=blocks_needed(none, plan.checkpointing))


def with_all_buffers(plan: PlanInput, rates: Rates | None) -> PlanInput:
    """The plan with all buffers that help, whether the card holds them or not: no other number is faster."""
    return plan.but(buffers=max(plan.settings.buffers, buffers_wanted(plan, rates))) if plan.streams else plan


def with_most_buffers(plan: PlanInput, least: Plan | None, gpu: int | None, rates: Rates | None) -> PlanInput:
    """The plan with no fewer buffers than `settled` would say, and mostly no more.

    A buffer lies on the card from the first update on, so what any moment of a later micro step holds leaves room for so many. `least`
    is the plan with all blocks recomputed: with fewer, no moment holds less.
    """
    most = with_all_buffers(plan, rates)
    if least is None or gpu is None or most == plan:
        return most
    held = max(size for phase, size in least.gpu.by_phase.items() if phase in MICRO_STEP)
    room = (int(SPARE_SHARE * gpu) + 1) / (1 + GPU_MARGIN) - beside_the_tape(plan) - held
    each = int(chunk_elems(plan) * bytes_per_elem(plan)) - MOST_PARTS  # each part of one is rounded, down by less than a byte
    return plan.but(buffers=min(most.settings.buffers, plan.settings.buffers + max(0, int(room // each))))
