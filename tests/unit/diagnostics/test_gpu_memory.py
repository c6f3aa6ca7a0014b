"""The card's memory between two steps, and a card that is too full to be fast."""

import torch

from bigtrain.diagnostics.gpu_memory import GpuMemory, Thrash


def test_retries_are_those_since_the_last_call(monkeypatch):
    counts = iter((2, 2, 7))
    stats = {"allocated_bytes.all.peak": 50, "reserved_bytes.all.peak": 60}
    resets = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {**stats, "num_alloc_retries": next(counts)})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30, 100))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(1))
    card = GpuMemory()
    assert [card.since_last() for _ in range(3)] == [(50, 60, 70, 2), (50, 60, 70, 0), (50, 60, 70, 5)]
    assert len(resets) == 3


def test_a_cpu_has_none():
    assert GpuMemory().since_last() == (0, 0, 0, 0) or torch.cuda.is_available()


def test_told_once_when_it_goes_on_after_the_first_steps():
    thrash = Thrash()
    said = [thrash.words(step, retries) for step, retries in enumerate((9, 9, 9, 1, 0, 2, 3, 4, 5), start=101)]
    assert [words is not None for words in said] == [False] * 6 + [True, False, False]
    assert "3 times in step 107" in said[6]
