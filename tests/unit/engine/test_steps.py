"""Which targets a loss is the mean over."""

import pytest
import torch
import transformers
from torch import nn

from bigtrain.engine import steps
from bigtrain.errors import DataError, ModelError


class Says(nn.Module):
    def __init__(self, loss_type, **config):
        super().__init__()
        self.loss_type, self.config = loss_type, type("Config", (), config)()


LABELS = torch.tensor([[3, -100, 5], [-100, 1, 255]])


def test_only_causal_models_leave_out_the_first_label_of_a_row():
    counts = {name: steps.target_counter(Says(name))({"labels": LABELS}) for name in (None, "ForCausalLM", "ForMaskedLM")}
    assert counts == {None: 3, "ForCausalLM": 3, "ForMaskedLM": 4}
    assert steps.target_counter(Says("ForTokenClassification"))({"labels": LABELS}) == 4
    assert steps.target_counter(Says("ForCausalLM", is_encoder_decoder=True))({"labels": LABELS}) == 4


def test_segmentation_has_an_index_of_its_own_for_what_is_ignored():
    model = Says("ForSemanticSegmentation", semantic_loss_ignore_index=255)
    assert steps.target_counter(model)({"labels": LABELS}) == 5


def test_a_sample_labelled_minus_100_is_no_target_either():
    """torch's cross entropy leaves it out of the mean that a classifier's loss is."""
    count = steps.target_counter(Says("ForSequenceClassification"))
    assert count({"input_ids": torch.zeros(4, 9), "labels": torch.tensor([2, -100, 0, -100])}) == 2
    assert count({"input_ids": torch.zeros(4, 9), "labels": torch.tensor([0.5, -100.0, 1.0, 2.0])}) == 4
    nothing = {"labels": torch.tensor([-100, -100])}
    assert count(nothing) == 0 and count(steps.without_targets(nothing)) == 1


@pytest.mark.parametrize("batches", [{"x": torch.ones(1)}, [[torch.ones(1)]]])
def test_what_is_no_list_of_mappings_is_told(batches):
    with pytest.raises(DataError, match=r"\[batch\]|got list"):
        [steps.counted(batch, steps.samples) for batch in steps.listed(batches)]


SIZES = {
    "d_model": 8,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 8,
    "vocab_size": 16,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    "head",
    [
        transformers.BartForCausalLM,
        transformers.BigBirdPegasusForCausalLM,
        transformers.MarianForCausalLM,
        transformers.MvpForCausalLM,
        transformers.GPT2LMHeadModel,
    ],
)
def test_heads_that_compare_each_position_with_its_own_label_are_counted_so(head):
    """A label at the first position alone: a model that shifts has no target then, and its mean is 0/0."""
    shifts = head is transformers.GPT2LMHeadModel
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16} if shifts else SIZES
    model = head(head.config_class(bos_token_id=1, eos_token_id=2, **sizes))
    batch = {"input_ids": torch.full((2, 4), 5), "labels": torch.tensor([[5, -100, -100, -100]] * 2)}
    terms = steps.target_counter(model)(batch)
    assert terms == (0 if shifts else 2) and bool(model(**batch).loss.isnan()) == shifts
    assert steps.target_counter(torch.nn.Sequential(model))(batch) == terms
    if shifts:
        assert steps.shifting(model) is model
    else:
        with pytest.raises(ModelError, match=f"{head.__name__} does not shift labels"):
            steps.shifting(model)
