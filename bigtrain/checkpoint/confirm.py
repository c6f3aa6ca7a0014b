"""What the writers of a checkpoint tell each other, beside training: each reports to rank 0, rank 0 tells all how it ended.

On a gloo group of its own, since the training thread talks at the same time. Every message is between two ranks, so that a rank
that died is known by its number, at once: its connections close with it.
"""

from __future__ import annotations

import datetime
import json
from typing import Any

import torch
import torch.distributed as dist

from bigtrain import ranks


class LostRankError(Exception):
    """A rank ended, or did not answer in time."""


class Confirmation:
    """One per saver; making it is collective.

    Args:
        timeout_s: how long one rank waits for another, as long as that one is alive.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        limit = datetime.timedelta(seconds=timeout_s)
        # A rank that dies before it has come here is known by its closed connection; the making of a group would wait for it to the limit.
        ranks.all_gather_object(None, "beginning to save")
        self._group = dist.new_group(backend="gloo", timeout=limit) if ranks.is_distributed() else None

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
        try:
            dist.send(torch.tensor([len(body)]), to, group=self._group)
            dist.send(body, to, group=self._group)
        except RuntimeError as error:
            raise self._lost(to, error) from error

    def _receive(self, source: int) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        try:
            dist.recv(size, source, group=self._group)
            body = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(body, source, group=self._group)
        except RuntimeError as error:
            raise self._lost(source, error) from error
        return json.loads(bytes(body.tolist()))

    def _lost(self, rank: int, error: RuntimeError) -> LostRankError:
        reason = str(error).splitlines()[0]
        return LostRankError(f"rank {rank} ended, or did not answer within {self._timeout_s:.0f} s ({reason})")
