"""Learning-rate schedules: pure functions of the step's number. The engine owns the rate and sets it itself.

`step` counts optimizer updates from 0. With a warm-up of W steps, update `s < W` runs at `(s + 1) / W` of the peak rate, so the
first update already moves the weights (transformers' lambdas give 0 there) and update `W - 1` is at the peak. From update W on
the values are those of transformers' `get_*_schedule_with_warmup` at the same step; past the end the last value stays.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

from bigtrain import guards
from bigtrain.errors import UsageError

log = logging.getLogger(__name__)

Factor = Callable[[int], float]
DECAYS: dict[str, Factor | Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
ALIASES = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd"}
NAMES = ("linear", "cosine", "constant", "wsd")


def schedule(
    name: str,
    *,
    warmup_steps: int = 0,
    total_steps: int | None = None,
    min_ratio: float = 0.0,
    decay_steps: int | None = None,
    decay: str = "linear",
) -> Factor:
    """The factor on the peak learning rate as a function of the update's number.

    Args:
        name: "linear", "cosine", "constant" or "wsd" (warm-up, stable, decay); the Hugging Face names are accepted.
        warmup_steps: updates of linear warm-up.
        total_steps: updates of the whole run; may be None for "constant" only.
        min_ratio: what the decay ends at, as a part of the peak rate.
        decay_steps: "wsd" only: updates of the decay at the end; a tenth of `total_steps` by default.
        decay: "wsd" only: "linear", "cosine" or "1-sqrt".

    Returns:
        A function from the 0-based update number to the factor, without state.

    Raises:
        UsageError: on an unknown name or values that contradict each other.
    """
    kind = ALIASES.get(name, name)
    if kind not in NAMES:
        near = difflib.get_close_matches(str(name), [*NAMES, *ALIASES], n=2)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise UsageError(f"unknown schedule {name!r}{hint} Known: {', '.join(NAMES)} (also {', '.join(ALIASES)}).")
    _check(kind, warmup_steps, total_steps, min_ratio, decay_steps, decay)
    if kind == "constant":
        return lambda step: _warm(step, warmup_steps, 1.0)
    assert total_steps is not None
    if kind == "wsd":
        length = max(1, round(total_steps * 0.1)) if decay_steps is None else decay_steps
        length = min(length, total_steps - warmup_steps)
        return _decaying(warmup_steps, total_steps - length, length, min_ratio, DECAYS[decay])
    return _decaying(warmup_steps, warmup_steps, total_steps - warmup_steps, min_ratio, DECAYS[kind])


def own_schedule(function: Callable[[int], Any]) -> Factor:
    """A user's function from the 0-based update number to the factor on the peak rate, checked each time it is asked.

    Raises:
        UsageError: from the result, where the function gives no number of at least 0.
    """

    def factor(step: int) -> float:
        value = function(step)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not 0.0 <= number < math.inf:
            raise UsageError(
                f"lr_scheduler's function gave {value!r} for update {step}: a number of at least 0 is needed, which learning_rate is multiplied by."
            )
        return number

    return factor


def refuse_unknown(kwargs: Iterable[str]) -> None:
    """Names that `schedule` does not take beside the run's own numbers.

    Raises:
        UsageError: naming them.
    """
    known = ("min_ratio", "decay_steps", "decay")
    if wrong := [name for name in kwargs if name not in known]:
        raise UsageError(f"lr_scheduler_kwargs: {', '.join(map(repr, wrong))} is unknown; it takes {', '.join(known)}.")


def _warm(step: int, warmup_steps: int, after: float) -> float:
    return (step + 1) / warmup_steps if step < warmup_steps else after


def _decaying(warmup_steps: int, start: int, length: int, min_ratio: float, shape: Callable) -> Factor:
    """Warm up, stay at the peak until `start`, then follow `shape` for `length` updates down to `min_ratio`."""

    def factor(step: int) -> float:
        progress = min(max(step - start, 0) / max(1, length), 1.0)
        return _warm(step, warmup_steps, shape(progress) * (1.0 - min_ratio) + min_ratio)

    return factor


def _check(
    kind: str, warmup_steps: int, total_steps: int | None, min_ratio: float, decay_steps: int | None, decay: str
) -> None:
    if warmup_steps < 0:
        raise UsageError(f"warmup_steps is {warmup_steps}: it must be 0 or more.")
    for name, value, kinds in (("min_ratio", min_ratio, int | float), ("decay_steps", decay_steps, int | None)):
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise UsageError(f"{name} is {value!r}: it must be a {'whole ' if name == 'decay_steps' else ''}number.")
    if not 0.0 <= min_ratio <= 1.0:
        raise UsageError(f"min_ratio is {min_ratio}: it is a part of the peak learning rate, between 0 and 1.")
    if not isinstance(decay, str) or decay not in DECAYS:
        raise UsageError(f"decay is {decay!r}: it must be one of {', '.join(DECAYS)}.")
    if total_steps is None:
        if kind != "constant":
            raise UsageError(f"schedule {kind!r} needs total_steps: how many updates the run makes.")
        return
    if total_steps < 1:
        raise UsageError(f"total_steps is {total_steps}: it must be at least 1.")
    if warmup_steps > total_steps:
        raise UsageError(f"warmup_steps is {warmup_steps}, more than the run's {total_steps} updates: shorten the warm-up.")
    room = total_steps - warmup_steps
    if kind == "wsd" and decay_steps is not None and not 0 <= decay_steps <= room:
        raise UsageError(f"decay_steps is {decay_steps}: it must lie between 0 and total_steps - warmup_steps = {room}.")


class GroupRates:
    """The learning rates of an optimizer's parameter groups: set right before each update, by nobody but the schedule.

    Args:
        optimizer: its groups hold their peak rates.
        factor: from `schedule`.

    Attributes:
        peaks: the highest rate of each group.
    """

    def __init__(self, optimizer: Any, factor: Factor):
        self._optimizer, self._factor = optimizer, factor
        self.peaks = self._now()
        self._set = list(self.peaks)
        self._spent_told = False

    def _now(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]  # a load may replace the groups

    def at(self, step: int) -> float:
        """The rate of the first group in the update after `step` others."""
        return self.peaks[0] * self._factor(step)

    def set(self, step: int) -> float:
        """Give every group its rate for the update after `step` others; the first group's."""
        self._set = [peak * self._factor(step) for peak in self.peaks]
        for group, rate in zip(self._optimizer.param_groups, self._set):
            group["lr"] = rate
        return self._set[0]

    def tell_spent(self, step: int, lr: float) -> None:
        """Say once that updates change nothing any more: the loop goes on after the schedule's end. `lr`: of update `step`, from 1."""
        if lr == 0.0 < self.peaks[0] and not self._spent_told:
            self._spent_told = True
            log.warning(
                "step %d has the learning rate 0, and so have all that follow: the schedule ended with total_steps. Give the Engine the "
                "total_steps that the loop makes, or a schedule with a min_ratio (lr_scheduler_kwargs).",
                step,
            )

    def changed(self) -> str:
        """The message if a script has set a rate since, else an empty string."""
        return guards.changed_rates(self._set, self._now())

    def forget(self) -> None:
        """The groups may hold any rates until the next update: a checkpoint brings its own."""
        self._set = []
