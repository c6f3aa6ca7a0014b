"""Weights copied out of the memory of the other ranks of this host, and what happens where that is not possible."""

import pytest
import torch

from bigtrain import ranks
from bigtrain.checkpoint import live, neighbours
from bigtrain.engine import Engine
from bigtrain.models import build_model
from tests.ranks.tiny import TinyLM, config, rows


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


def _engine(seed: int) -> Engine:
    cfg = config(2, bf16=True, micro=1, accumulation=1)
    model = build_model(lambda: TinyLM(width=34), ds_config=cfg, seed=seed)  # odd sizes: every partition has padding
    return Engine(model, ds_config=cfg, optimizer="adamw_torch", learning_rate=1e-3, hang_s=None)


def _weights(engine: Engine) -> list[torch.Tensor]:
    return [p.detach().clone() for p in engine.module.parameters()]


def _ways(root: str):
    """The weights after a load by each way, compared with those that were saved, on this rank."""
    engine = _engine(1)
    engine.train_step(rows(0, engine.world_size)[engine.rank :: engine.world_size])
    engine.save_checkpoint(root)
    expected, equal = _weights(engine), []
    engine.close()
    originals = neighbours.reachable, neighbours.gather, live.READING_RANKS
    try:
        for reachable, gather, reading_ranks in ((True, True, 4), (True, False, 4), (False, True, 4), (False, True, 0)):
            neighbours.reachable, live.READING_RANKS = (lambda: originals[0]()) if reachable else (lambda: False), reading_ranks
            neighbours.gather = originals[1] if gather else (lambda parts: False)
            other = _engine(2)
            other.load_checkpoint(root)
            equal.append(all(torch.equal(a, b) for a, b in zip(_weights(other), expected, strict=True)))
            other.close()
    finally:
        neighbours.reachable, neighbours.gather, live.READING_RANKS = originals
    return equal


@pytest.mark.parametrize("world", [2, 3])
def test_weights_are_the_same_by_every_way(rank_pool, tmp_path, world):
    assert rank_pool(world).run(_ways, str(tmp_path)) == [[True] * 4] * world
