"""How much of the host's memory is in use at this moment, against every limit that the kernel's killer would enforce.

What counts against a limit is what the kernel cannot take back: of a cgroup's use, the page cache (`inactive_file` and
`active_file` of memory.stat; Documentation/admin-guide/cgroup-v2.rst) is left out, since it is dropped before anything is
killed. Without any limit the machine's own memory counts: MemTotal less MemAvailable.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bigtrain.plan.machine import cgroup_limits, default_root, meminfo_bytes, show_bytes

# A plan "fits" with HOST_MARGIN (5 %) to spare: a run that was planned never comes near these.
WARNING_SHARE = 0.92
FULL_SHARE = 0.97

Verdict = Literal["fine", "warning", "full"]


@dataclass(frozen=True)
class Room:
    """Memory in use under one limit.

    Attributes:
        used_bytes: without page cache. limit_bytes: where the killer strikes. where: whose limit it is.
    """

    used_bytes: int
    limit_bytes: int
    where: str

    @property
    def share(self) -> float:
        """Part of the limit that is in use."""
        return self.used_bytes / self.limit_bytes

    def describe(self) -> str:
        """In words."""
        return f"{show_bytes(self.used_bytes)} of {show_bytes(self.limit_bytes)} ({self.where}) are in use, {self.share:.0%}"


def room(root: str | Path | None = None) -> Room | None:
    """The fullest of this process's cgroups and of the machine; None where the kernel tells nothing."""
    base = default_root() if root is None else Path(root)
    found = [Room(used, limit, "container limit") for folder, limit in cgroup_limits(base)
             if (used := cgroup_used(folder)) is not None]  # fmt: skip
    total, available = meminfo_bytes(base, "MemTotal"), meminfo_bytes(base, "MemAvailable")
    if total and available is not None:
        found.append(Room(total - available, total, "the machine's memory"))
    return max(found, key=lambda one: one.share, default=None)


def cgroup_used(folder: Path) -> int | None:
    """Bytes of a cgroup that cannot be taken back, version 2 or 1; None: not told."""
    for usage, prefix in (("memory.current", ""), ("memory.usage_in_bytes", "total_")):
        try:
            used = int((folder / usage).read_text())
        except (OSError, ValueError):
            continue
        return max(0, used - sum(_stat(folder, f"{prefix}{name}_file") for name in ("active", "inactive")))
    return None


def _stat(folder: Path, name: str) -> int:
    try:
        match = re.search(rf"^{name} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match.group(1)) if match else 0


def verdict(now: Room, before: Room | None) -> Verdict:
    """What to do about it: stop a little before the limit, or earlier when the last look's growth would reach it twice over.

    Args:
        now: this look. before: the last one, for how fast memory grows; None: not known.
    """
    grows = now.used_bytes - before.used_bytes if before is not None and before.limit_bytes == now.limit_bytes else 0
    if now.share >= FULL_SHARE:
        return "full"
    if now.share < WARNING_SHARE:
        return "fine"
    return "full" if grows > 0 and now.used_bytes + 2 * grows >= now.limit_bytes else "warning"
