"""A weight that the model ties and the file holds twice: what is read of it, and how it is compared."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from bigtrain.errors import WeightsError
from bigtrain.weights import load, load_into
from bigtrain.weights.mapping import Conversion


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 6)
        self.head = torch.nn.Linear(6, 50, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def folder(tmp_path):
    """Makes a folder of `embed.weight` and of a `head.weight` that differs from it in the flat elements `changed`."""

    def make(*changed):
        embed = torch.arange(300, dtype=torch.float32).view(50, 6)
        head = embed.clone()
        head.view(-1)[list(changed)] += 1
        save_file({"embed.weight": embed, "head.weight": head}, tmp_path / "model.safetensors")
        return tmp_path

    return make


def test_each_byte_of_a_tied_weight_is_read_once_and_every_stretch_compared(folder, monkeypatch):
    model = Tied()
    report = load_into(model, folder(), progress=False)
    assert report.bytes_read == 2 * 300 * 4
    assert torch.equal(model.embed.weight, torch.arange(300.0).view(50, 6)) and model.head.weight is model.embed.weight
    monkeypatch.setattr(load, "_COMPARED_ELEMS", 7)
    assert load_into(model, folder(), progress=False).bytes_read == 2 * 300 * 4
    for changed in (0, 6, 7, 150, 299):
        with pytest.raises(WeightsError, match=r"head.weight and embed.weight are tied in the model but differ"):
            load_into(model, folder(changed), progress=False)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_tied_weight_that_only_a_conversion_makes_is_compared_with_what_it_makes(folder, monkeypatch, shift):
    plan_load = load.plan_load

    def shuffled(*args):
        plan = plan_load(*args)
        (_, twin), *_ = plan.twins
        twin.runs, twin.made = None, "head.weight"
        twin.conversion = Conversion({}, lambda tensors: {"head.weight": tensors["head.weight"].roll(shift)})
        return plan

    monkeypatch.setattr(load, "plan_load", shuffled)
    if not shift:
        assert load_into(Tied(), folder(), progress=False).bytes_read == 2 * 300 * 4
        return
    with pytest.raises(WeightsError, match="differ"):
        load_into(Tied(), folder(), progress=False)
