"""Weights copied out of the memory of the other ranks of this host, and what happens where that is not possible."""

import torch

from bigtrain import ranks
from bigtrain.checkpoint import neighbours


def _gather(fails_on: int | None):
    assert neighbours.reachable()
    world, rank = ranks.world_size(), ranks.rank()
    flats = []
    for size, dtype in ((1, torch.bfloat16), (70_000_001, torch.uint8), (0, torch.float32), (1001, torch.float32)):
        whole = torch.zeros(size * world, dtype=dtype)
        parts = list(whole.split(size)) if size else [whole] * world
        owners = [(r + 1) % world for r in range(world)]
        parts[owners.index(rank)].fill_(rank + 1)
        flats.append((parts, owners))
    if rank == fails_on:
        original = neighbours.read_memory
        neighbours.read_memory = _refuse
    try:
        done = neighbours.gather(flats)
    finally:
        if rank == fails_on:
            neighbours.read_memory = original
    return done, all(bool((p == owner + 1).all()) for parts, owners in flats for p, owner in zip(parts, owners))


def _refuse(pid, address, into):
    raise PermissionError(1, "not permitted")


def test_every_rank_gets_every_part(rank_pool):
    for world in (2, 3):
        assert rank_pool(world).run(_gather, None) == [(True, True)] * world


def test_one_that_may_not_read_is_known_to_all(rank_pool):
    assert [done for done, _ in rank_pool(2).run(_gather, 1)] == [False, False]


def _another_process():
    """Rank 1 tells a process number that is not its own: as in another container, or on another host."""
    original = neighbours.os.getpid
    if ranks.rank() == 1:
        neighbours.os.getpid = lambda: 1
    try:
        return neighbours.reachable()
    finally:
        neighbours.os.getpid = original


def test_numbers_of_other_processes_are_not_believed(rank_pool):
    assert rank_pool(2).run(_another_process) == [False, False]
