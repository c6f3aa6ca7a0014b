"""The order of the examination: facts first, then the disk, then what needs torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bigtrain.diagnostics.doctor import calibration, comm, devices, limits, native, network, storage, tools, versions
from bigtrain.diagnostics.doctor.finding import Finding, broken


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to examine.

    Attributes:
        world_size: ranks of a run on this host; None: one a GPU, two on a machine without.
        quick: facts only: no native parts, rates, disk speed or ranks. build: compile native parts anew, in a scratch folder.
        folder: on the disk that runs write to. save: file for the rates, None: do not store them.
        root: of /proc, /sys, /dev/shm.
        limit_s: for the ranks' test, once they have started. ladder: try variations when it fails.
    """

    world_size: int | None = None
    quick: bool = False
    build: bool = False
    folder: str = "."
    save: Path | None = None
    root: str = "/"
    limit_s: float = comm.LIMIT_S
    ladder: bool = True


def examine(request: Request, env: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """All findings, in order, as they come."""
    launch = comm.Launch.from_launcher(env)
    found = devices.measure_devices(env)
    world = request.world_size or len(found.visible) or 2
    on_host = launch.local_world if launch else world
    driver = found.gpus[0].driver if found.gpus else None
    yield from guarded("versions", lambda: versions.check_versions(versions.measure_versions(env, driver)))
    capabilities = tuple(sorted({g.capability for g in found.visible if g.capability}))
    yield from guarded("tools", lambda: tools.check_tools(tools.measure_tools(env), capabilities))
    yield from devices.check_devices(found)
    # Under a launcher each process may see other cards: there only the ranks themselves can say.
    planned = None if launch else devices.check_places(devices.planned_places(found, on_host))
    placeable = planned is None or planned.status == "ok"
    if planned is not None and (request.quick or not placeable):
        yield planned
    yield from guarded(
        "limits", lambda: limits.check_limits(limits.measure_limits(on_host, bool(found.gpus), request.root, env))
    )
    # Under a launcher its port is in use, by itself.
    heard = guarded("network", lambda: network.check_network(network.measure_network(env)))
    yield from (f for f in heard if launch is None or f.name != "meeting port")
    disk = storage.measure_storage(request.folder, speed=not request.quick)
    yield storage.check_space(disk)
    yield from storage.check_disk(disk)
    if not request.quick:
        yield from _with_torch(request, env, launch, world, bool(found.visible), placeable)


def guarded(name: str, work: Callable[[], list[Finding]]) -> list[Finding]:
    """What `work` finds; that it failed is a finding too, and does not end the examination."""
    try:
        return work()
    except Exception as error:
        remedy = "please report this, with the output of bigtrain doctor --json"
        return [broken(name, "the examination itself failed", f"{type(error).__name__}: {error}", "an answer", remedy)]


def _with_torch(
    request: Request, env: Mapping[str, str], launch: comm.Launch | None, world: int, gpu: bool, placeable: bool
) -> Iterator[Finding]:
    # One after the other: rates that were measured while something else ran would mislead the planner. Under a launcher the
    # ranks come first, because those of other processes already wait.
    probed = attempts = None
    if placeable and launch:
        attempts = _talk(request, env, launch)
    if launch is None or launch.first_local == 0:
        ops = ["cpu_adam", *(["fused_adam"] if gpu else []), *(["async_io"] if request.build else [])]
        probed = native.measure_native(True, ops, request.build, env)
        yield from native.check_rates(probed)
        yield from (native.check_op(op, probed) for op in ops)
    if placeable and not launch:
        attempts = _talk(request, env, comm.Launch.local(world))
    yield from comm.check_comm(attempts) if attempts else ()
    if request.save is not None and probed is not None:
        yield calibration.save(calibration.rates_found(probed, attempts[0] if attempts else None), request.save)


def _talk(request: Request, env: Mapping[str, str], launch: comm.Launch) -> list[comm.Attempt]:
    def attempt(number: int, extra: Mapping[str, str]) -> comm.Attempt:
        return comm.measure_attempt(launch, number, extra, request.limit_s, env)

    return comm.climb(attempt, list(network.interfaces_up()), request.ladder)


def preflight(folder: str, ranks_on_host: int, env: Mapping[str, str] = os.environ, gpu: bool = False) -> list[Finding]:
    """The part that a run can afford before it starts, under a second and without torch: complaints only.

    Not the ranks' places: under a launcher each process may see other cards, so the ranks themselves compare them.
    """
    found = devices.measure_devices(env) if gpu else None
    driver = found.gpus[0].driver if found and found.gpus else None
    findings = guarded("versions", lambda: versions.check_installed(versions.measure_packages(driver)))
    findings += guarded("limits", lambda: limits.check_limits(limits.measure_limits(ranks_on_host, gpu, env=env)))
    findings += guarded("network", lambda: network.check_interfaces(network.measure_network(env)))
    findings.append(storage.check_space(storage.measure_storage(folder, speed=False)))
    findings += devices.check_devices(found) if found else []
    return [f for f in findings if f.status != "ok"]


def timed(findings: Iterator[Finding]) -> tuple[list[Finding], float]:
    """All findings and the seconds they took."""
    begun = time.monotonic()
    done = list(findings)
    return done, time.monotonic() - begun
