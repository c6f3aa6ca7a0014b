"""Names, interfaces and ports that ranks meet through."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from dataclasses import dataclass

from bigtrain.diagnostics.doctor.finding import Finding, broken, ok, warning
from bigtrain.hosts.ports import free_port, is_free

RESOLVE_S = 5.0
# Each names interfaces: gloo and tensorpipe by their full names, NCCL by prefixes, '=' for full names, '^' for all but these.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@dataclass(frozen=True, kw_only=True)
class Network:
    """What was found.

    Attributes:
        host: this machine's name; address: what it resolves to; resolve_error: why not.
        interfaces: that are up, with an address each. variables: of the environment that name interfaces.
        port: that a run would meet on; port_free; port_asked: MASTER_PORT said so; port_holder: who listens there.
        other_port: a free one. master: MASTER_ADDR; master_error: why it cannot be resolved.
    """

    host: str
    address: str | None
    resolve_error: str | None
    interfaces: Mapping[str, str]
    variables: Mapping[str, str]
    port: int
    port_free: bool
    port_asked: bool
    port_holder: str
    other_port: int
    master: str | None
    master_error: str | None


def measure_network(env: Mapping[str, str] = os.environ) -> Network:
    """Resolve this host's name, list interfaces, try the port."""
    host = socket.gethostname()
    address, error = resolve(host)
    text = env.get("MASTER_PORT", "")
    port = int(text) if text.isdigit() else 29500
    free, master = is_free(port), env.get("MASTER_ADDR")
    return Network(
        host=host,
        address=address,
        resolve_error=error,
        interfaces=interfaces_up(),
        variables={name: env[name] for name in INTERFACE_VARIABLES if env.get(name)},
        port=port,
        port_free=free,
        port_asked=bool(text),
        port_holder="" if free else listener(port),
        other_port=free_port(),
        master=master,
        master_error=resolve(master)[1] if master else None,
    )


def resolve(host: str, limit_s: float = RESOLVE_S) -> tuple[str | None, str | None]:
    """`(address, error)`; a resolver that does not answer is given up after `limit_s`."""
    pool = ThreadPoolExecutor(max_workers=1)
    try:
        return str(pool.submit(socket.getaddrinfo, host, None).result(limit_s)[0][4][0]), None
    except TimeoutError:
        return None, f"no answer within {limit_s:.0f} s"
    except OSError as error:
        return None, str(error.strerror or error)
    finally:
        pool.shutdown(wait=False)


def interfaces_up() -> dict[str, str]:
    """Interfaces that are up and have an address, the loopback last."""
    import psutil

    states, out = psutil.net_if_stats(), {}
    for name, addresses in psutil.net_if_addrs().items():
        usable = [a.address for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)]
        if usable and name in states and states[name].isup:
            out[name] = usable[0].split("%")[0]
    return dict(sorted(out.items(), key=lambda item: is_loopback(item[1])))


def is_loopback(address: str) -> bool:
    """127.x.x.x or ::1."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    return False


def listener(port: int) -> str:
    """Who listens on `port`, as far as this user may know."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for c in psutil.net_connections("tcp"):
            if c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN and c.pid:
                return f"process {c.pid} ({psutil.Process(c.pid).name()})"
    return "another user's process"


# ---------------------------------------------------------------- judging


def _real(network: Network) -> list[str]:
    return [name for name, address in network.interfaces.items() if not is_loopback(address)]


def check_host_name(network: Network) -> Finding:
    """The host's name: gloo listens on the address that it resolves to, unless it is told an interface."""
    name, needed = "host name", "an address that other hosts can reach"
    real = _real(network)
    pin = f"export GLOO_SOCKET_IFNAME={real[0]}" if real else "bring a network interface up"
    remedy = f"bigtrain finds the interface itself; other scripts on several hosts: {pin} on each, or mend the host's line in /etc/hosts"
    measured = f"{network.host} -> {network.address or network.resolve_error}"
    if network.variables.get("GLOO_SOCKET_IFNAME") in network.interfaces:
        return ok(name, "does not matter: GLOO_SOCKET_IFNAME says where to listen", measured, needed)
    if network.address is None:
        return warning(name, "cannot be resolved; fine on one host, gloo fails on several", measured, needed, remedy)
    if is_loopback(network.address):
        what = "resolves to the loopback address; fine on one host, on several gloo by itself fails with 'Connection refused'"
        return warning(name, what, measured, needed, remedy)
    return ok(name, "resolves", measured, needed)


def _wrong_names(variable: str, value: str, present: list[str]) -> list[str]:
    if variable != "NCCL_SOCKET_IFNAME":
        return [n for n in value.split(",") if n not in present]
    if value.startswith("^"):
        return []
    exact, names = value.startswith("="), value.lstrip("=").split(",")
    return [n for n in names if not any(p == n if exact else p.startswith(n) for p in present)]


def check_interfaces(network: Network) -> list[Finding]:
    """Variables that name interfaces name ones that are up."""
    present = list(network.interfaces)
    measured = ", ".join(f"{n} {a}" for n, a in network.interfaces.items()) or "none"
    if not present:
        return [broken("interfaces", "no interface is up: ranks cannot meet", "none", "lo at least", "ip link set lo up")]
    out = []
    for variable, value in network.variables.items():
        wrong = _wrong_names(variable, value, present)
        best = (_real(network) or present)[0]
        if wrong:
            what = f"{variable} names {', '.join(wrong)}, which is not there or not up: the process group cannot start"
            remedy = f"export {variable}={best}   (up are {', '.join(present)}; or unset {variable})"
            out.append(broken("interfaces", what, f"{variable}={value}", f"one of {', '.join(present)}", remedy))
    return out or [ok("interfaces", "up", measured)]


def check_port(network: Network) -> Finding:
    """The port that ranks meet on."""
    name, needed = "meeting port", "free"
    remedy = (
        f"deepspeed --master_port {network.other_port} ..., torchrun --master_port {network.other_port} ..., or end the other"
    )
    remedy += f" job: ss -ltnp 'sport = :{network.port}'"
    measured = f"port {network.port}: " + ("free" if network.port_free else f"in use by {network.port_holder}")
    if network.port_free:
        return ok(name, "free", measured, needed)
    if network.port_asked:
        return broken(name, "MASTER_PORT is taken: the ranks cannot meet", measured, needed,
                      f"export MASTER_PORT={network.other_port}; {remedy}")  # fmt: skip
    return warning(name, "the launchers' default port is taken: a launch that names none may fail", measured, needed, remedy)


def check_master(network: Network) -> list[Finding]:
    """MASTER_ADDR, where it is set."""
    if network.master is None:
        return []
    if network.master_error:
        remedy = "export MASTER_ADDR=<address of the first host>; a line for it in /etc/hosts of every host"
        return [
            broken(
                "MASTER_ADDR", "cannot be resolved", f"{network.master}: {network.master_error}", "a name or address", remedy
            )
        ]
    return [ok("MASTER_ADDR", "resolves", network.master)]


def check_network(network: Network) -> list[Finding]:
    """Everything about the network short of using it."""
    return [check_host_name(network), *check_interfaces(network), check_port(network), *check_master(network)]
