"""Resolved files run under plain `deepspeed.initialize`, and add up micro steps as ds_configs/README.md says.

One process, gloo. A single parameter with known gradients: 1.0 once and 2^-9 three times. Their mean is 0.25146484375;
in bf16, where 0.25 + 2^-11 is 0.25 again, it would be 0.25.
"""

from __future__ import annotations

import os

import pytest

from bigtrain.config import GenerateOptions, ModelShape, RunValues, generate, presets, resolve
from bigtrain.config.load import load

pytest.importorskip("deepspeed")

STEPS = (1.0, 2**-9, 2**-9, 2**-9)
FP32_MEAN, BF16_MEAN = sum(STEPS) / 4, 0.25
CASES = [(1, "none"), (1, "optimizer"), (2, "none"), (2, "optimizer"), (3, "none"), (3, "optimizer"), (3, "all")]


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory):
    """DeepSpeed on one gloo process; the group is left behind only if somebody else made it."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import torch.distributed as dist

    mine = not dist.is_initialized()
    if mine:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        store = f"file://{tmp_path_factory.mktemp('store') / 'store'}"
        deepspeed.init_distributed("gloo", init_method=store, rank=0, world_size=1, verbose=False)
    yield deepspeed
    if mine:
        dist.destroy_process_group()
        deepspeed.comm.comm.cdb = None
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name)


def one_parameter():
    import torch

    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(64, 64))

        def forward(self, factor):
            return (self.w * factor).sum()

    return Sum()


def two_steps(deepspeed, config):
    """Master weight after one step of STEPS and after a second one of 0.5 each, with SGD at rate 1."""
    import torch

    engine, *_ = deepspeed.initialize(model=one_parameter(), config=config)
    seen = []
    for factors in (STEPS, (0.5,) * 4):
        for factor in factors:
            engine.backward(engine(torch.full((64, 64), factor, dtype=torch.bfloat16)))
            engine.step()
        full = deepspeed.utils.safe_get_full_fp32_param(engine.module.w)
        seen.append(float((engine.module.w if full is None else full).flatten()[0]))
    engine.destroy()
    return seen


@pytest.mark.parametrize(("stage", "offload"), CASES)
def test_micro_steps_add_up_in_fp32(deepspeed, stage, offload):
    config = generate(GenerateOptions(stage=stage, offload=offload, max_grad_norm=0))
    config["optimizer"] = {"type": "SGD", "params": {"lr": 1.0}}
    done = resolve(config, run=RunValues(accumulation=4), device="cpu")
    assert two_steps(deepspeed, done.config) == [-FP32_MEAN, -FP32_MEAN - 0.5]


def test_stage_0_adds_up_in_bf16(deepspeed):
    config = generate(GenerateOptions(stage=0, max_grad_norm=0))
    config["optimizer"] = {"type": "SGD", "params": {"lr": 1.0}}
    done = resolve(config, run=RunValues(accumulation=4), device="cpu")
    assert two_steps(deepspeed, done.config) == [-BF16_MEAN, -BF16_MEAN - 0.5]


def test_stage_0_refuses_fp32_sums_as_the_lint_says(deepspeed):
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}, "train_batch_size": 1,
              "data_types": {"grad_accum_dtype": "fp32"}, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}  # fmt: skip
    with pytest.raises(NotImplementedError):
        deepspeed.initialize(model=one_parameter(), config=config)


@pytest.mark.parametrize("name", presets())
def test_a_resolved_preset_trains(deepspeed, name):
    import torch

    done = resolve(load(name), run=RunValues(learning_rate=1e-2), model=ModelShape(hidden_size=64), device="cpu")
    engine, *_ = deepspeed.initialize(model=one_parameter(), config=done.config)
    losses = []
    for _ in range(3):
        loss = engine(torch.ones(64, 64, dtype=torch.bfloat16))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    assert losses[0] == 0 > losses[1] > losses[2]
    assert engine.get_lr() == [1e-2] and engine.gradient_clipping() == 1.0
    engine.destroy()


def test_a_resolved_schedule_runs(deepspeed):
    options = GenerateOptions(stage=2, scheduler="linear", learning_rate=1e-3, warmup_steps=4, total_steps=10)
    done = resolve(generate(options), device="cpu")
    engine, *_ = deepspeed.initialize(model=one_parameter(), config=done.config)
    assert engine.lr_scheduler.max_lrs == [1e-3] and engine.lr_scheduler.total_num_steps == 10
    engine.destroy()
