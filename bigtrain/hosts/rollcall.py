"""The ranks of several hosts meet: at one store, by name, and with whatever keeps one of them from starting."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import shlex
import socket
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from bigtrain import ranks
from bigtrain.errors import BigtrainError, RanksDisagreeError
from bigtrain.hosts.network import several

logger = logging.getLogger(__name__)

NOTICE_S = 30.0
LINGER_S = 5.0
ROLL_CALL_S = 600.0  # hosts start one after the other, and a cold network disk takes minutes to import torch from
_called = False


def roll_call(limit_s: float = ROLL_CALL_S, failure: BaseException | None = None) -> dist.Store | None:
    """Meet the ranks of the other hosts; None on one host. Every rank calls it once, before the process group exists.

    torchrun keeps one store over restarts, with all that dead ranks have left there. So each process has a name of its own: it
    says that under its rank, rank 0 answers to that name, and the answer is acknowledged under both names.

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
    mine = {
        "name": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "failure": None if failure is None else f"{type(failure).__name__}: {failure}",
        "code": getattr(failure, "exit_code", BigtrainError.exit_code),
        "words": [word for word in sys.argv[1:] if not word.startswith(("--local_rank", "--local-rank"))],
    }
    store.set(_seat(ranks.rank()), json.dumps(mine))
    wait = Wait(store, ranks.world_size(), limit_s)
    try:
        first, everyone = _call(store, mine, wait) if ranks.rank() == 0 else _answer(store, mine, wait)
    except dist.DistNetworkError as lost:
        raise RanksDisagreeError(
            f"rank {ranks.rank()} on {mine['host']} lost the store at {_where()} while the ranks were meeting: whoever serves it (rank 0, "
            f"or torchrun's agent) has ended; its output says why.\n{lost}"
        ) from lost
    failed = {r: said for r, said in everyone.items() if said["failure"]}
    if failed and failure is None:
        listing = "\n".join(f"  rank {r} on {said['host']}: {said['failure']}" for r, said in failed.items())
        error = RanksDisagreeError(
            f"{len(failed)} of {len(everyone)} ranks cannot start, so none does:\n{listing}",
            {r: said["failure"] for r, said in failed.items()},
        )
        error.exit_code = failed[min(failed)]["code"]
        raise error
    return dist.PrefixStore(f"bigtrain/{first}", store)


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
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
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


def _seat(rank: int) -> str:
    return f"bigtrain/rank/{rank}"


def _read(store: dist.Store, key: str) -> Any:
    """A value that is there, else None."""
    return json.loads(store.get(key)) if store.check([key]) else None


class Wait:
    """A limit for waiting, with a word to the user on the way and the numbers of the missing at its end."""

    def __init__(self, store: dist.Store, world: int, limit_s: float):
        self.store, self.world, self.limit_s = store, world, limit_s
        self._end, self._notice = time.monotonic() + limit_s, time.monotonic() + NOTICE_S

    def a_little(self) -> None:
        """One turn.

        Raises:
            RanksDisagreeError: the limit is over.
        """
        now = time.monotonic()
        if now > min(self._end, self._notice):
            came = {r: said["host"] for r in range(self.world) if (said := _read(self.store, _seat(r)))}
            missing = [r for r in range(self.world) if r not in came]
            listing = f"ranks that came: {_by_host(came)}; ranks that did not: {_numbers(missing) or 'none'}"
            if now > self._end:
                raise RanksDisagreeError(
                    f"waited {self.limit_s:.0f} s for the ranks of the other hosts. {listing}. Look at the output of the hosts "
                    "that are not in the list: the program did not start there, or it ended early.",
                    {r: "did not come" for r in missing},
                )
            self._notice = float("inf")
            if ranks.is_main():
                logger.warning("waiting for other hosts; %s", listing)
        time.sleep(0.05)


def _call(store: dist.Store, mine: dict[str, Any], wait: Wait) -> tuple[str, dict[int, Any]]:
    """Rank 0: answer everybody, until all have acknowledged: (this process's name, what each rank said)."""
    while True:
        everyone = {r: _read(store, _seat(r)) for r in range(1, wait.world)}
        for said in everyone.values():
            if said is not None and said["words"] != mine["words"]:
                _linger(store, mine, everyone)
                raise _other_job(mine, said)
        if all(everyone.values()):
            names = {r: said["name"] for r, said in everyone.items()}
            everyone = {0: mine, **everyone}
            for name in names.values():
                if not store.check([f"bigtrain/answer/{name}"]):
                    store.set(f"bigtrain/answer/{name}", json.dumps({"first": mine["name"], "ranks": everyone}))
            if store.check([f"bigtrain/heard/{mine['name']}/{name}" for name in names.values()]):
                return mine["name"], everyone
        wait.a_little()


def _answer(store: dist.Store, mine: dict[str, Any], wait: Wait) -> tuple[str, dict[int, Any]]:
    """Other ranks: wait for the answer to this process's name."""
    while (told := _read(store, f"bigtrain/answer/{mine['name']}")) is None:
        zero = _read(store, _seat(0))
        if zero is not None and zero["words"] != mine["words"]:
            store.set(f"bigtrain/parted/{mine['name']}", "1")
            raise _other_job(mine, zero)
        wait.a_little()
    store.set(f"bigtrain/heard/{told['first']}/{mine['name']}", "1")
    return told["first"], {int(r): said for r, said in told["ranks"].items()}


def _linger(store: dist.Store, mine: dict[str, Any], everyone: Mapping[int, Any]) -> None:
    """Rank 0 may be serving the store: those who came with another command line see that it differs before it is gone."""
    parted = [f"bigtrain/parted/{said['name']}" for said in everyone.values() if said and said["words"] != mine["words"]]
    end = time.monotonic() + LINGER_S
    while time.monotonic() < end and not store.check(parted):
        time.sleep(0.05)


def _where() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _other_job(mine: dict[str, Any], other: dict[str, Any]) -> RanksDisagreeError:
    """On the default port, the second job of a host reaches the first one's store."""
    return RanksDisagreeError(
        f"rank {ranks.rank()} on {mine['host']} met a rank with another command line at {_where()}: another job has that port "
        "(choose one: deepspeed --master_port, torchrun --rdzv_endpoint), or the hosts were started differently.\n"
        f"  {mine['host']}: {shlex.join(mine['words'])}\n  {other['host']}: {shlex.join(other['words'])}"
    )


def _numbers(some: Sequence[int]) -> str:
    return ", ".join(map(str, some[:16])) + (f" and {len(some) - 16} more" if len(some) > 16 else "")


def _by_host(hosts: Mapping[int, str]) -> str:
    grouped = defaultdict(list)
    for rank in sorted(hosts):
        grouped[hosts[rank]].append(rank)
    return "; ".join(f"{_numbers(some)} on {host}" for host, some in grouped.items())
