"""The planner's word on a cell is the word that launch/train.py would act on."""

import pytest

from bigtrain.bench.grid import expand
from bigtrain.bench.prediction import Machine, flops_formula, planned, prediction
from bigtrain.plan.roofline import model_flops_per_token

H100 = Machine(device="cuda", card="NVIDIA H100 80GB HBM3", gpu_bytes=80 * 2**30, host_bytes=126 * 2**30)
BASE = {"seq_len": 4096, "micro_batch": 2, "gradient_checkpointing": True}


def cell(**values):
    return expand({**BASE, **values})[0]


def test_prediction_has_every_number_and_a_verdict():
    said = prediction(cell(model="preset:llama-3b", ds_config="zero2_offload"), H100)
    assert said["fits"] is True and said["host_bytes"] > 30 * 2**30
    assert 0 < said["gpu_allocated_bytes"] <= said["gpu_reserved_bytes"] < said["gpu_used_bytes"] < 80 * 2**30
    assert said["step_time_s"] > 0 and said["tokens_per_s_per_gpu"] > 0
    assert prediction(cell(model="preset:llama-8b", ds_config="zero2"), H100)["fits"] is False


def test_a_cap_counts_as_the_card():
    small = prediction(cell(model="preset:llama-3b", ds_config="zero2_offload", gpu_memory_cap=8), H100)
    assert small["fits"] is False and small["gpu_limit_bytes"] == 8 * 2**30


def test_auto_is_chosen_as_the_run_will_and_respects_what_is_given():
    said = prediction(cell(model="preset:llama-8b", ds_config="auto", use_liger_kernel=True), H100)
    assert said["fits"] is True and "micro batch 2 x 4096 tokens" in said["config"] and "checkpointing full" in said["config"]
    nothing = prediction(cell(model="preset:llama-405b", ds_config="auto"), H100)
    assert nothing["fits"] is False and "no configuration fits" in nothing["none"]


@pytest.mark.parametrize("model", ["llama-1b", "mixtral-8x7b", "qwen3-8b"])
def test_formula_is_the_planners(model):
    found = planned(cell(model=f"preset:{model}", ds_config="zero3"), H100).input
    assert flops_formula(found).per_token == pytest.approx(model_flops_per_token(found), rel=1e-12)


H200 = Machine(device="cuda", card="NVIDIA H200", gpu_bytes=150_754_820_096, host_bytes=270_334_464_000)


@pytest.mark.parametrize("model, cap, allocated, reserved", [
    ("llama-8b", None, 101.94, 110.57), ("llama-8b", 47.4, 45.51, 49.39), ("llama-20b", None, 141.57, 148.52),
    ("llama-3b", 33.5, 31.76, 33.78),
])  # fmt: skip
def test_what_a_cell_leaves_open_is_settled_as_by_the_run(model, cap, allocated, reserved):
    """Measured on one H200, in 1e9 bytes. The buffers of streamed state were counted as four, where the run took 80."""
    values = {"ds_config": "zero2_offload", "optim": "adamw_split_8bit", "checkpoint_blocks": "auto", "micro_batch": 4}
    said = prediction(cell(model=f"preset:{model}", gpu_memory_cap=cap, **values), H200)
    assert said["fits"] and said["gpu_used_bytes"] <= said["gpu_limit_bytes"]
    assert said["gpu_allocated_bytes"] == pytest.approx(allocated * 1e9, rel=0.01)
    assert said["gpu_reserved_bytes"] == pytest.approx(reserved * 1e9, rel=0.04)
