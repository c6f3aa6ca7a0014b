"""What --leaf_blocks makes of a run's ds_config, and what stands."""

from dataclasses import replace

import pytest
import yaml

from bigtrain import shapes
from bigtrain.bench.grid import expand
from bigtrain.config import ModelShape
from bigtrain.errors import UsageError
from bigtrain.models.source import config_from
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.inputs import plan_input
from bigtrain.plan.leaf_choice import with_leafs
from bigtrain.run import capacity, leaf_blocks, search
from bigtrain.run import job as jobs
from bigtrain.run.arguments import TrainArguments, parse
from bigtrain.run.auto import config_of, flags
from bigtrain.run.job import Job

LLAMA = shapes.config_dict("llama-8b")
BLOCK = ("LlamaDecoderLayer",)
GIB = 2**30


def job(said="auto", classes=BLOCK, **zero):
    args = TrainArguments(model_name_or_path="preset:llama-8b", ds_config="c", train_data="x", output_dir="y", leaf_blocks=said,
                          seq_len=4096, optim="adamw_split_8bit", gradient_checkpointing=True)  # fmt: skip
    model = config_from(args.model_name_or_path, args.trust_remote_code)
    config = {"zero_optimization": {"stage": 3, **zero}, "bf16": {"enabled": True}}
    done = jobs.resolve(args, config, ModelShape.from_config(model), 10)
    return Job(args=args, resolved=done, tokenizer=None, seq_len=4096, model_config=model, config_overrides={}, resize_vocab_to=None,
               block_classes=classes)  # fmt: skip


def plan(**values):
    usual = {"world_size": 2, "seq_len": 4096, "optimizer": "adamw_split_8bit", "kernels": "liger", "checkpointing": "full"}
    return plan_input(LLAMA, ds_config={"zero_optimization": {"stage": 3}}, **{**usual, **values})


def leafs(one):
    return one.resolved.config["zero_optimization"].get("leaf_module")


def how(one):
    return [(d.value, d.source, d.reason) for d in one.resolved.decisions if d.path == "leaf_blocks"]


def test_auto_writes_what_the_plan_chose():
    done = leaf_blocks.decided(job(), plan(), Hardware(139 * GIB))
    assert leafs(done) == {"classes": ["LlamaDecoderLayer"]} and done.leaf_blocks is True and leafs(job()) is None
    (value, source, reason), *more = how(done)
    assert (value, source, more) == ("on", "plan", []) and "s a step planned, with a hook on each layer" in reason
    assert leaf_blocks.decided(done, plan(), Hardware(139 * GIB)) == done  # what is decided stays
    off = leaf_blocks.decided(job(), plan(micro_batch=8), Hardware(139 * GIB))
    assert leafs(off) is None and off.leaf_blocks is False and how(off)[0][:2] == ("off", "plan")


@pytest.mark.parametrize(
    "one, found, reason",
    [
        (job(), None, "this model or run has no plan"),
        (job(classes=None), plan(), "which modules are this model's blocks is not known"),
        (job(classes=("Own",)), plan(), "which modules are this model's blocks is not known"),
        (job(), plan(device="cpu", kernels="hf"), "a CPU's seconds are not planned"),
    ],
)
def test_auto_never_fails(one, found, reason):
    done = leaf_blocks.decided(leaf_blocks.as_said(one), found, Hardware())
    assert how(done) == [("off", "plan", reason)] and done.resolved.config == one.resolved.config


def test_a_resume_does_as_before_where_it_fits(monkeypatch):
    monkeypatch.setattr(leaf_blocks.RunFolder, "kept", lambda resume: {"leaf_blocks": resume})
    for before, found in ((True, plan(micro_batch=8)), (False, plan())):  # each the contrary of what the plan would choose
        done = leaf_blocks.decided(job(), found, Hardware(), before)
        assert done.leaf_blocks is before and how(done)[0][1:] == ("plan", "as in the run that it goes on from")
        assert leaf_blocks.decided(job(said="off"), found, Hardware(), before).leaf_blocks is False
    small = leaf_blocks.decided(job(), plan(), Hardware(9 * GIB), True)
    assert (
        small.leaf_blocks is False
        and how(small)[0][2] == "not as in the run that it goes on from: with whole blocks it does not fit"
    )


@pytest.mark.parametrize("one, found", [(job(), None), (job(classes=("Own",)), plan())])
def test_a_resume_does_as_before_where_no_plan_says_that_it_does_not_fit(one, found, monkeypatch):
    """It was told `on`, and is gone on with without."""
    monkeypatch.setattr(leaf_blocks.RunFolder, "kept", lambda resume: {"leaf_blocks": True})
    done = leaf_blocks.decided(one, found, Hardware())
    assert how(done) == [("on", "plan", "as in the run that it goes on from")] and leafs(done) == {
        "classes": [*one.block_classes]
    }
    assert leaf_blocks.decided(job(classes=None), None, Hardware()).leaf_blocks is False


@pytest.mark.parametrize(
    "kept, on",
    [
        ({"seq_len": 4096}, False),  # of a run from before there was a choice: hooks on each layer
        ({"seq_len": 4096, "leaf_blocks": None}, True),  # at another stage, or as its ds_config said
        ({}, True),  # no resume
    ],
)
def test_a_checkpoint_that_does_not_tell(kept, on, monkeypatch):
    monkeypatch.setattr(leaf_blocks.RunFolder, "kept", lambda resume: kept)
    assert leaf_blocks.decided(job(), plan(), Hardware()).leaf_blocks is on


def test_the_slowest_card_is_each_ranks_own(card, monkeypatch):
    """nvidia-smi was asked, for the host's first card, and its absence made an H100 of any card."""
    card("NVIDIA A100-SXM4-80GB")
    assert capacity._card_flops() == 312e12
    monkeypatch.setattr(capacity.ranks, "all_gather_object", lambda mine, why: [mine, 181e12])
    assert capacity._card_flops() == 181e12


@pytest.mark.parametrize(
    "zero", [{"leaf_module": {"name_suffixes": ["mlp"]}}, {"stage3_module_granularity_threshold": 5}, {"stage": 2}]
)
def test_a_file_that_says_it_stands(zero):
    one = job(**zero)
    assert leaf_blocks.decided(leaf_blocks.as_said(one), plan(), Hardware()) == one and one.leaf_blocks is None


def test_on():
    done = leaf_blocks.decided(leaf_blocks.as_said(job("on")), None, Hardware())
    assert leafs(done) == {"classes": ["LlamaDecoderLayer"]} and how(done) == [("on", "flag", "--leaf_blocks")]
    named = job("on", leaf_module={"classes": "transformers.models.llama.modeling_llama.LlamaDecoderLayer"})
    done = leaf_blocks.decided(leaf_blocks.as_said(named), plan(), Hardware())
    assert leafs(done) == leafs(named) and how(done) == [("on", "flag", "--leaf_blocks")] and done.leaf_blocks is True


@pytest.mark.parametrize(
    "one, words",
    [
        (job("on", stage=2), "leaf_blocks on needs zero_optimization.stage 3, not 2"),
        (job("on", classes=None), "the class of this model's blocks is not known before it is built"),
        (job("on", leaf_module={"names": ["model.layers.0"]}), "leaf modules of its own, without LlamaDecoderLayer"),
        (
            job("off", leaf_module={"classes": ["LlamaDecoderLayer"]}),
            "leaf_blocks off, but leaf_module.classes of the ds_config names Llama",
        ),
    ],
)
def test_contradictions_are_refused(one, words):
    with pytest.raises(UsageError, match=words):
        leaf_blocks.as_said(one)


def test_the_search_is_told(card, monkeypatch):
    """What it looks at, and what it took, is as the user said."""
    card()
    monkeypatch.setattr(capacity, "hardware", lambda cap: Hardware(139 * GIB, 500 * GIB))
    asked = replace(job("on").args, ds_config="auto", per_device_train_batch_size=1, gradient_accumulation_steps=1)
    args, config = search.choose(asked)
    assert args.leaf_blocks == "on" and config["zero_optimization"]["leaf_module"] == {"classes": ["LlamaDecoderLayer"]}


@pytest.mark.parametrize("micro_batch, value", [(1, "on"), (8, "off")])
def test_what_the_search_chose_is_a_decision_of_the_run(micro_batch, value):
    """Off was one, and on was not, nor did the checkpoint keep it for the run that goes on."""
    asked, chosen = replace(job().args, ds_config="auto"), with_leafs(plan(micro_batch=micro_batch), Hardware())
    one = job(**config_of(chosen.settings)["zero_optimization"])
    one = replace(one, args=replace(asked, **flags(chosen)))
    done = search.named_auto(leaf_blocks.decided(leaf_blocks.as_said(one), None, Hardware()), asked)
    assert how(done) == [(value, "auto", "--ds_config auto: the fastest that fits")] and done.leaf_blocks is (value == "on")


@pytest.mark.parametrize("said", ["on", "off", "auto"])
def test_yaml_reads_on_and_off_as_true_and_false(said, tmp_path):
    values = yaml.safe_load(f"leaf_blocks: {said}\nmodel: preset:llama-tiny\nds_config: zero3")
    assert expand(values)[0].arguments["leaf_blocks"] == said
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "run.yaml").write_text(
        f"leaf_blocks: {said}\nmodel_name_or_path: preset:llama-tiny\nds_config: zero3\ntrain_data: {tmp_path}/text.txt\n"
        f"output_dir: {tmp_path}/out\ntokenizer_name_or_path: {tmp_path}\n"
    )
    assert parse([str(tmp_path / "run.yaml")]).leaf_blocks == said


def test_peers_have_no_place_for_it():
    cell = {"model": "preset:llama-8b", "ds_config": "zero3", "runner": "raw_deepspeed"}
    with pytest.raises(UsageError, match="leaf_blocks is bigtrain's own"):
        expand({**cell, "leaf_blocks": "on"})
    with pytest.raises(UsageError, match="leaf_blocks is 'maybe'"):
        expand({**cell, "runner": "bigtrain", "leaf_blocks": "maybe"})
    # It was refused on the cards, after the model had been built.
    with pytest.raises(UsageError, match="optim adamw_split_8bit is bigtrain's own: give the cells of runner raw_deepspeed one of adamw, adamw_8bit"):  # fmt: skip
        expand({**cell, "optim": "adamw_split_8bit"})
    assert expand({**cell, "optim": "adamw_split_8bit", "cells": [{"optim": "adamw"}]})[0].arguments["optim"] == "adamw"
