"""The window in one process: what is parked reads as NaN if anything slips through, so equality is proof."""

import copy
import gc

import pytest
import torch
from torch import nn

from bigtrain.models.seeding import seeded
from bigtrain.models.window import Window, _own_slice


def _built(limit, construct, draw=True):
    torch.manual_seed(0)
    window = Window(limit_bytes=limit, draw=draw)
    with window:
        module = construct()
        whole = {n: p.detach().clone() for n, p in module.named_parameters()} if draw else {}
    return window, module, whole


def _shared_views():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    view = net[0].weight.data  # kept while others push the parameter out
    net.append(nn.Linear(4, 4))
    view.fill_(3.0)
    net.append(nn.Linear(4, 4))
    return net


def _numpy_and_copies():
    net = nn.ModuleList([nn.Linear(3, 2)])
    net.append(copy.deepcopy(net[0]))
    array = net[1].weight.detach().numpy()
    array[:] = 2.0
    net.append(nn.Linear(3, 2))
    net[2].weight = nn.Parameter(net[0].weight)
    net[2].bias.data = net[1].bias.data.clone()
    net[0].weight.data.mul_(2)
    return net


def _half_and_back():
    net = nn.Linear(3, 3)
    return net.half().float()


@pytest.mark.parametrize("construct", [_shared_views, _numpy_and_copies, _half_and_back])
def test_values_are_those_of_a_plain_build(construct):
    torch.manual_seed(0)
    plain = {n: p.detach().clone() for n, p in construct().named_parameters()}
    for limit in (0, 40, 10**9):
        _, _, whole = _built(limit, construct)
        assert whole.keys() == plain.keys() and all(torch.equal(whole[n], plain[n]) for n in plain)


def test_metadata_of_a_parked_parameter_is_right_and_gathers_nothing():
    window, module, _ = _built(0, lambda: nn.Sequential(nn.Linear(5, 3, bias=False), nn.Linear(2, 2, bias=False)), draw=False)
    p = module[0].weight
    with window:
        assert p.shape == (3, 5) and p.numel() == 15 and p.dim() == 2 and p.dtype == torch.float32 and len(p) == 3
        p.requires_grad_(False)
        p.requires_grad = True
    assert p.untyped_storage().nbytes() == 4 and p.isnan().all()


def test_a_skeleton_draws_nothing():
    state = torch.get_rng_state()
    _, module, _ = _built(10**9, lambda: nn.TransformerEncoderLayer(8, 2, 16), draw=False)
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), torch.manual_seed(0).get_state()) and state is not None
    assert all(p.untyped_storage().nbytes() == 4 for p in module.parameters())


def test_discarded_parameters_are_let_go():
    window, module, _ = _built(0, lambda: nn.ModuleList([nn.Linear(50, 50)])[:0])
    gc.collect()
    assert all(ref() is None for ref in window._watched) and list(module.parameters()) == []


def test_what_is_hidden_from_the_model_is_whole_again_afterwards():
    teacher = []

    def construct():
        teacher.append(nn.Linear(3, 3))
        nn.init.ones_(teacher[0].weight)
        return nn.Linear(2, 2)

    window, module, _ = _built(0, construct)
    for p in module.parameters():
        window.close(p)
    assert window.restore_others() == 2 and torch.equal(teacher[0].weight, torch.ones(3, 3))


def test_an_error_inside_leaves_no_trace():
    before = (nn.Parameter.__dict__["__new__"], nn.Parameter.__dict__["__deepcopy__"])
    with pytest.raises(KeyError), Window():
        raise KeyError
    assert (nn.Parameter.__dict__["__new__"], nn.Parameter.__dict__["__deepcopy__"]) == before
    assert torch.overrides._get_current_function_mode_stack() == [] and not Window.active


def test_random_state_comes_back_and_depends_on_the_seed_alone():
    import random

    import numpy

    states = (torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist())
    draws = []
    for seed in (1, 1, 2):
        with seeded(seed):
            draws.append((torch.rand(1).item(), random.random(), numpy.random.rand()))
    assert draws[0] == draws[1] != draws[2]
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert states[2] == numpy.random.get_state()[1].tolist()


@pytest.mark.parametrize("numel", [0, 1, 2, 5, 6, 7])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_slices_join_to_the_whole_and_padding_is_zero(numel, world):
    data = torch.arange(1.0, numel + 1)
    slices = [_own_slice(data, r, world, data.device) for r in range(world)]
    joined = torch.cat(slices)
    assert len({s.numel() for s in slices}) == 1 and torch.equal(joined[:numel], data) and not joined[numel:].any()


@pytest.mark.parametrize("draw", [True, False])
def test_a_parameter_without_dimensions(draw):
    """CLIP's logit_scale."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.5))
            self.other = nn.Linear(4, 4)

    window, module, _ = _built(0, Scale, draw=draw)
    assert module.scale.shape == () and "_bigtrain_parked" in module.scale.__dict__
    parked = window.close(module.scale)
    assert parked.shape == () and (parked.shard.tolist() == [2.5] if draw else parked.shard is None)
