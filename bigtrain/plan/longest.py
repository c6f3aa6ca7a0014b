"""The longest sequence that fits."""

from __future__ import annotations

from collections.abc import Callable

from bigtrain.plan.hardware import Hardware
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.predict import quick

STEP_TOKENS = 1024
"""Lengths are multiples of it: matrix products like round numbers, and nobody needs the last token."""
MOST_TOKENS = 2**24


def longest(plan: PlanInput, hardware: Hardware, limit: int | None, settle: Callable[[PlanInput], PlanInput]) -> PlanInput:
    """The plan with the longest sequence with which it fits; with the shortest one if not even that does.

    Args:
        plan: whose sequence length is open.
        limit: positions that the model has; None: not known.
        settle: fills in what else is left open, for each length, so that it fits if it can.
    """

    def fits(tokens: int) -> bool:
        return hardware.holds(quick(settle(plan.but(seq_len=tokens))))

    most = min(limit or MOST_TOKENS, MOST_TOKENS)
    if most <= STEP_TOKENS or fits(most):
        return plan.but(seq_len=most)
    low, high = 1, -(-most // STEP_TOKENS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * STEP_TOKENS) else (low, middle)
    return plan.but(seq_len=low * STEP_TOKENS)


def length_text(tokens: int, limit: int | None) -> str:
    """What a length that `longest` found is bound by."""
    bound = "as many positions as the model has" if tokens == limit else "as many as fit, if any do"
    return f"{tokens:,} tokens, {bound}"
