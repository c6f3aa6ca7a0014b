"""`--ds_config auto`: the fastest configuration that the planner says fits, as a ds_config. Arithmetic only, no torch.

What the user said stands: an optimizer, activation checkpointing, micro batch or accumulation given on the command line are not
searched over. The ds_config spells out every number that the plan was made with, so that what runs is what was planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bigtrain import plan
from bigtrain.config import GenerateOptions, RunValues, generate
from bigtrain.errors import DoesNotFitError
from bigtrain.plan.choose import DEFAULT_OPTIMIZERS, Candidate, Choice, choose
from bigtrain.plan.inputs import Checkpointing, PlanInput, ZeroSettings
from bigtrain.plan.machine import expandable_segments
from bigtrain.plan.roofline import Rates
from bigtrain.plan.show import choice_text
from bigtrain.plan.states import layout_name

AUTO = "auto"
# Sequences of a step and a rank when the user says nothing of the batch: enough to let the micro batch vary.
SEQUENCES_PER_RANK = 8
# Buckets at every stage, in elements: as in the presets of stages 1 and 2.
BUCKET_ELEMS = 200_000_000


@dataclass(frozen=True)
class Picked:
    """What was chosen.

    Attributes:
        config: the ds_config. run: the user's run values with those of the choice filled in.
        choice: everything that was looked at. candidate: the one taken.
    """

    config: dict[str, Any]
    run: RunValues
    choice: Choice
    candidate: Candidate

    def text(self) -> str:
        """The ladder and what was taken from it."""
        return f"{choice_text(self.choice)}\nds_config auto: {self.candidate.describe()}"


def pick(
    model_config: Mapping[str, Any],
    run: RunValues,
    *,
    world_size: int,
    ranks_per_node: int,
    seq_len: int,
    gpu_memory_bytes: int | None,
    host_memory_bytes: int | None,
    device: str = "cuda",
    kernels: str = "hf",
    frozen: tuple[str, ...] = (),
    rates: Rates | None = None,
    policy: Checkpointing = "full",
    blocks: int | str | None = None,
) -> Picked:
    """Choose stage, offload, optimizer states, checkpointing, micro batch and accumulation.

    Args:
        model_config: parsed config.json. run: what the user said; None stands for "choose".
        gpu_memory_bytes, host_memory_bytes: of one card and of one host; None: no limit.
        rates: the machine's, for the ranking; None: the planner's defaults.
        policy: of checkpointing. blocks: how many are recomputed, "auto", or None: as the user said nothing of it.

    Raises:
        DoesNotFitError: nothing that the user's values allow fits; with the ladder and what would help.
        UsageError: the model's family has no formulas.
    """
    start = generate(GenerateOptions(stage=3))
    start["zero_optimization"]["reduce_bucket_size"] = BUCKET_ELEMS
    base = plan.plan_input(
        model_config, ds_config=start, world_size=world_size, gpus_per_node=ranks_per_node, seq_len=seq_len, device=device,
        kernels=kernels, frozen=frozen, optimizer=layout_name(run.optim or "adamw"), checkpointing=policy,
        checkpoint_blocks=int(blocks) if blocks not in (None, AUTO) else None, expandable=expandable_segments(),
    )  # fmt: skip
    if run.optim:
        optimizers: tuple[str, ...] = (base.optimizer,)
    else:
        optimizers = DEFAULT_OPTIMIZERS if device == "cuda" else DEFAULT_OPTIMIZERS[:1]
    choice = choose(
        base, gpu_memory_bytes=gpu_memory_bytes, host_memory_bytes=host_memory_bytes,
        global_batch=world_size * rows_per_rank(run), optimizers=optimizers, rates=rates,
    )  # fmt: skip
    allowed = [c for c in choice.fitting if _keeps(c, run, blocks)]
    if not allowed:
        lead = (
            "no configuration fits" if not choice.fitting else "none of those that fit has the values given on the command line"
        )
        raise DoesNotFitError(f"{choice_text(choice)}\n\nds_config auto: {lead}. Nothing was built.")
    best = allowed[0]
    filled = replace(
        run, optim=run.optim or best.input.optimizer, gradient_checkpointing=best.input.checkpointing != "none",
        micro_batch=best.input.micro_batch, accumulation=best.input.accumulation,
    )  # fmt: skip
    return Picked(config_of(best.input.settings), filled, choice, best)


def rows_per_rank(run: RunValues) -> int:
    """Sequences of a step and a rank: as the user said, as far as they did."""
    micro, accumulation = run.micro_batch, run.accumulation
    if micro:
        return micro * (accumulation or 1)
    return accumulation * max(1, SEQUENCES_PER_RANK // accumulation) if accumulation else SEQUENCES_PER_RANK


def _keeps(candidate: Candidate, run: RunValues, blocks: int | str | None) -> bool:
    found: PlanInput = candidate.input
    said = run.gradient_checkpointing
    if blocks == AUTO:  # as few as fit: none, if it fits without
        recomputes = True
    elif said and blocks is None:  # all blocks
        recomputes = found.checkpointing != "none" and found.checkpoint_blocks is None
    else:
        recomputes = said in (None, found.checkpointing != "none")
    return recomputes and run.micro_batch in (None, found.micro_batch) and run.accumulation in (None, found.accumulation)


def config_of(settings: ZeroSettings) -> dict[str, Any]:
    """The ds_config of planned ZeRO settings; batch and optimizer values are left to the run."""
    offload = "all" if settings.offload_param else "optimizer" if settings.offload_optimizer else "none"
    config = generate(GenerateOptions(stage=settings.stage, offload=offload))  # type: ignore[arg-type]
    zero = config["zero_optimization"]
    config["data_types"] = {"grad_accum_dtype": "fp32" if settings.grad_bytes == 4 else "bf16"}
    if settings.stage > 0:
        zero |= {"overlap_comm": settings.overlap_comm, "reduce_bucket_size": settings.reduce_bucket_elems}
    if settings.stage in (1, 2):
        zero["allgather_bucket_size"] = settings.reduce_bucket_elems
    if settings.stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": settings.prefetch_elems,
            "stage3_param_persistence_threshold": settings.persistence_elems,
            "stage3_max_live_parameters": settings.max_live_elems,
            "stage3_max_reuse_distance": settings.max_reuse_elems,
            "sub_group_size": settings.sub_group_elems,
        }
    if settings.offload_optimizer and settings.ratio < 1:
        zero["offload_optimizer"]["ratio"] = settings.ratio
    return config


def flags(planned: PlanInput) -> dict[str, str | None]:
    """The arguments of launch/train.py that recompute what was planned, beside `gradient_checkpointing`."""
    blocks = planned.checkpoint_blocks
    return {
        "checkpoint_blocks": None if blocks is None else str(blocks),
        "checkpointing_policy": "full" if planned.checkpointing == "none" else planned.checkpointing,
    }
