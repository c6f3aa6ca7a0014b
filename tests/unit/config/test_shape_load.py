"""Model shapes from Hugging Face configs, and reading files."""

from __future__ import annotations

import json

import pytest

from bigtrain.config import ModelShape, load
from bigtrain.errors import ConfigError, UsageError


@pytest.mark.parametrize(
    ("config", "hidden"),
    [
        ({"hidden_size": 4096, "text_config": {"hidden_size": 8}}, 4096),
        ({"hidden_sizes": [64, 256, 128]}, 256),
        ({"text_config": {"hidden_size": 2048}, "vision_config": {"hidden_size": 9999}}, 2048),
        ({"text_config": {"hidden_sizes": [1, 5, 3]}}, 5),
        ({"thinker_config": {"text_config": {"hidden_size": 3584}}}, 3584),
        ({"d_model": 512}, None),
        ({"hidden_size": None}, None),
        ({"hidden_sizes": []}, None),
        ({}, None),
    ],
)
def test_hidden_size(config, hidden):
    assert ModelShape.from_config(config).hidden_size == hidden


def test_largest_parameter():
    shape = ModelShape.from_config({"hidden_size": 64, "vocab_size": 1000, "intermediate_size": 128})
    assert shape.largest_parameter_elems == 64_000


def test_from_a_folder_a_file_and_an_object(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 32, "model_type": "llama"}))
    for source in (str(tmp_path), tmp_path, tmp_path / "config.json"):
        assert ModelShape.from_config(source) == ModelShape(hidden_size=32, model_type="llama")

    class Config:
        def to_dict(self):
            return {"hidden_size": 32, "model_type": "llama"}

    assert ModelShape.from_config(Config()).hidden_size == 32


def test_no_config_there(tmp_path):
    with pytest.raises(UsageError, match=r"no config\.json there"):
        ModelShape.from_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    for odd in ({"text_config": [1, 2]}, {"hidden_size": "big"}, {"hidden_sizes": [64, "x"]}):
        with pytest.raises(UsageError, match="model config"):  # these ended in a TypeError, or were passed over
            ModelShape.from_config(odd)
    with pytest.raises(UsageError, match="not JSON"):
        ModelShape.from_config(tmp_path)


def test_hjson_and_byte_order(tmp_path):
    file = tmp_path / "c.json"
    file.write_text('{\n  # a comment\n  "gradient_clipping": 1.0,\n  "train_batch_size": 4,\n}\n')
    assert load(file) == {"gradient_clipping": 1.0, "train_batch_size": 4}


def test_duplicate_keys_are_refused(tmp_path):
    file = tmp_path / "c.json"
    file.write_text('{"a": 1, "zero_optimization": {"stage": 2, "overlap_comm": true, "stage": 3}}')
    with pytest.raises(ConfigError, match=r'"stage" stands twice .*2, 3; beside overlap_comm'):
        load(file)


LONG = b'{"a": ' + b"9" * 5000 + b"}"  # more digits than Python makes a number of


@pytest.mark.parametrize("text", [b'{"a": [1, 2}', b'{"a": ', b"[1, 2]", b" \n", b'{"a": "caf\xe9"}', b'{"a": 1e999}', LONG])
def test_unreadable_files_are_named(tmp_path, text):
    file = tmp_path / "broken.json"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=r"broken\.json"):
        load(file)


def test_presets_by_name_and_near_misses():
    assert load("zero3_offload") == load("ds_configs/zero3_offload.json")
    with pytest.raises(ConfigError, match="Did you mean zero3_offload"):
        load("zero3_ofload")
    with pytest.raises(ConfigError, match="no such file"):
        load("nowhere/at/all.json")


def test_a_mapping_is_copied():
    config = {"bf16": {"enabled": True}}
    copied = load(config)
    copied["bf16"]["enabled"] = False
    assert config["bf16"]["enabled"] is True
