"""What the writers of a checkpoint tell each other, beside training: each reports to rank 0, rank 0 tells all how it ended.

On a group of their own, since the training thread talks at the same time. Every message is between two ranks, so that a rank
that died is known by its number, at once: its connections close with it.
"""

from __future__ import annotations

import datetime
import itertools
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bigtrain import ranks


class LostRankError(Exception):
    """A rank ended, or did not answer in time."""


_made = itertools.count()


class Confirmation:
    """One per saver; making it is collective.

    Args:
        timeout_s: how long one rank waits for another, as long as that one is alive.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._group = ranks.savers_group()
        self._tag = ranks.broadcast_object(next(_made), "beginning to save")  # savers of two engines talk at the same time

    def report(self, value: Any) -> dict[int, Any]:
        """Give this rank's JSON value to rank 0. There: every rank's value, or a `LostRankError` in its place; elsewhere {}."""
        if not ranks.is_main():
            self._send(value, 0)
            return {}
        told = {0: value}
        for other in range(1, ranks.world_size()):
            try:
                told[other] = self._receive(other)
            except LostRankError as error:
                told[other] = error
        return told

    def conclude(self, verdict: Any) -> Any:
        """Rank 0's JSON value on every rank.

        Raises:
            LostRankError: rank 0 is gone.
        """
        if not ranks.is_main():
            return self._receive(0)
        for other in range(1, ranks.world_size()):
            try:
                self._send(verdict, other)
            except LostRankError:
                continue  # it is named in the verdict, or ended after it had reported: the checkpoint does not need it
        return verdict

    def _send(self, value: Any, to: int) -> None:
        body = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        for part in (torch.tensor([len(body)]), body):
            self._wait(to, partial(dist.isend, part, to, group=self._group, tag=self._tag))

    def _receive(self, source: int) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        self._wait(source, partial(dist.irecv, size, source, group=self._group, tag=self._tag))
        body = torch.empty(int(size), dtype=torch.uint8)
        self._wait(source, partial(dist.irecv, body, source, group=self._group, tag=self._tag))
        return json.loads(bytes(body.tolist()))

    def _wait(self, rank: int, begin: Callable[[], Any]) -> None:
        try:
            begin().wait(datetime.timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise LostRankError(f"rank {rank} ended, or did not answer within {self._timeout_s:.0f} s ({reason})") from error
