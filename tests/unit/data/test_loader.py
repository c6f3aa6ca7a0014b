"""Step loader and evaluation loader: same batches on any split, exact resume, errors that name the sample."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import time

import psutil
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bigtrain.data.loader import EvalLoader, StepLoader, stack
from bigtrain.data.order import SampleOrder, plan_eval, plan_steps
from bigtrain.errors import DataError


@pytest.fixture
def no_workers_left():
    """Fails when a test leaves processes behind (others, such as a pool of ranks, may be there before it)."""
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) <= before


class Numbered:
    """Rows whose ids are their own index."""

    def __init__(self, n, broken=()):
        self.n, self.broken = n, set(broken)

    def __len__(self):
        return self.n

    def documents_of(self, row):
        return [row * 10]

    def __getitem__(self, row):
        if row in self.broken:
            raise ValueError("disk on fire")
        ids = torch.full((4,), row)
        labels = ids.clone()
        labels[0] = -100
        return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(4)}


def _loader(n=23, micro=2, accumulation=2, world=1, rank=0, rows=None, seed=1, **kwargs):
    plan = plan_steps(n, micro, accumulation, world, epochs=kwargs.pop("epochs", 2.5))
    return StepLoader(rows or Numbered(n), SampleOrder(n, seed), plan, rank, world, **kwargs)


def _ids(micro_batches):
    return [batch["input_ids"][:, 0].tolist() for batch in micro_batches]


def _global_rows(micro, accumulation, world, **kwargs):
    """Rows of each step in training order over all ranks."""
    ranks = [list(_loader(24, micro, accumulation, world, rank, **kwargs)) for rank in range(world)]
    assert len({len(steps) for steps in ranks}) == 1
    out = []
    for steps in zip(*ranks):
        out.append([row for a in range(accumulation) for rank in range(world) for row in _ids(steps[rank])[a]])
    return out


@pytest.mark.parametrize("split", [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1), (1, 1, 4)])
def test_B56_global_batches_do_not_depend_on_the_split(split):
    assert _global_rows(*split) == _global_rows(4, 1, 1)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_every_row_is_trained_before_any_repeats(micro, accumulation, world, seed):
    whole = micro * accumulation * world
    assume(whole <= 24)
    flat = [row for step in _global_rows(micro, accumulation, world, seed=seed, epochs=2.0) for row in step]
    assert sorted(flat[:24]) == list(range(24)) and sorted(flat[24:48]) == list(range(24))
    assert len(flat) == -(-48 // whole) * whole


@pytest.mark.parametrize("start", [0, 1, 5, 6, 13, 14])
def test_resume_is_exact_mid_epoch_and_in_later_epochs(start):
    whole = [_ids(step) for step in _loader()]
    assert len(whole) == 15 == len(_loader())
    resumed = _loader(start_step=start)
    assert len(resumed) == 15 - start
    assert [_ids(step) for step in resumed] == whole[start:]
    assert [_ids(step) for step in resumed] == whole[start:]  # iterating again starts at the same step
    assert resumed.position(3) == 12


def test_resume_on_another_world_size_continues_the_same_order():
    before = _global_rows(2, 2, 1)
    after = [list(_loader(24, 1, 1, 4, rank, start_step=4)) for rank in range(4)]
    assert [[_ids(s)[0][0] for s in steps] for steps in zip(*after)] == before[4:]


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_give_the_same_batches_and_end(workers, no_workers_left):
    alone = [_ids(step) for step in _loader()]
    with contextlib.closing(_loader(num_workers=workers)) as loader:
        assert [_ids(step) for step in loader] == alone
        iterator = iter(loader)
        assert _ids(next(iterator)) == alone[0]  # left in the middle


def test_leaving_the_loop_early_ends_the_workers(no_workers_left):
    loader = _loader(num_workers=2)
    for _ in loader:
        break
    loader.close()
    loader.close()


class Endless(Numbered):
    """A worker never comes back from the fifth row that it reads."""

    read = 0

    def __getitem__(self, row):
        self.read += 1
        time.sleep(60 * (self.read > 4))
        return super().__getitem__(row)


def _workers_of(loader):
    """Processes of a loader whose iteration has begun."""
    return loader._stream._running._workers


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "USR1", "USR2"])
def test_a_signal_to_the_whole_process_group_ends_no_worker(name, no_workers_left):
    with contextlib.closing(_loader(num_workers=2)) as loader:
        steps = iter(loader)
        first = _ids(next(steps))
        # From another process than the rank, which ends its workers by SIGTERM.
        subprocess.run(["kill", f"-{name}", *(str(worker.pid) for worker in _workers_of(loader))], check=True)
        assert [first, *map(_ids, steps)] == [_ids(step) for step in _loader()]


def test_a_busy_worker_ends_when_its_rank_says_so(no_workers_left):
    with contextlib.closing(_loader(rows=Endless(23), num_workers=1)) as loader:
        steps = iter(loader)
        next(steps)
        worker = _workers_of(loader)[0]
        worker.terminate()
        worker.join(10)
        assert worker.exitcode == 0


def test_a_busy_worker_does_not_outlive_its_rank():
    rank = os.fork()
    if rank == 0:
        list(_loader(rows=Endless(23), num_workers=2))
    end = time.monotonic() + 20
    while len(workers := psutil.Process(rank).children()) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.3)
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    assert len(workers) == 2 and psutil.wait_procs(workers, 10)[1] == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_row_that_cannot_be_read_is_named(workers, no_workers_left):
    loader = _loader(rows=Numbered(23, broken=[7]), num_workers=workers)
    with pytest.raises(DataError, match=r"row 7 \(samples \[70\]\) cannot be read: ValueError: disk on fire"):
        list(loader)


def test_loading_does_not_touch_the_models_random_numbers():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    list(_loader(num_workers=1))
    assert torch.equal(torch.rand(3), expected)


def test_batches_are_tensors_of_micro_batch_by_length():
    batch = next(iter(_loader(micro=3)))[0]
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
        name: ((3, 4), torch.int64) for name in ("input_ids", "labels", "position_ids")
    }


def test_document_bounds_for_flash_attention():
    positions = [torch.tensor([0, 1, 0, 1]), torch.tensor([0, 1, 2, 3])]
    batch = stack([{"position_ids": p} for p in positions], document_bounds=True)
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 2, 4, 8]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 4


def test_what_does_not_belong_together_is_refused():
    plan = plan_steps(8, 1, 1, 2)
    for arguments, message in [
        ((Numbered(8), SampleOrder(8), plan, 2, 2), "rank=2"),
        ((Numbered(8), SampleOrder(8), plan, 0, 1), "for 2 ranks, the loader is on 1"),
        ((Numbered(9), SampleOrder(8), plan, 0, 2), "9 rows, an order of 8"),
        ((Numbered(8), SampleOrder(8), plan, 0, 2, 5), "start_step=5 is outside this run of 4 steps"),
        ((Numbered(8), SampleOrder(8), plan, 0, 2, 0, -1), "num_workers=-1"),
    ]:
        with pytest.raises(DataError, match=message):
            StepLoader(*arguments)
    with pytest.raises(DataError, match="evaluation plan is for 5 rows on 2 ranks"):
        EvalLoader(Numbered(5), plan_eval(5, 1, 2), 0, 1)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 1])
def test_B48_evaluation_is_equally_long_everywhere_and_counts_each_row_once(world, workers):
    n = 5
    per_rank = [list(EvalLoader(Numbered(n), plan_eval(n, 2, world), r, world, workers)) for r in range(world)]
    assert len({len(batches) for batches in per_rank}) == 1
    real = [
        ids
        for batches in per_rank
        for batch in batches
        for ids, labels in zip(batch["input_ids"][:, 0].tolist(), batch["labels"])
        if (labels != -100).any()
    ]
    assert sorted(real) == list(range(n))
    targets = sum(int((b["labels"] != -100).sum()) for batches in per_rank for b in batches)
    assert targets == n * 3


def test_real_rows_through_spawned_workers(make_rows):
    """Rows pickle by file name: a worker that is started fresh reads the same."""
    import pickle

    rows = make_rows([[5, 6, 2], [7, 8, 9, 2]], 8)
    copy = pickle.loads(pickle.dumps(rows))
    for name, tensor in rows[0].items():
        assert torch.equal(tensor, copy[0][name])
