"""What launch/random_weights.py writes is a checkpoint that everybody can read."""

import pytest
import random_weights
import torch
from bench_load_cards import config_of
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize("shards", [1, 3])
def test_the_written_checkpoint_is_a_whole_model(tmp_path, shards, monkeypatch):
    monkeypatch.setattr(random_weights, "BLOCK_BYTES", 1 << 20)  # tensors longer than the block, and shorter
    total = random_weights.write(config_of("preset:llama-tiny"), tmp_path, shards)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    values = list(model.parameters())
    assert sum(p.nbytes for p in values) == total and len(list(tmp_path.glob("*.safetensors"))) == shards
    assert all(0.01 < float(p.detach().float().std()) < 0.03 for p in values if p.numel() > 1000)
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight)
