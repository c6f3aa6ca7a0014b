"""Continue, skip or stop: pure decisions from what the ranks told each other. No torch, no communication.

Every function is given the same rows on every rank, so every rank decides alike.

Counting rule. `global_step` counts global batches consumed: a skipped step counts, because its data are used up and the data
position moves on. The learning-rate schedule follows the same number, so that it ends with the data; `updates` counts the
optimizer updates that were applied, `global_step - updates` were skipped.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bigtrain.errors import NonFiniteError

log = logging.getLogger(__name__)
UNKNOWN = -1


@dataclass(frozen=True)
class RankStep:
    """What one rank knows at the end of a step, before the update.

    Attributes:
        loss: its share of the global loss (the shares of all ranks add up to the loss).
        tokens: its target tokens.
        bad_parameter: index of the first parameter whose local gradient is not finite, or UNKNOWN.
        order: hash of the order in which gradients were reduced.
        written: 0 if nobody else wrote weights since the last step, 1 if somebody did, 2 if this rank's masters took values over.
    """

    loss: float
    tokens: int
    bad_parameter: int
    order: int
    written: int = 0


@dataclass(frozen=True)
class Verdict:
    """What to do with a step: `apply` it or not; `reason` says why not."""

    apply: bool
    loss: float
    tokens: int
    reason: str = ""


def judge(rows: Sequence[RankStep], step: int, names: Sequence[str]) -> Verdict:
    """Apply the update unless some rank's loss or gradient is not finite.

    Args:
        rows: one per rank, in rank order.
        step: number of the step, for the message.
        names: parameter names by index.
    """
    loss = math.fsum(r.loss for r in rows) if all(math.isfinite(r.loss) for r in rows) else math.nan
    tokens = sum(r.tokens for r in rows)
    bad = [rank for rank, r in enumerate(rows) if not math.isfinite(r.loss) or r.bad_parameter != UNKNOWN]
    if not bad:
        return Verdict(True, loss, tokens)
    details = []
    for rank in bad:
        row = rows[rank]
        what = [] if math.isfinite(row.loss) else [f"loss {row.loss}"]
        if row.bad_parameter != UNKNOWN:
            what.append(f"first parameter with a non-finite gradient: {names[row.bad_parameter]}")
        details.append(f"rank {rank}: {', '.join(what)}")
    return Verdict(False, loss, tokens, f"step {step}: not finite on {'; '.join(details)}")


@dataclass
class NonFiniteCount:
    """Steps skipped in a row and in all; stops the run when `limit` in a row is reached."""

    limit: int
    in_a_row: int = 0
    total: int = 0

    def note(self, applied: bool) -> bool:
        """Record a step; True if the run must stop now."""
        if applied:
            self.in_a_row = 0
            return False
        self.in_a_row += 1
        self.total += 1
        return self.in_a_row >= self.limit

    def report(self, reason: str, step: int, lr: float) -> None:
        """Say that step number `step` was skipped.

        Raises:
            NonFiniteError: `limit` in a row.
        """
        log.error("%s. Step skipped: weights and optimizer state are unchanged (%d in a row).", reason, self.in_a_row)
        if self.in_a_row >= self.limit:
            raise NonFiniteError(
                f"{self.in_a_row} steps in a row were not finite; the last: {reason}. The weights are those of step "
                f"{step - self.in_a_row}. Look at the data and the learning rate ({lr:.3g}).",
                step,
                self.in_a_row,
            )


def differing(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Names whose values are not equal on all ranks, as first seen, each with the ranks' values in rank order."""
    names = dict.fromkeys(name for row in rows for name in row)
    table = {name: [row.get(name) for row in rows] for name in names}
    return {name: values for name, values in table.items() if any(v != values[0] for v in values[1:])}


def report_differences(differences: dict[str, list[Any]], step: int, buffers: Sequence[str] = ()) -> str:
    """The message for `differing`, in its order, at most 12 lines; `buffers`: those that are no parameters."""
    lines = []
    for name, values in list(differences.items())[:12]:
        lines.append(f"  {name}: " + ", ".join(f"rank {r} {v}" for r, v in enumerate(values)))
    if len(differences) > 12:
        lines.append(f"  and {len(differences) - 12} more")
    if buffers and len(buffers) == len(differences):
        why = (
            "\nThese are buffers, of which a checkpoint keeps rank 0's. What forward makes of a rank's own samples must be made the same on every "
            "rank: torch.distributed.all_reduce where forward computes it, or register_buffer(..., persistent=False), which ranks may "
            "hold different. The engine does so for running statistics of BatchNorm and InstanceNorm alone."
        )
        return f"after step {step} the ranks no longer hold the same state:\n" + "\n".join(lines) + why
    return (
        f"after step {step} the ranks no longer hold the same state:\n"
        + "\n".join(lines)
        + "\nTheir results cannot be trusted "
        "from here: go back to the last checkpoint. Usual causes: weights changed outside the optimizer on some rank only, a "
        "forward or backward that went around the engine, or hardware that computes wrongly."
    )


def changed_rates(set_to: Sequence[float], found: Sequence[float]) -> str:
    """The message if parameter groups no longer have the learning rates that the engine gave them, else an empty string."""
    changed = [f"group {i}: {now:g}" for i, (was, now) in enumerate(zip(set_to, found)) if was != now]
    if not changed:
        return ""
    return (
        f"the learning rate was set in the optimizer's parameter groups ({', '.join(changed)}): the engine sets it before each update "
        "from learning_rate and the schedule, so that would do nothing. For another rate, save, and load into a new Engine."
    )


def changed_freezing(
    before: Sequence[bool], now: Sequence[bool], names: Sequence[str], new: Sequence[str] = (), gone: Sequence[str] = ()
) -> str:
    """The message if parameters were frozen, unfrozen, put in or taken out since the engine was built, else an empty string."""
    thawed = [n for n, was, is_ in zip(names, before, now) if is_ and not was]
    frozen = [n for n, was, is_ in zip(names, before, now) if was and not is_]
    if not (thawed or frozen or new or gone):
        return ""
    parts = []
    if new:
        parts.append(
            f"{listing(new)} came into the model after the Engine was built: the optimizer does not know them, they would never move"
        )
    if gone:
        parts.append(
            f"{listing(gone)} left the model after the Engine was built: the optimizer would move what no forward uses (write values into the "
            "old parameter instead of replacing it)"
        )
    if thawed:
        parts.append(
            f"requires_grad was set to True on {listing(thawed)}: the optimizer does not know them, they would never move"
        )
    if frozen:
        parts.append(f"requires_grad was set to False on {listing(frozen)}: weight decay and momentum would still move them")
    return (
        "; ".join(parts) + ". Freeze and unfreeze before the Engine is built; to change it later, save, and build a new Engine."
    )


def listing(names: Sequence[str], shown: int = 5) -> str:
    """Up to `shown` names, then how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
