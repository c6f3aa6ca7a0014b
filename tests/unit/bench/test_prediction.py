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
