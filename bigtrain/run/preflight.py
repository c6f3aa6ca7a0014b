"""Before each run: what `bigtrain doctor` finds in a second, and a word between all ranks. What is broken stops the run.

facts            versions that fail together, limits, /dev/shm, interfaces, cards, space in the output folder: once a host
communication    an all-reduce, all-gather and reduce-scatter on the run's own ranks and backend, values checked, within LIMIT_S
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from bigtrain import ranks, watch
from bigtrain.diagnostics.doctor.collectives import COLLECTIVES
from bigtrain.diagnostics.doctor.examine import preflight
from bigtrain.diagnostics.doctor.finding import Finding
from bigtrain.errors import RanksDisagreeError, UsageError
from bigtrain.whereabouts import HERE

logger = logging.getLogger(__name__)

LIMIT_S = 30.0
HINT = (
    "`bigtrain doctor` tests it in processes of its own, tries the settings that are known to help, and prints the ones that did. "
    "--no_preflight starts the run all the same."
)


def check(output_dir: str, workers: int) -> None:
    """Look, and refuse. Collective, after the ranks have met.

    Args:
        output_dir: where the run writes; it need not exist.
        workers: data worker processes of a rank: they need /dev/shm.

    Raises:
        UsageError, RanksDisagreeError: on every rank alike, with each finding's remedy.
    """
    begun = time.monotonic()
    with ranks.together("looking at the machine"):
        found = facts(output_dir, workers) if ranks.local_rank() == 0 else []
    told = ranks.all_gather_object([(f.status, f.line()) for f in found], "looking at the machine")
    host = os.uname().nodename
    for finding in found:
        if finding.status == "warning":
            logger.warning("%s: %s", host, finding.line())
    stopping = [f"rank {r}: {text}" for r, row in enumerate(told) for status, text in row if status == "broken"]
    if stopping:
        lines = "\n  ".join(stopping)
        raise UsageError(f"this run would fail:\n  {lines}\nNothing was built. --no_preflight starts it all the same.")
    communicate()
    logger.info("preflight: machine and communication are fine (%.1f s)", time.monotonic() - begun)


def facts(output_dir: str, workers: int) -> list[Finding]:
    """What is wrong with this host, for this run: what it does not use is a warning at most."""
    gpu = torch.cuda.is_available()
    folder = Path(output_dir).absolute()
    above = next(p for p in (folder, *folder.parents) if p.exists())
    on_host = ranks.local_world_size()
    # Without workers and NCCL nothing goes through shared memory; and CUDA's own pinning is not bound by the lock limit.
    unused = {"lockable memory"} | (set() if workers or (gpu and on_host > 1) else {"/dev/shm"})
    complaints = preflight(str(above), on_host, gpu=gpu)
    return [_milder(f) for f in complaints if f.name not in unused or "RDMA" in f.what]


def _milder(finding: Finding) -> Finding:
    """A disk that is nearly full still holds what a small run writes; each save checks the space that it needs itself."""
    nearly = finding.name == "disk space" and "nearly full" in finding.what
    return replace(finding, status="warning") if nearly else finding


# ---------------------------------------------------------------- communication


def communicate(limit_s: float = LIMIT_S) -> None:
    """`COLLECTIVES` on the ranks of this run.

    A collective that never returns is ended by the watch, on every rank, with stacks.

    Raises:
        RanksDisagreeError: on every rank alike.
    """
    if ranks.world_size() == 1:
        return
    with watch.limited(limit_s):
        for name, collective in COLLECTIVES.items():
            error: Exception | None = None
            try:
                with HERE.together(f"the preflight's {name}"):
                    collective(limit_s)
            except Exception as problem:
                error = problem
            told = ranks.all_gather_object(None if error is None else f"{type(error).__name__}: {error}", f"after {name}")
            _refuse(name, told, error)


def _refuse(name: str, told: Sequence[str | None], error: Exception | None) -> None:
    failed = {r: text for r, text in enumerate(told) if text is not None}
    if failed:
        listing = "\n".join(f"  rank {r}: {text}" for r, text in failed.items())
        raise RanksDisagreeError(
            f"the {name} of {len(told)} ranks over {dist.get_backend()} fails:\n{listing}\n{HINT}", dict(failed)
        ) from error
