"""DeepSpeed's flat partitions: which elements of which parameters lie where, and weights made from masters again.

Reads attributes of DeepSpeed 0.19.8's ZeRO optimizers (their names are checked by tests/architecture); imports nothing of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bigtrain import zero


@dataclass(frozen=True)
class PlacedParameter:
    """Where one parameter lies in the partitions of its group.

    Attributes:
        shape: the whole parameter's.
        spans: for each rank of the group, the first element of the parameter (row-major) it holds, and how many.
        at: offset of this rank's span in its own flat partition.
        param: the parameter itself.
    """

    shape: torch.Size
    spans: tuple[tuple[int, int], ...]
    at: int
    param: torch.nn.Parameter


@dataclass(frozen=True)
class PartitionLayout:
    """The parameters in one flat partition, in order; `rank` within `group`."""

    matrices: tuple[PlacedParameter, ...]
    group: Any
    rank: int


def partition_layouts(ds_optimizer: Any) -> dict[torch.Tensor, PartitionLayout]:
    """What each flat master partition of a ZeRO optimizer (stages 1, 2, 3) holds; empty if it has none (stage 0)."""
    if hasattr(ds_optimizer, "fp32_partitioned_groups_flat"):
        return {
            flat: _layout_stage3(ds_optimizer.fp16_groups[i], ds_optimizer._get_sub_group_process_group(i))
            for i, flat in enumerate(ds_optimizer.fp32_partitioned_groups_flat)
        }
    if hasattr(ds_optimizer, "single_partition_of_fp32_groups"):
        flats = ds_optimizer.single_partition_of_fp32_groups
        members, offsets = ds_optimizer.round_robin_bit16_groups, ds_optimizer.round_robin_bit16_offsets
    elif hasattr(ds_optimizer, "fp32_groups_flat_partition"):  # stage 1 with fp32 accumulation
        flats, members = ds_optimizer.fp32_groups_flat_partition, ds_optimizer.bf16_groups
        offsets = [list(itertools.accumulate((p.numel() for p in group), initial=0))[:-1] for group in members]
    else:
        return {}
    return {
        flat: _layout_flat(params, starts, flat.numel(), group)
        for flat, params, starts, group in zip(flats, members, offsets, ds_optimizer.real_dp_process_group)
    }


def _layout_flat(params: Sequence[torch.nn.Parameter], starts: Sequence[int], size: int, group: Any) -> PartitionLayout:
    """Stages 1 and 2: parameters side by side in one flat buffer, cut into equal partitions of `size` elements."""
    world, me = dist.get_world_size(group=group), dist.get_rank(group=group)

    def span(start: int, numel: int, rank: int) -> tuple[int, int]:
        first, end = max(start, rank * size), min(start + numel, (rank + 1) * size)
        return (first - start, end - first) if first < end else (0, 0)

    placed = [
        PlacedParameter(p.shape, tuple(span(start, p.numel(), r) for r in range(world)), max(start - me * size, 0), p)
        for p, start in zip(params, starts)
    ]
    return PartitionLayout(tuple(placed), group, me)


def _layout_stage3(params: Sequence[torch.nn.Parameter], group: Any) -> PartitionLayout:
    """Stage 3: every parameter is cut into equal parts by itself, the last one padded."""
    world, me = dist.get_world_size(group=group), dist.get_rank(group=group)
    placed, at = [], 0
    for param in params:
        numel, part = zero.full_numel(param), param.partition_numel()  # type: ignore[attr-defined]
        spans = tuple((min(r * part, numel), max(0, min(part, numel - r * part))) for r in range(world))
        placed.append(PlacedParameter(zero.full_shape(param), spans, at, param))
        at += part
    return PartitionLayout(tuple(placed), group, me)


@torch.no_grad()
def refresh_weights(ds_optimizer: Any) -> None:
    """Make the model's weights from the masters, after these were changed from outside; all ranks call it."""
    kind = zero.optimizer_kind(ds_optimizer)
    if kind in ("zero12", "bf16"):
        ds_optimizer.update_lp_params()
        return
    if kind == "plain":
        for param, master in zip(ds_optimizer.model_params, ds_optimizer.masters):
            if param is not master:
                param.copy_(master)
        return
    for number, master in enumerate(ds_optimizer.fp32_partitioned_groups_flat):
        weights = ds_optimizer.fp16_partitioned_groups_flat[number]
        if weights.data_ptr() != master.data_ptr():
            weights.data.copy_(master.data)
        views = ds_optimizer.unflatten(weights, ds_optimizer.fp16_partitioned_groups[number])
        for part, view in zip(ds_optimizer.fp16_partitioned_groups[number], views):
            part.data = view.data
    regather_persistent(ds_optimizer)


def regather_persistent(ds_optimizer: Any) -> None:
    """Stage 3 keeps small parameters whole: drop those copies and gather them from the partitions again."""
    persistent = getattr(ds_optimizer, "persistent_parameters", [])
    if persistent:
        persistent[0].partition(persistent)
        persistent[0].all_gather(persistent)
