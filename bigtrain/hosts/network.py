"""Whether there are other hosts, and which network interface leads to them."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

from bigtrain import ranks

INWARD = ("lo", "docker", "veth", "virbr", "br-")  # no other host is behind these


def several() -> bool:
    """True if the launcher started ranks on more hosts than this one."""
    return ranks.world_size() > ranks.local_world_size()


def choose_interface(env: Any = os.environ) -> str | None:
    """Set GLOO_SOCKET_IFNAME, where it is not set, to the interface that leads to the other hosts; returns it.

    gloo takes the address that the host's own name has. On many systems that is 127.0.1.1 (/etc/hosts), which no other host
    reaches, and the ranks fail with "Connection refused, remote=[127.0.0.1]". NCCL looks for an interface by itself.
    """
    if env.get("GLOO_SOCKET_IFNAME"):
        return env["GLOO_SOCKET_IFNAME"]
    found = interface_to(env.get("MASTER_ADDR", ""))
    if found is not None:
        env["GLOO_SOCKET_IFNAME"] = found
    return found


def interface_to(address: str) -> str | None:
    """Name of the interface by which this host reaches `address`; where that is the host itself, the one that leads outward."""
    import psutil

    of_address = {a.address.split("%")[0]: name for name, known in psutil.net_if_addrs().items() for a in known if _is_ip(a)}
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for target in (address, "192.0.2.1", "2001:db8::1"):  # then the default route: addresses for documentation, nothing is sent
        name = of_address.get(_own_address_towards(target) or "")
        if name is not None and not name.startswith(INWARD):
            return name
    outward = sorted({name for name in of_address.values() if name in up and not name.startswith(INWARD)})
    return outward[0] if len(outward) == 1 else None


def _own_address_towards(address: str) -> str | None:
    """The address that packets to `address` would carry; a datagram socket that is connected sends nothing."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, where in socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                return probe.getsockname()[0].split("%")[0]
    return None


def _is_ip(known: Any) -> bool:
    return known.family in (socket.AF_INET, socket.AF_INET6) and not known.address.startswith("fe80")
