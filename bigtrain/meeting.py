"""Where ranks find out that one of them went another way.

Before a collective that would hang or mix data, each rank says in a few integers where it is and what it is about to do. A
rank that is at `step` while another is at `backward` is an error on both in a millisecond, with the numbers, and not a hang.
All traffic is small, on the CPU, over the control group; nothing waits for a GPU.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import struct
import time
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from bigtrain import ranks, watch
from bigtrain.errors import RanksDisagreeError
from bigtrain.whereabouts import HERE, after

SLOTS = 6
MEET_S = 120.0  # longest wait for the other ranks where a script calls between steps: a save, a load, an export
_BROKEN = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")  # gloo's words


class Point(enum.IntEnum):
    """Places where ranks meet."""

    FAILED = 0
    BATCH = 1
    FORWARD = 2
    BACKWARD = 3
    STEP = 4
    EVALUATE = 5
    SAVE = 6
    LOAD = 7
    EXPORT = 8
    PREPARE = 9
    AGREEMENT = 10


_PLACE = {
    Point.FAILED: "raising an error",
    Point.BATCH: "the start of engine.train_step()",
    Point.FORWARD: "the forward pass",
    Point.BACKWARD: "engine.backward()",
    Point.STEP: "engine.step()",
    Point.EVALUATE: "engine.evaluate()",
    Point.SAVE: "engine.save_checkpoint()",
    Point.LOAD: "engine.load_checkpoint()",
    Point.EXPORT: "engine.export()",
    Point.PREPARE: "engine.checkpoints.prepare()",
    Point.AGREEMENT: "engine.check_agreement()",
}


def pack(value: float) -> int:
    """A float's bits as an integer, so that it travels exactly."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


def unpack(bits: int) -> float:
    """The float behind `pack`."""
    return struct.unpack("<d", struct.pack("<q", bits))[0]


def meet(point: Point, step: int, count: int, values: Sequence[int] = (), limit_s: float | None = None) -> list[list[int]]:
    """Say where this rank is; return every rank's `values` in rank order.

    Args:
        point: what this rank is about to do.
        step: its step number.
        count: how often it did this within the step (micro steps, evaluation batches).
        values: up to SLOTS - 3 integers of 64 bits for the others.
        limit_s: longest wait; `ranks.CONTROL_TIMEOUT_S` by default.

    Raises:
        RanksDisagreeError: on every rank that came, if point, step or count differ, or if some rank did not come in time.
    """
    group = ranks.control_group()
    if group is None or ranks.world_size() == 1:
        return [list(values)]
    mine = torch.zeros(SLOTS, dtype=torch.int64)
    mine[0], mine[1], mine[2] = int(point), step, count
    for i, value in enumerate(values):
        mine[3 + i] = value
    rows = [torch.empty_like(mine) for _ in range(ranks.world_size())]
    limit = ranks.CONTROL_TIMEOUT_S if limit_s is None else limit_s
    began = time.monotonic()
    try:
        with HERE.together(_PLACE[point]):
            work = dist.all_gather(rows, mine, group=group, async_op=True)
            work.wait(datetime.timedelta(seconds=limit))
    except RuntimeError as error:
        raise _absent(point, step, count, time.monotonic() - began, error) from error
    told = [row.tolist() for row in rows]
    if any(row[:3] != told[0][:3] for row in told[1:]):
        raise _apart(told)
    return [row[3 : 3 + len(values)] for row in told]


def announce_failure(step: int) -> None:
    """Tell the others, at whatever point they are, that this rank is about to raise; returns when they know, or in 20 s."""
    with contextlib.suppress(RanksDisagreeError):
        meet(Point.FAILED, step, 0, limit_s=20.0)


def _apart(told: list[list[int]]) -> RanksDisagreeError:
    by_rank = {}
    for rank, (point, step, count, *_) in enumerate(told):
        by_rank[rank] = f"{_PLACE[Point(point)]}, {after(step)}" + (f", number {count}" if count else "")
    listing = "\n".join(f"  rank {r}: {text}" for r, text in by_rank.items())
    failed = [r for r, row in enumerate(told) if row[0] == Point.FAILED]
    hint = (
        f"Rank {', '.join(map(str, failed))} failed first: its own message says why."
        if failed
        else "All ranks must run the same number of forwards, backwards, steps and evaluations in the same order: give each "
        "rank the same number of batches, and call the engine's methods outside of any 'if rank == 0'."
    )
    return RanksDisagreeError(f"the ranks are at different places:\n{listing}\n{hint}", by_rank)


def _absent(point: Point, step: int, count: int, waited_s: float, error: RuntimeError) -> RanksDisagreeError:
    """Find out who has ended, or else, through the store, who else is waiting here: the rest did not come."""
    ended = watch.lost(2.0)
    if ended:
        listing = "\n".join(f"  rank {r}: {text}" for r, text in ended.items())
        return RanksDisagreeError(
            f"{_names(ended)} ended while this rank was at {_PLACE[point]} ({after(step)}), which every rank must reach"
            f"{_advice(ended.values())}\n{listing}",
            dict(ended),
        )
    missing = ranks_without("late", f"{int(point)}/{step}/{count}", wait_s=3.0)
    who = f"rank {', '.join(map(str, missing))}" if missing else "some rank"
    return RanksDisagreeError(
        f"waited {waited_s:.0f} s at {_PLACE[point]} ({after(step)}) and {who} did not come. Every rank must call it: look for an "
        f"'if rank == 0' around it, for a rank that ended or hangs, or for one that has fewer batches.\n{error}",
        {r: "did not come" for r in missing},
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
    """Where a rank's end breaks a collective inside, say which rank it was: gloo itself only knows a port.

    Raises:
        RanksDisagreeError: instead of the RuntimeError of a broken connection.
    """
    try:
        yield
    except RuntimeError as error:
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
