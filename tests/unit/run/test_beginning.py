"""What stands on the screen before the first step: two screens of tables, each of which is in a file too, are a few lines."""

import logging
from pathlib import Path

import pytest

from bigtrain import config as ds
from bigtrain.config import ModelShape, RunValues
from bigtrain.run.beginning import story
from tests import ROOT

PRESETS = sorted((ROOT / "ds_configs").glob("*.json"))


def told(config, device="cpu", **run):
    shape = ModelShape.from_config({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2})
    resolved = ds.resolve(config, run=RunValues(total_steps=10, **run), model=shape, world_size=2, device=device)
    return list(story(resolved, Path("OUT")))


def test_how_a_run_trains_is_one_line_and_what_the_machine_changed_follows():
    config = ds.load("ds_configs/zero3_offload.json")
    changed = "needs a GPU; this machine has none"
    assert told(config, learning_rate=3e-3, gradient_checkpointing=True) == [
        (logging.INFO, "ZeRO stage 3 with optimizer states offloaded, bf16, adamw, learning rate 0.003 (linear, 0 warm-up steps), gradients "
         "clipped at 1, activations recomputed; every value, with who decided it: OUT/ds_config.resolved.json"),
        (logging.INFO, f"  zero_optimization.overlap_comm is False: {changed}"),
        (logging.INFO, f"  zero_optimization.offload_optimizer.pin_memory is False: {changed}"),
    ]  # fmt: skip
    assert [text.split(";")[0] for _, text in told(config, device="cuda")] == [
        "ZeRO stage 3 with optimizer states offloaded, bf16, adamw, learning rate 5e-05 (linear, 0 warm-up steps), gradients clipped at 1"
    ]


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_config_has_its_line(path):
    assert told(ds.load(path), device="cuda")[0][1].startswith("ZeRO stage ")


def test_a_file_with_an_optimizer_and_a_schedule_of_its_own():
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}}  # fmt: skip
    assert told(config)[0][1].startswith("ZeRO stage 0, fp32, adamw, learning rate 0.0001 (")


def test_an_offload_to_nowhere_is_none():
    away = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}, "offload_param": {"device": "cpu"}}}
    assert told(away)[0][1].startswith("ZeRO stage 3 with parameters offloaded, ")


def test_warnings_are_told_in_full():
    level, text = told({"train_micro_batch_size_per_gpu": 1})[-1]
    assert level == logging.WARNING and "neither bf16 nor fp16 is on" in text
