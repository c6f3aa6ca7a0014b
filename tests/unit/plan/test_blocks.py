"""Some blocks recomputed: between none and all in bytes and seconds, and the fewest that fit."""

import functools
import itertools
from typing import get_args

import pytest

from bigtrain import shapes
from bigtrain.bench.grid import expand
from bigtrain.bench.machine import Machine
from bigtrain.bench.prediction import planned
from bigtrain.cli import main
from bigtrain.config import RunValues
from bigtrain.errors import UsageError
from bigtrain.plan import block_count, choose, least_blocks, plan_input, predict, step_time
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.inputs import Checkpointing
from bigtrain.plan.judge import judge
from bigtrain.plan.zero_settings import ZeroSettings
from bigtrain.run.auto import pick

GIB = 2**30
POLICIES = get_args(Checkpointing)[1:]


def base(name="llama-3b", stage=2, **values):
    settings = ZeroSettings(stage=stage, reduce_bucket_elems=50_000_000)
    values = {"micro_batch": 4, "kernels": "liger", "optimizer": "adamw_split_8bit", **values}
    return plan_input(shapes.config_dict(name), settings=settings, **values)


def numbers(plan):
    found, time = predict(plan), step_time(plan)
    return found.gpu.bytes, found.gpu_reserved_bytes, found.host.bytes, time.total_s


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_all_blocks_are_full_and_no_block_is_none(policy, stage):
    plan = base(stage=stage, checkpointing=policy, optimizer="adamw_split" if stage else "adamw")
    assert plan.block_count == 28 and plan.recomputed_blocks == 28
    assert plan.but(checkpoint_blocks=28) == plan and numbers(plan.but(checkpoint_blocks=28)) == numbers(plan)
    assert plan.but(checkpoint_blocks=0) == plan.but(checkpointing="none")
    assert plan.but(checkpoint_blocks=5).but(checkpointing="none").checkpoint_blocks is None


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_memory_falls_and_time_rises_with_each_block(policy, stage):
    plans = [base(stage=stage, checkpointing=policy, checkpoint_blocks=n, world_size=2) for n in (0, 1, 2, 9, 27, 28)]
    for a, b in itertools.pairwise(plans):
        # Where results are kept, the last block's recompute holds its output beside them.
        output = 2 * a.tokens * a.geometry.hidden if policy == "selective" else 0
        assert predict(a).gpu.bytes + output >= predict(b).gpu.bytes and step_time(a).total_s < step_time(b).total_s
    none, one = predict(plans[0]), predict(plans[1])
    stream = 2 * plans[0].tokens * plans[0].geometry.hidden
    if policy == "full":  # exactly: what a block keeps goes, its input stays
        from bigtrain.plan.activations import block_bytes

        cost = block_bytes(plans[0].geometry, plans[0].tokens, "liger")
        assert none.gpu.by_phase["loss"] - one.gpu.by_phase["loss"] == pytest.approx(cost.kept - stream, abs=8 * 512)
    if policy.startswith("offload"):  # on the host, and pinned
        assert predict(plans[-1]).host.by_phase["export"] - none.host.by_phase["export"] >= 28 * stream
        assert predict(plans[-1]).host_pinned_bytes - none.host_pinned_bytes >= 28 * stream


def test_policies_in_order_of_what_they_hold():
    def held(policy, **more):
        return predict(base(checkpointing=policy, kernels="hf", **more))

    inputs, offload, full, attention, selective, none = (
        held(c).gpu.bytes for c in ("offload_inputs", "offload", "full", "attention", "selective", "none")
    )
    assert inputs <= offload <= full < attention < selective < none
    cpu = {c: held(c, device="cpu").host.bytes for c in POLICIES}  # nowhere else to go
    assert cpu["full"] == cpu["offload_inputs"] < cpu["attention"] == cpu["offload"]


def test_wrong_numbers_are_refused():
    with pytest.raises(UsageError, match="checkpoint_blocks is 29, but the model has 28 blocks"):
        base(checkpoint_blocks=29)
    for wrong in (-1, True, 1.5):
        with pytest.raises(UsageError, match="a whole number of blocks is needed"):
            base(checkpoint_blocks=wrong)


def test_how_many_blocks_a_config_has():
    assert block_count(shapes.config_dict("llama-3b")) == 28
    t5 = {"model_type": "t5", "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4, "vocab_size": 61}
    assert block_count(t5) == 4 and block_count({**t5, "num_decoder_layers": 3}) == 5
    assert block_count({"model_type": "new", "num_hidden_layers": 7}) == 7
    for unclear in ({"model_type": "llava"}, {"model_type": "new"}, {"num_hidden_layers": 7, "vision_config": {"a": 1}}):
        assert block_count(unclear) is None


@pytest.mark.parametrize("policy", ["none", *POLICIES])
@pytest.mark.parametrize("gpu", [30, 48, 62, 80])
def test_least_blocks_is_the_least_that_fits(policy, gpu):
    plan = base(checkpointing=policy)
    found = least_blocks(plan, Hardware(gpu * GIB, 64 * GIB))
    policy = "full" if policy == "none" else policy
    fits = [judge(plan.but(checkpointing=policy, checkpoint_blocks=n), Hardware(gpu * GIB, 64 * GIB)).fits for n in range(29)]
    assert fits == sorted(fits)  # more blocks never hold more
    assert (found.input.recomputed_blocks if found else None) == (fits.index(True) if any(fits) else None)


def test_nothing_helps_where_states_are_too_large_or_the_host_too_small():
    assert least_blocks(base(), Hardware(8 * GIB)) is None
    assert least_blocks(base(checkpointing="offload"), Hardware(32 * GIB, 5 * GIB)) is None


def test_the_search_recomputes_no_more_than_it_must():
    choice = choose(base("llama-1b"), Hardware(24 * GIB, 100 * GIB), global_batch=4)
    some = [c for c in choice.fitting if c.input.checkpoint_blocks is not None]
    assert some and choice.best is choice.fitting[0]
    for c in some:
        assert f"checkpointing of {c.input.checkpoint_blocks} of 16 blocks" in c.describe()
        less = c.input.but(checkpoint_blocks=c.input.checkpoint_blocks - 1)
        fewer = judge(less, Hardware(24 * GIB, 100 * GIB))
        assert not fewer.fits or fewer.time.total_s >= c.time.total_s  # its allocator would meet the limit in each step
    fixed = choose(base("llama-1b", checkpoint_blocks=3), Hardware(80 * GIB), global_batch=4)
    assert {c.input.recomputed_blocks for c in (*fixed.fitting, *fixed.rejected)} == {0, 3}


def test_what_the_user_said_of_blocks_stands():
    @functools.cache
    def blocks(run, few=None, **values):
        base = plan_input(shapes.config_dict("llama-1b"), seq_len=4096, kernels="liger", checkpoint_blocks=few)
        found = pick(base, run, Hardware(24 * GIB, 100 * GIB), **values)
        return found.candidate.input, found.run.gradient_checkpointing

    run = RunValues(micro_batch=4, accumulation=1)
    told = RunValues(micro_batch=4, accumulation=1, gradient_checkpointing=True)
    assert 0 < blocks(run)[0].checkpoint_blocks < 16 and blocks(run)[1] is True
    assert blocks(told)[0].recomputed_blocks == 16
    assert blocks(told, blocks_are_open=True)[0] == blocks(run)[0]
    assert blocks(told, 15)[0].recomputed_blocks == 15


def test_cells_and_command_line_know_blocks(capsys):
    machine = Machine(device="cuda", card="x", gpu_bytes=20 * GIB, host_bytes=100 * GIB)
    grid = {"model": "preset:llama-1b", "ds_config": "zero2", "seq_len": 4096, "micro_batch": 4, "accumulation": 1,
            "optim": "adamw_split_8bit"}  # fmt: skip
    cells = expand({**grid, "checkpoint_blocks": [4, "auto"], "checkpointing_policy": ["full", "selective"]})
    seen = [planned(cell, machine).input for cell in cells]
    assert [p.checkpointing for p in seen] == ["full", "selective", "full", "selective"]
    assert [p.recomputed_blocks for p in seen[:2]] == [4, 4] and 0 < seen[2].recomputed_blocks < seen[3].recomputed_blocks <= 16
    with pytest.raises(UsageError, match="checkpoint_blocks is bigtrain's own"):
        expand({**grid, "checkpoint_blocks": 4, "runner": "hf_trainer"})
    code = main(
        ["plan", "--model", "preset:llama-1b", "--checkpoint_blocks", "4", "--gpu_memory", "80GiB", "--host_memory", "99GiB"]
    )
    assert code == 0 and "checkpointing full 4 of 16 blocks" in capsys.readouterr().out
