"""What an adapter's file must hold of a model: all that was trained, or a word about the rest."""

import logging

import pytest
import torch
from safetensors.torch import load_file

from bigtrain.weights import adapters


def _model(**settings):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 2))
    return get_peft_model(layers, LoraConfig(r=1, target_modules=["0"], **settings))


def _moved(model):
    for param in model.parameters():
        if param.requires_grad:
            param.data += 1.0
    return model


@pytest.mark.parametrize(("bias", "moved"), [("none", 0), ("lora_only", 1), ("all", 3)])
def test_trained_biases_are_in_the_file(tmp_path, caplog, bias, moved):
    """They were trained and left out, without a word."""
    from peft import PeftModel

    model = _moved(_model(bias=bias))
    names = adapters.export_adapter(model, tmp_path / "adapter")
    assert names == sorted(load_file(tmp_path / "adapter" / adapters.FILE)) and len(names) == 2 + moved
    base = _model().unload()
    again = PeftModel.from_pretrained(base, tmp_path / "adapter")
    x = torch.randn(4, 3)
    assert torch.equal(again(x), model(x)) and caplog.records == []


def test_what_was_trained_and_is_of_no_adapter_is_named(tmp_path, caplog):
    model = _model()
    model.add_adapter("other", model.peft_config["default"])
    model.base_model.model[2].weight.requires_grad_(True)
    with caplog.at_level(logging.WARNING):
        adapters.export_adapter(model, tmp_path / "adapter")
    (record,) = caplog.records
    assert record.getMessage().startswith("1 trained weights are not in the adapter's file")
    assert "base_model.model.2.weight." in record.getMessage()
