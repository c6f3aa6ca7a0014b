"""What a file asks of DeepSpeed's optimizer and scheduler is done or refused: nothing is passed over."""

import pytest

from bigtrain.config import PRESETS, RunValues, dump, generate
from bigtrain.config.undone import undone
from bigtrain.engine import settings
from bigtrain.errors import ConfigError
from bigtrain.run.arguments import TrainArguments
from bigtrain.run.job import read_ds_config


def file_with(section, kind, **params):
    params = {"lr": 1e-3, **params} if section == "optimizer" else {"warmup_num_steps": 2, "total_num_steps": 9, **params}
    if kind == "WarmupLR":
        del params["total_num_steps"]
    return {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, section: {"type": kind, "params": params}}


ASKED = [
    ("scheduler", "WarmupLR", "warmup_min_lr", 1e-4, "write 0"),
    ("scheduler", "WarmupDecayLR", "warmup_type", "log", 'write "linear"'),
    ("scheduler", "WarmupCosineLR", "warmup_min_ratio", 0.1, "write 0"),
    ("scheduler", "WarmupCosineLR", "cos_min_ratio", 0.2, '{"min_ratio": 0.2}'),
    ("optimizer", "Adam", "adam_w_mode", False, "remove it: AdamW"),
    ("optimizer", "AdamW", "bias_correction", False, "remove it"),
    ("optimizer", "Muon", "momentum", 0.9, "write 0.95"),
    ("optimizer", "Muon", "muon_lr", 0.02, "write the rate as lr"),
]


def by_engine(config):
    return settings.read(config, RunValues(), world_size=1, device="cpu")


def by_program(config):
    return read_ds_config(TrainArguments(model_name_or_path="m", train_data="d", output_dir="o", ds_config=dump(config)))


@pytest.mark.parametrize("reads", [by_engine, by_program])
@pytest.mark.parametrize(("section", "kind", "key", "value", "remedy"), ASKED)
def test_what_training_would_not_follow_is_refused(reads, section, kind, key, value, remedy):
    with pytest.raises(ConfigError) as refused:
        reads(file_with(section, kind, **{key: value}))
    assert f"{section}.params.{key}" in str(refused.value) and remedy in str(refused.value)
    reads(file_with(section, kind))


@pytest.mark.parametrize("reads", [by_engine, by_program])
@pytest.mark.parametrize(
    ("section", "written"),
    [
        ("optimizer", "adamw"),
        ("scheduler", {"type": "WarmupLR", "params": [1]}),
        ("scheduler", {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "cos_min_ratio": None}}),
        ("scheduler", {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "cos_min_ratio": "0.1"}}),
    ],
)
def test_values_of_a_wrong_kind_are_told_by_the_lint(reads, section, written):
    with pytest.raises(ConfigError, match=f"error +{section}"):
        reads({**file_with("optimizer", "AdamW"), section: written})


def test_a_section_that_does_not_count_is_not_looked_at():
    for section, config in (
        ("scheduler", file_with("scheduler", "WarmupLR", warmup_min_lr=1e-4)),
        ("optimizer", file_with("optimizer", "Adam", adam_w_mode=False)),
    ):
        assert len(list(undone(config))) == 1
        assert list(undone(config, **{section: False})) == []


def test_what_bigtrain_writes_itself_passes():
    assert [list(undone(generate(options))) for options in PRESETS.values()] == [[]] * len(PRESETS)
    same = {"warmup_min_lr": "auto", "warmup_min_ratio": 0, "warmup_type": "linear", "cos_min_ratio": 0}
    assert list(undone(file_with("scheduler", "WarmupCosineLR", **same))) == []
