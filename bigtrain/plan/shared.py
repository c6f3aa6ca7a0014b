"""What one rank's GPU holds at most, from parts that many plans share: the ledger of `device_tape`, without writing that tape.

Activations know nothing of ZeRO, weights and gradients know nothing of tokens. So each side of the micro steps is played once for all
plans that differ in the other side only, cut at the calls from one to the other, and the two are laid side by side. What comes before
the first update is shared as well; the updates are played for each plan.

Each part is a function of a plan in which what has no part in it stands at one value: nothing else can get in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from operator import add
from typing import Any, NamedTuple, cast

from bigtrain.plan.device import Run, Sharding, finish, sharding
from bigtrain.plan.inputs import PlanInput, ZeroSettings
from bigtrain.plan.tape import ALLOC, FREE, TOUCH, Ledger, Tape

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
        held = begin = 0
        for end in self.cuts:
            top = held
            for kind, size in zip(self.kinds[begin:end], self.sizes[begin:end]):
                if kind == ALLOC:
                    held += size
                    top = max(top, held)
                elif kind == FREE:
                    held -= size
                elif kind == TOUCH:
                    top = max(top, held + size)
            self.levels.append(held)
            self.tops.append(top)
            begin = end
        return self

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
        return self.held_rows(self.cuts[segment]) if segment >= 0 else {}


# What has no part in activations, in what ZeRO does in micro steps, in what comes before the first update.
_NO_ZERO = {"settings": ZeroSettings(stage=0), "optimizer": "adamw", "world_size": 1, "gpus_per_node": None, "drawn": False}
_NO_TOKENS = {"micro_batch": 1, "seq_len": 1, "kernels": "hf", "loss": None}
_NO_BLOCKS = {"checkpointing": "none", "checkpoint_blocks": None}


def _for_activations(plan: PlanInput) -> PlanInput:
    return plan.but(loss=plan.loss_kind, accumulation=min(2, plan.accumulation), **_NO_ZERO)


def _for_micro_steps(plan: PlanInput) -> PlanInput:
    blocks = {"checkpointing": "full" if plan.recomputed_blocks else "none"} if plan.settings.stage == 3 else _NO_BLOCKS
    optimizer = "adamw_split" if plan.streams else "adamw"
    return plan.but(
        accumulation=min(2, plan.accumulation), optimizer=optimizer, drawn=False, buffers=1, ratio=1.0, **blocks, **_NO_TOKENS
    )


def _for_start(plan: PlanInput) -> PlanInput:
    bucket = {} if plan.settings.stage == 3 else {"reduce_bucket_elems": 1}
    return plan.but(accumulation=1, buffers=1, **bucket, **_NO_BLOCKS, **_NO_TOKENS)


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


@lru_cache(maxsize=256)
def _start(plan: PlanInput) -> tuple[Tape, Ledger]:
    """Build and start-up, of a plan for the start."""
    tape = Tape()
    shards = sharding(plan, tape)
    tape.phase("build")
    shards.build()
    tape.phase("start-up")
    shards.initialise()
    return tape, tape.ledger()


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
            tops.append(_Top(phase, most_first, partial(_sum, activations.rows_at_top, at, weights.rows_after, at - 1)))
        else:
            tops.append(_Top(phase, most_then, partial(_sum, weights.rows_at_top, later, activations.rows_after, later)))
    return tops


def _sum(one: Callable[[int], dict[str, int]], at: int, other: Callable[[int], dict[str, int]], there: int) -> dict[str, int]:
    rows = dict(one(at))
    for row, size in other(there).items():
        rows[row] = rows.get(row, 0) + size
    return rows


def steady_ledger(plan: PlanInput, rank: int) -> Ledger:
    """`device_tape(plan, rank=rank, steady_only=True).ledger()`."""
    start, before = _start(_for_start(plan))
    activations, weights = _activations(_for_activations(plan)), _micro_steps(_for_micro_steps(plan), rank)
    tops, tape = _tops(activations, weights), Tape()
    shards = sharding(plan, tape, rank)
    tape.phase("start-up")
    tape.take_over(start)
    shards.step(first=True)
    for top in tops:
        tape.phase(top.phase)
        tape.touch(top.bytes, _MICRO_STEPS)
    tape.take_over(activations)
    tape.take_over(weights)
    shards.step(first=False)
    finish(tape, shards)
    after = tape.ledger()
    by_phase = {
        name: max(before.by_phase.get(name, 0), after.by_phase.get(name, 0)) for name in {**before.by_phase, **after.by_phase}
    }
    if before.peak_bytes >= after.peak_bytes:
        return Ledger(before.peak_bytes, before.peak_phase, before.rows, by_phase, after.final_bytes)
    rows = dict(after.rows)
    if size := rows.pop(_MICRO_STEPS, 0):
        top = next(top for top in tops if top.bytes == size and top.phase == after.peak_phase)
        rows = _sum(lambda _: rows, 0, lambda _: top.rows(), 0)
    return Ledger(after.peak_bytes, after.peak_phase, rows, by_phase, after.final_bytes)
