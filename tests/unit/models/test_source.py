"""What a source is, and how a wrong one is refused."""

import dataclasses
import functools
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from bigtrain.errors import ModelError, WeightsError
from bigtrain.models import build_model
from bigtrain.models.source import resolve

LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 31,
}  # fmt: skip


def _llama_config():
    from transformers import AutoConfig

    return AutoConfig.for_model(**LLAMA)


def test_a_folder_with_only_a_config_a_dict_and_a_config_object_build_the_same(tmp_path, caplog):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    models = [build_model(s, seed=4) for s in (tmp_path, str(tmp_path), dict(LLAMA), _llama_config())]
    assert caplog.text.count("holds no weight files") == 2  # of the two that name the folder
    first = models[0].state_dict()
    assert all(torch.equal(first[k], v) for m in models[1:] for k, v in m.state_dict().items())
    assert models[0].config.dtype == torch.bfloat16 and models[0].bigtrain_info.stage == 0


def test_the_text_part_of_a_config_of_several_is_built_as_auto_classes_do():
    from transformers import AutoConfig, AutoModelForCausalLM

    text = {k: v for k, v in LLAMA.items() if k != "model_type"} | {"layer_types": ["full_attention"], "head_dim": 8}
    config = AutoConfig.for_model("qwen3_5", text_config=text)
    expected = AutoModelForCausalLM.from_config(config)
    model = build_model(config)
    assert type(model) is type(expected) and type(model.config) is type(expected.config)
    assert [(n, p.shape) for n, p in model.named_parameters()] == [(n, p.shape) for n, p in expected.named_parameters()]


def test_a_config_that_its_class_cannot_compute_with_is_told():
    with pytest.raises(
        ModelError, match=r"NemotronForCausalLM cannot be built from this config: .*NoneType.*; at .*modeling_nemotron"
    ):
        build_model({**LLAMA, "model_type": "nemotron", "num_key_value_heads": None})
    with pytest.raises(ModelError, match=r"LlamaForCausalLM cannot be built from this config: Padding_idx must be within"):
        build_model({**LLAMA, "pad_token_id": 10**6})
    with pytest.raises(ModelError, match=r"LlamaForCausalLM cannot be built from this config: .*negative dimension -1"):
        build_model({**LLAMA, "vocab_size": -1, "pad_token_id": None})


@pytest.mark.parametrize(("key", "value"), [("dtype", "float8"), ("quantization_config", "x")])
def test_a_value_of_config_json_that_the_library_stumbles_over_is_told(tmp_path, key, value):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, key: value}))
    with pytest.raises(ModelError, match=r"config of .* cannot be used"):
        build_model(tmp_path)


@pytest.mark.parametrize(
    "named", [["BertModel"], ["AutoModel"], ["pipeline"], ["LlamaConfig"], "LlamaForCausalLM", ["Qwen2Model"]]
)
def test_architectures_that_are_no_class_for_the_model_type_are_passed_over_as_auto_classes_do(named):
    model = build_model({**LLAMA, "architectures": named})
    assert type(model).__name__ == "LlamaForCausalLM"


def test_architectures_that_are_no_names_are_refused():
    with pytest.raises(ModelError, match=r"architectures = \[7\]: names of classes are needed, or leave it out"):
        build_model({**LLAMA, "architectures": [7]})


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"cache_implementation": "nope"}', None])
def test_a_broken_generation_config_is_told_before_weights_are_read(tmp_path, text):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    file = tmp_path / "generation_config.json"
    file.symlink_to("nowhere") if text is None else file.write_text(text)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(WeightsError, match=r"generation_config\.json is .*(empty|not usable|does not exist)"):
        resolve(tmp_path)


def test_attention_that_there_is_not_is_refused():
    with pytest.raises(ModelError, match=r'LlamaForCausalLM cannot be built .*attn_implementation="nope"'):
        build_model(dict(LLAMA), attn_implementation="nope")
    if importlib.util.find_spec("flash_attn") is None:
        with pytest.raises(ModelError, match="Install it, or leave attn_implementation flash_attention_2 out"):
            build_model(dict(LLAMA), attn_implementation="flash_attention_2")


def test_a_preset_builds():
    model = build_model("preset:llama-tiny", num_hidden_layers=1)
    assert len(model.model.layers) == 1 and model.bigtrain_info.source == "preset:llama-tiny"
    assert model.bigtrain_info.tied == (("model.embed_tokens.weight", "lm_head.weight"),)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}])
def test_values_that_wait_on_the_host_in_fp32_are_those_of_a_plain_build(monkeypatch, changes):
    """One rank below stage 3 whose optimizer is on the host: a card that holds bf16 weights need not hold fp32 ones."""
    from bigtrain.models import build

    target, seen = build._target, []

    def on_host(*args):
        seen.append(dataclasses.replace(target(*args), shard_device=torch.device("cpu")))
        return seen[-1]

    plain = build_model(LLAMA, seed=4, **changes)
    monkeypatch.setattr(build, "_target", on_host)
    monkeypatch.setattr(build, "Window", functools.partial(build.Window, limit_bytes=1000))
    parked = build_model(LLAMA, seed=4, **changes)
    assert seen and parked.bigtrain_info.tied == plain.bigtrain_info.tied
    pairs = zip(plain.state_dict().items(), parked.state_dict().items(), strict=True)
    assert all(a == b and torch.equal(x, y) and x.dtype == y.dtype for (a, x), (b, y) in pairs)
    assert all(not p.__dict__.get("_bigtrain_key") for p in parked.parameters())


def test_the_callers_config_object_is_not_changed():
    config = _llama_config()
    before = config.to_dict()
    model = build_model(config, num_hidden_layers=2)
    assert config.to_dict() == before and len(model.model.layers) == 2


def test_nested_settings_of_a_composite_config():
    source = resolve(
        {
            "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": LLAMA,
            "vision_config": {"model_type": "clip_vision_model", "num_hidden_layers": 2},
        },
        overrides={"text_config": {"num_hidden_layers": 3}},
    )  # fmt: skip
    assert source.config.text_config.num_hidden_layers == 3


@pytest.mark.parametrize(
    ("source", "more", "says"),
    [
        ("/nowhere/at/all", {}, "there is no folder"),
        (Path("nowhere"), {}, "there is no folder"),
        ({"model_type": "lama"}, {}, "knows no model_type 'lama'"),
        (LLAMA, {"hiden_size": 3}, "nearest: hidden_size"),
        (LLAMA, {"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}}, r"'foo' is none of the values .*rope_type"),
        (torch.nn.Linear(2, 2), {}, "Pass a callable"),
        (lambda: 3, {}, "returned a int, not an nn.Module"),
        (5, {}, "cannot build a model from a int"),
        (LLAMA, {"init_device": "meta"}, "draws no values"),
        (LLAMA, {"ds_config": {"zero_optimization": {"stage": "auto"}}}, "stage is 'auto'"),
        (LLAMA, {"freeze": ("model.embed_token",)}, "model.embed_tokens"),
        (LLAMA, {"freeze": ("model", "lm_head")}, "leaves no parameter to train"),
        (torch.nn.Identity, {"resize_vocab_to": 9}, "has no resize_token_embeddings"),
    ],
)
def test_bad_sources_are_refused_with_a_remedy(source, more, says):
    with pytest.raises(ModelError, match=says):
        build_model(source, **more)


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        build_model(tmp_path)


def test_a_folder_with_its_own_code_is_not_run(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}})
    )
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelError, match="trust_remote_code=True"):
        build_model(tmp_path)
    assert not (tmp_path / "ran").exists()
