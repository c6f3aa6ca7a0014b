"""The planner's word on a cell is the word that launch/train.py would act on."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from bigtrain import config as ds
from bigtrain import shapes
from bigtrain.bench.grid import expand
from bigtrain.bench.machine import Machine
from bigtrain.bench.prediction import flops_formula, hardware, planned, prediction
from bigtrain.cli import main
from bigtrain.config import ModelShape
from bigtrain.models.source import config_from
from bigtrain.plan.roofline import model_flops_per_token
from bigtrain.plan.show import plan_text
from bigtrain.plan.spilled import asked_share
from bigtrain.run import capacity, left_open, search
from bigtrain.run.arguments import TrainArguments
from bigtrain.run.job import Job

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


@pytest.mark.parametrize(
    "said, attention",
    [({}, "sdpa"), ({"packing": "isolated"}, "masked"), ({"attn_implementation": "eager", "packing": "isolated"}, "eager")],
)
def test_the_plan_is_of_the_attention_that_will_run(said, attention):
    """On CPUs a dense mask keeps packed documents apart: it is kept, and keys and values are repeated for each head of queries."""
    cpu = replace(H100, device="cpu", gpu_bytes=None)
    keeps = planned(cell(model="preset:llama-8b", ds_config="zero2", **said), cpu).input.geometry.keeps
    assert (keeps.masked, keeps.matrix > 0) == (attention == "masked", attention == "eager")


def test_a_family_without_kernels_of_liger_kernels_is_planned_with_transformers_own(capsys):
    """Pythia was planned 2.3 % too high and OLMoE 3.6 % too low: liger-kernel does not know them, and leaves them alone but for the loss."""
    assert "hf kernels, fused loss" in prediction(cell(model="preset:pythia-1.4b", ds_config="zero2"), H100)["config"]
    assert "liger kernels, fused loss" in prediction(cell(model="preset:qwen3-1.7b", ds_config="zero2"), H100)["config"]
    peer = cell(model="preset:pythia-1.4b", ds_config="zero2", runner="hf_trainer", use_liger_kernel=True)
    assert "hf kernels, full loss" in prediction(peer, H100)["config"]
    assert main(["plan", "--model", "preset:pythia-1.4b", "--ds_config", "zero2", "--gpu_memory", "80GiB"]) == 0
    assert "hf kernels, fused loss" in capsys.readouterr().out


def test_auto_is_chosen_as_the_run_will_and_respects_what_is_given():
    said = prediction(cell(model="preset:llama-8b", ds_config="auto", use_liger_kernel=True), H100)
    assert said["fits"] is True and "micro batch 2 x 4096 tokens" in said["config"] and "checkpointing full" in said["config"]
    nothing = prediction(cell(model="preset:llama-405b", ds_config="auto"), H100)
    assert nothing["fits"] is False and "no configuration fits" in nothing["none"]


@pytest.mark.parametrize("model", ["llama-1b", "mixtral-8x7b", "qwen3-8b"])
def test_formula_is_the_planners(model):
    found = planned(cell(model=f"preset:{model}", ds_config="zero3"), H100).input
    assert flops_formula(found).per_token == pytest.approx(model_flops_per_token(found), rel=1e-12)


H200 = Machine(device="cuda", card="NVIDIA H200", gpu_bytes=150_754_820_096, host_bytes=270_334_464_000)


@pytest.mark.parametrize("model, cap, allocated, reserved", [
    ("llama-8b", None, 101.94, 110.57), ("llama-8b", 47.4, 45.51, 49.39), ("llama-20b", None, 141.57, 148.52),
    ("llama-3b", 33.5, 31.76, 33.78),
])  # fmt: skip
def test_what_a_cell_leaves_open_is_settled_as_by_the_run(model, cap, allocated, reserved):
    """Measured on one H200, in 1e9 bytes. The buffers of streamed state were counted as four, where the run took 80: a tenth less.

    With the margin of today (2.5 % of the card; 4 % then) and today's seconds of a forward a run takes a little more.
    """
    values = {"ds_config": "zero2_offload", "optim": "adamw_split_8bit", "checkpoint_blocks": "auto", "micro_batch": 4}
    said = prediction(cell(model=f"preset:{model}", gpu_memory_cap=cap, **values), H200)
    assert said["fits"] and said["gpu_used_bytes"] <= said["gpu_limit_bytes"]
    assert -0.01 <= said["gpu_allocated_bytes"] / (allocated * 1e9) - 1 <= 0.045
    assert said["gpu_reserved_bytes"] == pytest.approx(reserved * 1e9, rel=0.045)


def test_auto_plans_and_predicts_one_plan(card, capsys, monkeypatch):
    """What `bigtrain plan --auto` prints, what the program settles and plans, and what a sweep says, byte for byte."""
    card()
    for gpu_gib, model, more in (
        (47.4, "llama-8b", {}),
        (79.1, "llama-8b", {"micro_batch": 4}),
        (24, "llama-3b", {"micro_batch": 2}),
    ):
        machine = replace(H100, gpu_bytes=int(gpu_gib * 2**30))
        name = f"preset:{model}"
        cell = expand({"model": name, "ds_config": "auto", "seq_len": 4096, **more})[0]
        found, here = planned(cell, machine), hardware(cell, machine)
        words = ["--model", name, "--gpu_memory", str(machine.gpu_bytes), "--host_memory", str(machine.host_bytes)]
        words += [word for key, value in more.items() for word in (f"--{key}", str(value))]
        assert main(["plan", *words, "--seq_len", "4096", "--auto", "--kernels", "liger"]) == 0
        said = capsys.readouterr().out
        assert "\n" + plan_text(found, here) + "\n" in said

        monkeypatch.setattr(capacity, "hardware", lambda cap, here=here: here)
        args = TrainArguments(
            model_name_or_path=name, ds_config="auto", train_data="x", output_dir="y", seq_len=4096, use_liger_kernel=True,
            per_device_train_batch_size=more.get("micro_batch"),
        )  # fmt: skip
        args, config = search.choose(args)
        run = args.run_values()
        shape = ModelShape.from_config(shapes.config_dict(model))
        resolved = ds.resolve(config, run=run, model=shape, world_size=1, device="cuda")
        steps = SimpleNamespace(micro_batch=run.micro_batch, accumulation=run.accumulation)
        job = Job(args=args, resolved=resolved, tokenizer=None, seq_len=4096, steps=steps, model_config=config_from(args.model_name_or_path, args.trust_remote_code),
                  config_overrides={}, resize_vocab_to=None, offload_gradients=asked_share(args.offload_gradients) or 0.0)  # fmt: skip
        job = left_open.settle(job, here)
        assert plan_text(capacity.plan_of(job, here), here) == plan_text(found, here)


@pytest.mark.parametrize("gpu_gib", [79.1, 47.4])
def test_auto_is_never_planned_slower_than_the_file(gpu_gib):
    machine = replace(H100, gpu_bytes=int(gpu_gib * 2**30))
    values = {"model": "preset:llama-8b", "seq_len": 4096, "micro_batch": 4, "accumulation": 1}
    told = {"ds_config": "zero2_offload", "optim": "adamw_split_8bit", "checkpoint_blocks": "auto"}
    auto, explicit = (prediction(expand({**values, **more})[0], machine) for more in ({"ds_config": "auto"}, told))
    assert auto["fits"] and explicit["fits"]
    assert auto["tokens_per_s_per_gpu"] >= explicit["tokens_per_s_per_gpu"]
