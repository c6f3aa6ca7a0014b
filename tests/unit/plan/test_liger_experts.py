"""What liger-kernel 0.8.5 keeps of blocks of which it replaces only parts, or the experts as a whole.

Counted with torch's saved-tensor hooks on its own modules on a CPU, with its kernels not launched: they decide no size.
"""

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
    ("olmo2", {}, 15_769_600), ("hunyuan_v1_dense", {}, 14_745_600), ("gpt_oss", {}, 51_539_984), ("gemma2", {}, 64_503_808),
    ("gemma3_text", {}, 14_229_504), ("exaone4", {}, 12_648_448), ("glm4", {}, 14_065_664), ("qwen3", {}, 12_648_448),
    ("phi3", {}, 12_615_680), ("granite", {}, 11_567_104),
])  # fmt: skip
def test_kept_bytes_under_liger_kernel(name, more, counted):
    g = geometry(config_of(name, **more))
    assert block_bytes(g, 1024, "liger", block=2, seq_len=1024, device="cpu").kept == pytest.approx(counted, rel=0.0025)


def test_liger_kernels_experts_keep_gate_and_up_alone():
    """`LigerFusedMoEFunction.forward` saves its input, which the norm keeps, `pre_act`, weights and places of tokens."""
    g = geometry(config_of("mixtral"))
    block, own = (block_bytes(g, T, kernels, block=1) for kernels in ("liger", "hf"))
    assert block.middle + block.gate == 2 * (2 * T * 1024) * 2  # two halves, two experts a token
    assert (block.product, block.chosen, block.in_passing) == (0, 0, 2 * UNIT)
    assert own.chosen == 2 * UNIT and own.routing - block.routing == 2 * own.chosen


def test_backward_of_liger_kernels_experts_holds_all_that_it_makes_to_its_end():
    """Gradients of gate and up, the weighed product, gradients of each expert's inputs, of the input, and of both weights."""
    plan = plan_input(config_of("mixtral"), micro_batch=2, seq_len=1024, kernels="liger", checkpointing="none")
    tape = Tape(unit=1)
    run = Run(plan, tape, sharding(plan, tape))
    run.shards.fetch = run.shards.release = run._grad = lambda *args, **how: None
    block, feed = 1, 2 * T * 1024 * 2
    run._keep_block(block)
    before = tape.ledger().final_bytes
    run._block_backward(block, steady=True)
    weights = sum(2 * p.elems for p in plan.parameters.items if p.block == block and ".experts." in p.name)
    assert tape.ledger().peak_bytes - before == 3 * feed + 2 * UNIT + UNIT + weights


def test_a_small_mixtral_is_planned_without_what_transformers_experts_keep():
    """`fits` hangs on it: before, 36 % more activations were planned than there are."""
    config = shapes.config_dict("mixtral-4b")
    liger, own = (plan_input(config, seq_len=4096, kernels=kernels, loss="fused") for kernels in ("liger", "hf"))
    kept = [block_bytes(p.geometry, p.tokens, p.kernels, 0, 4096).kept for p in (liger, own)]
    assert kept[0] < 0.62 * kept[1]
