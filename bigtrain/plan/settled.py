"""What a run leaves open, decided by the memory there is: gradients that leave the GPU, buffers of streamed state, recomputed blocks.

The program runs what is decided here, and whoever says beforehand what it will do says the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from bigtrain.plan.activations import BlockBytes, block_bytes
from bigtrain.plan.constants import GPU_MARGIN
from bigtrain.plan.device import MICRO_STEP
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.inputs import Checkpointing, PlanInput
from bigtrain.plan.judge import Candidate, judge, time_on
from bigtrain.plan.predict import beside_the_tape, quick
from bigtrain.plan.roofline import Rates, forward_s, step_time
from bigtrain.plan.spilled import least_share
from bigtrain.plan.streamed import MOST_PARTS, buffers_that_help, bytes_per_elem, chunk_elems

_SPANS = 8  # of numbers of buffers, in a bound
_ROUNDING = 16 * 512  # the allocator's units in the tensors of one block
SPARE_SHARE = 0.9  # of a card, beside the margin of every plan: memory that is only useful must not bring a run near the edge

# What does the same where nothing of attention can be kept, or has no room.
WITHOUT_ATTENTION: dict[str, Checkpointing] = {"attention": "full", "offload": "offload_inputs"}

# Below it, attention is less than a quarter of what a block of 8B recomputes: what keeping its results saves is within the roofline's error.
LONG_TOKENS = 16384


def policies(plan: PlanInput) -> tuple[Checkpointing, ...]:
    """What a search looks at where the user said this policy, or said nothing ("full"): with attention's results and without."""
    said: Checkpointing = "full" if plan.checkpointing == "none" else plan.checkpointing
    able: Checkpointing = "attention" if said == "full" and plan.seq_len >= LONG_TOKENS else said
    without = WITHOUT_ATTENTION.get(able)
    if without is None or not plan.but(checkpointing=able, checkpoint_blocks=None).of_attention:
        return (without or said,)
    return (able,) if said == "attention" else (without, able)


def settled(plan: PlanInput, hardware: Hardware, *, share: bool, buffers: bool, blocks: bool) -> PlanInput:
    """The plan with what it leaves open (see `filled`) filled in, the policy among it: "offload" is the faster one of what fits, with
    attention or without."""
    fill = partial(filled, hardware=hardware, share=share, buffers=buffers, blocks=blocks)
    without = WITHOUT_ATTENTION.get(plan.checkpointing)
    if without is None:
        return fill(plan)
    if not plan.of_attention:
        return fill(plan.but(checkpointing=without))
    found = fill(plan)
    if plan.checkpointing == "attention":
        return found
    other = fill(plan.but(checkpointing=without))
    if not hardware.holds(quick(found)):
        return other
    # Where the bus is what a step waits for, both take about as long: then it is not worth the host's memory.
    faster = time_on(quick(found), hardware).total_s < 0.99 * time_on(quick(other), hardware).total_s
    return found if faster else other


def filled(plan: PlanInput, hardware: Hardware, *, share: bool, buffers: bool, blocks: bool) -> PlanInput:
    """The plan with what it leaves open filled in, but for its policy.

    Where buffers and blocks compete for a card, what is faster goes first: a GiB of buffers hides traffic once a step, a GiB of
    results saves a recompute in each micro step.

    Args:
        plan: for now with no gradients leaving, the least buffers, all blocks recomputed, where these are open.
        share: of the gradients that leave the GPU in backward: the least that fits.
        buffers: for streamed state: as many as hide its traffic and as the card holds.
        blocks: to recompute: as few as fit; all where not even that does, or where the plan does not know them.
    """
    if share:
        plan = plan.but(offload_gradients=least_share(plan, hardware))
    blocks = blocks and plan.blocks_are_all
    most = _spare_buffers(plan, hardware) if buffers else plan
    return _with_fewer_returns(_filled(plan, most, hardware), hardware) if blocks else most


def _with_fewer_returns(plan: PlanInput, hardware: Hardware) -> PlanInput:
    """A block more recomputed, or some, where the allocator would else meet its limit in each step and that takes longer."""
    if plan.world_size == 1 or not quick(plan).returns(hardware.gpu_bytes):
        return plan
    best, least_s = plan, time_on(quick(plan), hardware).total_s
    for blocks in range(plan.recomputed_blocks + 1, plan.block_count + 1):
        more = plan.but(checkpointing=_policy(plan), checkpoint_blocks=blocks)
        if step_time(more, hardware.rates).total_s >= least_s:
            break
        found = quick(more)
        if hardware.holds(found) and (total_s := time_on(found, hardware).total_s) < least_s:
            best, least_s = more, total_s
    return best


def _filled(plan: PlanInput, most: PlanInput, hardware: Hardware) -> PlanInput:
    """Blocks, and buffers in their place where that is faster. `most`: with as many buffers as the card holds."""
    found = _fewest_blocks(most, hardware)
    if most == plan or not found.recomputed_blocks:
        return found
    fewest = _fewest_blocks(plan, hardware)
    rates = hardware.rates
    if step_time(found, rates).total_s <= step_time(with_most_buffers(fewest, hardware), rates).total_s:
        return found
    other = _spare_buffers(fewest, hardware)
    return min(found, other, key=lambda p: step_time(p, rates).total_s)


def buffers_are_open(config: Mapping[str, Any]) -> bool:
    """Whether this ds_config leaves the number of buffers to the plan."""
    block = (config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    return bool(block) and block.get("buffer_count") is None


def buffers_wanted(plan: PlanInput, rates: Rates) -> int:
    """So many that the traffic of streamed state costs no time."""
    return buffers_that_help(plan, rates.h2d_bytes_s, rates.d2h_bytes_s, forward_s(plan, rates))


def _fewest_blocks(plan: PlanInput, hardware: Hardware) -> PlanInput:
    found = least_blocks(plan, hardware)
    return found.input if found is not None else plan


def _spare_buffers(plan: PlanInput, hardware: Hardware) -> PlanInput:
    gpu, host = hardware.gpu_bytes, hardware.host_bytes
    if gpu is None or not plan.streams:
        return plan
    most = with_most_buffers(plan, hardware).settings.buffers
    low, high, room, step = plan.settings.buffers, most + 1, int(SPARE_SHARE * gpu), 1
    while high - low > 1:  # mostly the first one, or one of the next, unless the peak is in no micro step
        guess = max(high - step, low + 1)
        if quick(plan.but(buffers=guess)).fits(room, host):
            low, step = guess, max(1, (high - guess) // 2)
        else:
            high, step = guess, 2 * step
    return plan.but(buffers=low)


def with_fewest_blocks(plan: PlanInput, hardware: Hardware) -> PlanInput:
    """The plan, which fits, with no more blocks recomputed than `settled` would say: quicker to tell."""
    if plan.checkpointing == "none":
        return plan
    none = judge(plan.but(checkpointing="none"), hardware)
    return none.input if none.fits else plan.but(checkpoint_blocks=blocks_needed(none, plan.checkpointing))


def with_all_buffers(plan: PlanInput, rates: Rates) -> PlanInput:
    """The plan with all buffers that help, whether the card holds them or not: no other number is faster."""
    return plan.but(buffers=max(plan.settings.buffers, buffers_wanted(plan, rates))) if plan.streams else plan


def with_most_buffers(plan: PlanInput, hardware: Hardware) -> PlanInput:
    """The plan with no fewer buffers than the card holds, and mostly no more.

    A buffer lies on the card from the first update on, so what any moment of a later micro step holds leaves room for so many.
    """
    gpu, most = hardware.gpu_bytes, with_all_buffers(plan, hardware.rates)
    if gpu is None or most == plan:
        return most
    spare = -_short_bytes(plan, int(SPARE_SHARE * gpu) + 1) // _buffer_bytes(plan)
    return plan.but(buffers=min(most.settings.buffers, plan.settings.buffers + max(0, int(spare))))


def least_s(plan: PlanInput, fewest: PlanInput, hardware: Hardware) -> float:
    """Seconds of a step, no more than with what `settled` would say for this plan, which fits: quicker to tell.

    Buffers and results compete for the card. With more than so many buffers, any moment of a micro step without recomputed blocks is short
    by so much, and so many blocks have to be recomputed: a bound for all numbers of buffers up to the next. `fewest`: as
    `with_fewest_blocks` has it; the plan itself where blocks are not open.
    """
    gpu, low, most = hardware.gpu_bytes, plan.settings.buffers, with_most_buffers(plan, hardware).settings.buffers
    if most == low or gpu is None or fewest == plan:
        return step_time(fewest.but(buffers=most), hardware.rates).total_s
    none = judge(plan.but(checkpointing="none"), Hardware())
    lacking, each = _short_bytes(none.input, gpu + 1), _buffer_bytes(plan)

    def bound(buffers: int, up_to: int) -> float:
        short = lacking + (buffers - low) * each
        needed = blocks_needed(none, plan.checkpointing, short) if short > 0 else 0
        blocks = plan.but(buffers=up_to, checkpoint_blocks=max(needed, fewest.recomputed_blocks))
        return step_time(blocks, hardware.rates).total_s

    spans = itertools.pairwise(sorted({low + (most - low) * at // _SPANS for at in range(_SPANS + 1)}))
    return min(itertools.starmap(bound, spans))


def _short_bytes(plan: PlanInput, gpu: int) -> float:
    """What a micro step lacks on a card with the margin; negative: what it leaves."""
    held = max(size for phase, size in quick(plan).gpu.by_phase.items() if phase in MICRO_STEP)
    return held + beside_the_tape(plan) - gpu / (1 + GPU_MARGIN)


def _buffer_bytes(plan: PlanInput) -> int:
    """No more than a buffer takes: each of its parts is rounded, down by less than a byte."""
    return int(chunk_elems(plan) * bytes_per_elem(plan)) - MOST_PARTS


# ---------------------------------------------------------------- how many blocks to recompute: as few as fit


def least_blocks(plan: PlanInput, hardware: Hardware) -> Candidate | None:
    """The plan with the fewest recomputed blocks that fits, 0 included; None if not even all of them suffice.

    Args:
        plan: the configuration; its policy is kept ("full" where it has none), its number of blocks is what is looked for.
    """
    # More blocks never hold more, except on the host of inputs that are kept there: that is looked at in the end.
    limits = replace(hardware, host_bytes=None) if plan.offloads_inputs else hardware
    none = judge(plan.but(checkpointing="none"), limits)
    if none.fits:
        return judge(none.input, hardware)
    found = _search(none, plan, limits)
    found = judge(found.input, hardware) if found is not None else None
    return found if found is not None and found.fits else None


def _policy(plan: PlanInput) -> str:
    return "full" if plan.checkpointing == "none" else plan.checkpointing


def _search(none: Candidate, plan: PlanInput, hardware: Hardware) -> Candidate | None:
    def tried(blocks: int) -> Candidate:
        return judge(plan.but(checkpointing=_policy(plan), checkpoint_blocks=blocks), hardware)

    high = plan.block_count
    best = tried(high)
    if not best.fits:
        return None
    low = blocks_needed(none, _policy(plan)) - 1
    ahead = 1  # mostly right: what is short, over what a block saves
    while high - low > 1:
        guess = min(low + ahead, high - 1)
        candidate = tried(guess)
        if candidate.fits:
            high, best, ahead = guess, candidate, max(1, (guess - low) // 2)
        else:
            low, ahead = guess, 2 * ahead
    return best


def blocks_needed(none: Candidate, policy: str, short_bytes: float | None = None) -> int:
    """No fewer blocks can suffice where this candidate, which recomputes none, is short on the GPU: at least 1.

    `short_bytes`: what some moment of its steps is short by; None: its peak.
    """
    plan = none.input
    if plan.device == "cpu" or none.plan is None:
        return 1
    g = plan.geometry
    costs = [
        block_bytes(g, plan.tokens, plan.kernels, block, plan.seq_len, plan.device, plan.tile_tokens) for block in g.unlike
    ]
    saved = max(c.kept - _left(c, policy) for c in costs) + _ROUNDING
    short = none.gpu_short_bytes / (1 + GPU_MARGIN) if short_bytes is None else short_bytes
    return min(plan.block_count, max(1, -(-int(short) // max(1, saved))))


def _left(cost: BlockBytes, policy: str) -> int:
    """Bytes on the GPU of a block that is recomputed."""
    if policy in ("offload", "offload_inputs"):
        return 0
    return cost.stream + {"attention": sum(cost.of_attention), "selective": cost.results}.get(policy, 0)
