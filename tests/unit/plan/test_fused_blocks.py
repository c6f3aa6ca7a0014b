"""What blocks keep of which liger-kernel 0.8.5 replaces parts, and bigtrain the experts.

Counted with torch's saved-tensor hooks on liger-kernel's own modules on a CPU, with its kernels not launched: they decide no size. Its experts,
which are counted in three of them, keep what bigtrain's do: gate and up. On a card: tests/unit/plan/test_grid_rows.py.
"""

from dataclasses import replace

import pytest

from bigtrain import shapes
from bigtrain.plan import plan_input
from bigtrain.plan.activations import block_bytes
from bigtrain.plan.device import Run, sharding
from bigtrain.plan.geometry import geometry
from bigtrain.plan.tape import Tape
from tests.unit.plan.test_activations import NO_DROPOUT, sized

T = 2048  # tokens
UNIT = 2 * T * 384  # one tensor of the stream's size
SIZES = dict(
    hidden_size=384, intermediate_size=1024, moe_intermediate_size=320, num_attention_heads=6, num_key_value_heads=2, head_dim=64,
    num_hidden_layers=4, vocab_size=4000,
)  # fmt: skip
LATENT = dict(
    kv_lora_rank=96, q_lora_rank=160, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=64, num_key_value_heads=6
)  # fmt: skip


def config_of(name, **more):
    config = {**sized(name, 4, **NO_DROPOUT), **{key: value for key, value in SIZES.items() if key != "moe_intermediate_size"}}
    config |= {"moe_intermediate_size": 320} if "moe_intermediate_size" in config else {}
    return {key: value for key, value in {**config, **more}.items() if key != "mlp_only_layers"}


# Bytes of one block at 1,024 tokens: storages that autograd keeps of a model of three blocks, less those of one of two.
@pytest.mark.parametrize("name, more, counted", [
    ("mixtral", {}, 13_742_380), ("qwen3_moe", {}, 9_040_172), ("deepseek_v2", LATENT, 16_752_940),
    ("olmo2", {}, 15_769_600), ("hunyuan_v1_dense", {}, 14_745_600), ("gemma2", {}, 64_503_808),
    ("gemma3_text", {}, 14_229_504), ("exaone4", {}, 12_648_448), ("glm4", {}, 14_065_664), ("qwen3", {}, 12_648_448),
    ("phi3", {}, 12_615_680), ("granite", {}, 11_567_104),
])  # fmt: skip
def test_kept_bytes_under_liger_kernel(name, more, counted):
    g = geometry(config_of(name, **more))
    g = replace(g, keeps=replace(g.keeps, fused_experts=g.keeps.groups_experts))
    assert block_bytes(g, 1024, "liger", block=2, seq_len=1024, device="cpu").kept == pytest.approx(counted, rel=0.0025)


@pytest.mark.parametrize("name, shared", [("mixtral", 0), ("olmoe", 0), ("gpt_oss", 0), ("qwen2_moe", 1)])
def test_grouped_experts_keep_gate_and_up_alone(name, shared):
    """kernels/experts.py: `_First` saves its input, which the norm keeps, and places of tokens, `_Second` the first product."""
    kernels = "hf" if name in ("olmoe", "qwen2_moe") else "liger"
    plans = [plan_input(config_of(name), kernels=kernels, chunks_loss=True, device=device) for device in ("cuda", "cpu")]
    block, own = (block_bytes(p.geometry, T, kernels, block=1) for p in plans)
    g = plans[0].geometry
    one, apart = 2 * T * g.ffn * g.experts_per_token, 2 * T * g.shared_ffn
    assert bool(apart) == bool(shared) and block.product == apart
    assert block.middle + block.gate == 2 * one + 3 * apart  # silu's input, its result and up of experts that all tokens use
    assert (block.chosen, block.in_passing) == (0, g.experts_per_token * UNIT)
    assert own.chosen == block.in_passing and own.routing - block.routing == 2 * own.chosen


def test_backward_of_grouped_experts_hands_on_one_weight_before_the_other():
    """Most as the second weight's gradient is made: gradients of the results, of what the gate let through, which is made again, gate and up."""
    plan = plan_input(config_of("mixtral"), micro_batch=2, seq_len=1024, kernels="liger", checkpointing="none")
    tape = Tape(unit=1)
    run = Run(plan, tape, sharding(plan, tape))
    run.shards.fetch = run.shards.release = run._grad = lambda *args, **how: None
    block, one = 1, 2 * T * 1024 * 2
    run._keep_block(block)
    before = tape.ledger().final_bytes
    run._block_backward(block, steady=True)
    up, down = (
        sum(2 * p.elems for p in plan.parameters.items if p.block == block and part in p.name)
        for part in ("gate_up", "experts.down")
    )
    second = max(2 * UNIT + 2 * one + down, 3 * one + down)  # as it is made; with gate's and up's gradients
    first = 2 * one + UNIT + 2 * UNIT + up - 2 * one  # when gate and up are gone
    assert up > 0 and down > 0
    assert tape.ledger().peak_bytes - before == max(second, first)


def test_a_small_mixtral_is_planned_without_what_transformers_experts_keep():
    """`fits` hangs on it: before, 36 % more activations were planned than there are."""
    config = shapes.config_dict("mixtral-4b")
    liger, own = (plan_input(config, seq_len=4096, kernels=kernels, loss="fused") for kernels in ("liger", "hf"))
    kept = [block_bytes(p.geometry, p.tokens, p.kernels, 0, 4096).kept for p in (liger, own)]
    assert kept[0] < 0.62 * kept[1]
