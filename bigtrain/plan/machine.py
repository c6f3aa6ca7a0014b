"""What this machine has: host memory (the container's limit where it is lower), lockable memory, /dev/shm, GPU memory.

What reads files takes the root folder, so that a test can point it at a faked tree; for a whole run the variable
BIGTRAIN_HOST_ROOT does that. What cards there are, nvidia-smi says.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bigtrain.errors import UsageError

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}{end}": 1024**power for power, letter in enumerate("KMGT", 1) for end in ("IB", "")}
# cgroup v1 writes "no limit" as a huge number (2^63 rounded to pages).
_NO_LIMIT = 2**60
LONGEST_S = 30.0  # of a program that is asked


def parse_bytes(text: str | int | float, what: str = "size") -> int:
    """`47.4GiB`, `80GB`, `128G` (= GiB) or plain bytes.

    Raises:
        UsageError: not a size, or nothing but a small number (a forgotten unit).
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = match.group(2).upper() if match else None
    if match is None or unit not in _UNITS:
        raise UsageError(f"{what} is '{text}': write a number with a unit, for example 47.4GiB or 80GB")
    try:
        size = float(match.group(1)) * _UNITS[unit]
    except ValueError as error:
        raise UsageError(f"{what} is '{text}': '{match.group(1)}' is not a number") from error
    if size >= _NO_LIMIT:
        raise UsageError(f"{what} is '{text}': no memory is that large")
    if size < 2**20:
        raise UsageError(f"{what} is '{text}', that is {size:.0f} bytes: give a size with a unit, for example 80GiB")
    return int(size)


def show_bytes(size: float) -> str:
    """Bytes for the eye, in GiB (MiB below 0.1 GiB)."""
    return f"{size / 2**20:.1f} MiB" if abs(size) < 0.1 * 2**30 else f"{size / 2**30:.2f} GiB"


# Lockable memory: Linux's old default of 64 KiB stops RDMA and some drivers' pinned memory; 8 MiB is the present default, and enough for
# CUDA, whose pinning does not count against it.
LOCK_LEAST_BYTES = 2**20


@dataclass(frozen=True)
class HostMemory:
    """Memory of the host that a job may use.

    Attributes:
        machine_bytes: MemTotal. limit_bytes: the lowest cgroup limit above this process, None if there is none.
        lockable_bytes: RLIMIT_MEMLOCK, None if unlimited. shm_bytes: size of /dev/shm, None if unknown.
    """

    machine_bytes: int
    limit_bytes: int | None
    lockable_bytes: int | None = None
    shm_bytes: int | None = None

    @property
    def usable_bytes(self) -> int:
        return min(self.machine_bytes, self.limit_bytes or self.machine_bytes)

    def describe(self) -> str:
        """Which limit counts, in words."""
        if self.limit_bytes is not None and self.limit_bytes < self.machine_bytes:
            return f"{show_bytes(self.limit_bytes)} (container limit; the machine has {show_bytes(self.machine_bytes)})"
        return f"{show_bytes(self.machine_bytes)} (the machine's)"


def default_root() -> Path:
    """The root folder whose proc and sys are read: "/" unless BIGTRAIN_HOST_ROOT names another."""
    return Path(os.environ.get("BIGTRAIN_HOST_ROOT") or "/")


def meminfo_bytes(root: Path, name: str) -> int | None:
    """A value of /proc/meminfo; None where it is not told."""
    try:
        text = (root / "proc/meminfo").read_text()
    except OSError:
        return None
    match = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return None if match is None else int(match.group(1)) * 1024


def host_memory(root: str | Path | None = None) -> HostMemory | None:
    """Read the limits below `root`; None where /proc/meminfo does not exist."""
    root = default_root() if root is None else Path(root)
    total = meminfo_bytes(root, "MemTotal")
    if total is None:
        return None
    lock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    lockable = None if lock == resource.RLIM_INFINITY else lock
    return HostMemory(total, cgroup_limit(root), lockable, _shm_bytes(root))


def _shm_bytes(root: Path) -> int | None:
    try:
        stat = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return stat.f_blocks * stat.f_frsize


def cgroup_limit(root: str | Path = "/") -> int | None:
    """Lowest memory limit of this process's cgroup and all above it, version 2 or 1; None: no limit."""
    return min((limit for _, limit in cgroup_limits(Path(root))), default=None)


def cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Of this process's cgroup and all above it, version 2 or 1 ("memory" or "cpu")."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    found: list[Path] = []
    for line in lines or ["0::/", f"1:{controller}:/"]:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "" or controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / (controller if controllers else "")
            folder = base / path.lstrip("/")
            found += [folder, *(p for p in folder.parents if p == base or base in p.parents)]
    return found


def cgroup_limits(root: Path) -> list[tuple[Path, int]]:
    """(folder, limit in bytes) of this process's cgroup and all above it that have a memory limit."""
    return [(folder, limit) for folder in cgroup_folders(root, "memory") if (limit := _memory_limit(folder))]


def _memory_limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):  # version 2, version 1
        with contextlib.suppress(OSError):
            text = (folder / name).read_text().strip()
            return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None
    return None


def expandable_segments(env: Mapping[str, str] = os.environ) -> bool:
    """Whether torch's allocator has segments that grow: bigtrain turns them on where the user has set nothing up (zero/startup.py)."""
    said = [env[name] for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if env.get(name)]
    return not said or any(re.search(r"expandable_segments\s*:\s*true", text, re.IGNORECASE) for text in said)


def run_program(
    command: Sequence[str], env: Mapping[str, str] = os.environ, stdin: str = ""
) -> tuple[subprocess.CompletedProcess[str] | None, str]:
    """(how a program on PATH ended, ""), or (None, why it could not be run)."""
    program = shutil.which(command[0], path=env.get("PATH"))
    if program is None:
        return None, f"{command[0]} is not on PATH"
    try:
        return subprocess.run([program, *command[1:]], input=stdin, capture_output=True, text=True, errors="replace",
                              timeout=LONGEST_S, check=False, env=dict(env)), ""  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return None, str(error)


def nvidia_smi(*words: str, env: Mapping[str, str] = os.environ) -> tuple[str | None, str | None]:
    """(what it prints, None), or (None, why it fails); both None where there is no such program."""
    if shutil.which("nvidia-smi", path=env.get("PATH")) is None:
        return None, None
    done, why = run_program(["nvidia-smi", *words], env)
    if done is None:
        return None, why
    if done.returncode:  # it says why on stdout
        return None, (done.stdout + done.stderr).strip().splitlines()[0] if done.stdout + done.stderr else "failed"
    return done.stdout, None


def gpu_memory() -> tuple[int, ...]:
    """What a program can have of each NVIDIA card by `nvidia-smi`, without loading torch; empty where there is none.

    Without what driver and firmware keep for themselves: CUDA, and so a run, does not count that as the card's.
    """
    text, why = nvidia_smi("--query-gpu=memory.total,memory.reserved", "--format=csv,noheader,nounits")
    if why:  # else a machine whose driver does not answer looks like one without cards
        print(f"warning: nvidia-smi does not say what cards there are: {why}", file=sys.stderr)
    rows = re.findall(r"^ *(\d+) *, *(\d*)", text or "", re.MULTILINE)
    return tuple((int(total) - int(reserved or 0)) * 2**20 for total, reserved in rows)
