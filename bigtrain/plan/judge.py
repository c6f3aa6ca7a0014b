"""Whether one configuration fits, and how fast it would be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bigtrain.partition import partition_size
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.machine import show_bytes
from bigtrain.plan.predict import Plan, quick
from bigtrain.plan.roofline import StepTime, step_time
from bigtrain.plan.states import LAYOUTS
from bigtrain.plan.zero_settings import ZeroSettings

# Tried in place of the asked bucket only where that does not fit; smaller buckets cost more collectives.
SMALL_BUCKET_ELEMS = 50_000_000
# What a step of several ranks waits each time an allocator meets its limit: for the device, for pages that are unmapped and mapped again, and
# for whoever did not meet it. 1B on two H200 capped at 24 GiB met it twice a step, as planned, and took 0.05 and 0.03 s more for each
# (docs/log.md). One card, 8B at 47.4 GiB, once a step, was no slower than planned without.
RETURN_S = 0.04


@dataclass(frozen=True)
class Candidate:
    """One configuration.

    Attributes:
        input: what it is. fits: whether it does. why: what is short, empty if it fits.
        gpu_short_bytes, host_short_bytes: what is missing (0 if enough; fragmentation is not counted).
        plan: its bytes; None if its states alone are too large. time: its roofline.
    """

    input: PlanInput
    fits: bool
    why: str
    gpu_short_bytes: int
    host_short_bytes: int
    plan: Plan | None
    time: StepTime

    @property
    def options(self) -> dict[str, Any]:
        """The names that `config generate` and the training script use."""
        zero = self.input.settings
        offload = "all" if zero.offload_param else "optimizer" if zero.offload_optimizer else "none"
        return {
            "stage": zero.stage,
            "offload": offload,
            "ratio": zero.ratio,
            "optimizer": self.input.optimizer,
            "activation_checkpointing": self.input.checkpointing != "none",
            "checkpointing_policy": self.input.checkpointing,
            "checkpoint_blocks": self.input.recomputed_blocks,
            "leaf_blocks": bool(zero.leaf_classes),
            "mlp_tile_tokens": self.input.mlp_tile_tokens,
            "micro_batch": self.input.micro_batch,
            "accumulation": self.input.accumulation,
            "reduce_bucket_size": zero.reduce_bucket_elems,
            "grad_accum_dtype": "fp32" if zero.grad_bytes == 4 else "bf16",
            "world_size": self.input.world_size,
        }

    def describe(self) -> str:
        """One line."""
        o = self.options
        parts = [f"ZeRO-{o['stage']}", f"offload {o['offload']}", str(o["optimizer"])]
        if o["offload"] != "none" and o["ratio"] < 1:
            parts[1] += f" ratio {o['ratio']:g}"
        if self.input.leaving:
            parts[1] += f" and {self.input.settings.offload_gradients:.0%} of the gradients"
        if self.input.streams and self.input.settings.buffers != ZeroSettings.buffers:
            parts.append(f"{self.input.settings.buffers} buffers")
        parts.append(_checkpointing(self.input))
        if self.input.settings.leaf_classes:
            parts.append("leaf blocks")
        if self.input.tile_tokens:
            parts.append(f"feed-forward in tiles of {self.input.tile_tokens}")
        parts.append(f"micro batch {o['micro_batch']} x {o['accumulation']}")
        if o["reduce_bucket_size"] == SMALL_BUCKET_ELEMS:
            parts.append("small buckets")
        parts.append(f"{o['grad_accum_dtype']} gradients")
        return ", ".join(parts)


def _checkpointing(plan: PlanInput) -> str:
    if plan.checkpointing == "none":
        return "no checkpointing"
    policy = "" if plan.checkpointing == "full" else f"{plan.checkpointing} "
    some = "" if plan.checkpoint_blocks is None else f" of {plan.checkpoint_blocks} of {plan.block_count} blocks"
    return f"{policy}checkpointing{some}"


def state_bytes(plan: PlanInput) -> tuple[int, int]:
    """(GPU, host) bytes of weights and optimizer states of one rank, on CPUs (0, all): less than this is impossible."""
    zero, layout = plan.settings, LAYOUTS[plan.optimizer]
    total = plan.parameters.elems
    owned = partition_size(plan.trained_elems, plan.world_size)
    weights = 2 * (partition_size(total, plan.world_size) if zero.stage == 3 else total)
    kept = layout.remainder + min(layout.moments, layout.matrix_moments)
    share = zero.ratio if plan.deepspeed_settings.offload_optimizer or plan.streams else 0.0
    gpu = (0 if zero.offload_param else weights) + (kept + (2 if zero.stage >= 2 else 0)) * owned * (1 - share)
    host = (kept + (0 if layout.own_offload else layout.step_grad)) * share * owned + (weights if zero.offload_param else 0)
    # A ratio moves whole sub-groups; the bound stays a bound with one sub-group's slack.
    slack = kept * zero.sub_group_elems if 0 < share < 1 else 0
    if plan.device == "cpu":
        return 0, int(gpu + host)
    return max(0, int(gpu - slack)), max(0, int(host - slack))


def _short(need: float, have: int | None) -> int:
    return 0 if have is None else max(0, int(need - have))


def _reason(gpu_short: int, host_short: int, plan: Plan | None) -> str:
    parts = []
    if gpu_short:
        where = f", peak in {plan.gpu.phase}" if plan else ", weights and states alone"
        parts.append(f"GPU short by {show_bytes(gpu_short)}{where}")
    if host_short:
        where = "" if plan else ", states alone"
        parts.append(f"host short by {show_bytes(host_short)}{where}")
    return "; ".join(parts)


def time_on(found: Plan, hardware: Hardware) -> StepTime:
    """Seconds of one step where the plan fits."""
    time = step_time(found.input, hardware.rates)
    return time.later(RETURN_S * found.returns(hardware.gpu_bytes)) if found.input.world_size > 1 else time


def states_short(plan: PlanInput, hardware: Hardware) -> tuple[int, int]:
    """(GPU, host) bytes that weights and states alone are short by; 0, 0: they may fit."""
    least_gpu, least_host = state_bytes(plan)
    return _short(least_gpu, hardware.gpu_bytes), _short(least_host * plan.ranks_per_node, hardware.host_bytes)


def judge(plan: PlanInput, hardware: Hardware) -> Candidate:
    """Does one configuration fit, and how fast would it be?"""
    gpu, host, time = hardware.gpu_bytes, hardware.host_bytes, step_time(plan, hardware.rates)
    gpu_short, host_short = states_short(plan, hardware)
    if gpu_short or host_short:
        return Candidate(plan, False, _reason(gpu_short, host_short, None), gpu_short, host_short, None, time)
    found = quick(plan)
    gpu_short, host_short = _short(found.gpu_least_bytes(), gpu), _short(found.host_need_bytes(), host)
    why = _reason(gpu_short, host_short, found)
    if not why and not hardware.holds(found):
        why = "GPU memory would fragment: what is allocated fits, but not with what would lie unused between it"
    if not why:
        time = time_on(found, hardware)
    return Candidate(plan, not why, why, gpu_short, host_short, found, time)
