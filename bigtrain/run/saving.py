"""What a run saves on the way: checkpoints or models alone, which of them are kept, and which is the best."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bigtrain import ranks, watch
from bigtrain.checkpoint import store
from bigtrain.data import StepPlan
from bigtrain.diagnostics.metrics import read_rows
from bigtrain.errors import BigtrainError, CheckpointError, RanksDisagreeError

logger = logging.getLogger("bigtrain")


class Saving:
    """The saves of one run; every rank calls it alike.

    Args:
        args: `save_steps`, `save_strategy`, `save_total_limit`, `keep_every`, `load_best_model_at_end`, `save_only_model`; also when to
            evaluate and log.
        engine: what is saved.
        steps: when which rows are trained.
        root: the output folder.
        state: the caller's own values for each checkpoint, beside which the global batch is kept.

    Attributes:
        step: of the newest save; -1 if there is none.
        refused: what the newest save could not begin for, such as a full disk.
        evaluations: the rows of eval.jsonl.
    """

    def __init__(self, args: Any, engine: Any, steps: StepPlan, root: Path, state: dict[str, Any]):
        self.args, self.engine, self.steps, self.root, self.state = args, engine, steps, root, state
        self.step, self._prepared = engine.global_step or -1, False
        self.refused: BigtrainError | None = None
        self.evaluations: Callable[[], list[dict[str, Any]]] = lambda: read_rows(root / "eval.jsonl")

    @property
    def resumable(self) -> bool:
        """True if a run can go on from what is saved."""
        return self.args.saves and not self.args.save_only_model

    def prepare(self) -> None:
        """After the first step that this process makes: what saves need is made beside the steps before the first of them."""
        if self.resumable and not self._prepared:
            self.engine.checkpoints.prepare(self.root)
        self._prepared = True

    def due(self, what: str = "save", step: int | None = None) -> bool:
        """True if it is time to "save", "eval" or log ("logging") after this step: a pure function of the step, so that a resumed run does alike."""
        step = self.engine.global_step if step is None else step
        if getattr(self.args, f"{what}_strategy") == "epoch":
            return self.steps.ends_epoch(step)
        every = getattr(self.args, f"{what}_steps")
        return bool(every) and step > 0 and step % every == 0

    def save(self) -> str:
        """Save this step; returns a line about it. A checkpoint is written while training goes on, a model alone at once.

        Raises:
            CheckpointError, RanksDisagreeError: it cannot be saved, and neither could the one before it. A first failure is told only, and
                `refused` or `lost` has it: somebody may free space before the next. So is one at the last step, after which there is a model.
        """
        before, self.step = self.step, self.engine.global_step
        if self.args.save_only_model:
            return f"saved {self._save_model()}"
        # After a checkpoint that failed, wait for this one: a second failure ends the run.
        failed, self.refused = self.engine.checkpoints.failure() or self.refused, None
        best = self.best() if self.args.load_best_model_at_end else None
        try:
            path = self.engine.save_checkpoint(
                self.root,
                state={**self.state, "global_batch": self.steps.global_batch},
                keep_last=self.args.save_total_limit,
                keep_every=self.args.keep_every,
                keep=() if best is None else (best,),
                wait=failed is not None,
            )
        except (CheckpointError, RanksDisagreeError) as error:  # on all ranks alike
            at_end = self.engine.global_step >= self.steps.steps
            if (failed is not None and not at_end) or _of_one_rank(error):
                raise
            self.step, self.refused = before, error
            what_then = "" if at_end else " (a second failure in a row ends the run)"
            return f"step {self.engine.global_step} was not saved{what_then}: {error}"
        return f"saving {path}, while training goes on"

    def last(self, save: Callable[[], None]) -> BigtrainError | None:
        """At the end of a run: `save` this step unless it is; why it is not saved. The run may still leave a model, which takes less space."""
        try:
            if self.resumable and self.step != self.engine.global_step:
                save()
        except (CheckpointError, RanksDisagreeError) as error:
            if _of_one_rank(error):
                raise
            return error
        return self.lost()

    def lost(self) -> BigtrainError | None:
        """Wait for a save in flight; why the newest step that was to be saved is not, on all ranks alike."""
        failed = self.engine.checkpoints.failure()
        return self.refused or failed

    def best(self) -> int | None:
        """The step with the lowest evaluation loss of those that are saved, this one among them; the earliest of equals."""
        return ranks.main_decides(self._best, "looking for the best checkpoint")

    def _best(self) -> int | None:
        there = {*store.steps(self.root), self.engine.global_step}
        losses = {row["step"]: row["eval_loss"] for row in self.evaluations()}
        known = [step for step in sorted(there) if losses.get(step) is not None]
        return min(known, key=lambda step: losses[step], default=None)

    def load_best(self) -> None:
        """Give the engine the weights of the best checkpoint; all saves are on disk."""
        best = self.best()
        if best is None:  # no evaluation gave a finite loss
            logger.warning("no evaluation has a finite loss: the model is that of the last step")
            return
        if best != self.engine.global_step:
            self.engine.load_checkpoint(self.root, best)
        logger.info("the model is that of step %d, which has the lowest evaluation loss", best)

    def _save_model(self) -> Path:
        out = self.engine.export(self.root / f"model-{self.step}", tokenizer=self.engine.checkpoints.tokenizer)
        ranks.main_decides(self._remove_old_models, "removing old models")
        return out

    def _remove_old_models(self) -> None:
        if self.args.save_total_limit is None:
            return
        found = {int(m[1]): p for p in self.root.glob("model-*") if (m := re.fullmatch(r"model-(\d+)", p.name))}
        for step in sorted(found)[: -self.args.save_total_limit]:
            if not self.args.keep_every or step % self.args.keep_every:
                shutil.rmtree(found[step])


def _of_one_rank(error: BigtrainError) -> bool:
    """Whether a rank has ended, or is about to, by what is caught here: the others cannot go on without it."""
    return bool(watch.lost()) or (isinstance(error, RanksDisagreeError) and error.unforeseen)
