"""What a run leaves open: decided by the memory there is, in one place for the program and for what is said of it beforehand."""

from typing import Any

import pytest

from bigtrain import shapes
from bigtrain.config import Resolved, RunValues
from bigtrain.plan import predict
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.inputs import plan_input
from bigtrain.plan.judge import judge
from bigtrain.plan.roofline import Rates, step_time
from bigtrain.plan.settled import (
    SPARE_SHARE,
    buffers_are_open,
    buffers_wanted,
    least_s,
    settled,
    with_all_buffers,
    with_fewest_blocks,
    with_most_buffers,
)
from bigtrain.plan.zero_settings import ZeroSettings
from bigtrain.run import capacity, left_open
from bigtrain.run.arguments import TrainArguments
from bigtrain.run.job import Job

GIB = 2**30
HOST = 126 * GIB


def plan_of(name="llama-8b", **values):
    settings = ZeroSettings(stage=2, offload_optimizer=True, reduce_bucket_elems=200_000_000, overlap_comm=True)
    values = {"micro_batch": 4, "kernels": "liger", "optimizer": "adamw_split_8bit", **values}
    return plan_input(shapes.config_dict(name), settings=settings, **values)


def all_open(plan, gpu, host=HOST):
    return settled(plan, Hardware(gpu, host), share=True, buffers=True, blocks=True)


@pytest.mark.parametrize("card_gib, hides", [(140, True), (80, True), (47.4, False), (34, None)])
def test_as_many_buffers_as_hide_the_traffic_or_as_the_card_holds(card_gib, hides):
    plan, card = plan_of(micro_batch=1), int(card_gib * GIB)
    count = settled(plan, Hardware(card, HOST), share=False, buffers=True, blocks=False).settings.buffers
    if hides is None:
        assert count == plan.settings.buffers
        return
    assert plan.settings.buffers < count <= buffers_wanted(plan, Rates()) and (count == buffers_wanted(plan, Rates())) == hides
    assert predict(plan.but(buffers=count)).fits(int(SPARE_SHARE * card), HOST)
    assert hides or not predict(plan.but(buffers=count + 1)).fits(int(SPARE_SHARE * card), HOST)


def test_what_is_not_open_or_without_limit_stays():
    plan = plan_of("llama-3b")
    assert settled(plan, Hardware(24 * GIB, HOST), share=False, buffers=False, blocks=False) == plan
    assert all_open(plan, None, None) == plan.but(checkpointing="none")
    nowhere = all_open(plan, 4 * GIB)
    assert nowhere.recomputed_blocks == nowhere.block_count and nowhere.settings == plan.settings


@pytest.mark.parametrize("name, card_gib", [("llama-8b", 79.1), ("llama-8b", 47.4), ("llama-20b", 79.1)])
def test_what_is_settled_fits_and_one_block_less_does_not(name, card_gib):
    card = int(card_gib * GIB)
    found = all_open(plan_of(name), card)
    assert judge(found, Hardware(card, HOST)).fits
    if found.recomputed_blocks:
        fewer = found.but(checkpoint_blocks=found.recomputed_blocks - 1)
        assert not judge(fewer, Hardware(card, HOST)).fits


def test_the_file_decides_where_it_says_a_number():
    assert not buffers_are_open({}) and not buffers_are_open({"zero_optimization": {"stage": 2}})
    block = {"device": "cpu"}
    assert buffers_are_open({"zero_optimization": {"offload_optimizer": block}})
    assert not buffers_are_open({"zero_optimization": {"offload_optimizer": {**block, "buffer_count": 4}}})


def job(**values: Any) -> Job:
    args = TrainArguments(
        ds_config="zero2_offload", model_name_or_path="preset:llama-8b", train_data="x", output_dir="y", **values
    )
    config = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    resolved = Resolved(config, [], RunValues(gradient_checkpointing=True), [])
    return Job(
        args=args, resolved=resolved, tokenizer=None, seq_len=4096, model_config=None, config_overrides={}, resize_vocab_to=None
    )


@pytest.mark.parametrize("name, card_gib", [("llama-8b", 139.8), ("llama-8b", 47.4), ("llama-20b", 79.1)])
def test_the_program_runs_what_is_settled(monkeypatch, name, card_gib):
    plan, card = plan_of(name), int(card_gib * GIB)
    monkeypatch.setattr(capacity, "plan_of", lambda job, gpu: predict(plan, reserve=False))
    done, found = left_open.settle(job(checkpoint_blocks="auto"), Hardware(card, HOST)), all_open(plan, card)
    told = {decision.path: decision.value for decision in done.resolved.decisions}
    offload = done.resolved.config["zero_optimization"]["offload_optimizer"]
    assert (
        offload.get("buffer_count", 4) == found.settings.buffers and done.offload_gradients == found.settings.offload_gradients
    )
    total, blocks = found.block_count, done.args.recomputed_blocks
    assert (0 if not done.args.gradient_checkpointing else total if blocks is None else blocks) == found.recomputed_blocks
    assert done.resolved.run.gradient_checkpointing == done.args.gradient_checkpointing
    assert set(told) >= {"checkpoint_blocks"} and told.get("offload_gradients", 0.0) == found.settings.offload_gradients
    assert left_open.settle(done, Hardware(card, HOST)).resolved.config == done.resolved.config  # what is decided stays


def test_no_plan_takes_no_spare_memory(monkeypatch):
    monkeypatch.setattr(capacity, "plan_of", lambda job, gpu: predict(plan_of(), reserve=False))
    done = left_open.settle(job(no_plan=True, checkpoint_blocks="auto"), Hardware(80 * GIB, HOST))
    assert "buffer_count" not in done.resolved.config["zero_optimization"]["offload_optimizer"]


@pytest.mark.parametrize("name, card_gib", [("llama-8b", 79.1), ("llama-8b", 47.4), ("llama-20b", 79.1)])
@pytest.mark.parametrize("micro_batch", [1, 8])
def test_what_a_search_looks_at_first_is_a_bound(name, card_gib, micro_batch):
    """`choose` leaves out what these bounds say is slower: no fewer buffers and no more blocks than are settled."""
    plan, card = plan_of(name, micro_batch=micro_batch), int(card_gib * GIB)
    found = settled(plan, Hardware(card, HOST), share=False, buffers=True, blocks=True)
    fewest = with_fewest_blocks(plan, Hardware(card, HOST))
    most = with_most_buffers(plan, Hardware(card))
    assert fewest.recomputed_blocks <= found.recomputed_blocks
    assert found.settings.buffers <= most.settings.buffers <= with_all_buffers(plan, Rates()).settings.buffers
    assert least_s(plan, fewest, Hardware(card)) <= step_time(found).total_s
