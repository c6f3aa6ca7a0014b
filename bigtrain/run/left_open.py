"""What the arguments leave open, decided by the plan, and written into the job as if it had been said."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path

from bigtrain import plan
from bigtrain.config import Decision
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.machine import show_bytes
from bigtrain.plan.settled import buffers_are_open, buffers_wanted, settled
from bigtrain.plan.spilled import asked_share
from bigtrain.run import capacity, leaf_blocks
from bigtrain.run.arguments import Policy
from bigtrain.run.job import Job

logger = logging.getLogger(__name__)


def settle(job: Job, hardware: Hardware, resume: Path | None = None) -> Job:
    """What the run leaves open, as `plan.settled` has it for the smallest card and host of all; the job with it.

    Without a plan no more gradients leave than were asked for, all blocks are recomputed, with a note, and none are leafs. The same on
    every rank.

    Args:
        resume: the checkpoint that the run goes on from.

    Raises:
        UsageError: `--leaf_blocks on` where that cannot be.
    """
    job = leaf_blocks.as_said(job)
    asked, blocks = asked_share(job.args.offload_gradients), job.args.checkpoint_blocks == "auto"
    layout = capacity.plan_of(job, hardware)
    found: plan.PlanInput | None = None
    if layout is not None:
        now, buffers = layout.input, not job.args.no_plan and buffers_are_open(job.resolved.config)
        found = settled(now, hardware, share=asked is None, buffers=buffers, blocks=blocks)
        job = _with_policy(replace(job, offload_gradients=found.settings.offload_gradients), now, found)
        if found.settings.buffers != now.settings.buffers:
            job = _with_buffers(job, found.settings.buffers, buffers_wanted(found, hardware.rates))
    elif job.args.checkpointing_policy == "offload":
        job = _policy_decided(job, "offload_inputs", "this model has no plan that would say whether there is room for more")
    if job.offload_gradients:
        why = "the least with which the run fits the card" if asked is None else "--offload_gradients"
        job = _decided(job, Decision("offload_gradients", job.offload_gradients, "plan" if asked is None else "flag", why))
    job = leaf_blocks.decided(job, found, hardware, resume)
    if not blocks:
        return job
    if found is None or not found.blocks_are_all:
        logger.warning("--checkpoint_blocks auto: there is no plan of this model's blocks, so all of them are recomputed")
        return _with_blocks(job, None, "all: this model's blocks are not in the plan")
    few, total = found.recomputed_blocks, found.block_count
    why = f"as few of {total} as fit {_limits(hardware)} with the plan's margin"
    return _with_blocks(job, few if few < total else None, why)


def _decided(job: Job, decision: Decision) -> Job:
    return replace(job, resolved=replace(job.resolved, decisions=[*job.resolved.decisions, decision]))


def _with_buffers(job: Job, count: int, wanted: int) -> Job:
    hidden = "so many chunks of state on the GPU hide its traffic"
    why = hidden if count >= wanted else f"all that fit; {wanted} would hide its traffic"
    job = _decided(job, Decision("zero_optimization.offload_optimizer.buffer_count", count, "plan", why))
    config = copy.deepcopy(job.resolved.config)
    config["zero_optimization"]["offload_optimizer"]["buffer_count"] = count
    return replace(job, resolved=replace(job.resolved, config=config))


def _with_policy(job: Job, asked: plan.PlanInput, found: plan.PlanInput) -> Job:
    """The job with the policy of checkpointing that was found."""
    if found.checkpointing == "none" or found.checkpointing == asked.checkpointing:
        return job
    if asked.of_attention:
        return _policy_decided(
            job, found.checkpointing, "with attention's results as well it does not fit, or would not be faster"
        )
    why = "attention is no fused operator here, or has dropout, so that its results cannot be kept: it runs again in backward"
    return _policy_decided(job, found.checkpointing, why)


def _policy_decided(job: Job, policy: Policy, why: str) -> Job:
    logger.warning("--checkpointing_policy %s: %s is taken: %s", job.args.checkpointing_policy, policy, why)
    job = _decided(job, Decision("checkpointing_policy", policy, "plan", why))
    return replace(job, args=replace(job.args, checkpointing_policy=policy))


def _limits(hardware: Hardware) -> str:
    if hardware.gpu_bytes is not None:
        return f"{show_bytes(hardware.gpu_bytes)} of GPU memory"
    return f"{show_bytes(hardware.host_bytes)} of host memory" if hardware.host_bytes else "no limit"


def _with_blocks(job: Job, blocks: int | None, reason: str) -> Job:
    """The job with that many blocks recomputed; 0: none, None: all."""
    logger.info("--checkpoint_blocks auto: %s (%s)", "all" if blocks is None else blocks, reason)
    job = _decided(job, Decision("checkpoint_blocks", "all" if blocks is None else blocks, "plan", reason))
    run = replace(job.resolved.run, gradient_checkpointing=blocks != 0)
    args = replace(job.args, checkpoint_blocks=str(blocks) if blocks else None, gradient_checkpointing=blocks != 0)
    return replace(job, args=args, resolved=replace(job.resolved, run=run))
