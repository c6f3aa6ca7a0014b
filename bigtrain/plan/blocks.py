"""How many blocks to recompute: as few as fit."""

from __future__ import annotations

from bigtrain.plan.activations import BlockBytes, block_bytes
from bigtrain.plan.constants import GPU_MARGIN
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.judge import Candidate, judge


def least_blocks(plan: PlanInput, gpu: int | None, host: int | None) -> Candidate | None:
    """The plan with the fewest recomputed blocks that fits, 0 included; None if not even all of them suffice.

    Args:
        plan: the configuration; its policy is kept ("full" where it has none), its number of blocks is what is looked for.
        gpu, host: bytes of one card and of one host; None: no limit.
    """
    # More blocks never hold more, except on the host of inputs that are kept there: that is looked at in the end.
    limit = None if plan.offloads_inputs else host
    none = judge(plan.but(checkpointing="none"), gpu, limit)
    if none.fits:
        return none if limit == host else judge(none.input, gpu, host)
    found = _search(none, plan, gpu, limit)
    if found is not None and limit != host:
        found = judge(found.input, gpu, host)
    return found if found is not None and found.fits else None


def _policy(plan: PlanInput) -> str:
    return "full" if plan.checkpointing == "none" else plan.checkpointing


def _search(none: Candidate, plan: PlanInput, gpu: int | None, host: int | None) -> Candidate | None:
    def tried(blocks: int) -> Candidate:
        return judge(plan.but(checkpointing=_policy(plan), checkpoint_blocks=blocks), gpu, host)

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


# The allocator's units in the tensors of one block.
_ROUNDING = 16 * 512
