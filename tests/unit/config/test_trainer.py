"""The shipped files in the Hugging Face Trainer's own machinery: accepted, and nothing left "auto"."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bigtrain.config import PRESETS, ModelShape, RunValues, load, resolve
from tests import ROOT

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def leaves(node):
    for value in node.values() if isinstance(node, dict) else ():
        yield from leaves(value) if isinstance(value, dict) else (value,)


def trainer_fills(path: str, **changed):
    """What HfTrainerDeepSpeedConfig makes of a file, with the arguments it reads."""
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    values = dict(
        world_size=2, per_device_train_batch_size=3, gradient_accumulation_steps=4, max_grad_norm=0.7,
        learning_rate=2e-4, adam_beta1=0.9, adam_beta2=0.98, adam_epsilon=1e-7, weight_decay=0.05,
        save_on_each_node=False, fp16=False, fp16_full_eval=False, bf16=True, bf16_full_eval=False,
        get_warmup_steps=lambda n: 10,
    )  # fmt: skip
    args = SimpleNamespace(**{**values, **changed})
    config = HfTrainerDeepSpeedConfig(path)
    config.trainer_config_process(args)
    config.trainer_config_finalize(args, SimpleNamespace(config=SimpleNamespace(hidden_size=256)), 100)
    return config.config


@pytest.mark.parametrize("name", PRESETS)
def test_preset_in_the_trainer(name):
    theirs = trainer_fills(str(ROOT / "ds_configs" / f"{name}.json"))
    assert "auto" not in list(leaves(theirs))
    assert theirs["train_batch_size"] == 24 and theirs["optimizer"]["params"]["lr"] == 2e-4


@pytest.mark.parametrize("name", PRESETS)
def test_resolving_gives_what_the_trainer_gives(name):
    run = RunValues(micro_batch=3, accumulation=4, max_grad_norm=0.7, learning_rate=2e-4, adam_beta1=0.9,
                    adam_beta2=0.98, adam_epsilon=1e-7, weight_decay=0.05, bf16=True)  # fmt: skip
    ours = resolve(load(name), run=run, model=ModelShape(hidden_size=256), world_size=2).config
    theirs = trainer_fills(str(ROOT / "ds_configs" / f"{name}.json"))
    # zero2_offload leaves the accumulation dtype to the run (ds_configs/README.md); DeepSpeed's throughput timer is switched off.
    assert {**theirs, "data_types": ours["data_types"], "timers": {"throughput": {"enabled": False}}} == ours


def test_the_trainer_must_be_told_bf16():
    with pytest.raises(ValueError, match="bf16"):
        trainer_fills(str(ROOT / "ds_configs/zero2.json"), bf16=False)


def test_a_real_config_object():
    from transformers import LlamaConfig

    shape = ModelShape.from_config(LlamaConfig(hidden_size=96, vocab_size=500))
    assert (shape.hidden_size, shape.model_type) == (96, "llama")
