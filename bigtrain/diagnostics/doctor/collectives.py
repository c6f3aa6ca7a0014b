"""The three collectives that ZeRO lives on, with their values checked and a limit: of the doctor's ranks, and of a run's own."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bigtrain import ranks

ELEMS = 1000


def _all_reduce(limit_s: float) -> None:
    device, world = ranks.device(), ranks.world_size()
    x = torch.full((ELEMS,), float(ranks.rank() + 1), device=device)
    _finish(dist.all_reduce(x, async_op=True), limit_s)
    expect(x, torch.full_like(x, world * (world + 1) / 2))


def _all_gather(limit_s: float) -> None:
    device, world = ranks.device(), ranks.world_size()
    whole = [torch.empty(ELEMS, device=device) for _ in range(world)]
    _finish(dist.all_gather(whole, torch.full((ELEMS,), float(ranks.rank()), device=device), async_op=True), limit_s)
    expect(torch.stack(whole)[:, 0], torch.arange(world, device=device).float())


def _reduce_scatter(limit_s: float) -> None:
    device, world, rank = ranks.device(), ranks.world_size(), ranks.rank()
    part, whole = torch.empty(ELEMS, device=device), torch.arange(world * ELEMS, device=device).float()
    _finish(dist.reduce_scatter(part, list(whole.chunk(world)), async_op=True), limit_s)
    expect(part, world * torch.arange(rank * ELEMS, (rank + 1) * ELEMS, device=device).float())


COLLECTIVES: dict[str, Callable[[float], None]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
}


def _finish(work: Any, limit_s: float) -> None:
    """Wait, with a limit: gloo's own wait has one; NCCL's returns before the work is done, so it is asked again and again."""
    if dist.get_backend() != "nccl":
        work.wait(datetime.timedelta(seconds=limit_s))  # of a reduce-scatter, gloo says `is_completed` only after this
        return
    end = time.monotonic() + limit_s
    while not work.is_completed():
        if time.monotonic() > end:
            raise TimeoutError(f"no answer within {limit_s:.0f} s")
        time.sleep(0.001)
    work.wait()


def expect(got: torch.Tensor, want: torch.Tensor) -> None:
    """Refuse other values.

    Raises:
        ValueError: with the first of both.
    """
    if not torch.equal(got, want):
        raise ValueError(f"it gives {got[:3].tolist()}..., it should be {want[:3].tolist()}...")
