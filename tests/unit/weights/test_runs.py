"""Runs follow stacking, concatenation and splitting exactly, and give up where elements are shuffled."""

import itertools
import random

import pytest
import torch

from bigtrain.weights.runs import Run, Runs, traced


def check(expression, shapes):
    """The runs of `expression` over tensors of `shapes` reproduce what it computes on real values."""
    values, first = {}, 0
    for index, shape in enumerate(shapes):
        n = torch.Size(shape).numel()
        values[f"t{index}"] = torch.arange(first, first + n, dtype=torch.float64).view(shape)
        first += n
    stand_ins = [traced(name, value.shape, torch.float32) for name, value in values.items()]
    expected, got = expression(*values.values()), expression(*stand_ins)
    if isinstance(expected, torch.Tensor):
        expected, got = [expected], [got]
    for want, have in zip(expected, got, strict=True):
        assert tuple(want.shape) == tuple(have.shape)
        flat = torch.cat([values[run.source].reshape(-1)[run.start : run.start + run.length] for run in have.runs.runs])
        assert torch.equal(flat, want.reshape(-1))


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_cat_stack_and_split(dim):
    check(lambda a, b: torch.cat([a, b], dim=dim), [(3, 4, 5), (3, 4, 5)])
    check(lambda a: torch.chunk(a, 3, dim=dim), [(6, 6, 6)])
    check(lambda a: torch.split(a, [1, 2, 3], dim=dim), [(6, 6, 6)])
    check(lambda a: a.unbind(dim), [(3, 4, 5)])
    check(lambda a, b, c: torch.stack([a, b, c], dim=dim), [(4, 5)] * 3) if dim != 2 else None


def test_a_chain_as_for_experts():
    def fuse(*tensors):
        gate, up = torch.stack(tensors[:3], dim=0), torch.stack(tensors[3:], dim=0)
        return torch.cat([gate, up], dim=1).contiguous()

    check(fuse, [(4, 5)] * 6)
    check(lambda fused: [half[1].squeeze(0).contiguous() for half in torch.chunk(fused, 2, dim=1)], [(3, 8, 5)])
    check(lambda t: t.reshape(4, -1)[1:3].flatten(), [(8, 3)])


def test_shuffles_have_no_runs():
    a = traced("a", (4, 6), torch.float32)
    for shuffled in (a.transpose(0, 1), a.T, a.permute(1, 0).contiguous(), torch.cat([a.t(), a.t()]), a[:, 1:], a[[1, 0]]):
        assert shuffled.runs is None
    assert a.transpose(0, 1).reshape(-1).runs is None


def test_cut_equals_slicing():
    rng = random.Random(1)
    runs = Runs([Run(rng.choice("ab"), rng.randrange(50), rng.randrange(6)) for _ in range(20)])
    elements = [(run.source, run.start + i) for run in runs.runs for i in range(run.length)]
    assert len(elements) == runs.numel
    for start, stop in itertools.combinations(range(runs.numel + 1), 2):
        assert [(run.source, run.start + i) for run in runs.cut(start, stop) for i in range(run.length)] == elements[start:stop]


def test_more_than_two_to_the_31_elements():
    huge = traced("huge", (3, 2**31, 4), torch.bfloat16)
    (_, second, _) = torch.chunk(huge, 3, dim=0)
    assert second.runs.runs == [Run("huge", 2**33, 2**33)]
    assert second.runs.cut(2**32, 2**32 + 5) == [Run("huge", 2**33 + 2**32, 5)]
