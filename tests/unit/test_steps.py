"""Which targets a loss is the mean over."""

import torch
from torch import nn

from bigtrain import steps


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
