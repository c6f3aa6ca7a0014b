"""Attention's results kept beside the inputs of recomputed blocks: bytes on the card and on the host, seconds, and who chooses it."""

import pytest

from bigtrain import shapes
from bigtrain.bench.grid import expand
from bigtrain.bench.machine import Machine
from bigtrain.bench.prediction import planned
from bigtrain.cli import main
from bigtrain.plan import attention_of, choose, plan_input, predict, step_time
from bigtrain.plan.choose import search_settings
from bigtrain.plan.constants import pieces, pinned_bytes
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.settled import LONG_TOKENS, policies, settled
from bigtrain.plan.zero_settings import ZeroSettings
from bigtrain.run.auto import flags

GIB = 2**30
BLOCKS, HEADS, HIDDEN = 32, 32, 4096


def long_row(policy, tokens=131_072, attention="sdpa", **values):
    """8B as launch/grids/long_sequence.yaml has it."""
    zero = ZeroSettings(stage=2, offload_optimizer=True, reduce_bucket_elems=50_000_000, grad_bytes=2)
    values = {"optimizer": "adamw_split_8bit", "kernels": "liger", "mlp_tile_tokens": 8192, **values}
    return plan_input(
        shapes.config_dict("llama-8b-1m"), settings=zero, seq_len=tokens, checkpointing=policy, attention=attention, **values
    )


def decided(plan, gpu=79.1, host=126):
    return settled(plan, Hardware(int(gpu * GIB), int(host * GIB)), share=True, buffers=True, blocks=False)


@pytest.mark.parametrize("tokens", [131_072, 100_001])
def test_bytes_on_card_and_host_are_those_of_the_tensors(tokens):
    out, stats = 2 * tokens * HIDDEN, 4 * tokens * HEADS
    assert long_row("attention", tokens).of_attention == ((out, stats),) * BLOCKS
    full, attention, inputs, offload = (
        predict(long_row(p, tokens), reserve=False) for p in ("full", "attention", "offload_inputs", "offload")
    )
    held = [p.gpu.by_phase["loss"] for p in (full, attention, inputs, offload)]
    assert held[1] - held[0] == pytest.approx(BLOCKS * (out + stats), abs=BLOCKS * 2 * 512)
    assert held[3] - held[2] == pytest.approx(out + stats, abs=2 * 512)  # of the last block, on its way down
    assert offload.gpu.bytes - inputs.gpu.bytes <= out + stats + 1024
    taken = BLOCKS * (sum(map(pinned_bytes, pieces(out))) + sum(map(pinned_bytes, pieces(stats))))
    assert offload.host_pinned_bytes - inputs.host_pinned_bytes == taken >= BLOCKS * (out + stats)
    pages = 4 * BLOCKS * 4096  # of two tensors and their rounding
    assert offload.host.bytes - inputs.host.bytes == pytest.approx(taken, abs=pages)
    assert {r.name: r.bytes for r in offload.host.rows}["attention results, host"] == pytest.approx(
        BLOCKS * (out + stats), abs=pages
    )
    assert attention.host.bytes == full.host.bytes


def test_seconds_are_those_of_one_attention_less_where_the_host_keeps_up():
    inputs, offload = (step_time(long_row(p)).total_s for p in ("offload_inputs", "offload"))
    attention = 2 * BLOCKS * 131_072 * HIDDEN * 131_072 / (784e12 * 0.761)  # heads of 128, forward
    assert inputs - offload == pytest.approx(attention) and 7.5 < attention < 7.6
    short = [step_time(long_row(p, 512, mlp_tile_tokens=0)).total_s for p in ("full", "attention")]
    assert short[0] < short[1]  # there the host is what a step waits for, and it looks for attention


@pytest.mark.parametrize(
    "tokens, host, policy", [(131_072, 126, "offload"), (131_072, 80, "offload_inputs"), (348_160, 126, "offload_inputs")]
)
def test_offload_keeps_both_where_the_host_has_room_and_else_inputs_alone(tokens, host, policy):
    found = decided(long_row("offload", tokens), host=host)
    assert found.checkpointing == policy and predict(found).fits(int(79.1 * GIB), host * GIB)
    both = predict(long_row("offload", tokens).but(settings=found.settings))
    assert both.fits(None, host * GIB) == (policy == "offload")
    assert decided(long_row("offload_inputs", tokens), host=500).checkpointing == "offload_inputs"  # as the user says


def test_where_it_would_only_cost_time_or_nothing_can_be_kept_inputs_are_all():
    assert decided(long_row("offload", 512, mlp_tile_tokens=0)).checkpointing == "offload_inputs"
    for attention in ("eager", "flex"):
        for policy, instead in (("offload", "offload_inputs"), ("attention", "full")):
            plan = long_row(policy, 2048, attention, mlp_tile_tokens=0)
            assert plan.of_attention == () and decided(plan, gpu=500).checkpointing == instead
    assert attention_of("flex_attention", "isolated", "cuda") == "flex"
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 97}
    for dropout, kept in ((0.1, ()), (0.0, ((2 * 512 * 64, 4 * 512 * 4),) * 2)):
        for device in ("cuda", "cpu"):
            plan = plan_input({**gpt2, "attn_pdrop": dropout}, seq_len=512, checkpointing="attention", device=device)
            assert plan.of_attention == kept
    assert decided(long_row("attention", 1024)).checkpointing == "attention"  # whatever it costs: the user says so


def test_some_blocks_keep_some_results():
    assert len(long_row("offload", checkpoint_blocks=5).of_attention) == 5
    assert long_row("full").of_attention == long_row("none").of_attention == ()


def test_a_search_takes_it_for_long_rows_and_nobody_has_to_ask():
    assert policies(long_row("none")) == policies(long_row("full")) == ("full", "attention")
    assert policies(long_row("full", LONG_TOKENS - 1)) == ("full",)
    assert policies(long_row("offload", 1024)) == ("offload_inputs", "offload")
    for alone in ("attention", "selective", "offload_inputs"):
        assert policies(long_row(alone)) == (alone,)
    assert policies(long_row("attention", 1024, "eager", mlp_tile_tokens=0)) == ("full",)

    def best(gpu, policy, host=126):
        start = long_row(policy, 32_768)
        start = start.but(settings=search_settings(start.geometry.hidden))
        return choose(start, Hardware(gpu * GIB, host * GIB), global_batch=1, wanted=1, recompute=True,
                      optimizers=("adamw_split_8bit",)).best  # fmt: skip

    assert [best(gpu, "none").options["checkpointing_policy"] for gpu in (36, 44)] == ["full", "attention"]
    found = best(36, "offload")
    assert found.options["checkpointing_policy"] == "offload" == flags(found.input)["checkpointing_policy"]
    assert best(36, "offload", 50).options["checkpointing_policy"] == "offload_inputs"


def test_the_command_line_and_cells_say_what_was_decided(capsys):
    args = ["plan", "--model", "preset:llama-8b-1m", "--gpu_memory", "79.1GiB", "--ds_config", "ds_configs/zero2_offload.json", "--optim",
            "adamw_split_8bit", "--micro_batch", "1", "--checkpointing", "offload", "--mlp_tile_tokens", "8192", "--seq_len", "131072"]  # fmt: skip
    for host, words in (("126GiB", "checkpointing offload,"), ("80GiB", "checkpointing offload_inputs,")):
        assert main([*args, "--host_memory", host]) == 0
        assert words in capsys.readouterr().out
    grid = {"model": "preset:llama-8b-1m", "ds_config": "zero2_offload", "optim": "adamw_split_8bit", "seq_len": 131_072,
            "mlp_tile_tokens": 8192, "micro_batch": 1, "accumulation": 1, "checkpointing_policy": ["offload", "offload_inputs"]}  # fmt: skip
    machine = Machine(device="cuda", card="x", gpu_bytes=80 * GIB, host_bytes=126 * GIB)
    assert [planned(cell, machine).input.checkpointing for cell in expand(grid)] == ["offload", "offload_inputs"]
