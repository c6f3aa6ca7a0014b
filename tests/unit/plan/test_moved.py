"""Bytes that operations of a block move, and what the seconds of a step take of them."""

import pytest

from bigtrain import shapes
from bigtrain.plan import ZeroSettings, plan_input, step_time
from bigtrain.plan.moved import moved_bytes
from bigtrain.plan.roofline import Rates


def moved(name, kernels="hf", tokens=4096, config=(), **values):
    """Of one token in one block, in elements of the width."""
    config = {**shapes.config_dict(name), **dict(config)}
    plan = plan_input(config, seq_len=tokens, kernels=kernels, **values)
    return moved_bytes(plan) / tokens / plan.geometry.layers / plan.geometry.hidden


def test_a_llama_block_by_hand_with_and_without_fused_kernels():
    # A width of 2,048 with 8,192 in the feed-forward part, keys and values of 512: of products 4 + 4 x 1.25 + 15, three times 2 bytes each way.
    products = 6 * (2 + 2 * 1.25 + 2 + 3 * 5)
    shared = 24 + 12 + 6  # residual sums; gradients of what three and of what two products read
    assert moved("llama-1b") == pytest.approx(products + shared + 2 * 130 + 1.25 * 44 + 4 * 28, rel=1e-12)
    assert moved("llama-1b", "liger") == pytest.approx(products + shared + 2 * 10 + 1.25 * 8 + 4 * 16, rel=1e-12)


def test_gelu_of_many_operations_dropout_and_biases_by_hand():
    """GPT-2: four widths in the feed-forward part, learned positions, one product of queries, keys and values."""
    products, biases = 6 * (4 + 2 + 5 + 5), 2 * (3 + 1 + 4 + 1)
    rest = 24 + 2 * 10 + 4 * 3
    usual = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    assert moved("gpt2-xl", config=usual) == pytest.approx(products + biases + rest + 4 * (10 + 14 * 6), rel=1e-12)
    assert moved("gpt2-xl") - moved("gpt2-xl", config=usual) == pytest.approx(2 * 10, rel=1e-9)
    plain = {**usual, "activation_function": "gelu"}
    assert moved("gpt2-xl", config=plain) == pytest.approx(products + biases + rest + 4 * 10, rel=1e-12)


def test_a_quarter_of_a_head_that_is_turned_is_cut_and_joined():
    products, biases = 6 * (4 + 2 + 5 + 5), 2 * (3 + 1 + 4 + 1)
    assert moved("pythia-1.4b") == pytest.approx(products + biases + 24 + 2 * 10 + 4 * 3 + 2 * 80 + 4 * 10, rel=1e-12)


def test_norms_of_queries_and_keys_that_liger_kernel_leaves_as_they_are():
    """OLMo 2's; Qwen3's it replaces."""
    products = 6 * (8 + 15)
    assert moved("olmo-2-1b", "liger") == pytest.approx(products + 24 + 12 + 6 + 2 * 10 + 2 * (130 + 8) + 4 * 16, rel=1e-12)
    # Qwen3 1.7B: keys and values of half the width, 6,144 in the feed-forward part.
    products = 6 * (2 + 2 * 1.5 + 2 + 3 * 4)
    assert moved("qwen3-1.7b", "liger") == pytest.approx(products + 24 + 12 + 6 + 2 * 10 + 1.5 * (10 + 8) + 3 * 16, rel=1e-12)


def test_scores_of_attention_by_operations_are_moved_and_multiplied_whole():
    """Of each head and key, forward and backward: a softmax in fp32 with casts and a mask 38 and 38, Gemma 2's cap 11 and 12 more, products 4 and 8."""
    one, two = (moved("llama-1b", tokens=n, attention="eager") for n in (1024, 2048))
    assert two - one == pytest.approx(1024 * 32 * (76 + 12) / 2048, rel=1e-9)
    one, two = (moved("gemma-2-2b", "liger", tokens=n) for n in (1024, 2048))
    assert two - one == pytest.approx(1024 * 8 * (99 + 12) / 2304, rel=1e-9)
    rates = Rates()
    fused, eager = (
        plan_input(shapes.config_dict("llama-1b"), seq_len=4096, attention=how, kernels="liger", checkpointing="none")
        for how in ("sdpa", "eager")
    )
    scores = 2 * 4096 * 16 * 4096 * 2048 / rates.matmul_flops
    more = scores * (6 / rates.products_share - 1 / 0.477 - 2 / 0.347)
    more += (moved_bytes(eager) - moved_bytes(fused)) / rates.device_bytes_s
    assert step_time(eager).compute_s - step_time(fused).compute_s == pytest.approx(more, rel=1e-9)


def test_parts_of_one_product_are_copied_and_joined():
    """Phi-3: slices of queries, keys and values have gradients as wide as all; liger-kernel copies gate and up."""
    f = 8192 / 3072
    products = 6 * (4 + 2 + (1 + 2 * f) + (1 + f))
    stream, slices = 24, 22 * 3 + 4 * 2
    assert moved("phi-3-mini") == pytest.approx(products + stream + 2 * 130 + 2 * 44 + slices + (28 + 8) * f, rel=1e-12)
    assert moved("phi-3-mini", "liger") == pytest.approx(products + stream + 2 * 10 + 2 * 8 + slices + (16 + 16) * f, rel=1e-12)


@pytest.mark.parametrize("name, kernels, of_weights", [("olmoe-1b-7b", "hf", 6), ("mixtral-4b", "liger", 6)])
def test_weights_of_all_experts_move_however_few_tokens_there_are(name, kernels, of_weights):
    plan = plan_input(shapes.config_dict(name), seq_len=16, kernels=kernels)
    weights = of_weights * sum(p.elems for p in plan.parameters.items if ".experts." in p.name)
    one = moved_bytes(plan) - weights
    assert one > 0
    assert moved_bytes(plan.but(seq_len=32)) - weights == pytest.approx(2 * one, rel=1e-9)


def test_products_of_experts_and_of_a_head_with_an_odd_vocabulary_are_slower():
    rates, run = Rates(), {"seq_len": 4096, "kernels": "liger", "checkpointing": "none", "settings": ZeroSettings(stage=2)}
    mixtral = plan_input(shapes.config_dict("mixtral-4b"), **run)
    chosen = 16 * 2 * 3 * 2048 * 5632
    slow, usual = (step_time(mixtral, Rates(experts_share=s)).compute_s for s in (rates.experts_share, rates.products_share))
    seconds = 6 * 4096 * chosen / rates.matmul_flops
    assert slow - usual == pytest.approx(seconds * (1 / rates.experts_share - 1 / rates.products_share), rel=1e-9)
    even, odd = (plan_input({**shapes.config_dict("llama-1b"), "vocab_size": n}, **run) for n in (49_152, 49_153))
    # The final norm is counted with the head.
    products = 6 * 4096 * 2048 * (4 * 49_154 - 49_153) / rates.matmul_flops / rates.products_share
    logits = 6 * 4096 / rates.device_bytes_s
    assert step_time(odd).compute_s - step_time(even).compute_s == pytest.approx(products + logits, rel=1e-9)


def test_a_recompute_moves_what_forward_moves():
    """A third of most; of scores by operations their own share, as Bloom's gelu of many operations."""
    plan = plan_input(shapes.config_dict("bloom-1b7"), seq_len=2048)
    once, twice = moved_bytes(plan), moved_bytes(plan, 2.0, 1.0)
    scores, gelu = 2048 * 16, 4 * 2048
    known = plan.tokens * 24 * (scores * (38 + 4 + 38 + 8) + gelu * (42 + 88))
    ahead = plan.tokens * 24 * (scores * (38 + 4) + gelu * 42)
    assert twice - once == pytest.approx((once - known) / 3 + ahead, rel=1e-9)
    assert moved_bytes(plan, 1.0, 0.0) + moved_bytes(plan, 0.0, 1.0) == pytest.approx(once, rel=1e-12)
