"""What a step took of the card, and whether the card was so full that the allocator stood in its way."""

from __future__ import annotations

import torch

from bigtrain.diagnostics.metrics import UNTIMED_STEPS

STEPS_IN_A_ROW = 2


class GpuMemory:
    """Of this rank's card, from one call to the next."""

    def __init__(self) -> None:
        self._retries = 0

    def since_last(self) -> tuple[int, int, int, int]:
        """(allocated, reserved) bytes at their highest since the last call, what the driver counts as used now, and how often since
        then the allocator found no room, gave what it had cached back to the driver and asked again; zeros on a CPU."""
        if not torch.cuda.is_available():
            return 0, 0, 0, 0
        stats = torch.cuda.memory_stats()
        retries, self._retries = stats.get("num_alloc_retries", 0) - self._retries, stats.get("num_alloc_retries", 0)
        free, total = torch.cuda.mem_get_info()
        torch.cuda.reset_peak_memory_stats()
        return (
            stats.get("allocated_bytes.all.peak", 0),
            stats.get("reserved_bytes.all.peak", 0),
            total - free,
            retries,
        )


class Thrash:
    """Tells once that steps wait for an allocator without room: the card stands still each time, and nothing else says so."""

    def __init__(self) -> None:
        self._steps, self._in_a_row, self._told = 0, 0, False

    def words(self, step: int, retries: int) -> str | None:
        """What to tell after a step in which the fullest rank's allocator asked again `retries` times; None mostly."""
        self._steps += 1
        self._in_a_row = self._in_a_row + 1 if retries and self._steps > UNTIMED_STEPS else 0
        if self._told or self._in_a_row < STEPS_IN_A_ROW:
            return None
        self._told = True
        return (
            f"GPU memory is so full that the allocator gave it back to the driver and asked again, {retries} times in step {step}: the card "
            "stands still each time. More room may make steps faster: a smaller micro batch, --checkpoint_blocks with a larger number, or "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (metrics.jsonl: gpu_alloc_retries)"
        )
