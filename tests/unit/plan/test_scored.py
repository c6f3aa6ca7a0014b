"""Seconds of attention's products by the width of heads, and what a block launches, against what traces of an H200 show."""

import pytest

from bigtrain import shapes
from bigtrain.plan import plan_input
from bigtrain.plan.launched import Launched, launched
from bigtrain.plan.scored import attention_flops

PRODUCTS = 0.89


def flops(name, seq_len=4096, ahead=1.0, back=1.0, **values):
    """Of one token's forward products in one block, in elements of scores times the width."""
    plan = plan_input(shapes.config_dict(name), seq_len=seq_len, device="cuda", **values)
    found = attention_flops(plan, PRODUCTS, ahead, back)
    return found / (2 * plan.tokens * plan.geometry.layers * plan.geometry.query * seq_len)


@pytest.mark.parametrize(
    "name, ahead, back",
    [
        ("stablelm-2-1.6b", 374 / 784, 272 / 784),  # heads of 64
        ("llama-3b", 597 / 784, 362 / 784),  # of 128
        ("phi-2", 0.548, 0.376),  # of 80: a quarter of the way
    ],
)
def test_forward_and_backward_by_the_width_of_heads(name, ahead, back):
    forward, backward = flops(name, 2048, back=0.0), flops(name, 2048, ahead=0.0)
    assert forward == pytest.approx(1 / ahead, rel=0.03)  # what the traces give, rounded
    assert backward == pytest.approx(2 / back, rel=0.06)
    assert flops(name, 2048, ahead=2.0) == pytest.approx(2 * forward + backward, rel=1e-12)


def test_a_dense_bias_hides_nothing_and_takes_longer():
    """Falcon's ALiBi: twice the products, at 0.65 of their rate."""
    assert flops("falcon-rw-1b", 2048, back=0.0) == pytest.approx(2 / (0.477 * 0.65), rel=1e-9)


def test_scores_by_operations_are_products_of_the_model():
    assert flops("bloom-1b7", 2048) == pytest.approx(2 * 3 / PRODUCTS, rel=1e-12)
    assert flops("gpt-j-6b", 2048, attention="eager") == pytest.approx(3 / PRODUCTS + 3 / 0.066, rel=1e-9)


@pytest.mark.parametrize(
    "name, kernels, seen, within",
    [
        ("llama-1b", "liger", 58, 1),
        ("stablelm-2-1.6b", "hf", 107, 1),
        ("qwen2.5-1.5b", "liger", 64, 1),
        ("opt-1.3b", "hf", 65, 1),
        ("gemma-2-2b", "liger", 97, 1),
        ("gpt2-xl", "hf", 68, 2),
        ("qwen3-1.7b", "liger", 68, 1),
        ("pythia-1.4b", "hf", 89, 5),
    ],
)
def test_kernels_of_a_block_are_those_that_the_profiler_saw(name, kernels, seen, within):
    """torch.profiler on an H200: kernels of forward and backward of one block more (two depths)."""
    assert abs(launched(plan_input(shapes.config_dict(name), kernels=kernels, device="cuda")).kernels - seen) <= within


def test_a_call_of_python_takes_as_long_as_many_kernels():
    plain, fused = (launched(plan_input(shapes.config_dict("llama-1b"), kernels=k, device="cuda")) for k in ("hf", "liger"))
    assert plain.calls == 0 and fused.calls == 4  # two norms, positions, the gate
    assert plain.kernels > 2 * fused.kernels and fused.operations > 0.95 * plain.operations
    assert Launched(100, 0).operations == pytest.approx(82 + 74)
