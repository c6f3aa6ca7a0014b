"""`--ds_config auto` of a run: the arguments and the ds_config of the fastest configuration that fits its cards and hosts."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from bigtrain import ranks
from bigtrain.config import Decision
from bigtrain.models.source import config_from
from bigtrain.plan.spilled import asked_share
from bigtrain.run import capacity
from bigtrain.run.arguments import TrainArguments
from bigtrain.run.auto import AUTO, flags, pick
from bigtrain.run.job import Job
from bigtrain.run.model_files import choose_seq_len

logger = logging.getLogger(__name__)


def choose(args: TrainArguments) -> tuple[TrainArguments, dict[str, Any]]:
    """(arguments, ds_config) of `--ds_config auto`. Collective; every rank chooses the same, from the least memory of all.

    Raises:
        DoesNotFitError: nothing fits. UsageError: the model has no formulas.
    """
    with ranks.together("reading the model's config"):
        model_config = config_from(args.model_name_or_path, args.trust_remote_code)
    hardware = capacity.hardware(args.gpu_memory_cap)
    run = args.run_values()
    base = capacity.plan_input(
        args, model_config, choose_seq_len(args, model_config), run, checkpointing=args.checkpointing_policy
    )
    picked = pick(
        base,
        run,
        hardware,
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
