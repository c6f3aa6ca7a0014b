"""The ranks of several hosts meet: at one store, by name, and with whatever keeps one of them from starting."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import socket
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from bigtrain import ranks
from bigtrain.errors import BigtrainError, RanksDisagreeError
from bigtrain.network import several

logger = logging.getLogger(__name__)

ROLL_CALL_S = 600.0  # hosts start one after the other, and a cold network disk takes minutes to import torch from
_called = False


def roll_call(limit_s: float = ROLL_CALL_S, failure: BaseException | None = None) -> dist.Store | None:
    """Meet the ranks of the other hosts; None on one host. Every rank calls it once, before the process group exists.

    Args:
        limit_s: how long to wait for the slowest host.
        failure: what this rank cannot start for; the others are told.

    Returns:
        The store that the process group is to use.

    Raises:
        RanksDisagreeError: some rank did not come within `limit_s`, or came with a failure; on all ranks that came.
    """
    global _called
    if _called or not several():
        return None
    _called = True
    store = _store(limit_s)
    rank, world = ranks.rank(), ranks.world_size()
    told = {"host": socket.gethostname(), "code": getattr(failure, "exit_code", BigtrainError.exit_code)}
    told["failure"] = None if failure is None else f"{type(failure).__name__}: {failure}"
    store.set(f"bigtrain/came/{rank}", json.dumps(told))
    came = _await_all(store, world, limit_s)
    _let_all_read(store, rank, world)
    failed = {r: said for r, said in came.items() if said["failure"]}
    if failed and failure is None:
        listing = "\n".join(f"  rank {r} on {said['host']}: {said['failure']}" for r, said in failed.items())
        error = RanksDisagreeError(
            f"{len(failed)} of {world} ranks cannot start, so none does:\n{listing}",
            {r: said["failure"] for r, said in failed.items()},
        )
        error.exit_code = failed[min(failed)]["code"]
        raise error
    return store


def tell(failure: BaseException, limit_s: float = 120.0) -> None:
    """Tell the ranks of other hosts what this one cannot start for. Does nothing on one host, or once the ranks have met."""
    if not _called and several():
        with contextlib.suppress(Exception):  # the failure itself is what the user needs to see
            roll_call(limit_s, failure)


def _store(limit_s: float) -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT: torchrun's agent serves it, or rank 0."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    limit = datetime.timedelta(seconds=limit_s)
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ:  # each restart has a place of its own in the agent's store
            return next(iter(dist.rendezvous("env://", timeout=limit)))[0]
        return dist.TCPStore(
            address, int(port), ranks.world_size(), ranks.rank() == 0, limit, wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, ValueError) as error:  # torch's store errors are RuntimeErrors
        if any(sign in str(error) for sign in ("EADDRINUSE", "already in use")):
            raise
        raise RanksDisagreeError(
            f"rank {ranks.rank()} on {socket.gethostname()} could not meet the others at {address}:{port} within {limit_s:.0f} s. "
            f"Look whether rank 0 has started there, whether `nc -vz {address} {port}` works from {socket.gethostname()} "
            f"(firewall, wrong address: deepspeed --master_addr, torchrun --rdzv_endpoint).\n{error}"
        ) from error


def _await_all(store: dist.Store, world: int, limit_s: float) -> dict[int, dict[str, Any]]:
    """What each rank said when it came."""
    end, notice = time.monotonic() + limit_s, time.monotonic() + 30.0
    missing = list(range(world))
    while True:
        missing = [r for r in missing if not store.check([f"bigtrain/came/{r}"])]
        if not missing:
            return {r: json.loads(store.get(f"bigtrain/came/{r}")) for r in range(world)}
        here = {r: json.loads(store.get(f"bigtrain/came/{r}"))["host"] for r in set(range(world)) - set(missing)}
        listing = f"ranks that came: {_by_host(here)}; ranks that did not: {_numbers(missing)}"
        if time.monotonic() > end:
            raise RanksDisagreeError(
                f"waited {limit_s:.0f} s for the ranks of the other hosts. {listing}. Look at the output of the hosts that are not "
                "in the list: the program did not start there, or it ended early.",
                {r: "did not come" for r in missing},
            )
        if time.monotonic() > notice and ranks.is_main():
            logger.warning("waiting for other hosts; %s", listing)
            notice = float("inf")
        time.sleep(0.1)


def _let_all_read(store: dist.Store, rank: int, world: int) -> None:
    """Rank 0 may serve the store: it must not end before the others have read."""
    store.add("bigtrain/read", 1)
    end = time.monotonic() + 10.0
    while rank == 0 and store.add("bigtrain/read", 0) < world and time.monotonic() < end:
        time.sleep(0.05)


def _numbers(some: Sequence[int]) -> str:
    return ", ".join(map(str, some[:16])) + (f" and {len(some) - 16} more" if len(some) > 16 else "")


def _by_host(hosts: Mapping[int, str]) -> str:
    grouped = defaultdict(list)
    for rank in sorted(hosts):
        grouped[hosts[rank]].append(rank)
    return "; ".join(f"{_numbers(some)} on {host}" for host, some in grouped.items())
