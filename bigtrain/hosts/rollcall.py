"""Ranks that nobody looks after meet: at one store, by name, and with whatever keeps one of them from starting.

They are those of several hosts, and those of one host that no launcher started (srun, processes by hand): where one of these ends early,
nobody ends the others.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import shlex
import socket
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from bigtrain import ranks
from bigtrain.errors import BigtrainError, RanksDisagreeError
from bigtrain.hosts.launcher import was_launched
from bigtrain.hosts.network import several

logger = logging.getLogger(__name__)

NOTICE_S, NOTICE_ON_ONE_HOST_S = 30.0, 10.0
LINGER_S = 5.0
ROLL_CALL_S = 600.0  # hosts start one after the other, and a cold network disk takes minutes to import torch from
ON_ONE_HOST_S = 120.0  # ranks of one host import from one page cache
TELL_S, TELL_ON_ONE_HOST_S = 120.0, 60.0  # a rank that has failed and said so stays for the others no longer than this
_called = False


def roll_call(
    limit_s: float | None = None, failure: BaseException | None = None, words: Sequence[str] | None = None
) -> dist.Store | None:
    """Meet the other ranks; None where a launcher on this host looks after all. Every rank calls it once, before the process group exists.

    torchrun keeps one store over restarts, with all that dead ranks have left there. So each process has a name of its own: it
    says that under its rank, rank 0 answers to that name, and the answer is acknowledged under both names.

    Args:
        limit_s: how long to wait for the slowest rank; by default `ROLL_CALL_S` for other hosts, `ON_ONE_HOST_S` on one.
        failure: what this rank cannot start for; the others are told.
        words: what all ranks of this job have alike; by default the command line.

    Returns:
        The store that the process group is to use.

    Raises:
        RanksDisagreeError: some rank did not come within `limit_s`, or came with a failure; on all ranks that came.
    """
    global _called
    if _called or not _by_themselves():
        return None
    _called = True
    limit_s = (ON_ONE_HOST_S if _on_one_host() else ROLL_CALL_S) if limit_s is None else limit_s
    store = _store(limit_s)
    mine = {
        "name": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "failure": None if failure is None else f"{type(failure).__name__}: {failure}",
        "code": getattr(failure, "exit_code", BigtrainError.exit_code),
        "words": _words(sys.argv[1:] if words is None else words),
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


def tell(failure: BaseException) -> bool:
    """Tell the other ranks what this one cannot start for; False if they could not be told. Does nothing once the ranks have met.

    Where a launcher looks after all ranks of this host, it ends the others by itself.
    """
    if _called or not _by_themselves():
        return True
    try:
        roll_call(TELL_S if several() else TELL_ON_ONE_HOST_S, failure)
    except Exception:  # the failure itself is what the user needs to see
        return False
    return True


def _by_themselves() -> bool:
    """Whether some rank would wait in vain for one that ends early."""
    return several() or (ranks.world_size() > 1 and not was_launched() and not ranks.is_distributed())


def _on_one_host(env: Mapping[str, str] = os.environ) -> bool:
    """Whether all ranks are known to be here. Pods of a cluster have RANK, WORLD_SIZE and the first one's name, and nothing that says where they are."""
    address = env.get("MASTER_ADDR", "")
    told = any(name in env for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_NUM_NODES"))
    return not several() and (told or address in ("localhost", "::1") or address.startswith("127."))


def _words(words: Sequence[str]) -> list[str]:
    """A command line without what each rank has of its own: --local_rank=N, --local_rank N."""
    names = ("--local_rank", "--local-rank")
    return [word for before, word in zip(["", *words], words) if not word.startswith(names) and before not in names]


def _store(limit_s: float) -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT: torchrun's agent serves it, or rank 0."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    limit = datetime.timedelta(seconds=limit_s)
    told = threading.Timer(_notice_s(), _tell_of_rank_0, (limit_s,))  # torch connects in C++, without a word
    told.daemon = True
    told.start()
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
            f"(firewall, wrong address: deepspeed --master_addr, torchrun --rdzv_endpoint).\n{error}",
            {0: "did not come"},
        ) from error
    finally:
        told.cancel()


def _notice_s() -> float:
    return NOTICE_S if several() else NOTICE_ON_ONE_HOST_S


def _tell_of_rank_0(limit_s: float) -> None:
    if ranks.local_rank() == 0 or not several():
        logger.warning(
            "waiting for rank 0, which has not come to %s yet: see its output. This ends %.0f s after its begin",
            _where(),
            limit_s,
        )


def _seat(rank: int) -> str:
    return f"bigtrain/rank/{rank}"


def _read(store: dist.Store, key: str) -> Any:
    """A value that is there, else None."""
    return json.loads(store.get(key)) if store.check([key]) else None


class Wait:
    """A limit for waiting, with a word to the user on the way and the numbers of the missing at its end."""

    def __init__(self, store: dist.Store, world: int, limit_s: float):
        self.store, self.world, self.limit_s = store, world, limit_s
        self._end, self._notice = time.monotonic() + limit_s, time.monotonic() + _notice_s()

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
                    f"waited {self.limit_s:.0f} s for the other ranks. {listing}. Look at the output of those that did not: the program "
                    "did not start there, or it ended early.",
                    {r: "did not come" for r in missing},
                )
            self._notice = float("inf")
            if ranks.is_main():
                logger.warning("waiting for other ranks; %s. This ends %.0f s after its begin", listing, self.limit_s)
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
