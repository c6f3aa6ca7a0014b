"""Limits of the host and the container: shared memory, lockable memory, open files, memory, cores, NUMA nodes."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bigtrain.diagnostics.doctor.finding import Finding, broken, ok, warning
from bigtrain.plan.constants import process_bytes
from bigtrain.plan.machine import LOCK_LEAST_BYTES, cgroup_folders, host_memory, meminfo_bytes, show_bytes

_MIB, _GIB = 2**20, 2**30
# NCCL's shared memory takes tens of MB a pair of ranks, data loader workers one batch each; docker gives 64 MB in all.
SHM_LEAST_BYTES, SHM_BYTES, SHM_PROBE_BYTES = 128 * _MIB, _GIB, 64 * _MIB
FILES_LEAST, FILES = 256, 1024
# Besides the process itself: tiny model, compiler, what Python's allocator holds.
RANK_BYTES = _GIB
# Compiling CPU Adam: two compilers at a time, each seen at 1.7e9 bytes (gcc 12, torch 2.13).
COMPILE_BYTES = 4 * _GIB


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What was found; None: no limit, or unknown.

    Attributes:
        shm_bytes, shm_free_bytes: of /dev/shm; shm_error: of really writing SHM_PROBE_BYTES there.
        lockable_bytes, lockable_hard: RLIMIT_MEMLOCK; files, files_hard: RLIMIT_NOFILE.
        machine_bytes: RAM; memory_limit_bytes: of the cgroup; available_bytes: MemAvailable within that limit.
        cores: that this process may use; core_quota: cores' worth of time that the cgroup allows.
        numa_nodes: cores of each node; numactl: it is installed; omp_threads: OMP_NUM_THREADS.
        infiniband: names of RDMA devices; ranks: of a run on this host; gpu: it has one.
    """

    shm_bytes: int | None
    shm_free_bytes: int | None
    shm_error: str | None
    lockable_bytes: int | None
    lockable_hard: int | None
    files: int | None
    files_hard: int | None
    machine_bytes: int | None
    memory_limit_bytes: int | None
    available_bytes: int | None
    cores: int
    core_quota: float | None
    numa_nodes: tuple[str, ...]
    numactl: bool
    omp_threads: str | None
    infiniband: tuple[str, ...]
    ranks: int
    gpu: bool


# ---------------------------------------------------------------- measuring


def measure_limits(ranks: int, gpu: bool, root: str | Path = "/", env: Mapping[str, str] = os.environ) -> Limits:
    """Read the limits below `root`, and really write to its /dev/shm."""
    root = Path(root)
    memory = host_memory(root)
    size, free, error = probe_shm(root / "dev/shm")
    soft, hard = _limit(resource.RLIMIT_NOFILE)
    lockable, lockable_hard = _limit(resource.RLIMIT_MEMLOCK)
    return Limits(
        shm_bytes=size,
        shm_free_bytes=free,
        shm_error=error,
        lockable_bytes=lockable,
        lockable_hard=lockable_hard,
        files=soft,
        files_hard=hard,
        machine_bytes=memory.machine_bytes if memory else None,
        memory_limit_bytes=memory.limit_bytes if memory else None,
        available_bytes=meminfo_bytes(root, "MemAvailable"),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        core_quota=core_quota(root),
        numa_nodes=_numa_nodes(root),
        numactl=shutil.which("numactl", path=env.get("PATH")) is not None,
        omp_threads=env.get("OMP_NUM_THREADS"),
        infiniband=_names(root / "sys/class/infiniband"),
        ranks=ranks,
        gpu=gpu,
    )


def _limit(kind: int) -> tuple[int | None, int | None]:
    soft, hard = resource.getrlimit(kind)
    return tuple(None if n == resource.RLIM_INFINITY else n for n in (soft, hard))  # type: ignore[return-value]


def probe_shm(folder: Path) -> tuple[int | None, int | None, str | None]:
    """`(size, free, error)`: writes a file there and removes it."""
    try:
        status = os.statvfs(folder)
    except OSError as error:
        return None, None, f"{folder}: {error.strerror}"
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    block = bytes(_MIB)
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            for _ in range(SHM_PROBE_BYTES // _MIB):
                if file.write(block) != _MIB:
                    return total, free, f"no space left after {file.tell() // _MIB} MiB"
    except OSError as error:
        return total, free, str(error.strerror)
    return total, free, None


def core_quota(root: str | Path = "/") -> float | None:
    """The lowest CPU quota of this process's cgroup and all above it, in cores; version 2 or 1. None: none."""
    found = []
    for place in cgroup_folders(Path(root), "cpu"):
        with contextlib.suppress(OSError, ValueError, IndexError, ZeroDivisionError):
            if (place / "cpu.max").exists():
                quota, period = (place / "cpu.max").read_text().split()
            else:
                quota, period = ((place / f"cpu.cfs_{n}_us").read_text().strip() for n in ("quota", "period"))
            if quota != "max" and int(quota) > 0:
                found.append(int(quota) / int(period))
    return min(found, default=None)


def _numa_nodes(root: Path) -> tuple[str, ...]:
    lists = sorted((root / "sys/devices/system/node").glob("node[0-9]*/cpulist"))
    return tuple(text for text in (f.read_text().strip() for f in lists) if text)  # nodes of memory alone have no cores


def _names(folder: Path) -> tuple[str, ...]:
    with contextlib.suppress(OSError):
        return tuple(sorted(os.listdir(folder)))
    return ()


# ---------------------------------------------------------------- judging


def check_shm(limits: Limits) -> Finding:
    """/dev/shm: NCCL between cards of one host and data loader workers use it (torchtitan#853)."""
    name, needed = "/dev/shm", show_bytes(SHM_BYTES)
    fix = "docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir of medium Memory mounted on /dev/shm; elsewhere: "
    fix += "mount -o remount,size=8G /dev/shm"
    if limits.shm_bytes is None:
        return broken(name, "missing: NCCL and data loader workers need it", limits.shm_error or "none", needed, fix)
    measured = f"{show_bytes(limits.shm_bytes)}, {show_bytes(limits.shm_free_bytes or 0)} free"
    if limits.shm_bytes < SHM_LEAST_BYTES:
        what = "too small: NCCL dies with an obscure error or a bus error, so do data loader workers"
        return broken(name, what, measured, needed, fix)
    if limits.shm_error:
        remedy = f"remove what fills it (ls -la /dev/shm), or {fix}"
        return broken(name, f"writing {show_bytes(SHM_PROBE_BYTES)} failed: {limits.shm_error}", measured, needed, remedy)
    if limits.shm_bytes < SHM_BYTES:
        return warning(name, "small: many ranks or large batches will fill it", measured, needed, fix)
    return ok(name, f"{show_bytes(SHM_PROBE_BYTES)} written", measured, needed)


def check_lockable(limits: Limits) -> Finding:
    """Lockable memory: a small limit shows as 'CUDA out of memory' on an empty GPU (DeepSpeed#2977), and stops RDMA."""
    name = "lockable memory"
    hard = limits.lockable_hard
    up_to = "unlimited" if hard is None else str(hard // 1024)
    fix = f"ulimit -l {up_to}; " if hard is None or hard > (limits.lockable_bytes or 0) else ""
    fix += "'memlock unlimited' in /etc/security/limits.conf and a new login; docker run --ulimit memlock=-1; Slurm: "
    fix += "PropagateResourceLimitsExcept=MEMLOCK; otherwise pin_memory false in the offload blocks"
    if limits.lockable_bytes is None:
        return ok(name, "unlimited", "unlimited")
    measured = show_bytes(limits.lockable_bytes)
    if limits.infiniband and limits.lockable_bytes < _GIB:
        what = f"too small for RDMA ({', '.join(limits.infiniband)}): NCCL fails to register memory"
        return broken(name, what, measured, "unlimited", fix)
    if limits.lockable_bytes < LOCK_LEAST_BYTES:
        what = "too small: pinned host memory fails and shows as 'CUDA out of memory' while the GPU is empty"
        return broken(name, what, measured, f"{show_bytes(8 * _MIB)}, better unlimited", fix)
    return ok(name, "CUDA's own pinning does not count against it; RDMA would", measured, show_bytes(LOCK_LEAST_BYTES))


def check_files(limits: Limits) -> Finding:
    """Open files: sockets to every rank, files of every shard, descriptors of data loader workers."""
    name = "open files"
    if limits.files is None:
        return ok(name, "unlimited", "unlimited")
    needed = max(FILES, 256 + 8 * limits.ranks)
    hard = limits.files_hard
    enough = hard is None or hard >= needed
    fix = f"ulimit -n {min(65536, hard or 65536)}"
    if not enough:
        fix = "'nofile 65536' in /etc/security/limits.conf and a new login; docker run --ulimit nofile=65536"
    if limits.files < FILES_LEAST:
        what = "too few: importing and meeting other ranks fails with 'Too many open files'"
        return broken(name, what, limits.files, str(needed), fix)
    if limits.files < needed:
        return warning(name, "few: data loader workers may fail with 'Too many open files'", limits.files, str(needed), fix)
    return ok(name, "enough", limits.files, str(needed))


def check_memory(limits: Limits) -> Finding:
    """Host memory, the container's limit where it is lower."""
    name = "host memory"
    if limits.machine_bytes is None:
        return ok(name, "cannot be read on this system", "unknown")
    limit = limits.memory_limit_bytes
    usable = min(limits.machine_bytes, limit or limits.machine_bytes)
    capped = limit is not None and limit < limits.machine_bytes
    least = limits.ranks * (process_bytes("cuda" if limits.gpu else "cpu", limits.ranks) + RANK_BYTES)
    needed = f"{show_bytes(least)} for {limits.ranks} ranks with a tiny model; for yours: bigtrain plan --model ..."
    measured = show_bytes(usable) + (
        f" (container limit; the machine has {show_bytes(limits.machine_bytes)})" if capped else ""
    )
    raise_it = "docker run --memory=...; Kubernetes: resources.limits.memory; Slurm: --mem=... (0 = all of the node)"
    if usable < least:
        remedy = f"raise the limit: {raise_it}; or fewer ranks on this host" if capped else "fewer ranks on this host"
        return broken(name, "too little: ranks are killed with signal 9 and no message", measured, needed, remedy)
    if usable < COMPILE_BYTES:
        what = "too little for compiling CPU Adam with several compilers at a time"
        return warning(name, what, measured, show_bytes(COMPILE_BYTES), "export MAX_JOBS=1")
    free = min(limits.available_bytes or usable, usable)
    measured += f", {show_bytes(free)} available"
    if free < least:
        return warning(name, "other processes hold most of it", measured, needed, "see who: ps aux --sort=-rss | head")
    return ok(name, "enough to start", measured, needed)


def check_cores(limits: Limits) -> Finding:
    """Cores a rank has, and whether more threads will be started than there are."""
    name = "cores"
    usable = min(limits.cores, limits.core_quota or limits.cores)
    measured = f"{limits.cores} cores" + (f", a quota of {limits.core_quota:g}" if limits.core_quota else "")
    measured += f", OMP_NUM_THREADS {limits.omp_threads or 'unset'}"
    share = max(1, math.floor(usable / limits.ranks))
    fix = f"export OMP_NUM_THREADS={share}"
    if usable < limits.ranks:
        what = f"{limits.ranks} ranks share {usable:g} cores"
        return warning(name, what, measured, f"{limits.ranks}", f"fewer ranks on this host, or more cores; and {fix}")
    if limits.core_quota and limits.core_quota < limits.cores and not limits.omp_threads:
        what = "torch would start a thread a core and the quota would stop them again and again"
        return warning(name, what, measured, "OMP_NUM_THREADS set", fix)
    if (limits.omp_threads or "").isdigit() and int(limits.omp_threads or 0) * limits.ranks > max(usable, limits.ranks):
        return warning(name, "more threads than cores: CPU Adam becomes slow", measured, f"at most {share} a rank", fix)
    return ok(name, "enough", measured, f"{limits.ranks}", "" if limits.omp_threads else f"for offload to the host: {fix}")


def check_numa(limits: Limits) -> Finding:
    """Binding of ranks to NUMA nodes: memory of the other node slows CPU Adam and copies to the GPU down."""
    name, nodes = "NUMA", limits.numa_nodes
    measured = f"{len(nodes)} nodes" + (f" (cores {' | '.join(nodes)})" if len(nodes) > 1 else "") if nodes else "unknown"
    if len(nodes) < 2:
        return ok(name, "one memory node: nothing to bind", measured.replace("1 nodes", "1 node"))
    if not limits.numactl:
        return warning(name, "ranks cannot be bound to their node", measured, "numactl", "apt-get install numactl")
    return ok(
        name, "bind ranks to nodes", measured, "", "deepspeed --bind_cores_to_rank ...; torchrun: numactl -N NODE -m NODE"
    )


def check_limits(limits: Limits) -> list[Finding]:
    """Everything about limits."""
    checks = (check_shm, check_lockable, check_files, check_memory, check_cores, check_numa)
    return [check(limits) for check in checks]
