"""Which parameters decay."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from bigtrain.errors import ModelError
from bigtrain.optim import param_groups
from tests.ranks import families


def _llama(tied=True):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(7, 4)
        self.conv = torch.nn.Conv2d(1, 3, 3)
        self.batch = torch.nn.BatchNorm2d(3)
        self.wide_norm = torch.nn.LayerNorm([3, 4])
        self.map = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 7)
        self.gate = torch.nn.Parameter(torch.zeros(4))
        self.scalar = torch.nn.Parameter(torch.zeros(()))


def test_biases_norms_and_vectors_do_not_decay_in_model_order():
    model = Odd()
    decay, plain = param_groups(model, 0.1)
    assert (decay["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert decay["names"] == ["table.weight", "conv.weight", "map.weight", "head.weight"]
    assert plain["names"] == [
        "gate", "scalar", "conv.bias", "batch.weight", "batch.bias", "wide_norm.weight", "wide_norm.bias",
        "map.bias", "head.bias",
    ]  # fmt: skip
    assert [n for n, p in model.named_parameters() if p.is_hidden_matrix] == ["map.weight"]


@pytest.mark.parametrize("tied", [True, False])
def test_the_rule_is_the_trainers(tied, tmp_path):
    model = _llama(tied)
    theirs = Trainer(model, TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)).get_decay_parameter_names(
        model
    )
    decay, _ = param_groups(model, 0.1)
    listed = {n for n, _ in model.named_parameters()}
    assert set(decay["names"]) == set(theirs) & listed


@pytest.mark.parametrize("family", ["gpt_oss", "t5"])
def test_biases_of_two_dimensions_do_not_decay_as_in_the_trainer(family):
    model = families.make(family)
    theirs = Trainer.get_decay_parameter_names(None, model)
    decay, _ = param_groups(model, 0.1)
    matrices = {n for n, p in model.named_parameters() if p.dim() > 1}
    assert set(decay["names"]) == set(theirs) & matrices
    biases = [p for n, p in model.named_parameters() if "bias" in n and n in matrices]
    assert biases and not any(p.is_hidden_matrix for p in biases)  # nor is there anything for Muon to orthogonalise


def test_an_embedding_named_for_its_norm_decays():
    class NormedEmbedding(torch.nn.Embedding):
        pass

    (group,) = param_groups(torch.nn.Sequential(NormedEmbedding(5, 3)), 0.1)
    assert group["weight_decay"] == 0.1


def test_frozen_parameters_are_left_out_and_tied_ones_listed_once():
    model = _llama()
    model.model.layers[0].requires_grad_(False)
    names = [n for group in param_groups(model, 0.1) for n in group["names"]]
    assert not [n for n in names if ".layers.0." in n]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert model.model.embed_tokens.weight.is_hidden_matrix is False


def test_everything_frozen_is_refused():
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ModelError, match="no parameter"):
        param_groups(model, 0.1)
