"""Ports of this host that ranks meet on."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST, _LAST = 10_000, 65_535
_TRIES = 100


def is_free(port: int) -> bool:
    """True if a server could listen on `port` on this host now."""
    for family, address in ((socket.AF_INET, ""), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
                probe.listen(1)
        except OSError as error:
            if family == socket.AF_INET or error.errno == 98:  # a host without IPv6 fails differently, and may
                return False
    return True


def free_port() -> int:
    """A port that nothing listens on now, and that the kernel gives to no outgoing connection before somebody listens.

    A port that the kernel picks (bind to 0) is one of those that it also gives to every connection of every process: ranks need
    seconds to import what they need before rank 0 listens, and connections of another job take it meanwhile.
    """
    lowest, highest = ephemeral_ports()
    lasting = [*range(_FIRST, min(lowest, _LAST + 1)), *range(max(highest + 1, _FIRST), _LAST + 1)]
    # Not the seeded generator: jobs with one seed would want the same port.
    for port in random.SystemRandom().sample(lasting, min(_TRIES, len(lasting))):
        if is_free(port):
            return port
    with socket.socket() as probe:  # every port is ephemeral here, or taken
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def ephemeral_ports() -> tuple[int, int]:
    """The lowest and the highest port that the kernel gives to connections (ip(7): ip_local_port_range; its default elsewhere)."""
    try:
        lowest, highest = _EPHEMERAL.read_text(encoding="ascii").split()
        return int(lowest), int(highest)
    except (OSError, ValueError):
        return 32_768, 60_999
