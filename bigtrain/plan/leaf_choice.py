"""Blocks as leaf modules of ZeRO-3, or a hook on each of their layers: where nobody says so, what is faster by the plan and fits.

Hooks on each layer can take the host longer than a card takes to compute a few thousand tokens. A leaf block has one hook, and is gathered
whole: less of that runs beside the computation, which costs where the card is what a step waits for. 8B, stage 3, rows of 4,096 tokens, H200,
commit e06e225: two cards, micro batch 1, all blocks recomputed 1.048 s a step, with leaf blocks 0.784 s (planned 1.13 and 0.77); four cards,
micro batch 4, none recomputed 1.537 s, with leaf blocks 1.570 s (planned 1.62 and 1.54). So a plan must be shorter by more than it was
wrong there.

The choice is a function of the run's shapes and the card's name alone, so that ranks, and the same run tomorrow, choose alike: rates that a
machine measured (`roofline.stored_rates`) have no part in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Literal, NamedTuple

from bigtrain.errors import UsageError
from bigtrain.plan.cards import H100_FLOPS
from bigtrain.plan.family_others import T5
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.leafs import block_class
from bigtrain.plan.predict import quick
from bigtrain.plan.roofline import Rates, host_s, step_time
from bigtrain.plan.zero_settings import ZeroSettings

LeafBlocks = Literal["auto", "on", "off"]
# Two ranks, bf16: first norms up to 1e-3 off those of a hook on each layer, and not stage 2's; others have the same bits (docs/log.md).
_OTHER_DIGITS = (*T5, "exaone4", "olmo2", "olmo3")
_LEAST_GAIN = 0.1  # of a step: on the four cards above leaf blocks are planned 5 % shorter, and were 2 % longer


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
        UsageError: see `refuse_contrary`.
    """
    return as_said(plan, "on")


def as_said(plan: PlanInput, said: LeafBlocks) -> PlanInput:
    """The plan with what the user said of it; "auto" is left open.

    Raises:
        UsageError: see `refuse_contrary`.
    """
    zero, name = plan.settings, block_class(plan.parameters.kind)
    refuse_contrary(said, zero.stage, (name,) if name else (), zero.leaf_classes, says_itself(zero))
    return plan.but(leaf_classes=(name,)) if said == "on" and name and not says_itself(zero) else plan


def refuse_contrary(said: LeafBlocks, stage: int, own: Collection[str], named: Iterable[str], says: bool) -> None:
    """Compare what the user said with the ds_config and the model, in a plan as in a run.

    Args:
        own: classes of the model's blocks; empty: not known.
        named: leaf_module.classes of the ds_config, with their modules or without. says: whether it has leaf modules of any kind.

    Raises:
        UsageError: "off", and the ds_config names blocks; "on", and the stage gathers nothing, the blocks are not known, or the ds_config
            names other leaf modules alone.
    """
    there = {name.rpartition(".")[2] for name in named}
    if said == "off" and (both := there & set(own)):
        raise UsageError(
            f"--leaf_blocks off, but leaf_module.classes of the ds_config names {', '.join(sorted(both))}: leave one of them out"
        )
    if said != "on":
        return
    if stage != 3:
        raise UsageError(f"--leaf_blocks on needs zero_optimization.stage 3, not {stage}, which gathers nothing: leave it out")
    if not own:
        raise UsageError(
            "--leaf_blocks on: the class of this model's blocks is not known before it is built; leave it out, and name the class in "
            "zero_optimization.leaf_module.classes of the ds_config"
        )
    if says and not set(own) <= there:
        raise UsageError(
            f"--leaf_blocks on, but the ds_config has leaf modules of its own, without {', '.join(own)}: name that in "
            "leaf_module.classes, or leave --leaf_blocks out"
        )


def either(plan: PlanInput) -> tuple[PlanInput, ...]:
    """The plan, and what it may become by `with_leafs`."""
    able = plan.settings.stage == 3 and not says_itself(plan.settings) and not _never(plan)
    return (plan, leafed(plan)) if able else (plan,)


def choose_leafs(plan: PlanInput, hardware: Hardware) -> LeafChoice | None:
    """For a plan that is settled otherwise; None: there is nothing to choose, at other stages or where the settings say leafs themselves.

    Args:
        plan: with a hook on each layer.
        hardware: its memory; see above for its rates.
    """
    if plan.settings.stage != 3 or says_itself(plan.settings):
        return None
    if why := _never(plan):
        return LeafChoice(False, why)
    here, leafs = _rates(plan), leafed(plan)
    hooked, whole = step_time(plan, here), step_time(leafs, here)
    took = f"{whole.total_s:.3g} s a step planned, with a hook on each layer {hooked.total_s:.3g}"
    if whole.total_s > (1 - _LEAST_GAIN) * hooked.total_s:
        return LeafChoice(False, f"{took}: less than {_LEAST_GAIN:.0%} shorter")
    if plan.ranks_per_node < plan.world_size and hooked.communication_s > plan.accumulation * host_s(plan, here):
        return LeafChoice(False, "what a step waits for is the network between the hosts")
    if not hardware.holds(quick(leafs)):
        return LeafChoice(False, f"{took}, but with whole blocks it does not fit")
    return LeafChoice(True, took)


def with_leafs(plan: PlanInput, hardware: Hardware) -> PlanInput:
    """The plan as `choose_leafs` has it."""
    found = choose_leafs(plan, hardware)
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
    if kind in _OTHER_DIGITS:
        return f"{kind}'s last digits would be others"
    return ""


def _rates(plan: PlanInput) -> Rates:
    usual = Rates()
    return replace(usual, matmul_flops=usual.matmul_flops * plan.card_flops / H100_FLOPS)
