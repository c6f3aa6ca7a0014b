"""DeepSpeed's flat partitions: what lies where in them, weights made from masters again, and masters that are the weights.

Imports nothing of DeepSpeed; uses these internal attributes of 0.19.8's ZeRO optimizers:
    fp32_partitioned_groups_flat, fp16_partitioned_groups_flat, fp16_partitioned_groups, fp16_groups,
    _get_sub_group_process_group, single_partition_of_fp32_groups, parallel_partitioned_bit16_groups, round_robin_bit16_groups,
    round_robin_bit16_offsets, round_robin_bit16_meta, bit16_groups_flat, _update_model_bit16_weights,
    fp32_groups_flat_partition, bf16_groups, real_dp_process_group, update_lp_params, unflatten,
    persistent_parameters, bf16_partitioned_groups, averaged_gradients, loss_scale, clip_grad, unscale_and_clip_grads, _link_all_hp_params,
    _prepare_fp32_grad_for_sub_group, _get_preflattened_grad_partition, _partition_all_parameters, grad_position, get_param_id;
    of a parameter: partition_numel, all_gather, _z3_optimizer;
    of the module of stages 1 and 2: all_gather_dp_groups
A test in tests/architecture checks that DeepSpeed has each of them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bigtrain import zero
from bigtrain.errors import UsageError

MasterOf = Callable[[Any], tuple[int, torch.Tensor] | None]

# By `zero.optimizer_kind`, the attribute with this rank's masters.
MASTERS = {
    "zero12": "single_partition_of_fp32_groups",
    "zero3": "fp32_partitioned_groups_flat",
    "bf16": "fp32_groups_flat_partition",
    "plain": "masters",  # bigtrain.engine.master.MasterOptimizer
}


def masters(ds_optimizer: Any) -> list[torch.Tensor]:
    """This rank's master weights: whole at stage 0, its flat partitions otherwise."""
    return list(getattr(ds_optimizer, MASTERS[zero.optimizer_kind(ds_optimizer)]))


@dataclass(frozen=True)
class PlacedParameter:
    """Where one parameter lies in the partitions of its group.

    Attributes:
        shape: the whole parameter's.
        spans: for each rank of the group, the first element of the parameter (row-major) it holds, and how many.
        offsets: of each rank's span in its own flat partition.
        at: that of this rank.
        param: the parameter itself.
    """

    shape: torch.Size
    spans: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...]
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
    kind = zero.optimizer_kind(ds_optimizer)
    if kind == "zero3":
        return {
            flat: _layout_stage3(ds_optimizer.fp16_groups[i], ds_optimizer._get_sub_group_process_group(i))
            for i, flat in enumerate(ds_optimizer.fp32_partitioned_groups_flat)
        }
    if kind == "zero12":
        members, offsets = ds_optimizer.round_robin_bit16_groups, ds_optimizer.round_robin_bit16_offsets
    elif kind == "bf16":
        members = ds_optimizer.bf16_groups
        offsets = [list(itertools.accumulate((p.numel() for p in group), initial=0))[:-1] for group in members]
    else:
        return {}
    return {
        flat: _layout_flat(params, starts, flat.numel(), group)
        for flat, params, starts, group in zip(masters(ds_optimizer), members, offsets, ds_optimizer.real_dp_process_group)
    }


def master_of(ds_optimizer: Any) -> MasterOf:
    """From a parameter to this rank's part of its fp32 master, in place, as `(start, flat)`; None if it has none here.

    `flat` covers the elements from `start` on, at stage 3 with the padding of the partition.
    """
    kind = zero.optimizer_kind(ds_optimizer)
    if kind == "plain":
        return ds_optimizer.master_of  # bigtrain.engine.master.MasterOptimizer
    if kind == "zero3":
        return lambda param: _master_stage3(ds_optimizer, param)
    # Not by DeepSpeed's own links: they follow the order of the model, also where `round_robin_gradients` has dealt the parameters to
    # the partitions in another (0.19.8, stage_1_and_2.py, _link_all_hp_params), and lead to the master of another parameter.
    places = {
        id(placed.param): (flat, placed.at, *placed.spans[layout.rank])
        for flat, layout in partition_layouts(ds_optimizer).items()
        for placed in layout.matrices
        if placed.spans[layout.rank][1]
    }

    def find(param: Any) -> tuple[int, torch.Tensor] | None:
        if id(param) not in places:
            return None
        flat, at, start, count = places[id(param)]
        return (start, flat.data.narrow(0, at, count)) if flat.dtype == torch.float32 else None

    return find


def _master_stage3(ds_optimizer: Any, param: Any) -> tuple[int, torch.Tensor] | None:
    if not param.requires_grad or not hasattr(param, "_z3_optimizer"):
        return None
    group, offset, count = ds_optimizer.grad_position[ds_optimizer.get_param_id(param)]
    flat = ds_optimizer.fp32_partitioned_groups_flat[group]
    if flat is None or flat.dtype != torch.float32 or flat.numel() < offset + count:
        return None  # swapped out, or there is no fp32 master
    return zero.slice_of(param)[0], flat.data.narrow(0, offset, count)


def _layout_flat(params: Sequence[torch.nn.Parameter], starts: Sequence[int], size: int, group: Any) -> PartitionLayout:
    """Stages 1 and 2: parameters side by side in one flat buffer, cut into equal partitions of `size` elements."""
    world, me = dist.get_world_size(group=group), dist.get_rank(group=group)

    def span(start: int, numel: int, rank: int) -> tuple[int, int]:
        first, end = max(start, rank * size), min(start + numel, (rank + 1) * size)
        return (first - start, end - first) if first < end else (0, 0)

    placed = []
    for param, start in zip(params, starts):
        spans = tuple(span(start, param.numel(), r) for r in range(world))
        offsets = tuple(max(start - r * size, 0) for r in range(world))
        placed.append(PlacedParameter(param.shape, spans, offsets, offsets[me], param))
    return PartitionLayout(tuple(placed), group, me)


def _layout_stage3(params: Sequence[torch.nn.Parameter], group: Any) -> PartitionLayout:
    """Stage 3: every parameter is cut into equal parts by itself, the last one padded."""
    world, me = dist.get_world_size(group=group), dist.get_rank(group=group)
    placed, at = [], 0
    for param in params:
        numel, part = zero.full_numel(param), param.partition_numel()  # type: ignore[attr-defined]
        spans = tuple((min(r * part, numel), max(0, min(part, numel - r * part))) for r in range(world))
        placed.append(PlacedParameter(zero.full_shape(param), spans, (at,) * world, at, param))
        at += part
    return PartitionLayout(tuple(placed), group, me)


@torch.no_grad()
def refresh_weights(ds_optimizer: Any, own_only: bool = False) -> None:
    """Make the model's weights from the masters, after these were changed from outside; all ranks call it.

    Args:
        ds_optimizer: of a DeepSpeed engine.
        own_only: at stages 1 and 2, nothing but this rank's partitions: the caller has filled in those of other ranks.
    """
    kind = zero.optimizer_kind(ds_optimizer)
    if kind in ("zero12", "bf16") and own_only:
        for weights, master in zip(_own_weights(ds_optimizer), masters(ds_optimizer)):
            weights.copy_(master.data)
        return
    if kind in ("zero12", "bf16"):
        ds_optimizer.update_lp_params()
        return
    if kind == "plain":
        for param, master in zip(ds_optimizer.model_params, ds_optimizer.masters):
            if param is not master:
                param.copy_(master)
        return
    ds_optimizer._partition_all_parameters()  # whole copies that an evaluation left behind would be used in place of the new values
    for number, master in enumerate(ds_optimizer.fp32_partitioned_groups_flat):
        weights = ds_optimizer.fp16_partitioned_groups_flat[number]
        if weights.data_ptr() != master.data_ptr():
            weights.data.copy_(master.data)
        views = ds_optimizer.unflatten(weights, ds_optimizer.fp16_partitioned_groups[number])
        for part, view in zip(ds_optimizer.fp16_partitioned_groups[number], views):
            part.data = view.data
    regather_persistent(ds_optimizer)


def weight_partitions(ds_optimizer: Any) -> list[tuple[list[torch.Tensor], list[int]]]:
    """Stages 1 and 2: of each flat tensor of weights its parts, all of which this rank holds, and the rank that updates each."""
    flat16 = "parallel_partitioned_bit16_groups"
    if zero.optimizer_kind(ds_optimizer) == "bf16":
        flat16 = "bf16_partitioned_groups"
    groups = zip(getattr(ds_optimizer, flat16), ds_optimizer.real_dp_process_group)
    return [([part.data for part in parts], dist.get_process_group_ranks(group)) for parts, group in groups]


def _own_weights(ds_optimizer: Any) -> list[torch.Tensor]:
    """Stages 1 and 2: this rank's part of each flat tensor of weights."""
    return [parts[owners.index(dist.get_rank())] for parts, owners in weight_partitions(ds_optimizer)]


def regather_persistent(ds_optimizer: Any) -> None:
    """Stage 3 keeps small parameters whole: drop those copies and gather them from the partitions again."""
    persistent = getattr(ds_optimizer, "persistent_parameters", [])
    if persistent:
        persistent[0].partition(persistent)
        persistent[0].all_gather(persistent)


def alias_master(ds_optimizer: Any) -> None:
    """With bf16 master weights, let DeepSpeed's master partition be the model's own bf16 partition: no second copy is kept.

    Raises:
        UsageError: if the ZeRO optimizer does not keep its master in bf16.
    """
    if zero.optimizer_kind(ds_optimizer) == "zero3":
        weights = ds_optimizer.fp16_partitioned_groups_flat
    else:
        weights = _own_weights(ds_optimizer)
    for master, weight in zip(masters(ds_optimizer), weights):
        if master.dtype != weight.dtype or master.device != weight.device:
            raise UsageError(
                f"DeepSpeed keeps a {master.dtype} master on {master.device}: this optimizer needs "
                "bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states true, and no offload_optimizer."
            )
        master.data = weight.data
        master.grad = None  # stage 3 allocates one at the start
    if hasattr(ds_optimizer, "_link_all_hp_params"):
        ds_optimizer._link_all_hp_params()  # the parameters' links into the old copy would keep it alive


def point_only_what_moved(ds_optimizer: Any) -> None:
    """Stages 1 and 2 make every weight a view of its group's flat tensor after each step, which it is already: look first."""
    point = ds_optimizer._update_model_bit16_weights

    def look(group: int) -> None:
        whole = ds_optimizer.bit16_groups_flat[group]
        first, size = whole.data_ptr(), whole.element_size()
        members, metas = ds_optimizer.round_robin_bit16_groups[group], ds_optimizer.round_robin_bit16_meta[group]
        offsets = ds_optimizer.round_robin_bit16_offsets[group]
        if any(p.data_ptr() != first + at * size or p.shape != m.shape for p, m, at in zip(members, metas, offsets)):
            point(group)

    ds_optimizer._update_model_bit16_weights = look


def hand_over_gradients(ds_optimizer: Any, client: Any) -> None:
    """Give `client` the reduced gradients as they are, and the clipping as a factor, not DeepSpeed's rounded flat copy.

    DeepSpeed flattens the gradients of a partition, casts them to the master's dtype and multiplies by the clipping factor: copies
    of a whole partition, and with a bf16 master each of the last two rounds to 8 bits. `client` needs `hand_over(partition, pieces)`
    and `grad_factor`.
    """

    def factor(total_norm: Any) -> Any:
        scale = ds_optimizer.loss_scale
        if ds_optimizer.clip_grad > 0.0:
            scale = torch.clamp((total_norm / scale + 1e-6) / ds_optimizer.clip_grad, min=1.0) * scale
        return 1.0 / scale

    def clip(_: Any, total_norm: Any) -> None:
        client.grad_factor = factor(total_norm)

    def prepare_stage3(sub_group_id: int) -> None:
        client.hand_over(ds_optimizer.fp32_partitioned_groups_flat[sub_group_id], ds_optimizer.averaged_gradients[sub_group_id])
        ds_optimizer.averaged_gradients[sub_group_id] = None

    def prepare_stage12(group: int) -> torch.Tensor:
        partition, grads = ds_optimizer.single_partition_of_fp32_groups[group], ds_optimizer.averaged_gradients[group]
        flat = getattr(grads, "flat_partition", None)
        client.hand_over(partition, list(grads) if flat is None else [flat.view(-1)])
        return partition.new_zeros(1).expand(partition.numel())  # what DeepSpeed sets as .grad: one element in memory

    ds_optimizer.unscale_and_clip_grads = clip
    if zero.optimizer_kind(ds_optimizer) == "zero3":
        ds_optimizer._prepare_fp32_grad_for_sub_group = prepare_stage3
    else:
        ds_optimizer._get_preflattened_grad_partition = prepare_stage12


def stream_updates(
    stream: Any, module: torch.nn.Module, ds_optimizer: Any, layouts: dict[torch.Tensor, PartitionLayout]
) -> None:
    """Let a stream of updates run on beside the next forward, where nothing of DeepSpeed's reads weights before it.

    That is stages 1 and 2. One rank's step ends with a copy of the partition onto itself, after which forward is next; several ranks'
    with a gather of all weights, in whose place the stream gives ranks each chunk as it is updated. At stage 3 weights are gathered
    ahead of the modules, so the step waits for the update.
    """
    if zero.optimizer_kind(ds_optimizer) == "zero12" and all(_is_of_all_ranks(layout.group) for layout in layouts.values()):
        places = {
            flat: [(m.param, at, at + n) for m in layout.matrices for at, (_, n) in zip(m.offsets, m.spans) if n]
            for flat, layout in layouts.items()
        }
        several = dist.get_world_size() > 1
        if several:
            _gather_nothing_in_step(ds_optimizer)
        stream.attach(module, places, _sharing(ds_optimizer, layouts) if several else None)
    zero.before_reading(stream.finish)


def _is_of_all_ranks(group: Any) -> bool:
    """Chunks of partitions of other groups (experts') would have another order on each rank."""
    return dist.get_world_size(group=group) == dist.get_world_size()


def _sharing(ds_optimizer: Any, layouts: dict[torch.Tensor, PartitionLayout]) -> Callable[[torch.Tensor, int, int], None]:
    """Elements `start` to `end` of every rank's partition, from the rank that updates it to the others, on the current stream."""
    of = dict(zip(masters(ds_optimizer), weight_partitions(ds_optimizer)))

    def share(partition: torch.Tensor, start: int, end: int) -> None:
        for part, owner in zip(*of[partition]):
            dist.broadcast(part[start:end], owner, group=layouts[partition].group)

    return share


def _gather_nothing_in_step(ds_optimizer: Any) -> None:
    """At the end of DeepSpeed's step the weights are those before the update that the stream is going to make."""
    own, home = ds_optimizer.step, sys.modules[type(ds_optimizer).__module__]

    def step(*args: Any, **kwargs: Any) -> Any:
        gather = home.all_gather_dp_groups
        home.all_gather_dp_groups = lambda *_, **__: None  # type: ignore[attr-defined]
        try:
            return own(*args, **kwargs)
        finally:
            home.all_gather_dp_groups = gather  # type: ignore[attr-defined]

    ds_optimizer.step = step
