"""Muon on whole matrices."""

import pytest
import torch

from bigtrain import optim
from bigtrain.engine.master import MasterOptimizer
from bigtrain.errors import UsageError
from bigtrain.optim.orthogonal import orthogonalise


@pytest.mark.parametrize("shape", [(16, 16), (40, 12), (12, 40), (1, 7)])
def test_singular_vectors_stay_and_values_go_to_one(shape):
    u, s, vh = torch.linalg.svd(torch.randn(shape, generator=torch.Generator().manual_seed(0)), full_matrices=False)
    s = torch.linspace(1.0, 0.05, s.numel())
    got = u.mT @ orthogonalise(u @ torch.diag(s) @ vh) @ vh.mT
    values = got.diagonal()
    # 0.68 .. 1.14 is the band of the five iterations for inputs above 0.05 / norm
    assert values.min() > 0.6 and values.max() < 1.3
    assert (got - torch.diag(values)).abs().max() < 1e-4  # fp32 rounding over 5 iterations


def test_matrices_take_muon_and_the_rest_adamw():
    model = torch.nn.Sequential(torch.nn.Embedding(5, 8), torch.nn.Linear(8, 12), torch.nn.LayerNorm(12))
    optimizer = optim.build_optimizer("muon", optim.param_groups(model, 0.1), optim.Options(lr=1e-2, device="cpu"))
    assert [(g["matrices"], g["weight_decay"], g["names"]) for g in optimizer.param_groups] == [
        (True, 0.1, ["1.weight"]),
        (False, 0.1, ["0.weight"]),
        (False, 0.0, ["1.bias", "2.weight", "2.bias"]),
    ]
    before = model[1].weight.detach().clone()
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    moved = (model[1].weight.detach() - before * (1 - 1e-3)) / 1e-2
    assert 0.1 < moved.square().mean().sqrt() < 0.25  # AdamW's size, 0.2, times sqrt(5 / 8): five rows give rank 5 of 8
    assert set(optimizer.state[model[1].weight]) == {"momentum_buffer"}
    assert set(optimizer.state[model[0].weight]) == {"step", "exp_avg", "exp_avg_sq"}


def test_a_flat_partition_without_layout_is_refused():
    param = torch.nn.Parameter(torch.zeros(12))
    param.is_hidden_matrix = True
    optimizer = optim.build_optimizer("muon", [{"params": [param]}], optim.Options(lr=1e-2, device="cpu"))
    param.grad = torch.ones(12)
    with pytest.raises(UsageError, match="after_initialize"):
        optimizer.step()


def test_fp32_masters_of_stage_0_are_still_known_as_matrices():
    model = torch.nn.Sequential(torch.nn.Embedding(5, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 5)).bfloat16()

    def build(groups):
        return optim.build_optimizer("muon", groups, optim.Options(lr=0.1))

    wrapped = MasterOptimizer(optim.param_groups(model, 0.0), build, max_norm=0.0)
    model(torch.tensor([1, 2])).float().square().mean().backward()
    wrapped.step()
    kinds = {tuple(p.shape): set(state) for p, state in wrapped.state.items()}
    assert kinds[8, 8] == {"momentum_buffer"} and "exp_avg" in kinds[5, 8]
