"""Every value is decided once, and a contradiction is said or refused."""

import pytest

from bigtrain import settings
from bigtrain.errors import ConfigError, UsageError

NOTHING = {
    **dict.fromkeys(
        ("optimizer", "learning_rate", "betas", "eps", "weight_decay", "lr_scheduler", "warmup_steps", "total_steps")
    ),
    **dict.fromkeys(("max_grad_norm", "micro_batch", "accumulation")),
}


def settle(config, world=2, **given):
    return settings.settle(config, world_size=world, **{**NOTHING, **given})


def base(stage=2, **more):
    return {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}, **more}


def test_arguments_win_over_the_config_and_it_is_said():
    config = base(optimizer={"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.1}}, gradient_clipping=0.3)
    s = settle(config, optimizer="adamw", learning_rate=1e-3, max_grad_norm=0.7)
    assert (s.learning_rate, s.weight_decay, s.max_grad_norm) == (1e-3, 0.1, 0.7)
    text = " ".join(s.notes)
    assert "two optimizers" in text and "0.5" in text and "0.3" in text
    assert "optimizer" not in s.config and s.config["gradient_clipping"] == 0.7


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
    with pytest.raises(ConfigError, match=r"5 .*micro batch 2 x accumulation 1 x ranks 2"):
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
    given = base(optimizer={"type": "AdamW"})
    assert settings.read(given) == given and settings.read(given) is not given


def test_lr_scheduler_kwargs_reach_the_schedule_and_unknown_ones_are_named():
    settled = settle(base(), lr_scheduler="cosine", total_steps=10, lr_scheduler_kwargs={"min_ratio": 0.25})
    assert settled.schedule()(10) == 0.25
    with pytest.raises(UsageError, match="'min_lr' is unknown; it takes min_ratio, decay_steps, decay"):
        settle(base(), lr_scheduler="cosine", total_steps=10, lr_scheduler_kwargs={"min_lr": 0.25}).schedule()
