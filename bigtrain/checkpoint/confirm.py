"""What the writers of a checkpoint tell each other, beside training: each reports to rank 0, rank 0 tells all how it ended.

On a gloo group of its own, since the training thread talks at the same time. Every message is between two ranks, so that a rank
that died is known by its number, at once: its connections close with it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bigtrain import ranks
from bigtrain.errors import RanksDisagreeError

CONNECT_TIMEOUT_S = 30.0  # of ranks that have just met; gloo tries five times where one died after it had said where it listens


class LostRankError(Exception):
    """A rank ended, or did not answer in time."""


class Confirmation:
    """One per saver; making it is collective.

    Args:
        timeout_s: how long one rank waits for another, as long as that one is alive.

    Raises:
        RanksDisagreeError: a rank was lost while the group was made.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        # A rank that dies before it has come here is known by its closed connection. One that dies later has none yet, and is waited for.
        ranks.all_gather_object(None, "beginning to save")
        self._group = _group() if ranks.is_distributed() else None

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
            self._wait(to, partial(dist.isend, part, to, group=self._group))

    def _receive(self, source: int) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        self._wait(source, partial(dist.irecv, size, source, group=self._group))
        body = torch.empty(int(size), dtype=torch.uint8)
        self._wait(source, partial(dist.irecv, body, source, group=self._group))
        return json.loads(bytes(body.tolist()))

    def _wait(self, rank: int, begin: Callable[[], Any]) -> None:
        """For a message; not as long as the group's own limit, which is that of its making."""
        try:
            begin().wait(datetime.timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise LostRankError(f"rank {rank} ended, or did not answer within {self._timeout_s:.0f} s ({reason})") from error


def _group() -> Any:
    """A gloo group whose ranks have just met.

    Raises:
        RanksDisagreeError: one did not come.
    """
    try:
        return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=CONNECT_TIMEOUT_S))
    except RuntimeError as error:
        raise RanksDisagreeError(
            f"some rank did not connect to those that save within {CONNECT_TIMEOUT_S:.0f} s: it ended, or its host stands still.\n{error}"
        ) from error
