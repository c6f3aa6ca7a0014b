"""The optimizer's groups, as counts of elements: laid out flat at ZeRO-1/2, cut into sub-groups at ZeRO-3.

Who owns which elements of them: `bigtrain.partition`. A sub-group has at least `sub_group_size` local elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bigtrain.partition import group_partition_size, partition_size
from bigtrain.plan.parameters import Parameter


@dataclass(frozen=True)
class FlatGroup:
    """One optimizer group of ZeRO-1/2.

    Attributes:
        members: indices of its parameters. offsets: their first element. padded: elements with padding.
        partition: elements of one rank, padded / ranks.
    """

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    padded: int
    partition: int

    def owners(self, position: int, elems: int) -> range:
        """Ranks that own a part of the member at `position`, which has `elems` elements."""
        start = self.offsets[position]
        return range(start // self.partition, (start + elems - 1) // self.partition + 1)

    def owned(self, position: int, elems: int, rank: int) -> int:
        """Elements of that member that `rank` owns."""
        start, left = self.offsets[position], rank * self.partition
        return max(0, min(start + elems, left + self.partition) - max(start, left))


def split_groups(items: Sequence[Parameter], decay_groups: bool, trains: Sequence[bool] | None = None) -> list[tuple[int, ...]]:
    """Indices of what trains per optimizer group: matrices decay, vectors do not; or everything together."""
    training = [i for i in range(len(items)) if trains is None or trains[i]]
    if not decay_groups:
        return [tuple(training)]
    matrices = tuple(i for i in training if len(items[i].shape) > 1)
    vectors = tuple(i for i in training if len(items[i].shape) <= 1)
    return [group for group in (matrices, vectors) if group]


def flat_group(items: Sequence[Parameter], members: tuple[int, ...], world: int) -> FlatGroup:
    """Lay one group out for `world` ranks."""
    offsets, total = [], 0
    for i in members:
        offsets.append(total)
        total += items[i].elems
    size = group_partition_size([total], world)
    return FlatGroup(members, tuple(offsets), size * world, size)


def heaviest_rank(items: Sequence[Parameter], groups: Sequence[FlatGroup], world: int) -> int:
    """The rank whose partition touches most elements: the one that a plan must be made for."""
    load = [0] * world
    for group in groups:
        for at, i in enumerate(group.members):
            for rank in group.owners(at, items[i].elems):
                load[rank] += items[i].elems
    return max(range(world), key=load.__getitem__)


def sub_groups(items: Sequence[Parameter], groups: Sequence[tuple[int, ...]], world: int, limit: int) -> list[int]:
    """ZeRO-3: local elements of every sub-group, in order (stage3.py `_create_fp16_sub_groups`)."""
    sizes: list[int] = []
    for members in groups:
        local = [partition_size(items[i].elems, world) for i in members]
        if limit >= sum(local):
            sizes.append(sum(local))
            continue
        size = 0
        for at, elems in enumerate(local):
            size += elems
            if size >= limit or at == len(local) - 1:
                sizes.append(size)
                size = 0
    return sizes
