"""Bytes that operations of transformers' own modules move beyond what they keep."""

import pytest

from bigtrain import shapes
from bigtrain.plan import plan_input, step_time
from bigtrain.plan.roofline import Rates
from bigtrain.plan.unfused import PASSES, joined_bytes, unfused_bytes


def test_bytes_of_a_llama_block():
    plan = plan_input(shapes.config_dict("llama-1b"), seq_len=4096, micro_batch=2)
    norms, turned, gated = 2 * 2048, 2048 + 512, 8192
    each = (130 - 8 * PASSES) * norms + 44 * turned + (28 - 8 * PASSES) * gated
    assert unfused_bytes(plan) == pytest.approx(8192 * 16 * each, rel=1e-12)


def test_layer_norms_are_one_kernel_each_way_and_a_quarter_of_a_head_is_turned():
    plan = plan_input(shapes.config_dict("pythia-1.4b"), seq_len=2048)
    assert unfused_bytes(plan) == pytest.approx(2048 * 24 * 44 * 0.25 * 2 * 2048, rel=1e-12)


def test_weights_of_all_experts_move_however_few_tokens_there_are():
    plan = plan_input(shapes.config_dict("olmoe-1b-7b"), seq_len=16)
    experts = sum(p.elems for p in plan.parameters.items if ".experts." in p.name)
    one = unfused_bytes(plan) - 6 * experts
    assert unfused_bytes(plan.but(seq_len=32)) - 6 * experts == pytest.approx(2 * one, rel=1e-9)
    assert (
        one > 0.5 * 16 * 16 * 8 * 2048 * 60
    )  # tokens x blocks x experts of a token x width, and more than a backward's scatter


def test_kernels_change_what_is_moved_and_not_how_fast_products_are():
    hf = plan_input(shapes.config_dict("llama-1b"), seq_len=4096, checkpointing="none", loss="fused")
    liger = hf.but(kernels="liger")
    elements = 4096 * 16 * (2 * 2 * 2048 + 8192)  # an fp32 copy for a bf16 input in two norms, and the activation's output
    more = unfused_bytes(hf) + PASSES * 2 * elements
    assert step_time(hf).compute_s - step_time(liger).compute_s == pytest.approx(more / Rates().device_bytes_s, rel=1e-3)


def test_parts_of_one_product_are_copied_and_joined():
    """Phi-3: slices of queries, keys and values have gradients as wide as all; liger-kernel copies gate and up. Pythia: one join."""
    tokens, d, f = 4096, 3072, 8192
    for kernels, halves in (("liger", 16), ("hf", 8)):
        phi = plan_input(shapes.config_dict("phi-3-mini"), seq_len=tokens, kernels=kernels)
        assert joined_bytes(phi) == tokens * 32 * (halves * f + 22 * 3 * d + 4 * 2 * d)
    assert joined_bytes(plan_input(shapes.config_dict("pythia-1.4b"), seq_len=2048)) == 2048 * 24 * 4 * 3 * 2048
    assert joined_bytes(plan_input(shapes.config_dict("llama-3b"), kernels="liger")) == 0


def test_weights_of_liger_kernels_experts_move_however_few_tokens_there_are():
    one, two = (plan_input(shapes.config_dict("mixtral-4b"), seq_len=n, kernels="liger") for n in (16, 32))
    weights = 8 * 16 * 8 * 3 * 2048 * 5632
    assert joined_bytes(one) - weights == pytest.approx(16 * 16 * 2 * (16 * 2048 + (28 - 4 * PASSES) * 5632), rel=1e-12)
    assert joined_bytes(two) - weights == pytest.approx(2 * (joined_bytes(one) - weights), rel=1e-12)
