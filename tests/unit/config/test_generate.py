"""Generation: the shipped files, integers, no contradiction ever written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigtrain.config import (
    PRESETS,
    GenerateOptions,
    ModelShape,
    RunValues,
    dump,
    generate,
    lint,
    load,
    resolve,
)
from bigtrain.errors import ConfigError
from tests import ROOT
from tests.unit.config.peers import CLEAN

RUN_OWNS = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "lr",
    "betas", "eps", "weight_decay", "reduce_bucket_size", "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
}  # fmt: skip


def leaves(node, name=""):
    if isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, key)
    else:
        yield name, node


@pytest.mark.parametrize("name", PRESETS)
def test_shipped_file_is_what_the_generator_writes(name):
    file = ROOT / "ds_configs" / f"{name}.json"
    assert file.read_text() == dump(generate(PRESETS[name]))
    assert load(name) == load(file) == json.loads(file.read_text())


def test_six_presets_are_shipped():
    assert list(PRESETS) == ["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_offload_all"]
    folder = ROOT / "ds_configs"
    assert {p.name for p in folder.glob("*.json")} == {f"{n}.json" for n in PRESETS}
    readme = (folder / "README.md").read_text()
    assert all(f"`{n}.json`" in readme for n in PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_clean_and_auto_only_where_a_run_owns_the_value(name):
    config = load(name)
    assert lint(config) == [] == lint(config, world_size=3, run=RunValues(micro_batch=2))
    assert {key for key, value in leaves(config) if value == "auto"} <= RUN_OWNS


@pytest.mark.parametrize("name", PRESETS)
def test_B04_every_size_is_an_integer(name):
    shape = ModelShape(hidden_size=4096)
    for config in (
        generate(GenerateOptions(**{**vars(PRESETS[name]), "model": shape})),
        resolve(load(name), model=shape).config,
    ):
        sizes = {k: v for k, v in leaves(config) if k.endswith(("_size", "_threshold", "_parameters", "_steps"))}
        assert sizes and all(type(v) is int or v == "auto" for v in sizes.values())
        if config["zero_optimization"]["stage"] == 3:
            assert config["zero_optimization"]["stage3_prefetch_bucket_size"] == 15099494


def test_B04_no_hidden_size_falls_back():
    config = generate(GenerateOptions(stage=3, model=ModelShape()))
    zero = config["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (500_000_000, 50_000_000)
    assert zero["stage3_param_persistence_threshold"] == 100_000
    assert lint(config) == []


@pytest.mark.parametrize("scheduler", ["linear", "cosine", "constant"])
def test_B07_a_generated_schedule_says_its_peak_and_its_length(scheduler):
    options = GenerateOptions(scheduler=scheduler, learning_rate=1e-5, warmup_steps=0, total_steps=50)
    config = generate(options)
    params = config["scheduler"]["params"]
    assert params["warmup_num_steps"] == 1 and params["warmup_type"] == "linear"
    assert params.get("warmup_max_lr", config["optimizer"]["params"]["lr"]) == 1e-5
    assert scheduler == "constant" or params["total_num_steps"] == 50
    left_open = generate(GenerateOptions(scheduler=scheduler))["scheduler"]["params"]
    assert set(left_open) == set(params)
    done = resolve(generate(GenerateOptions(scheduler=scheduler)), run=RunValues(total_steps=7, learning_rate=3e-4))
    assert done.config["scheduler"]["params"].get("warmup_max_lr", 3e-4) == 3e-4
    assert done.config["scheduler"]["params"].get("total_num_steps", 7) == 7


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(stage=4), "ZeRO stages"),
        (dict(stage=2, offload="all"), "stage 3 only"),
        (dict(stage=0, offload="optimizer"), "stage 0"),
        (dict(offload="disk"), "unknown choice"),
        (dict(nvme_path="/x"), "needs stage 3"),
        (dict(scheduler="wsd"), "unknown choice"),
        (dict(micro_batch=0), "at least 1"),
        (dict(micro_batch=2.0), "whole number"),
        (dict(micro_batch=2, accumulation=2, global_batch=6), "no number of ranks"),
        (dict(micro_batch=1, accumulation=1, global_batch=3, world_size=2), "One valid choice"),
        (dict(learning_rate=-1.0), "out of range"),
        (dict(learning_rate="1e-4"), "in quotes"),
        (dict(optimizer="AdmW"), "AdamW"),
        (dict(adam_beta2=1.0), "diverge"),
        (dict(max_grad_norm=-1), "at least 0"),
        (dict(scheduler="linear", warmup_steps=10, total_steps=5), "more than the run's 5 steps"),
        (dict(optimizer="Lamb", offload="optimizer"), "CPU version"),
    ],
)
def test_contradicting_choices_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        generate(GenerateOptions(**options))


options = st.builds(
    GenerateOptions,
    stage=st.integers(0, 3),
    offload=st.sampled_from(["none", "optimizer", "all"]),
    activation_checkpointing=st.booleans(),
    bf16=st.booleans(),
    optimizer=st.sampled_from(["AdamW", "Adam", "Muon", "Lion", "SGD"]),
    scheduler=st.sampled_from([None, "linear", "cosine", "constant"]),
    micro_batch=st.none() | st.integers(1, 16),
    accumulation=st.none() | st.integers(1, 8),
    global_batch=st.none() | st.integers(1, 128),
    world_size=st.none() | st.integers(1, 8),
    learning_rate=st.none() | st.floats(1e-7, 0.5),
    warmup_steps=st.none() | st.integers(0, 10),
    total_steps=st.none() | st.integers(10, 1000),
    max_grad_norm=st.none() | st.floats(0, 10),
    model=st.none() | st.builds(ModelShape, hidden_size=st.none() | st.integers(8, 16384)),
)


@settings(max_examples=150, deadline=None)
@given(options, st.integers(1, 8))
def test_what_is_generated_is_always_consistent(choice, ranks):
    try:
        config = generate(choice)
    except ConfigError as error:
        assert any(p.severity == "error" for p in error.problems)
        return
    assert json.loads(dump(config)) == config
    assert [p for p in lint(config, world_size=choice.world_size) if p.severity == "error"] == []
    try:
        done = resolve(config, run=RunValues(total_steps=100), world_size=choice.world_size or ranks, device="cpu")
    except ConfigError as error:  # only numbers that this many ranks, or this length, cannot have
        assert {p.path for p in error.problems if p.severity == "error"} <= {
            "train_batch_size", "scheduler.params.total_num_steps",
        }  # fmt: skip
        return
    still_open = [v for k, v in leaves(done.config) if v == "auto"]
    assert still_open == []
    assert [p for p in lint(done.config) if p.severity == "error"] == []
    triple = [done.config[k] for k in ("train_batch_size", "train_micro_batch_size_per_gpu",
                                       "gradient_accumulation_steps")]  # fmt: skip
    assert triple[0] == triple[1] * triple[2] * (choice.world_size or ranks)


@pytest.mark.parametrize("name", CLEAN)
def test_what_peers_ship_resolves(name):
    config = CLEAN[name]
    run = RunValues(total_steps=1000)
    if config.get("fp16", {}).get("enabled") is True:
        with pytest.raises(ConfigError, match="bf16 or fp32"):
            resolve(config, run=run, world_size=8)
        return
    done = resolve(config, run=run, world_size=1 if config.get("train_batch_size") == 1 else 8)
    native = {"select_strategy", "select_interval", "update_interval", "stages"}
    assert [k for k, v in leaves(done.config) if v == "auto" and k not in native] == []
    assert [str(p) for p in lint(done.config) if p.severity == "error"] == []
