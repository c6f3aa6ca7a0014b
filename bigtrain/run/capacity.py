"""Does a run fit, and which configuration would: its plan against the memory of the smallest card and host of all."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bigtrain import defaults, plan, ranks, shapes
from bigtrain.checkpoint.files import free_bytes
from bigtrain.config import Decision, RunValues
from bigtrain.errors import DoesNotFitError, UsageError
from bigtrain.kernels.attach import why_no_liger
from bigtrain.plan.cards import H100_FLOPS, peak_bf16_flops
from bigtrain.plan.constants import CUDA_CONTEXT_BYTES, nccl_bytes
from bigtrain.plan.disk import Writes, saves_to_come
from bigtrain.plan.machine import expandable_segments, host_memory, show_bytes
from bigtrain.plan.roofline import Rates, stored_rates
from bigtrain.plan.settled import buffers_are_open, buffers_wanted, settled
from bigtrain.plan.show import plan_text
from bigtrain.plan.spilled import asked_share
from bigtrain.plan.states import layout_name
from bigtrain.run import leaf_blocks, shortage
from bigtrain.run.arguments import Policy, TrainArguments
from bigtrain.run.auto import AUTO, flags, pick
from bigtrain.run.job import Job, device_type, fused_kernels, run_values
from bigtrain.run.model_files import choose_seq_len, load_model_config
from bigtrain.run.runfolder import RunFolder

logger = logging.getLogger(__name__)


def _plan_input(args: TrainArguments, model_config: Any, seq_len: int, run: RunValues, **more: Any) -> plan.PlanInput:
    """What is planned of a run: the same on every rank. `more`: other values of `plan.plan_input`."""
    return plan.plan_input(
        model_config.to_dict(),
        attention=plan.attention_of(args.attn_implementation, args.packing, device_type(), model_config.model_type),
        world_size=ranks.world_size(),
        gpus_per_node=ranks_per_host(),
        seq_len=seq_len,
        optimizer=layout_name(run.optim or defaults.OPTIM),
        checkpoint_blocks=args.recomputed_blocks,
        mlp_tile_tokens=args.mlp_tile_tokens or 0,
        **_kernels(args, model_config),
        device=device_type(),
        card_flops=_card_flops(),
        expandable=expandable_segments(),
        frozen=tuple(args.freeze),
        drawn=shapes.is_preset(args.model_name_or_path),
        **more,
    )


def _kernels(args: TrainArguments, model_config: Any) -> dict[str, Any]:
    """What `use_liger` will find to do, as the planner says it."""
    if not fused_kernels(args):
        return {"kernels": "hf"}
    return (
        {"kernels": "hf", "chunks_loss": True}
        if why_no_liger(model_config.to_dict().get("model_type"))
        else {"kernels": "liger"}
    )


def _card_flops() -> float:
    """Of the slowest card of all ranks, by name. Collective."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else None  # the rank's own, not the host's first
    return min(ranks.all_gather_object(peak_bf16_flops(card) or H100_FLOPS, "which card each rank has"))


def plan_of(job: Job, gpu: int | None) -> plan.Plan | None:
    """The bytes of the run on a card of `gpu` bytes, the same on every rank; None for a model that has no formulas."""
    run, args = job.resolved.run, job.args
    try:
        base = _plan_input(
            args,
            job.model_config,
            job.seq_len,
            run,
            ds_config=job.resolved.engine_config(),
            micro_batch=run.micro_batch,
            accumulation=run.accumulation,
            checkpointing=args.checkpointing_policy if run.gradient_checkpointing else "none",
        )
        return plan.predict(base.but(offload_gradients=job.offload_gradients), gpu_memory_bytes=gpu)
    except UsageError as error:
        logger.info("no memory plan: %s", error)
    except Exception as error:
        if not args.no_plan:  # with it, the plan is only there to explain an out-of-memory error
            raise
        logger.warning("no memory plan: %r", error)
    return None


def _rates() -> Rates | None:
    return ranks.main_decides(lambda: stored_rates(device_type()), "reading the rates that bigtrain doctor stored")


def settle(job: Job, gpu: int | None, host: int | None, resume: Path | None = None) -> Job:
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
    layout, rates = plan_of(job, gpu), _rates()
    found: plan.PlanInput | None = None
    if layout is not None:
        now, buffers = layout.input, not job.args.no_plan and buffers_are_open(job.resolved.config)
        found = settled(now, gpu, host, rates, share=asked is None, buffers=buffers, blocks=blocks)
        job = _with_policy(replace(job, offload_gradients=found.settings.offload_gradients), now, found)
        if found.settings.buffers != now.settings.buffers:
            job = _with_buffers(job, found.settings.buffers, buffers_wanted(found, rates))
    elif job.args.checkpointing_policy == "offload":
        job = _policy_decided(job, "offload_inputs", "this model has no plan that would say whether there is room for more")
    if job.offload_gradients:
        why = "the least with which the run fits the card" if asked is None else "--offload_gradients"
        job = _decided(job, Decision("offload_gradients", job.offload_gradients, "plan" if asked is None else "flag", why))
    job = leaf_blocks.decided(job, found, gpu, host, resume)
    if not blocks:
        return job
    if found is None or not found.blocks_are_all:
        logger.warning("--checkpoint_blocks auto: there is no plan of this model's blocks, so all of them are recomputed")
        return _with_blocks(job, None, "all: this model's blocks are not in the plan")
    few, total = found.recomputed_blocks, found.block_count
    return _with_blocks(
        job, few if few < total else None, f"as few of {total} as fit {_limits(gpu, host)} with the plan's margin"
    )


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


def _limits(gpu: int | None, host: int | None) -> str:
    return (
        f"{show_bytes(gpu)} of GPU memory" if gpu is not None else f"{show_bytes(host)} of host memory" if host else "no limit"
    )


def _with_blocks(job: Job, blocks: int | None, reason: str) -> Job:
    """The job with that many blocks recomputed; 0: none, None: all."""
    logger.info("--checkpoint_blocks auto: %s (%s)", "all" if blocks is None else blocks, reason)
    job = _decided(job, Decision("checkpoint_blocks", "all" if blocks is None else blocks, "plan", reason))
    run = replace(job.resolved.run, gradient_checkpointing=blocks != 0)
    args = replace(job.args, checkpoint_blocks=str(blocks) if blocks else None, gradient_checkpointing=blocks != 0)
    return replace(job, args=args, resolved=replace(job.resolved, run=run))


def check_fit(layout: plan.Plan | None, gpu: int | None, host: int | None) -> dict[str, Any] | None:
    """Refuse what cannot fit the smallest card and host of all; returns the plan's numbers, None without a plan. Collective.

    Raises:
        DoesNotFitError: with the plan, row by row, and the nearest configurations that fit.
    """
    if layout is None:
        return None
    ranks.main_decides(lambda: _refuse(layout, gpu, host), "looking whether the run fits")
    return {k: v for k, v in layout.to_json().items() if k != "trees"}


def _refuse(layout: plan.Plan, gpu: int | None, host: int | None) -> None:
    if not layout.fits(gpu, host):
        others = "\n".join(shortage.what_fits(layout.input, gpu, host))
        raise DoesNotFitError(
            f"{plan_text(layout, gpu, host)}\n\nNothing was built, no data was read. {others[0].upper()}{others[1:]}\n"
            "--ds_config auto takes the fastest of all that fit; `bigtrain plan --auto` lists them; --no_plan starts the run all the same."
        )


def check_disk(job: Job, folder: RunFolder, reached: int) -> None:
    """Refuse a run whose first checkpoint, or only result, the disk cannot hold; warn of one that will fill it. On rank 0.

    Args:
        folder: of the run, before it is opened.
        reached: step that it starts from.

    Raises:
        UsageError: with both sizes.
    """
    args, resumes = job.args, job.args.resume_from_checkpoint is not None
    if job.checkpoint_bytes is None or job.model_bytes is None:
        return
    kept = args.save_total_limit
    if kept is not None:  # beyond the newest: every N-th, and the best
        often = math.lcm(args.save_steps or 1, args.keep_every) if args.keep_every else None
        kept += saves_to_come(reached, job.steps.steps, often) + args.load_best_model_at_end
    writes = Writes(
        checkpoint_bytes=job.model_bytes if args.save_only_model else job.checkpoint_bytes,
        model_bytes=0 if args.no_export else job.model_bytes,
        saves=_saves(job, reached),
        keep=kept,
        there=len(folder.checkpoints()) if resumes else 0,
    )
    free = free_bytes(folder.root) + (0 if resumes else folder.own_bytes())
    if why := writes.too_much(free, str(folder.root)):
        raise UsageError(f"{why}\nNothing was built.")
    if why := writes.too_many(free, str(folder.root)):
        logger.warning("%s", why)


def _saves(job: Job, reached: int) -> int:
    """Saves of a run from step `reached` on."""
    if job.args.save_strategy != "epoch":
        return saves_to_come(reached, job.steps.steps, job.args.save_steps)
    last = job.steps.steps
    return job.steps.epochs_done(last) - job.steps.epochs_done(reached) + (last > reached and not job.steps.ends_epoch(last))


def choose(args: TrainArguments) -> tuple[TrainArguments, dict[str, Any]]:
    """(arguments, ds_config) of `--ds_config auto`. Collective; every rank chooses the same, from the least memory of all.

    Raises:
        DoesNotFitError: nothing fits. UsageError: the model has no formulas.
    """
    with ranks.together("reading the model's config"):
        model_config = load_model_config(args)
    gpu, host = memory_limits(args.gpu_memory_cap)
    run = run_values(args, None)
    base = _plan_input(args, model_config, choose_seq_len(args, model_config), run, checkpointing=args.checkpointing_policy)
    picked = pick(
        base,
        run,
        gpu_memory_bytes=gpu,
        host_memory_bytes=host,
        rates=_rates(),
        blocks_are_open=args.checkpoint_blocks == "auto",
        share=asked_share(args.offload_gradients),
        leaf_blocks=args.leaf_blocks,
    )
    logger.info("%s", picked.text())
    run = picked.run
    chosen: dict[str, Any] = {
        "per_device_train_batch_size": run.micro_batch,
        "gradient_accumulation_steps": run.accumulation,
        "optim": run.optim,
        "gradient_checkpointing": run.gradient_checkpointing,
        **flags(picked.candidate.input),
    }
    if asked_share(args.offload_gradients) is not None:
        chosen["offload_gradients"] = args.offload_gradients  # the same number, as the user wrote it
    return replace(args, **chosen), picked.config


# Arguments that the search fills in where the user left them open, and how their decisions are called.
_CHOSEN = {
    "per_device_train_batch_size": ("train_micro_batch_size_per_gpu",),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "optim": ("optimizer", "optimizer.type"),
    "gradient_checkpointing": ("gradient_checkpointing",),
    "offload_gradients": ("offload_gradients",),
    "leaf_blocks": ("leaf_blocks",),
}


def named_auto(job: Job, asked: TrainArguments) -> Job:
    """With `--ds_config auto` as the one who decided what neither a file nor a flag did, but the search. `asked`: as the user said."""
    if asked.ds_config != AUTO:
        return job
    filled = {p for name, paths in _CHOSEN.items() if getattr(asked, name) != getattr(job.args, name) for p in paths}

    def renamed(one: Decision) -> Decision:
        found = one.source == "file" or (one.source == "flag" and one.path in filled)
        return replace(one, source="auto", reason="--ds_config auto: the fastest that fits") if found else one

    return replace(job, resolved=replace(job.resolved, decisions=[renamed(one) for one in job.resolved.decisions]))


def ranks_per_host() -> int:
    """Ranks that share the fullest host, as the launchers said: hosts may differ, plans must not. Collective."""
    return max(ranks.all_gather_object(ranks.local_world_size(), "how many ranks each host has"))


def cap_gpu_memory(cap_gib: float | None) -> None:
    """Let this process hold at most `cap_gib` GiB of its card, context and NCCL included: it stands in for a smaller card."""
    if cap_gib is not None and torch.cuda.is_available():
        index = torch.cuda.current_device()
        total = torch.cuda.get_device_properties(index).total_memory
        outside = CUDA_CONTEXT_BYTES + nccl_bytes(ranks.world_size())
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, cap_gib * 2**30 - outside) / total), index)


def memory_limits(cap_gib: float | None) -> tuple[int | None, int | None]:
    """(bytes of the smallest card, or the cap if lower; bytes of the smallest host) over all ranks; None where unknown."""
    found = host_memory()
    card = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory if torch.cuda.is_available() else 0
    if card and cap_gib is not None:
        card = min(card, int(cap_gib * 2**30))
    mine = (card, found.usable_bytes if found else 0)
    everyone = ranks.all_gather_object(mine)
    return min(row[0] for row in everyone) or None, min(row[1] for row in everyone) or None
