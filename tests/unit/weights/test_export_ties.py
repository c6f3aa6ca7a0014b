"""A checkpoint whose two weights became different is not exported as a model that has them as one; model folders that are broken."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from bigtrain.checkpoint.export import StoredWeights
from bigtrain.errors import BigtrainError, WeightsError
from bigtrain.models import build_model
from bigtrain.weights.deepspeed_export import export_weights
from bigtrain.weights.slots import Piece

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("same", [True, False])
def test_a_head_of_its_own_is_not_dropped(tmp_path, same):
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, tie_word_embeddings=True, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path / "model")
    config.tie_word_embeddings = False
    held = {name: tensor.detach().float() for name, tensor in build_model(config).state_dict().items()}
    held[HEAD] = held[EMBED].clone() if same else held[EMBED] + 1
    source = StoredWeights("checkpoint", {name: tuple(tensor.shape) for name, tensor in held.items()})
    source.pieces = {name: [Piece(0, tensor.reshape(-1))] for name, tensor in held.items()}
    how = {"dtype": torch.float32, "model_dir": tmp_path / "model", "max_shard_bytes": 10**9}
    if same:
        export_weights(source, tmp_path / "out", **how)
        assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[EMBED], held[EMBED])
        return
    with pytest.raises(WeightsError, match="tied in the model but differ in the checkpoint"):
        export_weights(source, tmp_path / "out", **how)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("config.json", json.dumps({"model_type": "llama", "dtype": "float8"}), "config of .* cannot be read: .*float8"),
        (
            "config.json",
            json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": -1}),
            "no LlamaForCausalLM can be built",
        ),
        (
            "config.json",
            json.dumps({"model_type": "llama", "architectures": [7], "pad_token_id": 10**6}),
            "no 7 can be built .*Padding_idx",
        ),
        ("generation_config.json", "[]", "not usable: .*list"),
    ],
)
def test_a_broken_model_folder_is_told_before_anything_is_written(tmp_path, name, text, says):
    LlamaConfig().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / name).write_text(text)
    with pytest.raises(BigtrainError, match=says):
        export_weights(
            StoredWeights("checkpoint"), tmp_path / "out", dtype="bfloat16", model_dir=tmp_path / "model", max_shard_bytes=10**9
        )
    assert not (tmp_path / "out").exists()
