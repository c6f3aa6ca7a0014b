"""Blocks as leaf modules of ZeRO-3, or a hook on each of their layers: where nobody says so, what is faster by the plan and fits.

With a hook on each layer the host takes longer to launch a block than a card takes to compute a few thousand tokens in it. A leaf block has
one hook, and is gathered whole: less of that runs beside the computation, which costs where the card is what a step waits for. So blocks are
leafs where the host is. 8B, stage 3, rows of 4,096 tokens, H200, commit e06e225: two cards, micro batch 1, all blocks recomputed 1.048 s a
step, with leaf blocks 0.784 s; four cards, micro batch 4, none recomputed 1.537 s, with leaf blocks 1.570 s.

The choice is a function of the run's shapes and the card's name alone, so that ranks, and the same run tomorrow, choose alike: rates that a
machine measured (`roofline.stored_rates`) have no part in it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

from bigtrain.errors import UsageError
from bigtrain.plan.cards import H100_FLOPS
from bigtrain.plan.family_others import T5
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.leafs import block_class
from bigtrain.plan.predict import quick
from bigtrain.plan.roofline import Rates, step_time
from bigtrain.plan.zero_settings import ZeroSettings

LeafBlocks = Literal["auto", "on", "off"]
_HOOKED_S = 8.0e-3  # of the host, for one pass through a block: the 1.048 s above without the update, over 128 passes


class LeafChoice(NamedTuple):
    """Whether blocks are leaf modules, and why, in words."""

    on: bool
    why: str

    def text(self) -> str:
        """In a line."""
        return f"{'on' if self.on else 'off'} ({self.why})"


def says_itself(zero: ZeroSettings) -> bool:
    """Whether a ds_config says which modules are leafs."""
    return bool(zero.leaf_classes or zero.leaf_names or zero.leaf_suffixes or zero.leaf_threshold)


def leafed(plan: PlanInput) -> PlanInput:
    """The plan with its blocks as leaf modules.

    Raises:
        UsageError: it is not of stage 3, or the class of its blocks is not known.
    """
    name = block_class(plan.parameters.kind)
    if plan.settings.stage != 3:
        raise UsageError(
            f"leaf_blocks on needs ZeRO stage 3, not stage {plan.settings.stage}, which gathers nothing: leave it out"
        )
    if name is None:
        raise UsageError(
            f"leaf_blocks on: the class of the blocks of '{plan.parameters.kind}' is not known to the plan; name it in "
            "zero_optimization.leaf_module.classes"
        )
    return plan if says_itself(plan.settings) else plan.but(leaf_classes=(name,))


def either(plan: PlanInput) -> tuple[PlanInput, ...]:
    """The plan, and what it may become by `with_leafs`."""
    able = plan.settings.stage == 3 and not says_itself(plan.settings) and not _never(plan)
    return (plan, leafed(plan)) if able else (plan,)


def choose_leafs(plan: PlanInput, gpu: int | None, host: int | None) -> LeafChoice | None:
    """For a plan that is settled otherwise; None: there is nothing to choose, at other stages or where the settings say leafs themselves.

    Args:
        plan: with a hook on each layer.
        gpu, host: bytes of one card and of one host; None: no limit.
    """
    if plan.settings.stage != 3 or says_itself(plan.settings):
        return None
    if why := _never(plan):
        return LeafChoice(False, why)
    hooked_s, card_s = block_seconds(plan)
    took = f"a pass through a block takes the host {1e3 * hooked_s:.1f} ms with a hook on each layer, the card {1e3 * card_s:.1f} ms"
    if hooked_s <= card_s:
        return LeafChoice(False, took)
    if not quick(leafed(plan)).fits(gpu, host):
        return LeafChoice(False, f"{took}, but with whole blocks it does not fit")
    return LeafChoice(True, took)


def with_leafs(plan: PlanInput, gpu: int | None, host: int | None) -> PlanInput:
    """The plan as `choose_leafs` has it."""
    found = choose_leafs(plan, gpu, host)
    return leafed(plan) if found is not None and found.on else plan


def _never(plan: PlanInput) -> str:
    """Why there is no choice; empty: there is."""
    kind = plan.parameters.kind
    if plan.device != "cuda":
        return "a CPU's seconds are not planned"
    if block_class(kind) is None:
        return "the class of this model's blocks is not known"
    if not plan.blocks_are_all:
        return "blocks of its vision tower are not in the plan"
    if kind in T5:
        return f"{kind}'s last digits would be others"
    return ""


def block_seconds(plan: PlanInput) -> tuple[float, float]:
    """(of the host with a hook on each layer, of the card or of what moves weights to it) for one pass through a block, on average."""
    passes = plan.accumulation * (3 * plan.block_count + plan.recomputed_blocks)
    usual = Rates()
    flops = usual.matmul_flops * plan.card_flops / H100_FLOPS
    time = step_time(plan, replace(usual, matmul_flops=flops, launch_s_per_block=0.0, recompute_s_per_block=0.0))
    return _HOOKED_S, max(time.compute_s, time.communication_s + time.fetch_s) / passes
