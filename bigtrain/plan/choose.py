"""The fastest configuration that fits: enumerate, drop what does not fit, rank the rest, keep the reasons."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any, NamedTuple

from bigtrain.errors import UsageError
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.judge import SMALL_BUCKET_ELEMS, Candidate, judge, state_bytes, states_short
from bigtrain.plan.leaf_choice import LeafBlocks, either, leafed, with_leafs
from bigtrain.plan.machine import show_bytes
from bigtrain.plan.predict import quick
from bigtrain.plan.roofline import speed_numbers, step_time
from bigtrain.plan.settled import WITHOUT_ATTENTION, filled, least_s, policies, with_all_buffers, with_fewest_blocks
from bigtrain.plan.spilled import least_share
from bigtrain.plan.states import LAYOUTS
from bigtrain.plan.zero_settings import ZeroSettings, settings_from_config

# Optimizers that compute the same update as AdamW with an fp32 master, or nearly (8-bit moments).
DEFAULT_OPTIMIZERS = ("adamw", "adamw_8bit", "adamw_split", "adamw_split_8bit")
# Sequences of a step and a rank when the user says nothing of the batch: enough to let the micro batch vary.
SEQUENCES_PER_RANK = 8
# How many of the fastest are looked for: each one more has to be planned, and those that might be as fast.
WANTED = 3
# Settings of stage 3 alone: others leave them as DeepSpeed has them, so that the ds_config reads back as what was planned.
_STAGE_3 = {name: getattr(ZeroSettings, name) for name in
            ("prefetch_elems", "persistence_elems", "max_live_elems", "max_reuse_elems", "sub_group_elems",
             "leaf_classes", "leaf_names", "leaf_suffixes", "leaf_threshold")}  # fmt: skip
Rank = tuple[float, bool, int, int]
_MOST_RANKS = 4096
_MOST_SEQUENCES = 2**31
# Rows that buckets, the dtype of gradients and where these lie have a part in.
_SPARED = ("reduce ", "gradient", "optimizer state, on its way", "weights before flattening", "collective's own copy")


@dataclass(frozen=True)
class Choice:
    """What `choose` found.

    Attributes:
        best: the fastest that fits, None if nothing does.
        fitting: the fastest that fit. rejected: those that might have been faster and do not fit, nearest to fitting first.
        slower: how many were not planned, because they cannot be faster than the last of the fitting.
        advice: what would help, when nothing fits.
        global_batch: sequences of a step, the same for all candidates.
    """

    best: Candidate | None
    fitting: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]
    slower: int
    advice: tuple[str, ...]
    global_batch: int
    hardware: Hardware

    @property
    def options(self) -> dict[str, Any] | None:
        """Of the best candidate: stage, offload, checkpointing, micro batch, accumulation, optimizer."""
        return self.best.options if self.best else None

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""

        def one(c: Candidate) -> dict[str, Any]:
            need = {"gpu_need_bytes": _need(c), "host_need_bytes": c.plan.host_need_bytes()} if c.plan else {}
            return {**c.options, "fits": c.fits, "why": c.why, **speed_numbers(c.input.device, c.time), **need}

        return {
            "chosen": self.options,
            "global_batch": self.global_batch,
            "gpu_memory_bytes": self.hardware.gpu_bytes,
            "host_memory_bytes": self.hardware.host_bytes,
            "fitting": [one(c) for c in self.fitting],
            "rejected": [one(c) for c in self.rejected],
            "slower": self.slower,
            "advice": list(self.advice),
        }


def _need(candidate: Candidate) -> int:
    """Bytes of a card; of one that is short anyway without what fragmentation adds, which takes long to tell."""
    assert candidate.plan is not None
    return candidate.plan.gpu_least_bytes() if candidate.gpu_short_bytes else candidate.plan.gpu_need_bytes()


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
    low = [m for m in range(1, math.isqrt(per_rank) + 1) if per_rank % m == 0]
    return sorted({*low, *(per_rank // m for m in low)})


def usual_optimizers(device: str) -> tuple[str, ...]:
    """What is chosen from where the user said none."""
    return DEFAULT_OPTIMIZERS if device == "cuda" else DEFAULT_OPTIMIZERS[:1]


def rows_per_rank(micro_batch: int | None, accumulation: int | None) -> int:
    """Sequences of a step and a rank: as the user said, as far as they did."""
    if micro_batch:
        return micro_batch * (accumulation or 1)
    return accumulation * max(1, SEQUENCES_PER_RANK // accumulation) if accumulation else SEQUENCES_PER_RANK


def search_settings(hidden: int) -> ZeroSettings:
    """Where a search starts: stage 3 as `bigtrain config generate` writes it, with buckets as at the other stages."""
    zero: dict[str, Any] = dict.fromkeys(("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto")
    zero |= {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 200_000_000}
    return settings_from_config({"zero_optimization": zero, "data_types": {"grad_accum_dtype": "fp32"}}, hidden)


def _families(base: PlanInput, optimizers: tuple[str, ...], recompute: bool | None = None) -> Iterator[PlanInput]:
    """Everything but the micro batch: the base's policy, and what is like it, and number of blocks (without one: all), and no checkpointing."""
    recomputing = policies(base)
    tried = {None: ("none", *recomputing), True: recomputing, False: ("none",)}[recompute]
    for optimizer in optimizers:
        layout = LAYOUTS[optimizer]
        for place in _placements(base.world_size):
            if place["stage"] not in layout.stages:
                continue
            if layout.own_offload and place["offload_param"] and base.device == "cuda":
                continue
            own = {} if place["stage"] == 3 else _STAGE_3
            for checkpointing in tried:
                blocks = base.checkpoint_blocks if checkpointing != "none" else None
                yield base.but(
                    optimizer=optimizer, checkpointing=checkpointing, checkpoint_blocks=blocks, bf16_states=False, overlap_comm=True,
                    offload_gradients=0.0, buffers=ZeroSettings.buffers,
                    **{"ratio": 1.0, **place, **own},
                )  # fmt: skip


def _at(family: PlanInput, micro: int, accumulation: int) -> PlanInput:
    """The family at a micro batch. One micro step has nothing to sum: bf16 has the same bits (config/resolve_training.py)."""
    alike = accumulation == 1 and family.settings.stage >= 2
    return family.but(micro_batch=micro, accumulation=accumulation, grad_bytes=2 if alike else family.settings.grad_bytes)


def _first_fitting(plan: PlanInput, hardware: Hardware, open_share: bool) -> Candidate:
    """The plan as it is, with smaller buckets, gradients in bf16, or (where open) some of these leaving: the first that fits, else as it is."""
    asked = judge(plan, hardware)
    if asked.fits or asked.plan is None:  # weights and states alone are too large: these do not help
        return asked
    gpu = hardware.gpu_bytes
    if gpu is not None and asked.plan.gpu_least_bytes(_SPARED) > gpu:  # at its peak, what these leave alone is
        return asked
    buckets = [plan, plan.but(reduce_bucket_elems=min(SMALL_BUCKET_ELEMS, plan.settings.reduce_bucket_elems))]
    sums = [x.but(grad_bytes=2) for x in buckets] if plan.settings.grad_bytes == 4 else []
    for other in (*buckets[1:], *sums):
        candidate = judge(other, hardware)
        if candidate.fits:
            return candidate
    share = least_share(plan.but(grad_bytes=2), hardware) if open_share else 0.0
    candidate = judge(plan.but(grad_bytes=2, offload_gradients=share), hardware) if share else asked
    return candidate if candidate.fits else asked


def choose(
    base: PlanInput,
    hardware: Hardware,
    *,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    accumulation: int | None = None,
    recompute: bool | None = None,
    share: float | None = None,
    leaf_blocks: LeafBlocks = "auto",
    optimizers: tuple[str, ...] = DEFAULT_OPTIMIZERS,
    wanted: int | None = None,
) -> Choice:
    """Search stage, offload, optimizer states, checkpointing and micro batch at a fixed global batch.

    What a run leaves open (`plan.settled`) is part of each candidate, so that the one that is taken runs as it was ranked.

    Args:
        base: model, ranks, sequence length, kernels, policy of checkpointing; its other values are what the search replaces.
        global_batch: sequences of one step over all ranks; None: what `base` has.
        micro_batch, accumulation: as the user said; None: to be chosen.
        recompute: False: no block; True: those that `base` says; None: either, or as few as fit, unless `base` says a number.
        share: of the gradients that leave the GPU in backward, as the user said; None: the least that fits.
        leaf_blocks: at stage 3; "on": that stage alone is looked at. "auto": as `leaf_choice` has it.
        optimizers: which ones may be chosen, best liked first (ties in speed go to the earlier one).
        wanted: how many of the fastest; what cannot be one of them is not planned. None: all.

    Returns:
        The fastest that fits in `best`, None if nothing does; then with `advice`.

    Raises:
        UsageError: the global batch cannot be divided by the ranks, or is beyond any run; no gradients can leave, though `share` says so.
    """
    world = base.world_size
    batch = global_batch or world * base.micro_batch * base.accumulation
    if base.device == "cpu":  # a card that is there too limits nothing
        hardware = replace(hardware, gpu_bytes=None)
    asked = candidates(
        base, batch, micro_batch=micro_batch, accumulation=accumulation, recompute=recompute, share=share, leaf_blocks=leaf_blocks,
        optimizers=optimizers,
    )  # fmt: skip
    open_blocks = recompute is None and base.checkpoint_blocks is None and base.blocks_are_all
    opened = _Open(open_blocks, share is None, leaf_blocks == "auto")
    fitting, rejected, slower = _search(asked, hardware, optimizers, wanted, opened)
    rejected.sort(key=lambda c: c.gpu_short_bytes * world + c.host_short_bytes)
    one_row = base.but(micro_batch=1, accumulation=batch // world)
    advice = () if fitting else _advice(one_row, rejected, hardware, optimizers)
    return Choice(fitting[0] if fitting else None, tuple(fitting), tuple(rejected), slower, tuple(advice), batch, hardware)


def candidates(
    base: PlanInput, batch: int, *, micro_batch: int | None, accumulation: int | None, recompute: bool | None, share: float | None,
    leaf_blocks: LeafBlocks, optimizers: tuple[str, ...],
) -> list[tuple[int, PlanInput]]:  # fmt: skip
    """What `choose` looks at, before it is known what fits: families by number, at their micro batches.

    Args:
        batch: sequences of one step over all ranks. Others as `choose` has them.

    Raises:
        UsageError: as `choose` has it.
    """
    world = base.world_size
    if batch % world:
        raise UsageError(f"a global batch of {batch} sequences cannot be divided by {world} ranks")
    if batch // world > _MOST_SEQUENCES:
        raise UsageError(f"a global batch of {batch} sequences is more than {_MOST_SEQUENCES:,} for each of {world} ranks")
    pairs = [(m, batch // world // m) for m in _micro_batches(batch // world)]
    pairs = [(m, a) for m, a in pairs if micro_batch in (None, m) and accumulation in (None, a)]
    families = _families(base, optimizers, recompute)
    asked = [(at, _at(family, *pair)) for at, family in enumerate(families) for pair in pairs]
    if share:
        asked = _leaving(asked, share, optimizers)
    if leaf_blocks == "on":
        asked = [(at, leafed(plan)) for at, plan in asked if plan.settings.stage == 3]
        if not asked:
            raise UsageError(
                f"--leaf_blocks on needs ZeRO stage 3, and --offload_gradients {share:g} stage 2: leave one of them out"
            )
    return asked


def _leaving(asked: list[tuple[int, PlanInput]], share: float, optimizers: tuple[str, ...]) -> list[tuple[int, PlanInput]]:
    """Those that can let gradients leave, with that share."""
    able = [(at, plan.but(grad_bytes=2)) for at, plan in asked]
    able = [(at, plan.but(offload_gradients=share)) for at, plan in able if plan.alone]
    if not able:
        one = asked[0][1] if asked else None
        where = f"{one.world_size} rank(s) on {one.device} with {', '.join(optimizers)}" if one else "this batch"
        raise UsageError(
            f"--offload_gradients {share:g} needs one rank on a GPU and an adamw_split optimizer; this is {where}: leave it out, or say auto"
        )
    return able


class _Fitting:
    """Candidates that fit, fastest first. What a run leaves open takes plans to settle, so that is put off until it decides a place.

    Args:
        wanted: places; None: all are settled. rank: of a plan, by seconds of a step. settle: the candidate that will run.
    """

    def __init__(
        self, wanted: int | None, rank: Callable[[PlanInput, float], Rank], settle: Callable[[Candidate], Candidate]
    ) -> None:
        self.wanted, self.rank, self.settle = wanted, rank, settle
        self._open: list[tuple[Rank, int, Candidate]] = []  # by the least that each can come to; a heap
        self._done: list[tuple[Rank, int, Candidate]] = []
        self._count = 0

    def add(self, candidate: Candidate, least_s: float) -> None:
        """`least_s`: no more than what a step takes once it is settled."""
        heappush(self._open, (self.rank(candidate.input, least_s), self._count, candidate))
        self._count += 1

    def faster_than(self, rank: Rank) -> bool:
        """Whether all places are taken by what is as fast at least."""
        while self._open and self._open[0][0] <= rank and not self._taken(rank):
            self._settle_one()
        return self._taken(rank)

    def _taken(self, rank: Rank) -> bool:
        return self.wanted is not None and len(self._done) >= self.wanted and self._done[self.wanted - 1][0] <= rank

    def _settle_one(self) -> None:
        _, number, candidate = heappop(self._open)
        settled = self.settle(candidate)
        for at, (rank, other, known) in enumerate(self._done):
            if known.input == settled.input:  # two ways to the same: the first one counts
                self._done[at] = (rank, min(number, other), known)
                break
        else:
            self._done.append((self.rank(settled.input, settled.time.total_s), number, settled))
        self._done.sort(key=lambda row: row[:2])

    def best(self) -> list[Candidate]:
        """Those that have the places."""
        while self._open and not self.faster_than(self._open[0][0]):
            continue  # it has settled that one, at least
        return [candidate for _, _, candidate in self._done[: self.wanted]]


class _Open(NamedTuple):
    """What a run leaves to its plan: how many blocks are recomputed, how much of the gradients leaves, whether blocks are leafs."""

    blocks: bool
    share: bool
    leafs: bool


def _search(
    asked: list[tuple[int, PlanInput]], hardware: Hardware, optimizers: tuple[str, ...], wanted: int | None, opened: _Open
) -> tuple[list[Candidate], list[Candidate], int]:
    """(the fastest that fit, those that do not fit, how many are slower), by bounds on seconds, the least first.

    `asked`: families by number, at their micro batches.
    """
    blocks, rates = opened.blocks, hardware.rates

    def rank(plan: PlanInput, total_s: float) -> Rank:
        """As fast by the plan: the one that leaves the host alone."""
        return round(total_s, 3), plan.settings.offload_optimizer, optimizers.index(plan.optimizer), plan.settings.stage

    def least_total_s(plan: PlanInput) -> float:
        able = either(plan) if opened.leafs else (plan,)
        return min(step_time(with_all_buffers(one, rates), rates).total_s for one in able)

    def bound(plan: PlanInput) -> Rank:
        least = plan.but(grad_bytes=2)  # which is faster, and what it may have to come to (`_first_fitting`)
        least = least.but(checkpointing="none") if blocks else least
        return rank(plan, least_total_s(least))

    def settle(candidate: Candidate) -> Candidate:
        fewer = blocks and candidate.input.checkpointing != "none"
        best = filled(candidate.input, hardware, share=False, buffers=True, blocks=fewer)
        best = with_leafs(best, hardware) if opened.leafs else best
        return candidate if best == candidate.input else judge(best, hardware)

    fitting = _Fitting(wanted, rank, settle)
    rejected: list[Candidate] = []
    too_large: dict[int, int] = {}
    slower = 0
    for least, at, plan in sorted(((bound(plan), at, plan) for at, plan in asked), key=lambda row: row[0]):
        if fitting.faster_than(least):
            slower += 1
            continue
        if plan.micro_batch >= too_large.get(at, _MOST_SEQUENCES + 1):  # a larger micro batch holds more
            continue
        candidate = _first_fitting(plan, hardware, opened.share)
        if not candidate.fits:
            rejected.append(candidate)
            if candidate.gpu_short_bytes:
                too_large[at] = plan.micro_batch
            continue
        fewest = with_fewest_blocks(candidate.input, hardware) if blocks else candidate.input
        if fitting.faster_than(rank(plan, least_total_s(fewest))):
            slower += 1
            continue
        able = zip(either(candidate.input), either(fewest)) if opened.leafs else [(candidate.input, fewest)]
        fitting.add(candidate, min(least_s(one, few, hardware) for one, few in able))
    return fitting.best(), rejected, slower


def _smallest(base: PlanInput, optimizers: tuple[str, ...]) -> list[PlanInput]:
    """The configurations that hold least at the base's micro batch and accumulation, one for each optimizer and placement."""
    least = base.but(
        checkpointing=WITHOUT_ATTENTION.get(base.checkpointing, base.checkpointing),
        checkpoint_blocks=None,
        reduce_bucket_elems=SMALL_BUCKET_ELEMS,
        grad_bytes=2,
    )
    found = _families(least, optimizers, recompute=True)
    return [f for f in found if f.settings.stage >= 2 and not f.of_attention]


def _any_fits(base: PlanInput, hardware: Hardware, optimizers: tuple[str, ...]) -> Candidate | None:
    options = (option for option in _smallest(base, optimizers) if not any(states_short(option, hardware)))
    judged = (judge(option, hardware) for option in options)
    return next((candidate for candidate in judged if candidate.fits), None)


def _holds_least(base: PlanInput, optimizers: tuple[str, ...]) -> Candidate:
    """The first of those that hold least: on a card or, on CPUs, on the host. Planned are those alone whose states leave that open."""
    on_cards = base.device == "cuda"
    options = _smallest(base, optimizers)
    states = [state_bytes(option)[0 if on_cards else 1] for option in options]
    found: list[tuple[int, int]] = []
    for at in sorted(range(len(options)), key=states.__getitem__):
        if found and states[at] * (1 if on_cards else base.ranks_per_node) > min(found)[0]:
            break
        plan = quick(options[at])
        found.append((plan.gpu_least_bytes() if on_cards else plan.host_need_bytes(), at))
    return judge(options[min(found)[1]], Hardware())


def _advice(base: PlanInput, rejected: list[Candidate], hardware: Hardware, optimizers: tuple[str, ...]) -> list[str]:
    """What would make it fit: more memory, more ranks, shorter sequences. `base`: one row at a time."""
    lines = []
    on_cards = base.device == "cuda"
    least = _holds_least(base, optimizers)
    if least.plan:
        need_gpu, need_host = show_bytes(least.plan.gpu_need_bytes()), show_bytes(least.plan.host_need_bytes())
        held = (
            f"least GPU memory: {need_gpu} a card with {need_host} of host" if on_cards else f"least host memory: {need_host}"
        )
        lines.append(f"{held} ({least.describe()})")
    nearest = rejected[0]
    lines.append(f"nearest: {nearest.describe()}: {nearest.why}")
    # What was fixed of micro batch, recomputing or leaf blocks may be in the way.
    if found := _any_fits(base, hardware, optimizers):
        return [*lines, f"with micro batch and checkpointing left open: {found.describe()} would do"]
    others = tuple(name for name in DEFAULT_OPTIMIZERS if name not in optimizers) if on_cards else ()
    if found := _any_fits(base, hardware, others):
        lines.append(f"another optimizer: {found.describe()} would do")
    return lines + _more_ranks(base, hardware, optimizers) + _fewer_tokens(base, hardware, optimizers)


def _more_ranks(base: PlanInput, hardware: Hardware, optimizers: tuple[str, ...]) -> list[str]:
    per_node, world, rows = base.ranks_per_node, base.world_size, base.world_size * base.accumulation
    what = "cards" if base.device == "cuda" else f"ranks, {max(8, per_node)} on a host,"
    while world < _MOST_RANKS:
        world *= 2
        more = base.but(world_size=world, gpus_per_node=min(world, max(8, per_node)), accumulation=max(1, rows // world))
        found = _any_fits(more, hardware, optimizers)
        if found:
            return [f"more ranks: {world} {what} would do ({found.describe()})"]
    return [f"more ranks: even {_MOST_RANKS} {what} of this size would not do"]


def _fewer_tokens(base: PlanInput, hardware: Hardware, optimizers: tuple[str, ...]) -> list[str]:
    tokens = base.seq_len
    while tokens > 256:
        tokens //= 2
        found = _any_fits(base.but(seq_len=tokens), hardware, optimizers)
        if found:
            return [f"fewer tokens: sequences of {tokens} would do ({found.describe()})"]
    return ["fewer tokens: shorter sequences alone do not help, weights and states are too large"]
