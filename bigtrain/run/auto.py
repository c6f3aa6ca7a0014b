"""`--ds_config auto`: the fastest configuration that the planner says fits, as a ds_config. Arithmetic only, no torch.

What the user said stands: an optimizer, activation checkpointing, micro batch or accumulation given on the command line are not
searched over, nor is the share of the gradients that leaves. The ds_config spells out every number that the plan was made with, so that what runs is what was planned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bigtrain.config import GenerateOptions, RunValues, generate
from bigtrain.errors import DoesNotFitError
from bigtrain.plan.choose import WANTED, Candidate, Choice, candidates, choose, rows_per_rank, search_settings, usual_optimizers
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.leaf_choice import LeafBlocks
from bigtrain.plan.show import choice_text
from bigtrain.plan.zero_settings import ZeroSettings

AUTO = "auto"


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
        return f"{choice_text(self.choice)}\n--ds_config auto: {self.candidate.describe()}"


def pick(
    base: PlanInput,
    run: RunValues,
    hardware: Hardware,
    *,
    blocks_are_open: bool = False,
    share: float | None = None,
    leaf_blocks: LeafBlocks = "auto",
) -> Picked:
    """Choose stage, offload, optimizer states, checkpointing, micro batch and accumulation.

    Args:
        base: the model and what else stands: ranks, sequence length, policy and number of recomputed blocks, tiles, kernels.
        run: what the user said; None stands for "choose".
        blocks_are_open: choose how many blocks are recomputed, too.
        share: of the gradients that leaves the GPU in backward, as the user said; None: the least that fits.
        leaf_blocks: as the user said.

    Raises:
        DoesNotFitError: nothing that the user's values allow fits; with the ladder and what would help.
        UsageError: no gradients can leave, though `share` says so.
    """
    choice = choose(
        **_searched(base, run, blocks_are_open, share, leaf_blocks),
        hardware=hardware,
        wanted=WANTED,
    )
    if choice.best is None:
        raise DoesNotFitError(
            f"{choice_text(choice)}\n\n--ds_config auto: no configuration fits that the values on the command line allow. "
            "Nothing was built."
        )
    best = choice.best
    return Picked(config_of(best.input.settings), _filled(run, best.input), choice, best)


def any_candidate(
    base: PlanInput, run: RunValues, *, share: float | None = None, leaf_blocks: LeafBlocks = "auto"
) -> tuple[dict[str, Any], RunValues]:
    """(ds_config, run values) of one that `pick` would look at, without its search: what is wrong with it is wrong with all.

    Raises:
        UsageError: `pick` refuses what the user said, whatever fits.
    """
    searched = _searched(base, run, False, share, leaf_blocks)
    _, found = candidates(searched.pop("base"), searched.pop("global_batch"), **searched)[0]
    return config_of(found.settings), _filled(run, found)


def _filled(run: RunValues, best: PlanInput) -> RunValues:
    return replace(
        run, optim=run.optim or best.optimizer, gradient_checkpointing=best.checkpointing != "none", micro_batch=best.micro_batch,
        accumulation=best.accumulation,
    )  # fmt: skip


def _searched(
    base: PlanInput, run: RunValues, blocks_are_open: bool, share: float | None, leaf_blocks: LeafBlocks
) -> dict[str, Any]:
    """What is searched over, for `choose` and its `candidates`."""
    return {
        "base": base.but(settings=search_settings(base.geometry.hidden)),
        "global_batch": base.world_size * rows_per_rank(run.micro_batch, run.accumulation),
        "optimizers": (base.optimizer,) if run.optim else usual_optimizers(base.device),
        "micro_batch": run.micro_batch,
        "accumulation": run.accumulation,
        "recompute": None if blocks_are_open else run.gradient_checkpointing,
        "share": share,
        "leaf_blocks": leaf_blocks,
    }


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
    if settings.leaf_classes:
        zero["leaf_module"] = {"classes": list(settings.leaf_classes)}
    if settings.offload_optimizer and settings.ratio < 1:
        zero["offload_optimizer"]["ratio"] = settings.ratio
    if settings.offload_optimizer:
        zero["offload_optimizer"]["buffer_count"] = settings.buffers
    return config


def flags(planned: PlanInput) -> dict[str, str | int | None]:
    """The arguments of launch/train.py that do what was planned, beside those of `RunValues`."""
    blocks = planned.checkpoint_blocks
    return {
        "checkpoint_blocks": None if blocks is None else str(blocks),
        "checkpointing_policy": "full" if planned.checkpointing == "none" else planned.checkpointing,
        "offload_gradients": str(planned.settings.offload_gradients),
        "leaf_blocks": "on" if planned.settings.leaf_classes else "off" if planned.settings.stage == 3 else "auto",
        "mlp_tile_tokens": planned.mlp_tile_tokens or None,
    }
