"""How a program that trains fails: which rank prints what, the exit code, what other ranks and hosts are told. Torch may be missing."""

from __future__ import annotations

import os
import signal
import sys
import traceback

from bigtrain.errors import BigtrainError, RanksDisagreeError, StoppedError
from bigtrain.hosts import meeting
from bigtrain.versions import missing_package


def report(error: Exception) -> int:
    """Print an error once, or with its rank where only that rank has it; tell the other ranks; returns the exit code."""
    if _has_met() and not isinstance(error, StoppedError):
        from bigtrain import watch

        watch.failed(error)
    ours = error if isinstance(error, BigtrainError) else missing_package(error) or meeting.explain_port(error)
    rank = "0" if meeting.launch_problems() else os.environ.get("RANK", "0")
    if ours is None:
        story = "".join([*traceback.format_exception(error), *untested()])
        print(f"[rank {rank}] {story}", file=sys.stderr, flush=True)
        return BigtrainError.exit_code
    if rank == "0":
        print(f"{type(ours).__name__}: {ours}" if ours.exit_code != StoppedError.exit_code else str(ours), file=sys.stderr)
    elif ours.exit_code != StoppedError.exit_code and (os.environ.get("LOCAL_RANK") == "0" or _first_left(int(rank), ours)):
        # The first rank of another host: under torchrun and Slurm its output is all that is seen there.
        print(f"[rank {rank}] {type(ours).__name__}: {ours}", file=sys.stderr)
    elif _has_met() and not isinstance(ours, RanksDisagreeError | StoppedError) and not _said_by_rank_0(ours):
        print(f"[rank {rank}] {type(ours).__name__}: {str(ours).splitlines()[0]}", file=sys.stderr)
    sys.stderr.flush()
    return ours.exit_code


def untested() -> list[str]:
    """A line for each package that is there in a version which was not tested: a likely cause of what nobody expected."""
    try:
        from bigtrain.diagnostics.doctor.versions import check_installed, measure_packages

        return [f"{finding.line()}\n" for finding in check_installed(measure_packages()) if finding.status != "ok"]
    except OSError:  # a limit on open files may be what failed, and must be told
        return []


def _first_left(rank: int, error: Exception) -> bool:
    """Every rank before this one was killed, so that none of them says what happened."""
    if not _has_met():
        return isinstance(error, RanksDisagreeError) and all(before in error.by_rank for before in range(rank))
    from bigtrain import watch

    lost = watch.lost() or getattr(error, "by_rank", {})  # before there is a watch, the error may know
    return all("without a word" in str(lost.get(before, "")) for before in range(rank))


def _said_by_rank_0(error: Exception) -> bool:
    """What is wrong with the arguments or the data is wrong on every rank."""
    from bigtrain import watch

    return watch.fails_alike(0, error)


def tell_others(error: Exception) -> None:
    """A rank that fails before it has met those that nobody ends with it tells them why, so that they do not wait for it.

    To be called once `report` has said it here; a signal meanwhile ends the process.
    """
    if _has_met() or meeting.launch_problems():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    try:
        from bigtrain.hosts import rollcall
    except ImportError:  # torch itself may be what is missing
        return
    rank = os.environ.get("RANK", "0")
    heard = rollcall.tell(error)  # by rank 0, which says it
    if not heard and "0" not in (rank, os.environ.get("LOCAL_RANK")) and isinstance(error, BigtrainError):
        print(f"[rank {rank}] {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def _has_met() -> bool:
    """True once a process group exists; imports nothing."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def leave() -> None:
    """End the process group, so that no rank's exit looks like a crash to the others."""
    if _has_met():
        import torch.distributed as dist

        from bigtrain import watch

        watch.end()
        dist.destroy_process_group()
