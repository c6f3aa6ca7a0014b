"""What happened since the last step: forwards, backwards, this rank's share of loss and tokens; and telling the other ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import torch

from bigtrain import guards, ranks
from bigtrain.engine import agreement
from bigtrain.engine.flags import GradientFlags
from bigtrain.errors import DataError, RanksDisagreeError
from bigtrain.guards import RankStep
from bigtrain.meeting import Point, meet
from bigtrain.ranks import pack, unpack

log = logging.getLogger(__name__)


class Accumulation:
    """The micro batches of one step.

    Args:
        size: backwards a step, unless a step plans its own number.
        device: where the model runs.

    Attributes:
        forwards, backwards: through the engine, since the last step.
        planned: backwards until the next step.
        sums: this rank's share of the loss, and of the target tokens; float64, on the device.
        torn: a backward failed half-way: some gradients hold its part, others do not.
        held: host memory that the device may still be reading.
    """

    def __init__(self, size: int, device: torch.device):
        self._size = size
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)
        self.forwards = self.backwards = 0
        self.planned = size
        self.torn = False
        self.held: list[torch.Tensor] = []

    @property
    def at_last(self) -> bool:
        """True if the next backward is the step's last."""
        return self.backwards + 1 >= self.planned

    def no_backward(self) -> str:
        """Why a backward cannot come now; empty if it can."""
        if self.torn:
            return self.unfinished()
        if self.forwards == 0:
            return (
                "backward() without a forward through the engine since the last step: call loss = engine(**batch).loss first."
            )
        if self.backwards >= self.forwards:  # losses of parts that share nothing: torch itself would not mind
            return (
                f"backward() number {self.backwards + 1} of a step in which the model ran {self.forwards} times: each call counts as one micro "
                "batch, so that two losses of one forward would be averaged, and the step come early. Add them: backward(loss_a + loss_b)."
            )
        if self.backwards >= self.planned:
            return f"backward() number {self.backwards + 1} of a step of {self.planned}: call engine.step() between."
        return ""

    def unfinished(self) -> str:
        """Why no new step can begin."""
        return (
            f"a step is under way, with {self.backwards} of {self.planned} backwards done: finish it with backward() and step(). If "
            "it failed half-way, its gradients cannot be taken back: load the last checkpoint into a new Engine."
        )

    def tell_left_out(self) -> None:
        """Warn, at the end of a loop, of backwards that no step has used: rows that went through the model and taught it nothing."""
        if self.backwards and not self.torn and ranks.is_main():
            log.warning(
                "the last %d of %d micro batches of a step were not applied: no engine.step() came that had all of them. Weights are those "
                "after the step before; give a multiple of %d batches, or the rest to engine.train_step() as a step of its own",
                self.backwards,
                self.planned,
                self.planned,
            )

    @contextlib.contextmanager
    def adding(self, share: torch.Tensor) -> Iterator[None]:
        """A backward of a loss whose share in the reported one is `share`, in fp64: a bf16 loss would be rounded once more."""
        self.torn = True
        yield
        self.torn = False
        self.sums[0].add_(share)
        self.backwards += 1

    def plan(self, counts: Sequence[int], step: int) -> int:
        """Plan a step of micro batches with so many target tokens each; the number in all ranks' together.

        Raises:
            RanksDisagreeError: on every rank, if they have different numbers of micro batches.
            DataError: on every rank, if there is no target at all.
        """
        told = meet(Point.BATCH, step, 0, (len(counts), sum(counts)))
        if len({row[0] for row in told}) > 1:
            numbers = {r: row[0] for r, row in enumerate(told)}
            raise RanksDisagreeError(f"train_step(): ranks were given different numbers of micro batches: {numbers}", numbers)
        total = sum(row[1] for row in told)
        if not counts:
            raise DataError(
                f"step {step + 1}: train_step() got no micro batch: an empty list, or a generator that was used up. It takes the micro "
                "batches of one step: train_step([batch, ...])."
            )
        if total == 0:
            raise DataError(
                f"step {step + 1}: no target token in the global batch ({len(told)} ranks x {len(counts)} "
                "micro batches): every label is -100. Check the chat template's answers, seq_len and the truncation side."
            )
        self.planned = len(counts)
        self.sums[1].fill_(sum(counts))  # not added: the forward of an earlier plan may have failed
        return total

    def exchange(self, step: int, flags: GradientFlags, order: int, written: int) -> list[RankStep]:
        """Tell what this rank knows, and hear the others. The one wait for the device in a step: DeepSpeed would wait here too.

        Args:
            step: steps done.
            flags: which parameters got a sound gradient.
            order: hash of the order in which gradients were reduced.
            written: see `RankStep`.

        Raises:
            RanksDisagreeError: if the orders differ, a rank is elsewhere, or weights were written on some ranks only.
        """
        sound = torch.isfinite(flags.marks).all().double().reshape(1)
        loss, tokens, finite = torch.cat([self.sums, sound]).tolist()
        bad = guards.UNKNOWN if finite else flags.first()
        packed = (pack(loss), 4 * int(tokens) + written, agreement.fold(bad, order))
        rows = meet(Point.STEP, step, self.backwards, packed)
        told = [RankStep(unpack(a), b // 4, *agreement.unfold(c), b % 4) for a, b, c in rows]
        if len({row.order for row in told}) > 1:
            raise RanksDisagreeError(
                f"step {step + 1}: ranks reduced the same parameters in different orders: gradients are mixed. "
                "Run the model's modules in the same order on every rank."
            )
        without = [rank for rank, row in enumerate(told) if not row.written]
        if without and any(row.written == 2 for row in told):
            raise RanksDisagreeError(
                f"step {step + 1}: a script wrote weights since the last step, but not on ranks {without}: each rank updates the part "
                "that it owns, so they would be old in one part and new in another. Write the same values on every rank."
            )
        return told

    def clear(self) -> None:
        """A step is done."""
        self.forwards = self.backwards = 0
        self.planned = self._size
        self.held = []
        self.sums.zero_()
