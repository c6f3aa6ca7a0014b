"""Which row is trained when: pure functions of (seed, epoch, position) and of the step. No torch, no state.

Position p of a run is a plain counter over all rows of all epochs: epoch p // n_rows, place p % n_rows in that epoch's
permutation. Step s of global batch G = micro_batch * accumulation * world_size uses positions s*G ... s*G + G - 1:

    row j of micro step a on rank r  =  s*G + a*(micro_batch*world_size) + r*micro_batch + j

So the rows of a step, and their order, do not depend on how G is split, and a run resumes from one integer. A run that is
resumed with another G goes on at the position it had reached: `StepPlan.offset` is added to every position then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from bigtrain.errors import DataError

_MASK64 = (1 << 64) - 1
# Eight alternating half rounds: four already mix a Feistel network (Luby and Rackoff 1988); small radices get more.
_ROUNDS = 8


def _mix(x: int) -> int:
    """Finaliser of SplitMix64 (Steele, Lea, Flood 2014): 64 bits in, 64 well mixed bits out."""
    x &= _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """One key per half round; every pair (seed, epoch) gives unrelated keys."""
    key = _mix(_mix(seed + 0x9E3779B97F4A7C15) ^ _mix(epoch + 0xD1B54A32D192ED03))
    return tuple(_mix(key + 0x9E3779B97F4A7C15 * (i + 1)) for i in range(_ROUNDS))


def _encrypt(x: int, radix: int, keys: tuple[int, ...]) -> int:
    """A bijection of 0 ... radix**2 - 1: a Feistel network over two digits of that radix."""
    left, right = divmod(x, radix)
    for key in keys:
        left, right = right, (left + _mix(key ^ (right * 0x9E3779B97F4A7C15))) % radix
    return left * radix + right


@dataclass(frozen=True)
class SampleOrder:
    """The order of `n_rows` rows over any number of epochs, in O(1) memory.

    Args:
        n_rows: rows in the data set, at least 1.
        seed: another seed gives another order; every epoch has its own permutation.
        shuffle: False keeps the order of the data set.

    Raises:
        DataError: there are no rows.
    """

    n_rows: int
    seed: int = 42
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.n_rows < 1:
            raise DataError(f"the data set has {self.n_rows} rows: there is nothing to order or to train on")

    def row(self, position: int) -> int:
        """Index (0 ... n_rows - 1) of the row at `position` (0, 1, ... without end)."""
        if position < 0:
            raise DataError(f"position {position} of the sample order is negative")
        epoch, x = divmod(position, self.n_rows)
        if not self.shuffle or self.n_rows == 1:
            return x
        keys = _round_keys(self.seed, epoch)
        radix = math.isqrt(self.n_rows - 1) + 1  # smallest with radix**2 >= n_rows, so walks are short
        # Cycle walking (Black and Rogaway 2002): a bijection of the square restricted to 0 ... n_rows-1 stays one.
        x = _encrypt(x, radix, keys)
        while x >= self.n_rows:
            x = _encrypt(x, radix, keys)
        return x


@dataclass(frozen=True)
class StepPlan:
    """How many steps a run has and which positions each micro batch takes; the same on every rank by construction.

    Attributes:
        n_rows: rows in the training set.
        micro_batch: rows in one forward on one rank.
        accumulation: micro batches per step on one rank.
        world_size: ranks.
        steps: optimizer updates of the whole run, at least 1.
        offset: added to every position; not 0 where earlier steps had another global batch.
        resumed_at: (step, position of the step before it) where a run goes on, if known: that one may have had another global batch.
    """

    n_rows: int
    micro_batch: int
    accumulation: int
    world_size: int
    steps: int
    offset: int = 0
    resumed_at: tuple[int, int] | None = None

    @property
    def global_batch(self) -> int:
        """Rows per step over all ranks."""
        return self.micro_batch * self.accumulation * self.world_size

    @property
    def epochs(self) -> float:
        """Epochs that the planned steps make."""
        return self.position(self.steps) / self.n_rows

    def position(self, step: int) -> int:
        """Rows used by all ranks before `step`."""
        return self.offset + step * self.global_batch

    def ends_epoch(self, step: int) -> bool:
        """True if an epoch's last row is among those of the step that makes `step` steps done; steps run on into the next epoch."""
        if step < 1:
            return False
        resumed_at, before = self.resumed_at or (-1, 0)
        if step != resumed_at:
            before = self.position(step - 1)
        return self.epochs_done(step) > max(0, before) // self.n_rows

    def epochs_done(self, step: int) -> int:
        """Whole passes over the rows before `step`."""
        return max(0, self.position(step)) // self.n_rows  # below 0 before a run that was resumed with a larger global batch

    def resumed(self, step: int, position: int, last_batch: int | None = None) -> StepPlan:
        """The same steps, of which `step` begins at `position`; `last_batch`: rows of the step before, if known."""
        at = None if last_batch is None else (step, position - last_batch)
        return replace(self, offset=position - step * self.global_batch, resumed_at=at)

    def positions(self, step: int, rank: int, micro_step: int) -> range:
        """The `micro_batch` consecutive positions of one micro batch."""
        first = self.position(step) + (micro_step * self.world_size + rank) * self.micro_batch
        return range(first, first + self.micro_batch)

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"{self.steps} steps of {self.global_batch} rows ({self.micro_batch} micro x {self.accumulation} accumulation "
            f"x {self.world_size} ranks) = {self.epochs:.3f} epochs of {self.n_rows} rows; epochs run on into each other, "
            "no row is dropped"
        )


def _check_counts(counts: dict[str, int]) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DataError(f"{name}={value!r} must be an integer of at least 1")


def plan_steps(
    n_rows: int,
    micro_batch: int,
    accumulation: int,
    world_size: int,
    epochs: float = 1.0,
    max_steps: int | None = None,
    *,
    n_samples: int | None = None,
    done: tuple[int, int] = (0, 0),
) -> StepPlan:
    """Agrees on the number of steps before the first one.

    Rule: a run of E epochs has ceil(E * n_rows / global batch) steps. Epochs run on into each other, so no row is
    dropped at the end of an epoch; the last step of the run is filled with the first rows of the next epoch's order.
    Of a resumed run this holds for the rows that are left.

    Args:
        n_rows: rows of the packed training set.
        micro_batch: rows per forward and rank.
        accumulation: micro batches per step and rank.
        world_size: ranks.
        epochs: passes over the rows, fractions allowed.
        max_steps: when given (and not -1), the number of steps; `epochs` is then not used.
        n_samples: samples before packing, for the message.
        done: (step, position) that a resumed run starts from.

    Raises:
        DataError: a count is not a positive integer, the rows do not fill one global batch, or a resumed run is beyond its
            last step.
    """
    _check_counts({"micro_batch": micro_batch, "accumulation": accumulation, "world_size": world_size})
    global_batch = micro_batch * accumulation * world_size
    if n_rows < global_batch:
        samples = f"{n_samples} samples make " if n_samples is not None else ""
        raise DataError(
            f"too little data for one step: {samples}{n_rows} rows, but a step takes {global_batch} = {micro_batch} "
            f"(micro batch) x {accumulation} (accumulation) x {world_size} (ranks). Use a smaller micro batch or "
            "accumulation, fewer ranks, a shorter seq_len (more rows), or more data"
        )
    if max_steps is not None and max_steps != -1:
        _check_counts({"max_steps": max_steps})
        if done[0] > max_steps:
            raise DataError(f"the run is resumed after step {done[0]}, but max_steps is {max_steps}: raise max_steps")
        return StepPlan(n_rows, micro_batch, accumulation, world_size, max_steps).resumed(*done)
    if not (epochs > 0 and math.isfinite(epochs)):
        raise DataError(f"epochs={epochs!r} must be a finite number above 0 (or give max_steps)")
    # As a fraction: 1.1 epochs of 10 rows are 11 rows, where floating point says 11.000000000000002, one step more.
    step, position = done
    rows_left = Fraction(epochs).limit_denominator(10**6) * n_rows - position
    steps = max(1, step + max(0, math.ceil(rows_left / global_batch)))
    return StepPlan(n_rows, micro_batch, accumulation, world_size, steps).resumed(step, position)


@dataclass(frozen=True)
class EvalPlan:
    """The same number of evaluation batches on every rank; places beyond the last row are filled without loss."""

    n_rows: int
    micro_batch: int
    world_size: int

    @property
    def batches(self) -> int:
        """Batches per rank, equal on all of them."""
        return -(-self.n_rows // (self.micro_batch * self.world_size))

    def rows(self, batch: int, rank: int) -> Iterator[int | None]:
        """Row indices of one batch; None where there is no row left and a filler without targets stands in."""
        first = (batch * self.world_size + rank) * self.micro_batch
        for row in range(first, first + self.micro_batch):
            yield row if row < self.n_rows else None


def plan_eval(n_rows: int, micro_batch: int, world_size: int) -> EvalPlan:
    """Plans an evaluation pass over every row exactly once.

    Raises:
        DataError: no rows, or a count that is not a positive integer.
    """
    _check_counts({"micro_batch": micro_batch, "world_size": world_size})
    if n_rows < 1:
        raise DataError("the evaluation set has 0 rows; give evaluation data with text in it, or turn evaluation off")
    return EvalPlan(n_rows, micro_batch, world_size)
