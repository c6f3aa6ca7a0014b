"""A launcher that starts the same job again after a failure: it goes on from its newest checkpoint, whatever the flags say."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bigtrain import ranks
from bigtrain.run.argument_problems import RESTART_COUNTS
from bigtrain.run.runfolder import RunFolder

logger = logging.getLogger(__name__)


def restarts(env: Mapping[str, str] = os.environ) -> int:
    """How often the launcher has started this job before; 0 the first time."""
    return max((int(env[name]) for name in RESTART_COUNTS if env.get(name, "").isdigit()), default=0)


def after_restart(args: Any) -> Any:
    """The arguments of a job that its launcher has restarted. Collective.

    The command line is that of the first start: it may say to overwrite the output folder, or to begin at a checkpoint that the
    job has long left behind. Both would throw steps away.

    Args:
        args: `bigtrain.run.arguments.TrainArguments`.

    Returns:
        `args`, on a restart with `--resume_from_checkpoint auto` where this job may have written to its output folder.
    """
    # A host that has just joined counts from 0: the highest count is the job's.
    count = int(ranks.max_across(restarts()))
    if count == 0:
        return args
    said = args.resume_from_checkpoint
    own = ranks.main_decides(lambda: _own_checkpoints(RunFolder(args.output_dir)), "looking for checkpoints")
    resume = "auto" if own or said is None else said
    if ranks.is_main():
        logger.info("restart %d of this job by its launcher: --resume_from_checkpoint %s", count, resume)
    return replace(args, resume_from_checkpoint=resume, overwrite_output_dir=False)


def _own_checkpoints(folder: RunFolder) -> bool:
    """Whether this job has saved; what it was to replace is not its own, and goes."""
    folder.forget_the_one_before(always=True)
    return bool(folder.checkpoints())
