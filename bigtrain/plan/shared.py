"""What one rank's GPU holds at most, from parts that many plans share: the ledger of `device_tape`, without writing that tape.

Activations know nothing of ZeRO, weights and gradients know nothing of tokens. So each side of the micro steps is played once for all
plans that differ in the other side only, cut at the calls from one to the other, and the two are laid side by side. What comes before
the first update is shared as well; the updates are played for each plan.

Each part is a function of a plan in which what has no part in it stands at one value: nothing else can get in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from operator import add
from typing import Any, NamedTuple, cast

from bigtrain.plan.allocator import at_most_kept
from bigtrain.plan.device import Run, Sharding, finish, sharding
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.tape import ALLOC, FREE, TOUCH, Ledger, Tape
from bigtrain.plan.zero_settings import ZeroSettings

_MICRO_STEPS = "micro steps"
Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class _Cut(Tape):
    """A tape in segments.

    Attributes:
        calls: what was called between them, or the phase that begins there. cuts: events before each call.
        levels: held at the end of each segment. tops: most held in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.cuts: list[int] = []
        self.levels: list[int] = []
        self.tops: list[int] = []

    def call(self, name: str, *args: Any, **how: Any) -> None:
        self.calls.append((name, args, how))
        self.cuts.append(len(self.kinds))

    def phase(self, name: str) -> None:
        self.call("phase", name)
        super().phase(name)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """As the stage of ZeRO that activations talk to."""
        return partial(self.call, name)

    def measured(self) -> _Cut:
        """With the last segment ended, and levels and tops."""
        self.call("end")
        self.levels, self.tops = _profile(self, self.sizes, self.cuts)
        return self

    @cached_property
    def padded(self) -> tuple[list[int], list[int]]:
        """Levels and tops of what the allocator may keep for it."""
        return _profile(self, list(map(at_most_kept, self.sizes)), self.cuts)

    def rows_at_top(self, segment: int) -> dict[str, int]:
        """When a segment holds most."""
        begin, held = (self.cuts[segment - 1], self.levels[segment - 1]) if segment else (0, 0)
        for at in range(begin, self.cuts[segment]):
            kind, size = self.kinds[at], self.sizes[at]
            if kind in (ALLOC, TOUCH) and held + size == self.tops[segment]:
                return self.held_rows(at + 1, in_passing=True)
            held += {ALLOC: size, FREE: -size}.get(kind, 0)
        return self.held_rows(begin)

    def rows_after(self, segment: int) -> dict[str, int]:
        """When it has ended."""
        return self.held_rows(self.cuts[segment]) if segment >= 0 else {}


def _profile(tape: Tape, sizes: list[int], cuts: list[int]) -> tuple[list[int], list[int]]:
    """(held at the end of each segment, most held in it), of a tape with these sizes."""
    levels, tops = [], []
    held = begin = 0
    for end in cuts:
        top = held
        for kind, size in zip(tape.kinds[begin:end], sizes[begin:end]):
            if kind == ALLOC:
                held += size
                top = max(top, held)
            elif kind == FREE:
                held -= size
            elif kind == TOUCH:
                top = max(top, held + size)
        levels.append(held)
        tops.append(top)
        begin = end
    return levels, tops


# What has no part in activations, in what ZeRO does in micro steps, in what comes before the first update.
_NO_ZERO = {"settings": ZeroSettings(stage=0), "optimizer": "adamw", "world_size": 1, "gpus_per_node": None, "drawn": False}
_NO_TOKENS = {"micro_batch": 1, "seq_len": 1, "kernels": "hf", "loss": None}
# What is gathered at once does have a part in what stage 3 does.
_NO_TILES = {"mlp_tile_tokens": 0}
_NO_BLOCKS = {"checkpointing": "none", "checkpoint_blocks": None}


def _for_activations(plan: PlanInput) -> PlanInput:
    return plan.but(loss=plan.loss_kind, accumulation=min(2, plan.accumulation), **_NO_ZERO)


def _for_micro_steps(plan: PlanInput) -> PlanInput:
    """State that is streamed has a part in them where gradients leave, and in what stage 1 is."""
    zero = plan.settings
    blocks = {"checkpointing": "full" if plan.recomputed_blocks else "none"} if zero.stage == 3 else _NO_BLOCKS
    tiles = {"mlp_tile_tokens": 1} if zero.stage == 3 and plan.mlp_tile_tokens else _NO_TILES
    streams = plan.streams and (plan.leaving or zero.stage == 1)
    return plan.but(
        settings=zero if streams else plan.deepspeed_settings, optimizer="adamw_split" if streams else "adamw", drawn=False,
        accumulation=min(2, plan.accumulation), buffers=1, ratio=1.0, **blocks, **tiles, **_NO_TOKENS,
    )  # fmt: skip


def _for_start(plan: PlanInput) -> PlanInput:
    bucket = {} if plan.settings.stage == 3 else {"reduce_bucket_elems": 1}
    return plan.but(accumulation=1, buffers=1, **bucket, **_NO_BLOCKS, **_NO_TILES, **_NO_TOKENS)


@lru_cache(maxsize=256)
def _activations(plan: PlanInput) -> _Cut:
    """All micro steps of a step, of a plan for activations."""
    tape = _Cut()
    Run(plan, tape, cast(Sharding, tape)).micro_steps(steady=True)
    return tape.measured()


@lru_cache(maxsize=256)
def _micro_steps(plan: PlanInput, rank: int) -> _Cut:
    """What the plan's stage does in them, of a plan for micro steps."""
    tape = _Cut()
    shards = sharding(plan, tape, rank)
    for name, args, how in _activations(_for_activations(plan)).calls[:-1]:
        if name != "phase":
            getattr(shards, name)(*args, **how)
        tape.call(name)
    return tape.measured()


class _Start(NamedTuple):
    tape: Tape
    ledger: Ledger
    padded_bytes: int


@lru_cache(maxsize=256)
def _start(plan: PlanInput) -> _Start:
    """Build and start-up, of a plan for the start."""
    tape = Tape()
    shards = sharding(plan, tape)
    tape.phase("build")
    shards.build()
    tape.phase("start-up")
    shards.initialise()
    return _Start(tape, tape.ledger(), _padded_peak(tape))


def _padded_peak(tape: Tape, known: Mapping[str, int] | None = None) -> int:
    """Most that the allocator may keep for a tape. `known`: of some rows."""
    known = known or {}
    sizes = [known[name] if name in known else at_most_kept(size) for size, name in zip(tape.sizes, tape.names)]
    return _profile(tape, sizes, [len(sizes)])[1][0]


class _Top(NamedTuple):
    """Most held in one phase of one micro step, by activations and weights together; `rows` finds what."""

    phase: str
    bytes: int
    rows: Callable[[], dict[str, int]]


def _tops(activations: _Cut, weights: _Cut) -> list[_Top]:
    assert len(activations.cuts) == len(weights.cuts), "activations and weights of different models"
    first = list(map(add, activations.tops, [0, *weights.levels]))  # a segment of activations, then what its call does
    then = list(map(add, weights.tops, activations.levels))
    begins = [(at + 1, args[0]) for at, (name, args, _) in enumerate(activations.calls) if name == "phase"]
    tops = []
    for (begin, phase), (end, _) in pairwise([*begins, (len(first), "")]):
        most_first, most_then = max(first[begin:end]), max(then[begin:end])
        at, later = first.index(most_first, begin), then.index(most_then, begin)
        if most_first > most_then or (most_first == most_then and at <= later):
            tops.append(_Top(phase, most_first, partial(_rows, activations, at, weights, at - 1)))
        else:
            tops.append(_Top(phase, most_then, partial(_rows, weights, later, activations, later)))
    return tops


def _rows(side: _Cut, at: int, other: _Cut, there: int) -> dict[str, int]:
    """When one side holds most in a segment, and the other what it holds after a segment."""
    return _sum(side.rows_at_top(at), other.rows_after(there))


def _sum(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {row: one.get(row, 0) + other.get(row, 0) for row in {**one, **other}}


def _sides(plan: PlanInput, rank: int) -> tuple[_Cut, _Cut]:
    return _activations(_for_activations(plan)), _micro_steps(_for_micro_steps(plan), rank)


def _updates(plan: PlanInput, rank: int, sides: tuple[_Cut, _Cut], tops: Iterable[tuple[str, int]]) -> Tape:
    """From the start's end on, with the micro steps as these (phase, most bytes) on top of what is there."""
    tape = Tape()
    shards = sharding(plan, tape, rank)
    tape.phase("start-up")
    tape.take_over(_start(_for_start(plan)).tape)
    shards.step(first=True)
    for phase, size in tops:
        tape.phase(phase)
        tape.touch(size, _MICRO_STEPS)
    for side in sides:
        tape.take_over(side)
    shards.step(first=False)
    finish(tape, shards)
    return tape


def steady_ledger(plan: PlanInput, rank: int) -> Ledger:
    """`device_tape(plan, rank=rank, steady_only=True).ledger()`."""
    sides, before = _sides(plan, rank), _start(_for_start(plan)).ledger
    tops = _tops(*sides)
    after = _updates(plan, rank, sides, [top[:2] for top in tops]).ledger()
    phases = {**before.by_phase, **after.by_phase}
    by_phase = {name: max(before.by_phase.get(name, 0), after.by_phase.get(name, 0)) for name in phases}
    most, rows = before if before.peak_bytes >= after.peak_bytes else after, {}
    if size := most.rows.get(_MICRO_STEPS):
        rows = next(top for top in tops if top.bytes == size and top.phase == most.peak_phase).rows()
    rows = _sum(rows, {row: held for row, held in most.rows.items() if row != _MICRO_STEPS})
    return Ledger(most.peak_bytes, most.peak_phase, rows, by_phase, after.final_bytes)


def enough_bytes(plan: PlanInput, rank: int) -> int:
    """With so much to reserve, `replay` of expandable memory is never short, whatever lies where; mostly less would do.

    That is what `at_most_kept` says of each block at the moment when these sum to most. The first step is no part of it: each of its
    blocks is there in a later one at the same moment, and more.
    """
    sides = _sides(plan, rank)
    (activations, over), (weights, above) = (side.padded for side in sides)
    micro_steps = max(*map(add, over, [0, *weights]), *map(add, above, activations))
    tape = _updates(plan, rank, sides, [("steady forward", 1)])
    return max(_start(_for_start(plan)).padded_bytes, _padded_peak(tape, {_MICRO_STEPS: micro_steps}))
