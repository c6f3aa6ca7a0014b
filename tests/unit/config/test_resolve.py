"""Resolving: who decides what, all open values in one error, nothing said twice."""

from __future__ import annotations

import pytest

from bigtrain.config import PRESETS, ModelShape, RunValues, load, resolve, table
from bigtrain.errors import ConfigError
from bigtrain.optim.table import OPTIMIZERS
from tests.unit.config.wrong_configs import BASE, wrong


def decided(done, path):
    return {d.path: (d.value, d.source) for d in done.decisions}[path]


def test_precedence_file_then_flag_then_default():
    config = wrong({"optimizer.params.weight_decay": "auto", "optimizer.params.eps": "auto"})
    done = resolve(config, run=RunValues(weight_decay=0.3, learning_rate=1e-4))
    assert decided(done, "learning_rate") == (1e-4, "file")
    assert decided(done, "weight_decay") == (0.3, "flag")
    assert decided(done, "adam_epsilon") == (1e-8, "default")
    assert done.config["optimizer"]["params"] == {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.3}
    assert (done.run.learning_rate, done.run.weight_decay, done.run.adam_beta2) == (1e-4, 0.3, 0.95)
    text = table(done.decisions)
    assert "weight_decay" in text and "flag" in text and len(text.splitlines()) == len(done.decisions)


def test_the_input_is_not_changed():
    config = load("zero3")
    resolve(config, model=ModelShape(hidden_size=64), world_size=2)
    assert config == load("zero3")


def test_run_values_are_complete():
    run = resolve(load("zero2"), run=RunValues(total_steps=10), world_size=2).run
    missing = {"seed", "seq_len"}  # have no place in a ds_config
    assert {n for n, v in vars(run).items() if v is None} == missing
    assert (run.micro_batch, run.accumulation, run.global_batch) == (1, 1, 2)
    assert (run.optim, run.lr_scheduler_type, run.warmup_steps) == ("adamw", "linear", 0)
    assert run.bf16 is True and run.gradient_checkpointing is False


def test_huggingface_formulas():
    zero = resolve(load("zero3"), model=ModelShape(hidden_size=3072)).config["zero_optimization"]
    assert zero["reduce_bucket_size"] == 3072 * 3072
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * 3072 * 3072)
    assert zero["stage3_param_persistence_threshold"] == 30720


def test_without_a_hidden_size_deepspeeds_defaults():
    done = resolve(load("zero3"))
    assert decided(done, "zero_optimization.reduce_bucket_size") == (500_000_000, "default")


@pytest.mark.parametrize("path", ["train_micro_batch_size_per_gpu", "gradient_clipping", "optimizer.params.lr",
                                  "zero_optimization.reduce_bucket_size"])  # fmt: skip
def test_B03_auto_is_filled_in_without_the_trainer(path):
    change = {path: "auto"} | ({"scheduler.params.warmup_max_lr": "auto"} if "lr" in path else {})
    done = resolve(wrong(change))
    node = done.config
    for part in path.split("."):
        node = node[part]
    assert isinstance(node, int | float)


def test_B03_all_open_values_in_one_error():
    config = wrong({
        "scheduler.params.total_num_steps": "auto", "scheduler.params.warmup_type": "auto",
        "wall_clock_breakdown": "auto", "optimizer.params.bias_correction": "auto",
    })  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        resolve(config)
    paths = {p.path for p in caught.value.problems if p.severity == "error"}
    assert paths >= {"wall_clock_breakdown", "scheduler.params.warmup_type", "optimizer.params.bias_correction"}
    with pytest.raises(ConfigError) as caught:
        resolve(wrong({"scheduler.params.total_num_steps": "auto"}))
    assert [p.path for p in caught.value.problems] == ["scheduler.params.total_num_steps"]
    assert "--max_steps" in str(caught.value)


def test_B05_offload_chooses_the_cpu_optimizer_and_says_so():
    done = resolve(load("zero3_offload"))
    value, _ = decided(done, "optimizer")
    assert value == "DeepSpeedCPUAdam"
    reason = next(d.reason for d in done.decisions if d.path == "optimizer")
    assert "zero_force_ds_cpu_optimizer false" in reason


@pytest.mark.parametrize("optim", ["adamw_8bit", "some_other"])
def test_B05_another_optimizer_gets_the_flags_it_needs(optim):
    done = resolve(load("zero2_offload"), run=RunValues(optim=optim))
    assert done.config["zero_force_ds_cpu_optimizer"] is False
    assert done.config["zero_allow_untested_optimizer"] is True
    assert "optimizer" not in done.config, "DeepSpeed could not build it"
    assert done.run.optim == ("adamw" if optim == "adamw_torch" else optim)  # what the Trainer calls so
    config = load("zero2")
    del config["zero_allow_untested_optimizer"]
    done = resolve(config, run=RunValues(optim=optim))
    assert done.config["zero_allow_untested_optimizer"] is True
    assert "zero_force_ds_cpu_optimizer" not in done.config


def test_B06_a_section_of_autos_leaves_the_optimizer_to_the_run():
    done = resolve(load("zero2"), run=RunValues(optim="muon", learning_rate=0.02))
    assert done.config["optimizer"]["type"] == "Muon" and done.config["optimizer"]["params"]["lr"] == 0.02
    assert decided(done, "optimizer") == ({"type": "Muon", "params": done.config["optimizer"]["params"]}, "flag")
    with pytest.raises(ConfigError, match="--optim says 'muon'"):
        resolve(BASE, run=RunValues(optim="muon"))


def test_B06_the_engine_gets_neither_section():
    done = resolve(BASE)
    engine = done.engine_config()
    assert "optimizer" not in engine and "scheduler" not in engine
    assert done.config["scheduler"]["type"] == "WarmupDecayLR", "the printed file keeps them"
    engine["zero_optimization"]["stage"] = 0
    assert done.config["zero_optimization"]["stage"] == 2, "a copy"


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_every_optimizer_may_be_chosen_for_every_preset(preset, optim):
    """The presets leave the optimizer to the run; stage 3's say reduce_scatter true, which Muon cannot have beside it."""
    done = resolve(load(preset), run=RunValues(optim=optim, max_grad_norm=1.0, total_steps=9), world_size=2)
    assert done.run.optim == ("adamw" if optim == "adamw_torch" else optim)  # what the Trainer calls so
    scatters = done.config["zero_optimization"]["reduce_scatter"]
    assert scatters is not (optim == "muon" and done.config["zero_optimization"]["stage"] == 3)


def test_muon_at_stage_3_needs_reduce_scatter_off():
    config = load("zero3")
    del config["zero_optimization"]["reduce_scatter"]
    done = resolve(config, run=RunValues(optim="muon"))
    assert done.config["zero_optimization"]["reduce_scatter"] is False


@pytest.mark.parametrize(
    ("kind", "name"), [("WarmupLR", "constant"), ("WarmupDecayLR", "linear"), ("WarmupCosineLR", "cosine")]
)
def test_B07_schedule_of_the_file(kind, name):
    params = {"warmup_num_steps": "auto"} | ({} if kind == "WarmupLR" else {"total_num_steps": "auto"})
    config = wrong({"scheduler": {"type": kind, "params": params}})
    done = resolve(config, run=RunValues(total_steps=50, warmup_steps=0))
    assert done.run.lr_scheduler_type == name
    assert (done.run.warmup_steps, done.run.total_steps) == (0, 50)
    written = done.config["scheduler"]["params"]
    assert written["warmup_num_steps"] == 1 and written["warmup_type"] == "linear"
    if kind != "WarmupCosineLR":
        assert written["warmup_max_lr"] == 1e-4, "never DeepSpeed's 0.001"
    if kind != "WarmupLR":
        assert written["total_num_steps"] == 50


def test_B07_peak_rate_of_the_schedule_is_the_learning_rate():
    config = wrong({"optimizer.params.lr": "auto", "scheduler.params.warmup_max_lr": 2e-5})
    done = resolve(config)
    assert done.config["optimizer"]["params"]["lr"] == 2e-5 == done.run.learning_rate


def test_B08_equal_passes_and_names_both():
    done = resolve(wrong({"gradient_accumulation_steps": 4}), run=RunValues(accumulation=4))
    assert next(d.source for d in done.decisions if d.path == "gradient_accumulation_steps") == "file"
    with pytest.raises(ConfigError, match=r"the file says 4, --gradient_accumulation_steps says 2"):
        resolve(wrong({"gradient_accumulation_steps": 4}), run=RunValues(accumulation=2))


def test_clipping_is_always_said():
    config = wrong({})
    del config["gradient_clipping"]
    assert resolve(config).config["gradient_clipping"] == 1.0
    assert resolve(config, run=RunValues(max_grad_norm=0)).config["gradient_clipping"] == 0.0


def test_B38_fp16_leaves_no_trace():
    done = resolve(wrong({"fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16}}))
    assert "fp16" not in done.config
    assert any(d.path == "fp16" and "loss scaling" in d.reason for d in done.decisions)
    with pytest.raises(ConfigError, match="without loss scaling"):
        resolve(wrong({"bf16": {"enabled": False}, "fp16": {"enabled": True}}))


def test_bf16_is_said():
    assert resolve(wrong({"bf16.enabled": "auto"})).config["bf16"]["enabled"] is True
    config = {"zero_optimization": {"stage": 2}}
    assert resolve(config).config["bf16"]["enabled"] is False, "a missing section means fp32, as in DeepSpeed"
    assert resolve(config, run=RunValues(bf16=True)).config["bf16"]["enabled"] is True
    assert "data_types" not in resolve(config).config


@pytest.mark.parametrize(
    ("stage", "offload", "accumulation", "expected"),
    [
        (0, False, 4, None),
        (1, False, 4, "fp32"),
        (1, True, 4, "fp32"),
        (2, False, 1, "bf16"),
        (2, False, 2, "fp32"),
        (2, True, 1, "bf16"),
        (2, True, 4, "fp32"),
        (3, False, 4, "fp32"),
        (3, True, 1, "bf16"),
        (3, False, 1, "bf16"),
    ],
)
def test_gradient_accumulation_dtype(stage, offload, accumulation, expected):
    zero = {"stage": stage} | ({"offload_optimizer": {"device": "cpu"}} if offload else {})
    config = {"bf16": {"enabled": True}, "zero_optimization": zero}
    done = resolve(config, run=RunValues(accumulation=accumulation))
    assert done.config.get("data_types", {}).get("grad_accum_dtype") == expected
    assert done.config.get("communication_data_type") == ("fp32" if stage == 1 else None)


def test_bf16_master_weights_keep_their_own_accumulation():
    config = {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        "zero_optimization": {"stage": 3},
    }
    assert "data_types" not in resolve(config).config


def test_B66_gpu_only_options_are_dropped_on_cpu():
    done = resolve(load("zero3_offload_all"), device="cpu")
    zero = done.config["zero_optimization"]
    assert zero["overlap_comm"] is False
    assert zero["offload_optimizer"]["pin_memory"] is zero["offload_param"]["pin_memory"] is False
    assert decided(done, "zero_optimization.overlap_comm") == (False, "device")
    implied = resolve({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, device="cpu").config
    assert implied["zero_optimization"]["overlap_comm"] is False, "DeepSpeed's default would be true"
    assert implied["zero_optimization"]["offload_optimizer"]["pin_memory"] is False
    on_gpu = resolve(load("zero3_offload_all")).config["zero_optimization"]
    assert on_gpu["overlap_comm"] is True and on_gpu["offload_optimizer"]["pin_memory"] is True


def test_old_spellings_become_new_ones():
    config = {
        "_comment": "x", "bfloat16": {"enabled": True}, "comms_config": {},
        "zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True, "max_live_parameters": 1e9,
                              "stage3_gather_fp16_weights_on_model_save": True, "prefetch_bucket_size": "auto"},
    }  # fmt: skip
    done = resolve(config, model=ModelShape(hidden_size=10))
    zero = done.config["zero_optimization"]
    assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu"}
    assert zero["stage3_max_live_parameters"] == 10**9 and type(zero["stage3_max_live_parameters"]) is int
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True
    assert zero["stage3_prefetch_bucket_size"] == 90
    assert set(done.config) & {"_comment", "bfloat16", "comms_config", "cpu_offload"} == set()
    assert resolve({"zero_optimization": True}).config["zero_optimization"]["stage"] == 1


def test_activation_checkpointing_block_is_a_wish():
    block = {"activation_checkpointing": {"partition_activations": False}}
    assert resolve(wrong(block)).run.gradient_checkpointing is True
    assert resolve(BASE).run.gradient_checkpointing is False
    assert resolve(BASE, run=RunValues(gradient_checkpointing=True)).run.gradient_checkpointing is True


def test_every_lint_error_stops_resolving():
    with pytest.raises(ConfigError) as caught:
        resolve(wrong({"gradient_cliping": 1, "optimizer.params.lr": -1}))
    assert {"gradient_cliping", "optimizer.params.lr"} <= {p.path for p in caught.value.problems}
