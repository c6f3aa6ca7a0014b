"""Lines between the watches of all ranks: TCP, one connection a pair, short JSON messages.

Apart from torch's store and process groups, which may be stuck or gone when they would be needed (the store lives in one of the
ranks). A connection that closes is a process that ended, at once and by its number; one that falls silent is a process that
is stopped, or a host that is unreachable.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CONNECT_S = 20.0  # after which a rank that cannot be reached is left unwatched
BACKLOG_BYTES = 1 << 16  # kept for a rank that does not read; what is said beyond is dropped
LONGEST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a rank's watch listens, and which process it is.

    Attributes:
        network: names the network namespace: within one, 127.0.0.1 does. started: clock tick at which the process began, which
            with its number names it for as long as the host runs. pids: names the process namespace.
    """

    rank: int
    host: str
    network: str
    pids: str
    addresses: tuple[str, ...]
    port: int
    pid: int
    started: str


def network() -> str:
    """Names what 127.0.0.1 leads to: the host, and the network namespace within it."""
    return f"{socket.gethostname()}/{_namespace('net')}"


def listen(rank: int, local: bool) -> tuple[socket.socket, Address]:
    """A listening socket, to this host alone if `local`, and what the other ranks must know to reach it."""
    listener = socket.create_server(("127.0.0.1" if local else "", 0), backlog=128)
    listener.setblocking(False)
    host = socket.gethostname()
    return listener, Address(
        rank=rank, host=host, network=network(), pids=f"{host}/{_namespace('pid')}",
        addresses=own_addresses(), port=listener.getsockname()[1], pid=os.getpid(), started=start_tick(os.getpid()),
    )  # fmt: skip


def _namespace(kind: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/ns/{kind}")
    return "?"


def start_tick(pid: int) -> str:
    """The clock tick at which a process began; with its number, its identity. Empty if there is none."""
    return (process_status(pid) or ["", ""])[1]


def process_status(pid: int) -> list[str] | None:
    """[state letter, start tick] of a process of this host: field 3 and 22 of /proc/<pid>/stat."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return [fields[0], fields[19]]
    except (OSError, IndexError):
        return None


def own_addresses() -> tuple[str, ...]:
    """Addresses of this host by which others may reach it: of the interface that gloo or NCCL was told to use, else all."""
    import psutil

    named = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME") or ""
    found: dict[str, list[str]] = {}
    for name, addresses in psutil.net_if_addrs().items():
        found[name] = [a.address for a in addresses if a.family == socket.AF_INET and not a.address.startswith("127.")]
    chosen = [a for name in named.split(",") for a in found.get(name, [])]
    return tuple(chosen or [a for some in found.values() for a in some])


class Mesh:
    """This rank's lines to all others. Used by one thread.

    Args:
        listener: from `listen`.
        everyone: every rank's address, in rank order.
        rank: this rank.
        token: a secret that only ranks of this run know.
    """

    def __init__(self, listener: socket.socket, everyone: Sequence[Address], rank: int, token: str):
        self._listener, self._everyone, self._rank, self._token = listener, everyone, rank, token
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, socket.socket] = {}
        self._incoming: dict[socket.socket, bytes] = {}
        self._outgoing: dict[int, bytes] = {}
        self._begun = time.monotonic()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._to_call = {a.rank for a in everyone if a.rank < rank}  # the higher rank calls the lower one
        _OPEN.add(self)

    @property
    def reached(self) -> set[int]:
        """Ranks with a line to them now."""
        return set(self._lines)

    @property
    def settled(self) -> bool:
        """True once nothing more will be tried."""
        return len(self._lines) == len(self._everyone) - 1 or time.monotonic() - self._begun > CONNECT_S

    def say(self, message: dict[str, Any]) -> None:
        """To all; a rank that does not read hears it later, or not at all."""
        line = json.dumps(message).encode() + b"\n"
        for rank in list(self._lines):
            if len(self._outgoing[rank]) < BACKLOG_BYTES:
                self._outgoing[rank] += line
            self._flush(rank)

    def poll(self, wait_s: float) -> list[tuple[int, dict[str, Any] | None]]:
        """What was said within `wait_s`: (rank, message); None for a rank whose line has closed."""
        if self._to_call and not self.settled:
            self._call()
        for rank in list(self._lines):
            self._flush(rank)
        heard: list[tuple[int, dict[str, Any] | None]] = []
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                self._accept()
            else:
                heard += self._read(key.fileobj, key.data)  # type: ignore[arg-type]
        return heard

    def close(self) -> None:
        """Hang up."""
        _OPEN.discard(self)
        self._selector.close()
        for line in (self._listener, *self._lines.values(), *self._incoming):
            line.close()
        self._lines, self._incoming = {}, {}

    # ------------------------------------------------------------ connecting

    def _call(self) -> None:
        mine = self._everyone[self._rank]
        for rank in sorted(self._to_call):
            other = self._everyone[rank]
            local = other.network == mine.network and not other.network.endswith("?")
            for address in ("127.0.0.1",) if local else other.addresses:
                try:
                    line = socket.create_connection((address, other.port), timeout=1.0)
                except OSError:
                    continue
                line.sendall(json.dumps({"hello": self._rank, "token": self._token}).encode() + b"\n")
                self._welcome(rank, line)
                self._to_call.discard(rank)
                break

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            line, _ = self._listener.accept()
            line.setblocking(False)
            self._incoming[line] = b""
            self._selector.register(line, selectors.EVENT_READ, None)

    def _welcome(self, rank: int, line: socket.socket) -> None:
        line.setblocking(False)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines[rank], self._outgoing[rank] = line, b""
        self._incoming.setdefault(line, b"")
        with contextlib.suppress(KeyError):
            self._selector.unregister(line)
        self._selector.register(line, selectors.EVENT_READ, rank)

    # ------------------------------------------------------------ talking

    def _flush(self, rank: int) -> None:
        with contextlib.suppress(OSError):  # BlockingIOError: later; a broken line is noticed where it is read
            while self._outgoing[rank]:
                sent = self._lines[rank].send(self._outgoing[rank])
                self._outgoing[rank] = self._outgoing[rank][sent:]

    def _read(self, line: socket.socket, rank: int | None) -> list[tuple[int, dict[str, Any] | None]]:
        try:
            data = line.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *complete, rest = (self._incoming[line] + data).split(b"\n")
        if not data or len(rest) > LONGEST_BYTES:
            self._hang_up(line, rank)
            return [(rank, None)] if rank is not None else []
        self._incoming[line] = rest
        heard: list[tuple[int, dict[str, Any] | None]] = []
        for text in complete:
            message = _parsed(text)
            if rank is None:
                rank = self._introduced(line, message)
                if rank is None:
                    return heard
            elif message is not None:
                heard.append((rank, message))
        return heard

    def _introduced(self, line: socket.socket, message: dict[str, Any] | None) -> int | None:
        """The rank that called, once it has proved that it belongs to this run."""
        rank = (message or {}).get("hello")
        if message is None or message.get("token") != self._token or not isinstance(rank, int):
            self._hang_up(line, None)
            return None
        self._welcome(rank, line)
        return rank

    def _hang_up(self, line: socket.socket, rank: int | None) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line)
        self._incoming.pop(line, None)
        if rank is not None:
            self._lines.pop(rank, None)
        line.close()


def _parsed(text: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        return value if isinstance(value, dict) else None
    return None


_OPEN: weakref.WeakSet[Mesh] = weakref.WeakSet()


def _hang_up_in_child() -> None:
    """A forked data worker must not hold its rank's lines open: the rank's end would not be noticed before the worker's."""
    for mesh in list(_OPEN):
        mesh._selector.close()
        for line in (mesh._listener, *mesh._incoming):
            with contextlib.suppress(OSError):
                os.close(line.detach())
    _OPEN.clear()


os.register_at_fork(after_in_child=_hang_up_in_child)
