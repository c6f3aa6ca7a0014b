"""Seconds of one optimizer step: matmul time, collectives, PCIe bytes, work on the host. A ranking, not a promise.

The defaults are of one H100 80GB HBM3 with 16 cores (PCIe gen5) and, where nothing else tells them, fitted to runs of H200s
(docs/results/plan_accuracy.md). `bigtrain doctor` measures a machine's own and stores
them; where it has, they are used (`stored_rates`), and `--calibration FILE.json` puts other numbers in their place.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from bigtrain.errors import UsageError
from bigtrain.plan.activations import block_bytes
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.launched import launched
from bigtrain.plan.leafs import leafs_of_plan
from bigtrain.plan.moved import moved_bytes
from bigtrain.plan.parts import feed_forward, parts_of
from bigtrain.plan.scored import attention_flops
from bigtrain.plan.states import LAYOUTS
from bigtrain.plan.streamed import leaving_s, seconds


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a machine does in a second.

    Attributes:
        matmul_flops: large bf16 matmul, FLOP/s. products_share, experts_share: part of it that a model's matrices, and products in
            groups of routed experts reach (gpt-oss's 606 TFLOP/s on an H200; attention: `scored`).
        device_bytes_s: GPU memory copied, read and written (an H200's: the others were measured on an H100). h2d_bytes_s, d2h_bytes_s: pinned PCIe. pageable_bytes_s: unpinned.
        cpu_adam_s_per_elem: DeepSpeedCPUAdam; cpu_adam_8bit_s_per_elem: its 8-bit stand-in (assumed twice that).
        operation_s: of the host's thread, for a small elementwise operation on a card and its backward (see `launched`).
        stage3_s_per_tensor: what stage 3's hooks add to a block's forward (to its backward twice) for each of its weights and biases, on a host
            with the default `operation_s`. stage3_s_per_leaf: the same for each leaf module, or less where its weights by themselves
            would take less.
        host_bytes_s: elementwise passes over host memory with all cores; host_copy_bytes_s: with one thread.
        link_bytes_s: collectives between the cards of one host; network_bytes_s: between hosts. stage3_bytes_s: those of stage 3, which
            come a module or a prefetch bucket at a time, are no faster than that.
        peak_flops: what MFU is counted against.
        ranks_share_host: ranks of one host divide its cores and memory bandwidth.
    """

    matmul_flops: float = 784e12
    products_share: float = 0.89
    experts_share: float = 0.77
    device_bytes_s: float = 3.6e12
    h2d_bytes_s: float = 53e9
    d2h_bytes_s: float = 54e9
    pageable_bytes_s: float = 10e9
    cpu_adam_s_per_elem: float = 0.174e-9
    cpu_adam_8bit_s_per_elem: float = 0.348e-9
    operation_s: float = 24.3e-6
    stage3_s_per_tensor: float = 0.43e-3
    stage3_s_per_leaf: float = 2.5e-3
    host_bytes_s: float = 95e9
    host_copy_bytes_s: float = 28e9
    link_bytes_s: float = 200e9
    network_bytes_s: float = 40e9
    stage3_bytes_s: float = 80e9
    peak_flops: float = 989e12
    ranks_share_host: bool = True

    @property
    def pace(self) -> float:
        """How much longer this host takes for what its thread does than the one of the defaults."""
        return self.operation_s / Rates.operation_s


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


def rates_file() -> Path:
    """Where `bigtrain doctor` stores a machine's rates: this user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "bigtrain", "machine.json")


def stored_rates(device: str = "cuda") -> Rates | None:
    """The rates that `bigtrain doctor` measured on this machine; None: it has not, or on no GPU while `device` is one.

    A login node's memory and cores say nothing of the machine with the cards, so a file without a card's rates is left alone.
    """
    try:
        values = json.loads(rates_file().read_text(encoding="utf-8"))
        rates = rates_from(values)
    except (OSError, ValueError, AttributeError, UsageError):
        return None
    return rates if device == "cpu" or "matmul_flops" in values else None


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step of all ranks, and its parts.

    Attributes:
        compute_s, host_s, communication_s, fetch_s: of all micro steps together; what overlaps is counted once in `total_s`.
            host_s: of the thread that launches the card's work.
        optimizer_s: everything after backward. total_s: the step.
        tokens: trained in a step by all ranks. mfu: model FLOP/s (no recompute) over `peak_flops`.
    """

    compute_s: float
    host_s: float
    communication_s: float
    fetch_s: float
    optimizer_s: float
    total_s: float
    tokens: int
    mfu: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total_s

    def later(self, seconds: float) -> StepTime:
        """The step with so much more."""
        total = self.total_s + seconds
        return replace(self, total_s=total, mfu=self.mfu * self.total_s / total)


def active_elems(plan: PlanInput, *, of_blocks: bool = False, of_experts: bool = False) -> int:
    """Parameters that one token passes through (in the blocks, or in their routed experts): of these the chosen ones."""
    g = plan.geometry

    def count() -> int:
        total = 0
        for p in plan.parameters.items:
            sparse = ".experts." in p.name and g.experts
            if (p.block is not None or not of_blocks) and (sparse or not of_experts):
                total += p.elems * g.experts_per_token // g.experts if sparse else p.elems
        return total

    return plan.parameters.fact(("active", of_blocks, of_experts, g), count)


def model_flops_per_token(plan: PlanInput) -> float:
    """6 N + 6 L s d: forward and backward of the matrices, causal attention counted at half; of a sliding window what it sees."""
    g = plan.geometry
    return 6 * active_elems(plan) + 6 * g.attended(plan.seq_len) * g.query


def _compute_s(plan: PlanInput, rates: Rates, *, forward: bool = False) -> float:
    """Of one micro step on the card: matrices, attention, and what else the blocks move. `forward`: of its forward alone."""
    times, again = (1.0, 0.0) if forward else (3.0, _recomputed(plan))
    blocks = times * active_elems(plan, of_blocks=True) + (0 if forward else _again_elems(plan))
    outside = times * (active_elems(plan) - active_elems(plan, of_blocks=True) - _looked_up_elems(plan))
    experts = (times + again) * _experts_elems(plan)
    # A row of logits that is no multiple of 16 bytes: products read it element by element.
    outside *= 1 if plan.geometry.vocab % 8 == 0 else _UNALIGNED
    products = (blocks - experts + outside) / rates.products_share + experts / rates.experts_share
    ahead, back = (1.0, 0.0) if forward else (1.0 + again, 1.0)
    attention = attention_flops(plan, rates.products_share, 1.0 if plan.of_attention else ahead, back)
    passes = moved_bytes(plan, ahead, back) / rates.device_bytes_s
    return (2 * plan.tokens * products + attention) / rates.matmul_flops + passes


# Of the head's products, where rows of logits are no multiple of 16 bytes: seconds over those of others (Granite 3 2B, 49,155 columns).
_UNALIGNED = 4.0


def _experts_elems(plan: PlanInput) -> int:
    """Of the routed experts of one token: products in groups of as many rows as chose each of them."""
    return active_elems(plan, of_blocks=True, of_experts=True)


def _looked_up_elems(plan: PlanInput) -> int:
    """Embeddings that no product is made with: rows of them are copied."""

    def count() -> int:
        parts = parts_of(plan.parameters)
        head = parts.head if plan.geometry.vocab else []
        outside = [plan.parameters.items[i] for i in parts.before if i not in head]
        return sum(p.elems for p in outside if len(p.shape) == 2 and any(word in p.name for word in _LOOKED_UP))

    return plan.parameters.fact(("looked up", bool(plan.geometry.vocab)), count)


_LOOKED_UP = ("emb", "wte", "wpe", "shared")


def _recomputed(plan: PlanInput) -> float:
    """Which part of the blocks makes everything again in backward."""
    return 0.0 if plan.checkpointing in ("none", "selective") else plan.recomputed_blocks / max(1, plan.block_count)


def _again_elems(plan: PlanInput) -> float:
    """Matrices' elements that a token passes through again in recomputed blocks; embedding and head are not among them.

    A recompute ends once everything is there that backward asks for: in a block that adds its last product to the stream, before it,
    and before a feed-forward part in tiles (models/tiles.py).
    """
    g = plan.geometry
    left_out = 0
    if not g.experts and g.norms <= 2:
        left_out = _feed_elems(plan) if plan.tile_tokens else plan.block_count * g.ffn * g.hidden
    return _recomputed(plan) * max(0, active_elems(plan, of_blocks=True) - left_out)


def _logits_s(plan: PlanInput, rates: Rates) -> float:
    """Passes over the logits: two readings and a writing where the loss is one kernel. Where operations in fp32 are it, their softmax reads
    a row that no cache holds three times forward, and twice backward."""
    per_logit = 52 if plan.loss_kind == "full" else 6
    return per_logit * plan.tokens * plan.geometry.vocab / rates.device_bytes_s


def _communication_s(plan: PlanInput, rates: Rates) -> float:
    """Collectives of one micro step; ring algorithms move (N - 1) / N of the bytes once (twice for an all-reduce)."""
    world, zero = plan.world_size, plan.settings
    if world == 1:
        return 0.0
    size = 2 * plan.parameters.elems * (world - 1) / world
    speed = rates.link_bytes_s if plan.ranks_per_node == world else rates.network_bytes_s
    if zero.stage == 3:
        return 3 * size / min(speed, rates.stage3_bytes_s)  # gather for forward, gather for backward, reduce-scatter
    every = zero.stage == 2
    return 2 * size / speed / (1 if every else plan.accumulation)  # all-reduce, also at stage 2


def _optimizer_s(plan: PlanInput, rates: Rates, forward_s: float, backward_s: float) -> float:
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
        return gather + seconds(plan, rates.h2d_bytes_s, rates.d2h_bytes_s, forward_s, backward_s) + kernel
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
    """Of one micro step: on the card, or longer if its launches take longer."""
    return max(_compute_s(plan, rates, forward=True), plan.block_count * _launch_s(plan, rates) / 3)


def _elementwise_s(plan: PlanInput, rates: Rates) -> float:
    """The recompute of selective blocks: what is made again is written once, and about twice as much is read for it."""
    one = block_bytes(
        plan.geometry, plan.tokens, plan.kernels, plan.geometry.dense_layers, plan.seq_len, plan.device, plan.tile_tokens
    )
    return plan.recomputed_blocks * 3 * one.made_again / rates.device_bytes_s


def _tiles(plan: PlanInput) -> int:
    """Tiles of a feed-forward part; 0: it runs in one piece."""
    return -(-plan.tokens // plan.tile_tokens) if plan.tile_tokens else 0


def _feed_elems(plan: PlanInput) -> int:
    """Of all feed-forward parts."""
    items = plan.parameters.items
    return plan.parameters.fact(
        "feed elems", lambda: sum(items[i].elems for feed in feed_forward(plan.parameters) for i in feed)
    )


def _tiles_s(plan: PlanInput, rates: Rates) -> float:
    """What tiles add to a micro step: each runs once more in backward, and adds its weight gradients to the fp32 sums."""
    if not plan.tile_tokens:
        return 0.0
    elems = _feed_elems(plan)
    again = 2 * elems * plan.tokens / (rates.matmul_flops * rates.products_share)
    return again + _tiles(plan) * 10 * elems / rates.device_bytes_s  # bf16 read, fp32 read and written


def host_s(plan: PlanInput, rates: Rates | None = None) -> float:
    """Seconds of the host's thread for one micro step: to launch its blocks, and at stage 3 its hooks.

    A small micro step is over sooner on the card than it is launched. Of stage 3's hooks with and without blocks as leaf modules tells
    this of two plans that differ in `settings.leaf_classes`; `step_time` counts it beside what the card does meanwhile.
    """
    rates = rates or Rates()
    again = _launch_s(plan, rates) / 3 + (_WATCHED_S if plan.of_attention else 0.0)
    launches = plan.block_count * _launch_s(plan, rates) + plan.recomputed_blocks * again
    if plan.settings.stage == 3:
        alone, inside = _hooked_tensors(plan)
        leafs_s = (min(rates.stage3_s_per_leaf, n * rates.stage3_s_per_tensor) for n in inside)
        hooks = alone * rates.stage3_s_per_tensor + sum(leafs_s)
        launches += (3 + plan.recomputed_blocks / max(1, plan.block_count)) * hooks * rates.pace
    return launches


def _hooked_tensors(plan: PlanInput) -> tuple[int, list[int]]:
    """Of the blocks at stage 3: how many tensors lie in no leaf module, how many in each of those."""
    zero = plan.settings

    def count() -> tuple[int, list[int]]:
        leafs, tensors = leafs_of_plan(plan), [i for block in plan.parameters.blocks.values() for i in block]
        inside = Counter(leafs[i] for i in tensors if i in leafs)
        return len(tensors) - inside.total(), list(inside.values())

    return plan.parameters.fact(
        ("hooked", zero.leaf_classes, zero.leaf_names, zero.leaf_suffixes, bool(plan.mlp_tile_tokens)), count
    )


def _launch_s(plan: PlanInput, rates: Rates) -> float:
    """Of the host's thread for one block, forward and backward, of which a third is forward's."""
    return launched(plan).operations * rates.operation_s


# Of the host, to look for attention in a block's two forwards (models/recompute.py _InAttention), on a CPU where a block takes 4 ms.
_WATCHED_S = 0.8e-3


def _beside(device_s: float, host_s: float) -> float:
    """What card and host take together: the longer of the two where one takes far longer, a fifth more where they are alike.

    Each waits for the other at times: forward and backward are not bound alike, and at stage 3 the host waits for weights.
    """
    most = max(device_s, host_s)
    return most * (1 + (min(device_s, host_s) / most) ** 4) ** 0.25 if most else 0.0


# Collectives beside computation take memory bandwidth and cores from it: this part of them, at the card.
_CONTENTION = 0.2


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
    model = model_flops_per_token(plan)
    compute = _compute_s(plan, rates) + _logits_s(plan, rates) + _tiles_s(plan, rates)
    if plan.checkpointing == "selective":
        compute += _elementwise_s(plan, rates)
    if plan.checkpointing in ("offload", "offload_inputs"):  # beside the computation, or longer than it
        compute = max(compute, _host_inputs_s(plan, rates))
    communication, host = _communication_s(plan, rates), host_s(plan, rates)
    fetch = 0.0
    if plan.settings.offload_param:
        fetch = 2 * 2 * plan.parameters.elems / plan.world_size / rates.h2d_bytes_s
    if plan.settings.stage == 3:  # the host waits for weights before it launches what needs them
        micro = max(_beside(compute + _CONTENTION * communication, host + communication), communication + fetch)
    elif plan.settings.overlap_comm:
        micro = max(_beside(compute + _CONTENTION * communication, host), communication + fetch)
    else:
        micro = _beside(compute, host) + communication + fetch
    compute, communication, fetch, micro = (plan.accumulation * s for s in (compute, communication, fetch, micro))
    if plan.device == "cuda":
        micro += _sums_s(plan, rates)
    forward = forward_s(plan, rates)
    backward = max(compute / plan.accumulation, host) - forward
    optimizer = _optimizer_s(plan, rates, forward, backward)
    exposed = leaving_s(plan, rates.h2d_bytes_s, rates.d2h_bytes_s, backward)
    tokens = plan.tokens * plan.accumulation * plan.world_size
    total = micro + exposed + optimizer
    mfu = model * tokens / plan.world_size / total / rates.peak_flops
    return StepTime(compute, plan.accumulation * host, communication + exposed, fetch, optimizer, total, tokens, mfu)


def speed_numbers(device: str, time: StepTime) -> dict[str, float | None]:
    """What people are told of the speed: nothing for CPUs, for which the rates, a card's, are good for an order only."""
    known = device == "cuda"
    return {
        "seconds_per_step": time.total_s if known else None,
        "tokens_per_s": time.tokens_per_s if known else None,
        "mfu": time.mfu if known else None,
    }
