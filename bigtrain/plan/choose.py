"""The fastest configuration that fits: enumerate, drop what does not fit, rank the rest, keep the reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bigtrain.errors import UsageError
from bigtrain.plan.flat import slice_elems
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.machine import show_bytes
from bigtrain.plan.predict import Plan, fragments, predict
from bigtrain.plan.roofline import Rates, StepTime, step_time
from bigtrain.plan.spilled import least_share
from bigtrain.plan.states import LAYOUTS

# Optimizers that compute the same update as AdamW with an fp32 master, or nearly (8-bit moments).
DEFAULT_OPTIMIZERS = ("adamw", "adamw_8bit", "adamw_split", "adamw_split_8bit")
# Tried in place of the asked bucket only where that does not fit; smaller buckets cost more collectives.
SMALL_BUCKET_ELEMS = 50_000_000
_MOST_RANKS = 4096


@dataclass(frozen=True)
class Candidate:
    """One configuration.

    Attributes:
        input: what it is. fits: whether it does. why: what is short, empty if it fits.
        gpu_short_bytes, host_short_bytes: what is missing (0 if enough).
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
            "activation_checkpointing": self.input.checkpointing == "full",
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
        parts.append("checkpointing" if o["activation_checkpointing"] else "no checkpointing")
        parts.append(f"micro batch {o['micro_batch']} x {o['accumulation']}")
        if o["reduce_bucket_size"] == SMALL_BUCKET_ELEMS:
            parts.append("small buckets")
        parts.append(f"{o['grad_accum_dtype']} gradients")
        return ", ".join(parts)


@dataclass(frozen=True)
class Choice:
    """What `choose` found.

    Attributes:
        best: the fastest that fits, None if nothing does.
        fitting: all that fit, fastest first. rejected: the rest, nearest to fitting first.
        advice: what would help, when nothing fits.
        global_batch: sequences of a step, the same for all candidates.
    """

    best: Candidate | None
    fitting: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]
    advice: tuple[str, ...]
    global_batch: int
    gpu_memory_bytes: int | None
    host_memory_bytes: int | None

    @property
    def options(self) -> dict[str, Any] | None:
        """Of the best candidate: stage, offload, checkpointing, micro batch, accumulation, optimizer."""
        return self.best.options if self.best else None

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""

        def one(c: Candidate) -> dict[str, Any]:
            numbers = {"seconds_per_step": c.time.total_s, "tokens_per_s": c.time.tokens_per_s, "mfu": c.time.mfu}
            need = {"gpu_need_bytes": c.plan.gpu_need_bytes(), "host_need_bytes": c.plan.host_need_bytes()} if c.plan else {}
            return {**c.options, "fits": c.fits, "why": c.why, **numbers, **need}

        return {
            "chosen": self.options,
            "global_batch": self.global_batch,
            "gpu_memory_bytes": self.gpu_memory_bytes,
            "host_memory_bytes": self.host_memory_bytes,
            "plan": self.best.plan.to_json() if self.best and self.best.plan else None,
            "fitting": [one(c) for c in self.fitting],
            "rejected": [one(c) for c in self.rejected],
            "advice": list(self.advice),
        }


def _placements(world: int) -> list[dict[str, Any]]:
    """Stages and offloads worth telling apart; with one rank, stages 1 and 2 hold the same as each other."""
    stages = [2] if world == 1 else [1, 2]
    found: list[dict[str, Any]] = [{"stage": s, "offload_optimizer": False, "offload_param": False} for s in stages]
    found.append({"stage": 2, "offload_optimizer": True, "offload_param": False})
    found.append({"stage": 3, "offload_optimizer": False, "offload_param": False})
    found += [{"stage": 3, "offload_optimizer": True, "offload_param": False, "ratio": r} for r in (0.5, 1.0)]
    found.append({"stage": 3, "offload_optimizer": True, "offload_param": True})
    return found


def _micro_batches(per_rank: int) -> list[int]:
    """Divisors of the sequences a rank has in a step, smallest first."""
    return [m for m in range(1, per_rank + 1) if per_rank % m == 0]


def _families(base: PlanInput, optimizers: tuple[str, ...]) -> Iterator[PlanInput]:
    """Everything but the micro batch."""
    for optimizer in optimizers:
        layout = LAYOUTS[optimizer]
        for place in _placements(base.world_size):
            if place["stage"] not in layout.stages or (place["offload_optimizer"] and not layout.offload):
                continue
            if layout.own_offload and place["offload_param"] and base.device == "cuda":
                continue
            for checkpointing in ("none", "full"):
                yield base.but(
                    optimizer=optimizer, checkpointing=checkpointing, bf16_states=False, overlap_comm=True,
                    **{"ratio": 1.0, **place},
                )  # fmt: skip


def state_bytes(plan: PlanInput) -> tuple[int, int]:
    """(GPU, host) bytes of weights and optimizer states of one rank: less than this is impossible."""
    zero, layout = plan.settings, LAYOUTS[plan.optimizer]
    total = plan.parameters.elems
    owned = slice_elems(plan.trained_elems, plan.world_size)
    weights = 2 * (slice_elems(total, plan.world_size) if zero.stage == 3 else total)
    kept = layout.remainder + min(layout.moments, layout.matrix_moments)
    share = zero.ratio if plan.told.offload_optimizer or plan.streams else 0.0
    gpu = (0 if zero.offload_param else weights) + (kept + (2 if zero.stage >= 2 else 0)) * owned * (1 - share)
    host = (kept + (0 if layout.own_offload else layout.step_grad)) * share * owned + (weights if zero.offload_param else 0)
    # A ratio moves whole sub-groups; the bound stays a bound with one sub-group's slack.
    slack = kept * zero.sub_group_elems if 0 < share < 1 else 0
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


def judge(plan: PlanInput, gpu: int | None, host: int | None, rates: Rates | None = None) -> Candidate:
    """Does one configuration fit, and how fast would it be?

    Args:
        plan: the configuration. gpu: bytes of one card; host: bytes of one host; None: no limit.
    """
    time, ranks = step_time(plan, rates), plan.ranks_per_node
    least_gpu, least_host = state_bytes(plan)
    gpu_short, host_short = _short(least_gpu, gpu), _short(least_host * ranks, host)
    if gpu_short or host_short:
        return Candidate(plan, False, _reason(gpu_short, host_short, None), gpu_short, host_short, None, time)
    found = predict(plan, reserve=False)
    gpu_short, host_short = _short(found.gpu_need_bytes(), gpu), _short(found.host_need_bytes(), host)
    why = _reason(gpu_short, host_short, found)
    if not why and gpu is not None and fragments(plan, gpu):
        why = "GPU memory would fragment: allocations fit, the allocator's segments do not"
    return Candidate(plan, not why, why, gpu_short, host_short, found, time)


def least_blocks(plan: PlanInput, gpu: int | None, host: int | None, rates: Rates | None = None) -> Candidate | None:
    """The plan with the fewest recomputed blocks that fits, 0 included; None if not even all of them suffice.

    Args:
        plan: the configuration; its policy is kept ("full" where it has none), its number of blocks is what is looked for.
        gpu, host: bytes of one card and of one host; None: no limit.
    """
    policy = "full" if plan.checkpointing == "none" else plan.checkpointing

    def candidate(blocks: int, host: int | None) -> Candidate:
        return judge(plan.but(checkpointing=policy, checkpoint_blocks=blocks), gpu, host, rates)

    # More blocks never hold more, except on the host of inputs that are kept there: that is looked at in the end.
    limit = None if policy == "offload" and plan.device == "cuda" else host
    low, high = -1, plan.block_count
    if not candidate(high, limit).fits:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if candidate(middle, limit).fits else (middle, high)
    found = candidate(high, host)
    return found if found.fits else None


def _first_fitting(plan: PlanInput, gpu: int | None, host: int | None, rates: Rates | None) -> Candidate:
    """The plan as it is, with smaller buckets, gradients summed in bf16, or some of these leaving: the first that fits, else as it is."""
    asked = judge(plan, gpu, host, rates)
    if asked.fits or asked.plan is None:  # weights and states alone are too large: these do not help
        return asked
    buckets = [plan, plan.but(reduce_bucket_elems=min(SMALL_BUCKET_ELEMS, plan.settings.reduce_bucket_elems))]
    sums = [x.but(grad_bytes=2) for x in buckets] if plan.settings.grad_bytes == 4 else []
    for other in (*buckets[1:], *sums):
        candidate = judge(other, gpu, host, rates)
        if candidate.fits:
            return candidate
    share = least_share(plan.but(grad_bytes=2), gpu, host)
    candidate = judge(plan.but(grad_bytes=2, offload_gradients=share), gpu, host, rates) if share else asked
    return candidate if candidate.fits else asked


def choose(
    base: PlanInput,
    *,
    gpu_memory_bytes: int | None,
    host_memory_bytes: int | None,
    global_batch: int | None = None,
    optimizers: tuple[str, ...] = DEFAULT_OPTIMIZERS,
    rates: Rates | None = None,
) -> Choice:
    """Search stage, offload, optimizer states, checkpointing and micro batch at a fixed global batch.

    Args:
        base: model, ranks, sequence length, kernels; its other values are what the search replaces.
        gpu_memory_bytes, host_memory_bytes: of one card and of one host; None: no limit.
        global_batch: sequences of one step over all ranks; None: what `base` has.
        optimizers: which ones may be chosen, best liked first (ties in speed go to the earlier one).

    Raises:
        UsageError: the global batch cannot be divided by the ranks.
    """
    world = base.world_size
    batch = global_batch or world * base.micro_batch * base.accumulation
    if batch % world:
        raise UsageError(f"a global batch of {batch} sequences cannot be divided by {world} ranks")
    fitting: list[Candidate] = []
    rejected: list[Candidate] = []
    for family in _families(base, optimizers):
        for micro in _micro_batches(batch // world):
            settings = family.but(micro_batch=micro, accumulation=batch // world // micro)
            candidate = _first_fitting(settings, gpu_memory_bytes, host_memory_bytes, rates)
            (fitting if candidate.fits else rejected).append(candidate)
            if not candidate.fits and candidate.gpu_short_bytes:
                break  # a larger micro batch holds more
    order = {name: at for at, name in enumerate(optimizers)}
    fitting.sort(key=lambda c: (round(c.time.total_s, 3), order[c.input.optimizer], c.input.settings.stage))
    rejected.sort(key=lambda c: c.gpu_short_bytes * world + c.host_short_bytes)
    advice = () if fitting else _advice(base, rejected, gpu_memory_bytes, host_memory_bytes, optimizers)
    return Choice(
        fitting[0] if fitting else None, tuple(fitting), tuple(rejected), tuple(advice), batch, gpu_memory_bytes,
        host_memory_bytes,
    )  # fmt: skip


def _smallest(base: PlanInput, optimizers: tuple[str, ...]) -> list[PlanInput]:
    """The configurations that hold least, one for each optimizer and placement."""
    least = base.but(micro_batch=1, accumulation=1, reduce_bucket_elems=SMALL_BUCKET_ELEMS, grad_bytes=2)
    return [f for f in _families(least, optimizers) if f.checkpointing == "full" and f.settings.stage >= 2]


def _any_fits(base: PlanInput, gpu: int | None, host: int | None, optimizers: tuple[str, ...]) -> Candidate | None:
    for option in _smallest(base, optimizers):
        candidate = judge(option, gpu, host)
        if candidate.fits:
            return candidate
    return None


def _advice(
    base: PlanInput, rejected: list[Candidate], gpu: int | None, host: int | None, optimizers: tuple[str, ...]
) -> list[str]:
    """What would make it fit: more memory, more ranks, shorter sequences."""
    lines = []
    smallest = [judge(option, None, None) for option in _smallest(base, optimizers)]
    by_gpu = min(smallest, key=lambda c: c.plan.gpu_need_bytes() if c.plan else 0)
    if by_gpu.plan:
        need_gpu, need_host = by_gpu.plan.gpu_need_bytes(), by_gpu.plan.host_need_bytes()
        held = f"{show_bytes(need_gpu)} a card with {show_bytes(need_host)} of host"
        lines.append(f"least GPU memory: {held} ({by_gpu.describe()})")
    nearest = rejected[0]
    lines.append(f"nearest: {nearest.describe()}: {nearest.why}")
    lines += _more_ranks(base, gpu, host, optimizers) + _fewer_tokens(base, gpu, host, optimizers)
    return lines


def _more_ranks(base: PlanInput, gpu: int | None, host: int | None, optimizers: tuple[str, ...]) -> list[str]:
    per_node, world = base.ranks_per_node, base.world_size
    while world < _MOST_RANKS:
        world *= 2
        found = _any_fits(base.but(world_size=world, gpus_per_node=min(world, max(8, per_node))), gpu, host, optimizers)
        if found:
            return [f"more ranks: {world} cards would do ({found.describe()})"]
    return [f"more ranks: even {_MOST_RANKS} cards of this size would not do"]


def _fewer_tokens(base: PlanInput, gpu: int | None, host: int | None, optimizers: tuple[str, ...]) -> list[str]:
    tokens = base.seq_len
    while tokens > 256:
        tokens //= 2
        found = _any_fits(base.but(seq_len=tokens), gpu, host, optimizers)
        if found:
            return [f"fewer tokens: sequences of {tokens} would do ({found.describe()})"]
    return ["fewer tokens: shorter sequences alone do not help, weights and states are too large"]
