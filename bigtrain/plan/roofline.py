"""Seconds of one optimizer step: matmul time, collectives, PCIe bytes, work on the host. A ranking, not a promise.

The defaults were measured on one H100 80GB HBM3 with 16 cores (PCIe gen5). `bigtrain doctor` measures a machine's own and stores
them; where it has, they are used (`stored_rates`), and `--calibration FILE.json` puts other numbers in their place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from bigtrain.errors import UsageError
from bigtrain.plan.activations import block_bytes
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.parts import feed_forward
from bigtrain.plan.states import LAYOUTS
from bigtrain.plan.streamed import leaving_s, seconds


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a machine does in a second.

    Attributes:
        matmul_flops: large bf16 matmul, FLOP/s. hf_share, liger_share: part of it that a whole model reaches.
        device_bytes_s: GPU memory copied. h2d_bytes_s, d2h_bytes_s: pinned PCIe. pageable_bytes_s: unpinned.
        cpu_adam_s_per_elem: DeepSpeedCPUAdam; cpu_adam_8bit_s_per_elem: its 8-bit stand-in (assumed twice that).
        launch_s_per_block: of the host's thread, to launch one block's forward on a GPU; its backward takes twice that.
        recompute_s_per_block: the same for a forward in backward, with the hooks around it.
        stage3_s_per_block: what stage 3 adds to each of these, hooks and copies that nothing hides.
        host_bytes_s: elementwise passes over host memory with all cores; host_copy_bytes_s: with one thread.
        link_bytes_s: collectives between the cards of one host; network_bytes_s: between hosts.
        peak_flops: what MFU is counted against.
        ranks_share_host: ranks of one host divide its cores and memory bandwidth.
    """

    matmul_flops: float = 784e12
    hf_share: float = 0.57
    liger_share: float = 0.71
    device_bytes_s: float = 2.95e12
    h2d_bytes_s: float = 53e9
    d2h_bytes_s: float = 54e9
    pageable_bytes_s: float = 10e9
    cpu_adam_s_per_elem: float = 0.174e-9
    cpu_adam_8bit_s_per_elem: float = 0.348e-9
    launch_s_per_block: float = 2.0e-3
    recompute_s_per_block: float = 3.2e-3
    stage3_s_per_block: float = 1.5e-3
    host_bytes_s: float = 95e9
    host_copy_bytes_s: float = 28e9
    link_bytes_s: float = 200e9
    network_bytes_s: float = 40e9
    peak_flops: float = 989e12
    ranks_share_host: bool = True


def rates_from(values: Mapping[str, Any]) -> Rates:
    """Defaults with some values replaced.

    Raises:
        UsageError: a key is unknown or a value is not a positive number.
    """
    known = {f.name for f in fields(Rates)}
    for key, value in values.items():
        if key not in known:
            raise UsageError(f"calibration has the unknown key '{key}': use {', '.join(sorted(known))}")
        if key != "ranks_share_host" and (
            isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf")
        ):
            raise UsageError(f"calibration {key} is {value!r}: a positive number is needed")
    return replace(Rates(), **values)


def rates_file(env: Mapping[str, str] | None = None) -> Path:
    """Where `bigtrain doctor` stores a machine's rates: this user's cache folder."""
    env = os.environ if env is None else env
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache", "bigtrain", "machine.json")


def stored_rates(device: str = "cuda", file: Path | None = None) -> Rates | None:
    """The rates that `bigtrain doctor` measured on this machine; None: it has not, or on no GPU while `device` is one.

    A login node's memory and cores say nothing of the machine with the cards, so a file without a card's rates is left alone.
    """
    try:
        values = json.loads((file or rates_file()).read_text(encoding="utf-8"))
        rates = rates_from(values)
    except (OSError, ValueError, AttributeError, UsageError):
        return None
    return rates if device == "cpu" or "matmul_flops" in values else None


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step of all ranks, and its parts.

    Attributes:
        compute_s, communication_s, fetch_s: of all micro steps together; what overlaps is counted once in `total_s`.
        optimizer_s: everything after backward. total_s: the step.
        tokens: trained in a step by all ranks. mfu: model FLOP/s (no recompute) over `peak_flops`.
    """

    compute_s: float
    communication_s: float
    fetch_s: float
    optimizer_s: float
    total_s: float
    tokens: int
    mfu: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total_s


def active_elems(plan: PlanInput, *, of_blocks: bool = False) -> int:
    """Parameters that one token passes through (`of_blocks`: in the blocks): all of a dense model, the chosen experts of a sparse one."""
    g = plan.geometry

    def count() -> int:
        total = 0
        for p in plan.parameters.items:
            sparse = ".experts." in p.name and g.experts
            if p.block is not None or not of_blocks:
                total += p.elems * g.experts_per_token // g.experts if sparse else p.elems
        return total

    return plan.parameters.fact(("active", of_blocks, g), count)


def model_flops_per_token(plan: PlanInput) -> float:
    """6 N + 6 L s d: forward and backward of the matrices, causal attention counted at half."""
    g = plan.geometry
    return 6 * active_elems(plan) + 6 * g.layers * plan.seq_len * g.query


def _again_flops_per_token(plan: PlanInput) -> float:
    """A forward of the blocks that are recomputed, without attention if its results are kept; embedding and head are not among them."""
    if plan.checkpointing in ("none", "selective"):
        return 0.0
    attention = 0 if plan.of_attention else 2 * plan.geometry.layers * plan.seq_len * plan.geometry.query
    whole = 2 * active_elems(plan, of_blocks=True) + attention
    return whole * plan.recomputed_blocks / max(1, plan.block_count)


def _communication_s(plan: PlanInput, rates: Rates) -> float:
    """Collectives of one micro step; ring algorithms move (N - 1) / N of the bytes once (twice for an all-reduce)."""
    world, zero = plan.world_size, plan.settings
    if world == 1:
        return 0.0
    size = 2 * plan.parameters.elems * (world - 1) / world
    speed = rates.link_bytes_s if plan.ranks_per_node == world else rates.network_bytes_s
    if zero.stage == 3:
        return 3 * size / speed  # gather for forward, gather for backward, reduce-scatter
    every = zero.stage == 2
    return 2 * size / speed / (1 if every else plan.accumulation)  # all-reduce, also at stage 2


def _optimizer_s(plan: PlanInput, rates: Rates, forward_s: float) -> float:
    zero, world = plan.settings, plan.world_size
    owned = plan.trained_elems / world
    gather = 0.0
    if world > 1 and zero.stage in (0, 1, 2):
        speed = rates.link_bytes_s if plan.ranks_per_node == world else rates.network_bytes_s
        gather = 2 * plan.parameters.elems * (world - 1) / world / speed
    # 16 B states read and written, gradient cast and copied: about 40 B an element. One kernel of a split optimizer: half, wherever the
    # state comes from.
    kernel = (20 if LAYOUTS[plan.optimizer].own_offload else 40) * owned / rates.device_bytes_s
    if plan.streams:
        return gather + seconds(plan, rates.h2d_bytes_s, rates.d2h_bytes_s, forward_s) + kernel
    if not zero.offload_optimizer:
        return gather + kernel
    share = plan.ranks_per_node if rates.ranks_share_host else 1
    on_host = owned * (zero.ratio if zero.stage == 3 else 1.0)
    eight_bit = "8bit" in plan.optimizer
    adam = on_host * share * (rates.cpu_adam_8bit_s_per_elem if eight_bit else rates.cpu_adam_s_per_elem)
    passes = on_host * share * 14 / rates.host_bytes_s  # clipping 8 B, bf16 copy 6 B
    if zero.stage == 3:
        # Gradients go down, come back up and go down in fp32; weights return through pageable memory, converted by
        # one thread.
        bus = on_host * (6 / rates.d2h_bytes_s + 2 / rates.h2d_bytes_s)
        back = 0.0 if zero.offload_param else on_host * (2 / rates.pageable_bytes_s + 6 / rates.host_copy_bytes_s)
        return adam + passes + bus + back
    return gather + adam + passes + on_host * (4 / rates.d2h_bytes_s + 2 / rates.h2d_bytes_s)


def forward_s(plan: PlanInput, rates: Rates) -> float:
    """Of one micro step: a third of what forward and backward need, or longer if its launches take longer."""
    share = rates.liger_share if plan.kernels == "liger" else rates.hf_share
    compute = plan.tokens * model_flops_per_token(plan) / 3 / (rates.matmul_flops * share)
    return max(compute, plan.block_count * rates.launch_s_per_block)


def _elementwise_s(plan: PlanInput, rates: Rates) -> float:
    """The recompute of selective blocks: what is made again is written once, and about twice as much is read for it."""
    one = block_bytes(
        plan.geometry, plan.tokens, plan.kernels, plan.geometry.dense_layers, plan.seq_len, plan.device, plan.tile_tokens
    )
    return plan.recomputed_blocks * 3 * one.made_again / rates.device_bytes_s


def _tiles(plan: PlanInput) -> int:
    """Tiles of a feed-forward part; 0: it runs in one piece."""
    return -(-plan.tokens // plan.tile_tokens) if plan.tile_tokens else 0


def _tiles_s(plan: PlanInput, rates: Rates) -> float:
    """What tiles add to a micro step: each runs once more in backward, and adds its weight gradients to the fp32 sums.

    A block that is recomputed with another policy than "selective" has counted that run: its recompute ends before the tiles, unless a norm
    comes after them.
    """
    if not plan.tile_tokens:
        return 0.0
    share = rates.liger_share if plan.kernels == "liger" else rates.hf_share
    elems = sum(plan.parameters.items[i].elems for feed in feed_forward(plan.parameters) for i in feed)
    counted = plan.recomputed_blocks / max(1, plan.block_count) if plan.checkpointing != "selective" else 0.0
    if plan.geometry.norms > 2:
        counted = 0.0
    again = 2 * elems * plan.tokens * (1 - counted) / (rates.matmul_flops * share)
    return again + _tiles(plan) * 10 * elems / rates.device_bytes_s  # bf16 read, fp32 read and written


def _launch_s(plan: PlanInput, rates: Rates) -> float:
    """What the host needs for the launches of one micro step: a small one is over sooner on the card than it is launched."""
    recompute = rates.recompute_s_per_block + (_WATCHED_S if plan.of_attention else 0.0)
    return 3 * plan.block_count * rates.launch_s_per_block + plan.recomputed_blocks * recompute


# Of the host, to look for attention in a block's two forwards (models/recompute.py _InAttention), on a CPU where a block takes 4 ms.
_WATCHED_S = 0.8e-3


def _visits(plan: PlanInput) -> int:
    """Blocks that one micro step runs: forward, backward as two, and those that are recomputed."""
    # A tile's two forwards and its backward are about one visit; those of the first one are in the others.
    return 3 * plan.block_count + plan.recomputed_blocks + plan.block_count * max(0, _tiles(plan) - 1)


def _sums_s(plan: PlanInput, rates: Rates) -> float:
    """Passes over gradients that are summed in fp32: each micro step's addition, and copies for the reduction at stages 0 and 1."""
    zero = plan.deepspeed_settings
    whole = zero.stage == 0 or (zero.stage == 1 and zero.grad_bytes == 4)
    if not whole and zero.grad_bytes == 2:
        return 0.0
    straight = zero.stage == 0 or plan.no_buckets
    addition = 10 if straight else 18  # bf16 read, sum read and written; elsewhere a cast or a copy before it
    return (plan.accumulation * addition + (16 if whole else 0)) * plan.trained_elems / rates.device_bytes_s


def _host_inputs_s(plan: PlanInput, rates: Rates) -> float:
    size = 2 * plan.tokens * plan.geometry.hidden * plan.recomputed_blocks + sum(map(sum, plan.of_attention))
    return size * (1 / rates.d2h_bytes_s + 1 / rates.h2d_bytes_s)


def step_time(plan: PlanInput, rates: Rates | None = None) -> StepTime:
    """Seconds of one step of this plan."""
    rates = rates or Rates()
    g = plan.geometry
    share = rates.liger_share if plan.kernels == "liger" else rates.hf_share
    model = model_flops_per_token(plan)
    compute = plan.accumulation * plan.tokens * (model + _again_flops_per_token(plan)) / (rates.matmul_flops * share)
    if plan.checkpointing == "selective":
        compute += plan.accumulation * _elementwise_s(plan, rates)
    compute += plan.accumulation * _tiles_s(plan, rates)
    if plan.checkpointing in ("offload", "offload_inputs"):  # beside the computation, or longer than it
        compute = max(compute, plan.accumulation * _host_inputs_s(plan, rates))
    if g.vocab and plan.loss_kind == "full":
        compute += plan.accumulation * 40 * plan.tokens * g.vocab / rates.device_bytes_s  # passes over fp32 logits
    compute = max(compute, plan.accumulation * _launch_s(plan, rates))
    communication = plan.accumulation * _communication_s(plan, rates)
    fetch = 0.0
    if plan.settings.offload_param:
        fetch = plan.accumulation * 2 * 2 * plan.parameters.elems / plan.world_size / rates.h2d_bytes_s
    hidden = plan.settings.overlap_comm or plan.settings.stage == 3
    micro = max(compute, communication + fetch) if hidden else compute + communication + fetch
    if plan.settings.stage == 3:
        # A part in tiles is one module to stage 3.
        micro += plan.accumulation * (3 * plan.block_count + plan.recomputed_blocks) * rates.stage3_s_per_block
    if plan.device == "cuda":
        micro += _sums_s(plan, rates)
    optimizer = _optimizer_s(plan, rates, forward_s(plan, rates))
    backward = compute / plan.accumulation - forward_s(plan, rates)
    exposed = leaving_s(plan, rates.h2d_bytes_s, rates.d2h_bytes_s, backward)
    tokens = plan.tokens * plan.accumulation * plan.world_size
    total = micro + exposed + optimizer
    mfu = model * tokens / plan.world_size / total / rates.peak_flops
    return StepTime(compute, communication + exposed, fetch, optimizer, total, tokens, mfu)


def speed_numbers(device: str, time: StepTime) -> dict[str, float | None]:
    """What people are told of the speed: nothing for CPUs, for which the rates, a card's, are good for an order only."""
    known = device == "cuda"
    return {
        "seconds_per_step": time.total_s if known else None,
        "tokens_per_s": time.tokens_per_s if known else None,
        "mfu": time.mfu if known else None,
    }
