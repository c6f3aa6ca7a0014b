"""Every value is decided once, and a contradiction is said or refused."""

import copy

import pytest
import torch

from bigtrain.config import RunValues, resolve
from bigtrain.engine import settings
from bigtrain.errors import ConfigError, UsageError
from bigtrain.plan import settings_from_config


def settle(config, world=2, scheduler_kwargs=None, offload_gradients=0.0, **given):
    return settings.settle(
        config, RunValues(**given), world_size=world, scheduler_kwargs=scheduler_kwargs, offload_gradients=offload_gradients
    )


def base(stage=2, **more):
    return {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}, **more}


def test_arguments_win_over_the_config_and_it_is_said():
    config = base(optimizer={"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.1}}, gradient_clipping=0.3)
    s = settle(config, optim="adamw", learning_rate=1e-3, max_grad_norm=0.7)
    assert (s.options.lr, s.options.weight_decay, s.max_grad_norm) == (1e-3, 0.1, 0.7)
    text = " ".join(s.notes)
    assert "two optimizers" in text and "0.5" in text and "0.3" in text
    assert "optimizer" not in s.config and s.config["gradient_clipping"] == 0.7


@pytest.mark.parametrize("share", ["auto", "0.5", True, None, -0.1, 1.5, float("nan")])
def test_a_share_of_gradients_is_a_number_from_0_to_1(share):
    with pytest.raises(UsageError, match="a share of the gradients, from 0 to 1"):
        settle(base(), offload_gradients=share)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_grad_norm": -1.0}, "max_grad_norm is -1.0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm is nan"),
        ({"warmup_steps": 0.1, "total_steps": 100}, "warmup_steps is 0.1"),
        ({"total_steps": 10.7}, "total_steps is 10.7"),
        ({"adam_beta2": 1.0}, r"betas are \(0.9, 1.0\)"),
        ({"learning_rate": -1.0}, "the learning rate is -1.0"),
    ],
)
def test_values_that_would_be_read_as_others_are_refused(given, said):
    with pytest.raises(UsageError, match=said):
        settle(base(), **given)
    assert settle(base(), warmup_steps=2.0, total_steps=10).warmup_steps == 2


@pytest.mark.parametrize("spelling", ["fp32", "float32", "float", "torch.float32"])
def test_each_spelling_of_the_type_of_sums_is_understood(spelling):
    """In some of them DeepSpeed's class with an fp32 master came up at stage 1, and a traceback; the plan counted bf16 sums."""
    config = base(stage=1, data_types={"grad_accum_dtype": spelling}, gradient_accumulation_steps=2)
    given = RunValues(optim="adamw_split", micro_batch=1, total_steps=5)
    for said in (config, resolve(config, run=given, world_size=2, device="cpu")):
        private, _ = settings.read(said, given, world_size=2, device="cpu")
        settled = settings.settle(private, given, world_size=2)
        assert settled.config["data_types"] == {"grad_accum_dtype": "fp32"}
        assert settled.config["zero_optimization"]["stage"] == 2
    assert settings_from_config(config, 64).grad_bytes == 4


@pytest.mark.parametrize("config", [{"bf16": {"enabled": False}}, {}, {"data_types": {"grad_accum_dtype": "fp32"}}])
@pytest.mark.parametrize("name", ["adamw_split", "adamw_split_bf16", "adamw_split_8bit"])
def test_an_optimizer_that_trains_in_bf16_alone_is_refused_in_a_config_that_says_fp32(config, name):
    config["zero_optimization"] = {"stage": 2}
    with pytest.raises(UsageError, match=r"keeps 16 bits beside each bf16 weight .*write bf16.enabled true, or take adamw"):
        settle(config, optim=name)
    assert not settle(config, optim="adamw").bf16
    assert settle({**config, "bf16": {"enabled": True}}, optim=name).bf16


@pytest.mark.parametrize(
    ("config", "given", "said"),
    [
        ({}, {"micro_batch": 1.5}, "micro_batch is 1.5"),
        ({}, {"accumulation": 2.5}, "accumulation is 2.5"),
        ({"train_batch_size": 8.5}, {}, "train_batch_size is 8.5"),
    ],
)
def test_a_part_of_a_row_is_not_cut_off(config, given, said):
    with pytest.raises(ConfigError, match=f"{said}: a whole number"):
        settle(base(**config), **given)
    assert settle(base(), micro_batch=2.0).micro_batch == 2


def test_clipping_defaults_to_one_and_auto_is_not_a_value():
    assert settle(base()).max_grad_norm == 1.0
    assert settle(base(gradient_clipping="auto")).max_grad_norm == 1.0
    assert settle(base(gradient_clipping=0.0)).max_grad_norm == 0.0


@pytest.mark.parametrize("kind,name", [("WarmupLR", "constant"), ("WarmupDecayLR", "linear"), ("WarmupCosineLR", "cosine")])
def test_B06_known_schedulers_are_translated(kind, name):
    section = {"type": kind, "params": {"warmup_num_steps": 3, "total_num_steps": 9}}
    s = settle(base(scheduler=section))
    assert (s.scheduler, s.warmup_steps, s.total_steps) == (name, 3, 9)
    assert any(kind in note for note in s.notes)


def test_B06_unknown_schedulers_and_optimizers_are_refused_by_name():
    with pytest.raises(UsageError, match="OneCycle"):
        settle(base(scheduler={"type": "OneCycle"}))
    with pytest.raises(UsageError, match="OneBitAdam"):
        settle(base(optimizer={"type": "OneBitAdam"}))


def test_the_batch_is_solved_from_any_two_and_contradictions_have_all_numbers():
    s = settle(base(train_batch_size=24, gradient_accumulation_steps=3))
    assert (s.micro_batch, s.accumulation) == (4, 3)
    assert settle(base(train_batch_size=24, train_micro_batch_size_per_gpu=2)).accumulation == 6
    with pytest.raises(ConfigError, match=r"train_batch_size 5 .*_gpu 2 .*steps 1 .*ranks 2"):
        settle(base(train_batch_size=5, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=1))


def test_B08_equal_values_pass_and_different_ones_stop_with_both():
    assert settle(base(gradient_accumulation_steps=4), accumulation=4).accumulation == 4
    with pytest.raises(ConfigError, match="given 2, the ds_config says 4"):
        settle(base(gradient_accumulation_steps=4), accumulation=2)


def test_accumulation_is_fp32_unless_the_config_says_otherwise():
    assert settle(base()).config["data_types"]["grad_accum_dtype"] == "fp32"
    assert settle(base(data_types={"grad_accum_dtype": "bf16"})).config["data_types"]["grad_accum_dtype"] == "bf16"
    zero = settle(base(stage=0))
    assert zero.config["bf16"] == {"enabled": False} and zero.config["gradient_clipping"] == 0.0 and zero.bf16


def test_fp16_is_refused_and_a_config_is_never_changed_in_place():
    with pytest.raises(ConfigError, match="bf16"):
        settle({"fp16": {"enabled": True}})
    for groups in ({"tensor_parallel": {"autotp_size": 2}}, {"sequence_parallel_size": 2}, {"pipeline": {"stages": 2}}):
        with pytest.raises(ConfigError, match=r"(_size|stages) is 2: bigtrain gives every rank rows of its own"):
            settle(base(**groups))
    given = base(optimizer={"type": "AdamW"})
    before = copy.deepcopy(given)
    settle(*read(given)[:1])
    assert given == before


def read(config, model_config=None, **given):
    return settings.read(config, RunValues(**given), world_size=2, device="cpu", model_config=model_config)


def test_a_custom_loop_gets_the_lint_and_the_report_has_every_problem(tmp_path):
    wrong = base(gradient_cliping=1.0, train_micro_batch_size_per_gpu=0)
    with pytest.raises(ConfigError, match=r"(?s)gradient_clipping.*train_micro_batch|train_micro_batch.*gradient_clipping"):
        read(wrong)
    twice = tmp_path / "twice.json"
    twice.write_text('{"gradient_clipping": 1.0, /* hjson */ "gradient_clipping": 2.0}')
    with pytest.raises(ConfigError, match="stands twice"):
        read(twice)


def test_a_preset_name_is_a_config_and_auto_is_filled_from_model_and_arguments():
    config, _ = read("zero3_offload", learning_rate=1e-3, micro_batch=4, total_steps=9, model_config={"hidden_size": 64})
    assert config["zero_optimization"]["reduce_bucket_size"] == 64 * 64
    s = settle(config, learning_rate=1e-3, micro_batch=4, total_steps=9)
    assert (s.options.lr, s.micro_batch, s.bf16, s.notes) == (1e-3, 4, True, [])


def test_what_the_file_contradicts_is_still_said_and_what_it_leaves_open_is_no_contradiction():
    config, _ = read(base(gradient_clipping=0.3), max_grad_norm=0.7, learning_rate=1e-3, total_steps=9)
    s = settle(config, max_grad_norm=0.7, learning_rate=1e-3, total_steps=9)
    assert s.max_grad_norm == 0.7 and len(s.notes) == 1 and "0.3" in s.notes[0]


def test_sums_stay_fp32_beside_offload_because_a_step_may_have_more_micro_batches_than_the_file_says():
    config, _ = read({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    assert settle(config).config["data_types"] == {"grad_accum_dtype": "fp32"}


def test_a_schedule_that_contradicts_the_optimizer_in_the_file_is_refused():
    rates = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}},
    }
    with pytest.raises(ConfigError, match="write the same number in both"):
        read(base(**rates))


def test_a_config_without_bf16_is_fp32_and_a_resolved_one_is_taken_as_it_is():
    config, _ = read({"zero_optimization": {"stage": 1}})
    assert config["bf16"] == {"enabled": False}
    done = resolve(base(gradient_clipping=0.5), world_size=2, device="cpu")
    assert read(done) == (done.engine_config(), [])


def test_scheduler_kwargs_reach_the_schedule_and_unknown_ones_are_named():
    settled = settle(base(), lr_scheduler_type="cosine", total_steps=10, scheduler_kwargs={"min_ratio": 0.25})
    assert settled.schedule()(10) == 0.25
    with pytest.raises(UsageError, match="'min_lr' is unknown; it takes min_ratio, decay_steps, decay"):
        settle(base(), lr_scheduler_type="cosine", total_steps=10, scheduler_kwargs={"min_lr": 0.25}).schedule()


def test_what_is_no_number_is_named():
    given = RunValues(learning_rate="1e-3", total_steps=[3], optim="adamw", max_grad_norm=1)
    with pytest.raises(UsageError, match=r"learning_rate is '1e-3', total_steps is \[3\], seed is None: give a number"):
        settings.refuse_other_kinds(given, None)
    settings.refuse_other_kinds(RunValues(learning_rate=1, warmup_steps=0), 7)
    for betas in ((0.9,), 0.9, "ab", (0.9, 0.99, 0.999)):
        with pytest.raises(UsageError, match=r"betas is .*two numbers"):
            settings.pair_of(betas)
    assert settings.pair_of(None) == (None, None) and settings.pair_of([0.8, 0.9]) == (0.8, 0.9)
    with pytest.raises(ConfigError, match="ds_config is a int"):
        settings.read(3, RunValues(), world_size=1, device="cpu")


@pytest.mark.parametrize(
    ("rate", "decay", "said"),
    [(1e4, 0.0, "learning rate is 10000"), (1e-10, 0.0, "learning rate is 1e-10"), (1e-3, 1000.0, "weight_decay is 1000")],
)
def test_what_can_hardly_be_meant_is_said(rate, decay, said):
    (note,) = settle(base(), learning_rate=rate, weight_decay=decay, total_steps=9).notes
    assert said in note
    for usual in (0.0, 1e-9, 5e-5, 0.1):
        assert settle(base(), learning_rate=usual, weight_decay=0.1, total_steps=9).notes == []


def test_each_number_that_the_file_contradicts_is_said_with_its_place():
    section = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}}
    warmup = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": 9}}
    given = {
        "learning_rate": 1e-3,
        "adam_beta2": 0.99,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "warmup_steps": 2,
        "total_steps": 8,
    }
    s = settle(base(optimizer=section, scheduler=warmup), **given)
    assert (s.options.betas, s.options.eps, s.options.weight_decay, s.warmup_steps, s.total_steps) == (
        (0.9, 0.99),
        1e-8,
        0.0,
        2,
        8,
    )
    places = {"betas": "params.betas", "eps": "params.eps", "weight_decay": "params.weight_decay"}
    for name, path in {**places, "warmup_steps": "params.warmup_num_steps", "total_steps": "params.total_num_steps"}.items():
        begins = f"{name}: the Engine was given "
        assert any(note.startswith(begins) and f"{path} of the ds_config says" in note for note in s.notes), (name, s.notes)
    assert not any("params.lr" in note for note in s.notes)


_WEIGHT = torch.zeros(2, requires_grad=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optim": torch.optim.AdamW([_WEIGHT])}, r"Engine\(optimizer=...\) is a AdamW: the engine builds it itself"),
        ({"optim": torch.optim.SGD}, r"Engine\(optimizer=...\) is a SGD"),
        (
            {"lr_scheduler_type": torch.optim.lr_scheduler.StepLR},
            r"Engine\(lr_scheduler=...\) is a StepLR: a name .*, or a function",
        ),
        ({"lr_scheduler_type": torch.optim.lr_scheduler.StepLR(torch.optim.SGD([_WEIGHT]), 1)}, "is a StepLR"),
    ],
)
def test_optimizers_and_schedules_as_objects_are_refused_by_what_they_are(given, said):
    named, own = settings.schedule_of(given.get("lr_scheduler_type"), None, None)
    assert own is None and named is given.get("lr_scheduler_type")
    with pytest.raises(UsageError, match=said):
        settings.refuse_other_kinds(RunValues(**given), seed=1)


def test_a_function_is_the_whole_schedule():
    named, own = settings.schedule_of(lambda step: 1 / (step + 1), None, None)
    assert named == "constant" and [own(0), own(3)] == [1.0, 0.25]
    for beside in ({"warmup_steps": 3, "kwargs": None}, {"warmup_steps": None, "kwargs": {"min_ratio": 0.1}}):
        with pytest.raises(UsageError, match="the warm-up's too"):
            settings.schedule_of(lambda step: 1.0, **beside)
    for value in (-0.5, float("nan"), float("inf"), None, "a"):
        with pytest.raises(UsageError, match=f"gave {value!r} for update 7"):
            settings.schedule_of(lambda step, value=value: value, None, None)[1](7)
