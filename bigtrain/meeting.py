"""Where ranks find out that one of them went another way.

Before a collective that would hang or mix data, each rank says in a few integers where it is and what it is about to do. A
rank that is at `step` while another is at `backward` is an error on both in a millisecond, with the numbers, and not a hang.
All traffic is small, on the CPU, over the control group; nothing waits for a GPU.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Iterable, Iterator, Sequence

import torch.distributed as dist

from bigtrain import ranks, watch
from bigtrain.errors import RanksDisagreeError
from bigtrain.whereabouts import HERE, after, called_from

MEET_S = 120.0  # longest wait for the other ranks where a script calls between steps: a save, a load, an export
_LATE = ("Timed out waiting", "Operation timed out")  # gloo's words
_BROKEN = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")


class Point(enum.StrEnum):
    """Places where ranks meet."""

    FAILED = ranks.FAILED
    BATCH = "the start of engine.train_step()"
    FORWARD = "the forward pass"
    BACKWARD = "engine.backward()"
    STEP = "engine.step()"
    EVALUATE = "engine.evaluate()"
    SAVE = "engine.save_checkpoint()"
    LOAD = "engine.load_checkpoint()"
    EXPORT = "engine.export()"
    PREPARE = "engine.checkpoints.prepare()"
    AGREEMENT = "engine.check_agreement()"
    GATHERED = "bigtrain.zero.gathered()"


def meet(point: Point, step: int, count: int, values: Sequence[int] = (), limit_s: float | None = None) -> list[list[int]]:
    """Say where this rank is; return every rank's `values` in rank order.

    Args:
        point: what this rank is about to do.
        step: its step number.
        count: how often it did this within the step (micro steps, evaluation batches).
        values: up to ranks.SLOTS - 3 integers of 64 bits for the others.
        limit_s: longest wait; `ranks.CONTROL_TIMEOUT_S` by default.

    Raises:
        RanksDisagreeError: on every rank that came, if point, step or count differ, or if some rank did not come in time.
    """
    began = time.monotonic()
    try:
        with HERE.together(point.value):
            words = f"{point}, {after(step)}" + (f", number {count}" if count else "")
            return ranks.header(point, step, count, values, words, limit_s)
    except RuntimeError as error:
        raise _absent(point, step, count, time.monotonic() - began, error) from error


def announce_failure(step: int) -> None:
    """Tell the others, at whatever point they are, that this rank is about to raise; returns when they know, or in 20 s."""
    with contextlib.suppress(RanksDisagreeError):
        meet(Point.FAILED, step, 0, limit_s=20.0)


def _absent(point: Point, step: int, count: int, waited_s: float, error: RuntimeError) -> RanksDisagreeError:
    """Find out who has ended, or else, through the store, who else is waiting here: the rest did not come."""
    line = called_from()[1]
    here = f"{point} ({after(step)}{f', called at {line}' if line else ''})"
    ended = watch.lost(2.0)
    if ended:
        listing = "\n".join(f"  rank {r}: {text}" for r, text in ended.items())
        return RanksDisagreeError(
            f"{_names(ended)} ended while this rank was at {here}, which every rank must reach{_advice(ended.values())}\n{listing}",
            dict(ended),
        )
    missing = ranks_without("late", f"{point.name}/{step}/{count}", wait_s=3.0)
    who = f"rank {', '.join(map(str, missing))}" if missing else "some rank"
    seen = watch.seen()
    listing = "".join(f"\n  rank {r}: {seen[r]}" for r in missing if r in seen)
    return RanksDisagreeError(
        f"waited {waited_s:.0f} s at {here} and {who} did not come. Every rank must call it: look for an "
        f"'if rank == 0' around it, for a rank that ended or hangs, or for one that has fewer batches.{listing}\n{error}",
        {r: seen.get(r, "did not come") for r in missing},
    )


def _advice(ends: Iterable[str]) -> str:
    """What to do about ranks that ended so; the words are `watch.lost`'s."""
    if any("came to its end" in end for end in ends):
        return ". Give each rank the same number of batches and calls:"
    if any(end.startswith("failed") for end in ends):
        return ": its own message says why."
    return f": {watch.KILLED}. Go on from the newest checkpoint (--resume_from_checkpoint auto, engine.load_checkpoint)."


@contextlib.contextmanager
def naming_the_lost() -> Iterator[None]:
    """Where a collective inside is broken by a rank's end, or waits in vain, say which rank it was: gloo itself only knows a port.

    Raises:
        RanksDisagreeError: instead of the RuntimeError of a broken connection, or of one in which nobody came.
    """
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error) for sign in _LATE):
            raise _in_vain(error) from error
        if not any(sign in str(error) for sign in _BROKEN):
            raise
        gone = watch.lost(3.0)
        if gone is None:
            gone = {r: "ended without a word" for r in ranks_without("lost", "connection", wait_s=3.0)}
        listing = "".join(f"\n  rank {r}: {text}" for r, text in gone.items())
        raise RanksDisagreeError(
            f"{_names(gone) if gone else 'some rank'} ended, or lost its connection, while the others waited for it: its own output "
            "says why; if it says nothing, the process was killed from outside (kill -9, out of memory: see dmesg). Go on from "
            f"the newest checkpoint (--resume_from_checkpoint auto, engine.load_checkpoint).{listing}\n{error}",
            gone,
        ) from error


def _in_vain(error: RuntimeError) -> RanksDisagreeError:
    line, seen = called_from()[1], watch.seen()
    listing = "".join(f"\n  rank {r}: {text}" for r, text in seen.items())
    return RanksDisagreeError(
        f"this rank{f', called at {line},' if line else ''} waited in vain for another: every rank must make the same calls. Look for an "
        f"'if rank == 0' around this one, and for a rank that hangs.{listing}\n{error}",
        dict(seen),
    )


def _names(ended: Iterable[int]) -> str:
    return f"rank {', '.join(map(str, ended))}"


def ranks_without(topic: str, key: str, wait_s: float) -> list[int]:
    """Leave a note `topic/key` in the store for this rank and list the ranks that left none within `wait_s`."""
    store = store_for(topic)
    if store is None:
        return []
    try:
        store.set(f"{key}/{ranks.rank()}", "here")
        end = time.monotonic() + wait_s
        while True:
            missing = [r for r in range(ranks.world_size()) if not store.check([f"{key}/{r}"])]
            if not missing or time.monotonic() > end:
                return missing
            time.sleep(0.05)
    except RuntimeError:  # the store's host is gone
        return []


def store_for(topic: str) -> dist.Store | None:
    """The process group's key-value store, under a prefix of its own: reachable when collectives are stuck."""
    if not ranks.is_distributed():
        return None
    return dist.PrefixStore(f"bigtrain/{topic}", dist.distributed_c10d._get_default_store())
