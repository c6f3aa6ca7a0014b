"""Which device each rank takes.

One rule: rank r takes the visible device number LOCAL_RANK modulo the number of visible devices. What is visible is
the launcher's and the scheduler's business (CUDA_VISIBLE_DEVICES); two ranks of one host on one card are refused.
"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bigtrain.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one rank runs. `physical` identifies the card itself (its UUID), whatever the visible numbering is."""

    rank: int
    host: str
    local_rank: int
    device: str
    physical: str | None = None
    visible: str | None = None

    def __str__(self) -> str:
        card = f" {self.physical}" if self.physical else ""
        visible = f" (CUDA_VISIBLE_DEVICES={self.visible})" if self.visible else ""
        return f"rank {self.rank}: {self.host}, {self.device}{card}{visible}"


def device_index(local_rank: int, visible_count: int) -> int:
    """Index of the visible device that a rank takes: one visible card per task is always index 0.

    Raises:
        UsageError: nothing is visible.
    """
    if visible_count < 1:
        raise UsageError(
            "no GPU is visible to this process: check CUDA_VISIBLE_DEVICES, or set DS_ACCELERATOR=cpu to use the CPU"
        )
    return local_rank % visible_count


def refuse_shared_cards(places: Sequence[Place]) -> None:
    """Two ranks on one card halve its memory and hang NCCL.

    Raises:
        UsageError: names the ranks, the card, and the variables that led there.
    """
    by_card: dict[tuple[str, str], list[Place]] = defaultdict(list)
    for place in places:
        if place.physical:
            by_card[place.host, place.physical].append(place)
    shared = [group for group in by_card.values() if len(group) > 1]
    if not shared:
        return
    lines = [str(place) for group in shared for place in group]
    most = max(len(group) for group in shared)
    raise UsageError(
        "several ranks would use one GPU:\n  "
        + "\n  ".join(lines)
        + f"\nStart fewer ranks on that host ({most} share a card), or "
        "let each see its own card. Note that `deepspeed --num_gpus N` ignores CUDA_VISIBLE_DEVICES and takes cards 0 to N-1: "
        "use either the flag, or the variable alone, or --include localhost:IDS."
    )


def scheduler_conflict(env: Mapping[str, str]) -> str | None:
    """A sentence if CUDA_VISIBLE_DEVICES shows more cards than Slurm gave to this job, else None."""
    given = env.get("SLURM_STEP_GPUS") or env.get("SLURM_JOB_GPUS")
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if not given or not visible:
        return None
    n_given, n_visible = len(given.split(",")), len([v for v in visible.split(",") if v.strip()])
    if n_visible <= n_given:
        return None
    return (
        f"CUDA_VISIBLE_DEVICES={visible} shows {n_visible} cards but Slurm gave this job {n_given} ({given}): "
        "a launcher flag such as --num_gpus or --include overrode the scheduler's choice"
    )


def this_place() -> Place:
    """Where this rank runs; sets no device."""
    import torch

    from bigtrain import ranks

    device, physical = "CPU", None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(ranks.device())
        device, physical = properties.name, str(getattr(properties, "uuid", "")) or None
    return Place(
        rank=ranks.rank(),
        host=socket.gethostname(),
        local_rank=ranks.local_rank(),
        device=device,
        physical=physical,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES") if physical else None,
    )
