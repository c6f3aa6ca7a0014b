"""Does what a run writes fit the disk that it is written to, and the place that it is to have there."""

from __future__ import annotations

import logging
import math

from bigtrain.checkpoint.files import free_bytes
from bigtrain.errors import UsageError
from bigtrain.plan.disk import Writes, saves_to_come
from bigtrain.run.job import Job
from bigtrain.run.runfolder import RunFolder
from bigtrain.weights.replace import refuse_foreign

logger = logging.getLogger(__name__)


def check(job: Job, folder: RunFolder, reached: int) -> None:
    """Refuse a run whose first checkpoint, or only result, has no place on the disk; warn of one that will fill it. On rank 0.

    Args:
        folder: of the run, before it is opened.
        reached: step that it starts from.

    Raises:
        UsageError: with both sizes; or a run that goes on would at its end find a model in its place that no export may replace.
    """
    args, resumes = job.args, job.args.resume_from_checkpoint is not None
    if resumes and not args.no_export and reached < job.steps.steps:
        refuse_foreign(str(folder.root / "model"), "Move that away, give another --output_dir, or add --no_export")
    if job.checkpoint_bytes is None or job.model_bytes is None:
        return
    kept = args.save_total_limit
    if kept is not None:  # beyond the newest: every N-th, and the best
        often = math.lcm(args.save_steps or 1, args.keep_every) if args.keep_every else None
        kept += saves_to_come(reached, job.steps.steps, often) + args.load_best_model_at_end
    writes = Writes(
        checkpoint_bytes=job.model_bytes if args.save_only_model else job.checkpoint_bytes,
        model_bytes=0 if args.no_export else job.model_bytes,
        saves=_saves(job, reached),
        keep=kept,
        there=len(folder.checkpoints()) if resumes else 0,
    )
    free = free_bytes(folder.root) + (0 if resumes else folder.own_bytes())
    if why := writes.too_much(free, str(folder.root)):
        raise UsageError(f"{why}\nNothing was built.")
    if why := writes.too_many(free, str(folder.root)):
        logger.warning("%s", why)


def _saves(job: Job, reached: int) -> int:
    """Saves of a run from step `reached` on."""
    if job.args.save_strategy != "epoch":
        return saves_to_come(reached, job.steps.steps, job.args.save_steps)
    last = job.steps.steps
    return job.steps.epochs_done(last) - job.steps.epochs_done(reached) + (last > reached and not job.steps.ends_epoch(last))
