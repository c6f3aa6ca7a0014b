"""Renaming rules of transformers are left out only where there are none."""

import pytest
import torch
import transformers
from transformers import conversion_mapping

from bigtrain.weights import mapping

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


@pytest.fixture(autouse=True)
def no_table(monkeypatch):
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)


def built(config):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    state = dict(model.state_dict())
    return model, state, {name: tuple(value.shape) for name, value in state.items()}


def table_made():
    return conversion_mapping._checkpoint_conversion_mapping_cache is not None


def test_every_name_with_rules_is_seen_without_the_table():
    table = conversion_mapping._build_checkpoint_conversion_mapping()
    assert set(table) - {"legacy"} <= mapping.names_in_table()
    assert len(table) > 100


def test_a_file_named_like_the_model_needs_no_table_and_gets_the_same_parts():
    model, state, shapes = built(transformers.LlamaConfig(num_key_value_heads=2, **TINY))
    quick = mapping.file_to_model(model, state, shapes)
    used = model._weight_conversions
    assert not table_made()
    conversion_mapping.get_checkpoint_conversion_mapping("legacy")  # makes the table
    full = mapping.file_to_model(model, state, shapes)
    assert used == model._weight_conversions == []
    assert quick.unexpected == full.unexpected == {}
    assert {n: (p.name, p.shape, p.sources, p.runs.runs) for n, p in quick.parts.items()} == {
        n: (p.name, p.shape, p.sources, p.runs.runs) for n, p in full.parts.items()
    }


def test_a_tied_head_that_the_file_lacks_needs_no_table():
    model, state, shapes = built(transformers.LlamaConfig(num_key_value_heads=2, tie_word_embeddings=True, **TINY))
    del shapes["lm_head.weight"]
    assert set(mapping.file_to_model(model, state, shapes).parts) == set(shapes)
    assert not table_made()


@pytest.mark.parametrize("change", ["other name", "missing", "model with rules", "other version"])
def test_otherwise_the_rules_are_asked(change, monkeypatch):
    config = transformers.LlamaConfig(num_key_value_heads=2, **TINY)
    if change == "model with rules":
        config = transformers.Qwen2MoeConfig(num_key_value_heads=2, num_experts=2, moe_intermediate_size=8, **TINY)
    model, state, shapes = built(config)
    if change == "other name":
        shapes = {name.removeprefix("model."): shape for name, shape in shapes.items()}
    elif change == "missing":
        del shapes["model.norm.weight"]
    elif change == "other version":
        monkeypatch.setattr(mapping, "_READABLE_TABLE", ("5.23.",))
    assert set(mapping.file_to_model(model, state, shapes).parts) == set(state) - (
        {"model.norm.weight"} if change == "missing" else set()
    )
    assert table_made()
