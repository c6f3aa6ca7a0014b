"""Exact values, and transformers' lambdas where they are the same."""

import pytest
import torch
import transformers

from bigtrain.errors import UsageError
from bigtrain.optim import schedule


def _transformers(name, steps, **kw):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    factor = getattr(transformers, f"get_{name}")(optimizer, **kw).lr_lambdas[0]
    return [factor(s) for s in range(steps)]


def test_the_first_update_runs_at_the_warm_up_rate():
    factor = schedule("linear", warmup_steps=4, total_steps=10)
    assert [factor(s) for s in range(11)] == [0.25, 0.5, 0.75, 1.0, 1.0, 5 / 6, 1 - 2 / 6, 0.5, 1 - 4 / 6, 1 - 5 / 6, 0.0]


@pytest.mark.parametrize(
    "ours, theirs, kw, their_kw",
    [
        ("linear", "linear_schedule_with_warmup", {}, {"num_training_steps": 20}),
        ("cosine", "cosine_schedule_with_warmup", {}, {"num_training_steps": 20}),
        ("constant", "constant_schedule_with_warmup", {}, {}),
        ("cosine", "cosine_with_min_lr_schedule_with_warmup", {"min_ratio": 0.1},
         {"num_training_steps": 20, "min_lr_rate": 0.1}),
        ("wsd", "wsd_schedule", {"decay_steps": 6, "min_ratio": 0.2},
         {"num_training_steps": 20, "num_decay_steps": 6, "min_lr_ratio": 0.2, "decay_type": "linear"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("warmup", [0, 5])
def test_equals_transformers_from_the_end_of_the_warm_up_on(ours, theirs, kw, their_kw, warmup):
    factor = schedule(ours, warmup_steps=warmup, total_steps=20, **kw)
    expected = _transformers(theirs, 21, num_warmup_steps=warmup, **their_kw)
    # 1e-15: 1 - p against (T - s) / (T - W) differ in the last bit
    assert [factor(s) for s in range(warmup, 21)] == pytest.approx(expected[warmup:], abs=1e-15)
    assert [factor(s) for s in range(warmup)] == [(s + 1) / warmup for s in range(warmup)]


def test_after_the_end_the_last_value_stays():
    for name in ("linear", "cosine", "wsd"):
        factor = schedule(name, warmup_steps=2, total_steps=10, min_ratio=0.1)
        assert factor(10) == pytest.approx(0.1, abs=1e-15) and factor(1000) == factor(10)


def test_wsd_decays_over_the_last_tenth_by_default():
    factor = schedule("warmup_stable_decay", warmup_steps=5, total_steps=40)
    assert [factor(s) for s in (0, 4, 5, 35, 36, 37, 39, 40)] == [0.2, 1.0, 1.0, 1.0, 1.0, 0.75, 0.25, 0.0]


def test_a_warm_up_as_long_as_the_run():
    factor = schedule("cosine", warmup_steps=3, total_steps=3)
    assert [factor(s) for s in range(4)] == [1 / 3, 2 / 3, 1.0, 1.0]


@pytest.mark.parametrize(
    "name, kw",
    [
        ("cosin", {"total_steps": 3}),
        ("linear", {}),
        ("linear", {"total_steps": 0}),
        ("linear", {"total_steps": 3, "warmup_steps": 4}),
        ("linear", {"total_steps": 3, "warmup_steps": -1}),
        ("cosine", {"total_steps": 3, "min_ratio": 1.5}),
        ("cosine", {"total_steps": 3, "min_ratio": "0.1"}),
        ("wsd", {"total_steps": 5, "decay_steps": 6}),
        ("wsd", {"total_steps": 5, "decay_steps": 2.5}),
        ("wsd", {"total_steps": 5, "decay": ["linear"]}),
        ("wsd", {"total_steps": 5, "decay": "square"}),
    ],
)
def test_values_that_contradict_each_other_are_refused(name, kw):
    with pytest.raises(UsageError):
        schedule(name, **kw)
