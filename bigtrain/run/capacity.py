"""Does a run fit: its plan, against the memory of the smallest card and host of all."""

from __future__ import annotations

import logging
from typing import Any

import torch

from bigtrain import defaults, plan, ranks, shapes
from bigtrain.config import RunValues
from bigtrain.errors import DoesNotFitError, UsageError
from bigtrain.kernels.attach import why_no_liger
from bigtrain.plan.cards import H100_FLOPS, peak_bf16_flops
from bigtrain.plan.constants import CUDA_CONTEXT_BYTES, nccl_bytes
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.machine import expandable_segments, host_memory
from bigtrain.plan.roofline import Rates, stored_rates
from bigtrain.plan.show import plan_text
from bigtrain.plan.states import layout_name
from bigtrain.run import shortage
from bigtrain.run.arguments import TrainArguments
from bigtrain.run.job import Job, device_type, fused_kernels

logger = logging.getLogger(__name__)


def plan_input(args: TrainArguments, model_config: Any, seq_len: int, run: RunValues, **more: Any) -> plan.PlanInput:
    """What is planned of a run: the same on every rank. `more`: other values of `plan.plan_input`."""
    config = model_config.to_dict()
    text = config.get("text_config") or config
    attention = plan.attention_of(
        args.attn_implementation, args.packing, device_type(), model_config.model_type,
        seq_len=seq_len, selective=args.is_selective, dropout=text.get("attention_dropout") or 0.0,
    )  # fmt: skip
    return plan.plan_input(
        config,
        attention=attention,
        grouped_experts=not args.torch_compile,
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


def plan_of(job: Job, hardware: Hardware) -> plan.Plan | None:
    """The bytes of the run, the same on every rank; None for a model that has no formulas."""
    run, args = job.resolved.run, job.args
    try:
        base = plan_input(
            args,
            job.model_config,
            job.seq_len,
            run,
            ds_config=job.resolved.engine_config(),
            micro_batch=run.micro_batch,
            accumulation=run.accumulation,
            checkpointing=args.checkpointing_policy if run.gradient_checkpointing else "none",
        )
        return plan.predict(base.but(offload_gradients=job.offload_gradients), gpu_memory_bytes=hardware.gpu_bytes)
    except UsageError as error:
        logger.info("no memory plan: %s", error)
    except Exception as error:
        if not args.no_plan:  # with it, the plan is only there to explain an out-of-memory error
            raise
        logger.warning("no memory plan: %r", error)
    return None


def check_fit(layout: plan.Plan | None, hardware: Hardware) -> dict[str, Any] | None:
    """Refuse what cannot fit the smallest card and host of all; returns the plan's numbers, None without a plan. Collective.

    Raises:
        DoesNotFitError: with the plan, row by row, and the nearest configurations that fit.
    """
    if layout is None:
        return None
    ranks.main_decides(lambda: _refuse(layout, hardware), "looking whether the run fits")
    return {k: v for k, v in layout.to_json().items() if k != "trees"}


def _refuse(layout: plan.Plan, hardware: Hardware) -> None:
    if not hardware.holds(layout):
        others = "\n".join(shortage.what_fits(layout.input, hardware))
        raise DoesNotFitError(
            f"{plan_text(layout, hardware)}\n\nNothing was built, no data was read. {others[0].upper()}{others[1:]}\n"
            "--ds_config auto takes the fastest of all that fit; `bigtrain plan --auto` lists them; --no_plan starts the run all the same."
        )


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


def hardware(cap_gib: float | None) -> Hardware:
    """The smallest card, or the cap if lower, and the smallest host of all ranks, with the rates of the main rank's machine. Collective."""
    found = host_memory()
    card = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory if torch.cuda.is_available() else 0
    if card and cap_gib is not None:
        card = min(card, int(cap_gib * 2**30))
    mine = (card, found.usable_bytes if found else 0)
    cards, hosts = zip(*ranks.all_gather_object(mine))
    rates = ranks.main_decides(lambda: stored_rates(device_type()), "reading the rates that bigtrain doctor stored")
    return Hardware(min(cards) or None, min(hosts) or None, rates or Rates())
