"""Resolved files run under plain `deepspeed.initialize`, and add up micro steps as ds_configs/README.md says.

A single parameter with known gradients: 1.0 once and 2^-9 three times. Their mean is 0.25146484375; in bf16, where
0.25 + 2^-11 is 0.25 again, it would be 0.25. Both are exact in fp32, so everything here is compared exactly.
"""

from __future__ import annotations

import pytest

from bigtrain.config import PRESETS, GenerateOptions, ModelShape, RunValues, generate, resolve
from bigtrain.config.load import load

MICRO_STEPS = (1.0, 2**-9, 2**-9, 2**-9)
FP32_MEAN, BF16_MEAN = sum(MICRO_STEPS) / 4, 0.25
CASES = [(1, "none"), (1, "optimizer"), (2, "none"), (2, "optimizer"), (3, "none"), (3, "optimizer"), (3, "all")]


def start(config):
    """A DeepSpeed engine around one 64 x 64 parameter, built from the file alone."""
    import deepspeed
    import torch

    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(64, 64))

        def forward(self, factor):
            return (self.w * torch.full((64, 64), factor, dtype=self.w.dtype)).sum()

    engine, *_ = deepspeed.initialize(model=Sum(), config=config)
    return engine


def two_steps(config):
    """Master weight after a step of MICRO_STEPS and after one of 0.5 four times, with SGD at rate 1."""
    from deepspeed.utils import safe_get_full_fp32_param

    engine = start(config)
    seen = []
    for factors in (MICRO_STEPS, (0.5,) * 4):
        for factor in factors:
            engine.backward(engine(factor))
            engine.step()
        full = safe_get_full_fp32_param(engine.module.w)
        seen.append(float((engine.module.w if full is None else full).flatten()[0]))
    return seen


def sgd(stage, offload, world):
    """A resolved file with plain SGD, so that the step is the gradient."""
    config = generate(GenerateOptions(stage=stage, offload=offload, max_grad_norm=0))
    config["optimizer"] = {"type": "SGD", "params": {"lr": 1.0}}
    return resolve(config, run=RunValues(accumulation=4), world_size=world, device="cpu").config


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("stage", "offload"), CASES)
def test_micro_steps_add_up_in_fp32(rank_pool, world, stage, offload):
    results = rank_pool(world).run(two_steps, sgd(stage, offload, world))
    expected = [-FP32_MEAN, -FP32_MEAN - 0.5]
    if world == 3:
        # A mean over three ranks is not exact in bf16 (1/3 is not): each micro step, reduced in bf16, may be off by
        # half an ulp of bf16 at its size, 2^-9 of it.
        assert all(abs(a - b) <= 2**-9 for seen in results for a, b in zip(seen, expected))
        assert all(seen == results[0] for seen in results)
    else:
        assert results == [expected] * world


@pytest.mark.parametrize("world", [1, 2])
def test_stage_0_adds_up_in_bf16(rank_pool, world):
    results = rank_pool(world).run(two_steps, sgd(0, "none", world))
    assert results == [[-BF16_MEAN, -BF16_MEAN - 0.5]] * world


def initialize_fails(config):
    """The kind of error that DeepSpeed raises on a file."""
    try:
        start(config)
    except Exception as error:
        return type(error).__name__
    return ""


def test_stage_0_refuses_fp32_sums_as_the_lint_says(rank_pool):
    config = sgd(0, "none", 2) | {"data_types": {"grad_accum_dtype": "fp32"}}
    assert rank_pool(2).run(initialize_fails, config) == ["NotImplementedError"] * 2


def three_losses(config):
    """Three steps on the sum of the parameter; losses, rate and clipping in use, optimizer class."""
    engine = start(config)
    losses = []
    for _ in range(3):
        loss = engine(1.0)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses, engine.get_lr(), engine.gradient_clipping(), type(engine.basic_optimizer).__name__


@pytest.mark.parametrize("name", PRESETS)
def test_a_resolved_preset_trains(rank_pool, name):
    done = resolve(load(name), run=RunValues(learning_rate=1e-2), model=ModelShape(hidden_size=64), world_size=2, device="cpu")
    for losses, rate, clipping, optimizer in rank_pool(2).run(three_losses, done.config):
        assert losses[0] == 0 > losses[1] > losses[2]
        assert (rate, clipping) == ([1e-2], 1.0)
        assert optimizer == ("DeepSpeedCPUAdam" if "offload" in name else "AdamW")


def first_rates(config):
    """The schedule DeepSpeed builds from the file: peak, length."""
    scheduler = start(config).lr_scheduler
    return scheduler.max_lrs, scheduler.total_num_steps


def test_B07_a_resolved_schedule_has_our_peak_and_length(rank_pool):
    options = GenerateOptions(stage=2, scheduler="linear", learning_rate=1e-5, warmup_steps=4, total_steps=10)
    done = resolve(generate(options), world_size=2, device="cpu")
    assert rank_pool(2).run(first_rates, done.config) == [([1e-5], 10)] * 2
