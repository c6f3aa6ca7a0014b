"""Updates in chunks against the optimizer's own step on the gradient in one piece."""

import copy

import pytest
import torch

from bigtrain import optim
from bigtrain.optim import chunks

SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def both(name, grad_dtype, device, n, limit, monkeypatch):
    """(master, state) after three updates: in one piece, and in chunks of `limit` with gradients in pieces."""
    monkeypatch.setitem(chunks.CHUNK_ELEMS, device, limit)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(n, generator=generator)
    whole, cut = torch.nn.Parameter(start.to(device)), torch.nn.Parameter(start.to(device))
    one, other = (
        optim.build_optimizer(name, [{"params": [p]}], optim.Options(device=device, **SETTINGS)) for p in (whole, cut)
    )
    begin = getattr(other, "begin", None) or (lambda param, group: chunks.begin_adamw(other, param, group))
    ours = chunks.Chunks(other, begin)
    for factor in (1.0, 0.37, torch.tensor(0.61, device=device)):
        grad = torch.randn(n, generator=generator).to(device, grad_dtype)
        whole.grad = grad.to(torch.float32, copy=True).mul_(factor)
        one.step()
        ours.hand_over(cut, [grad[:1000].clone(), grad[1000:1003].clone(), grad[1003:].clone()])
        ours.grad_factor = factor
        other.step()
        assert cut.grad is None
    return (whole, one.state_dict()), (cut, other.state_dict())


def check(one, other):
    assert torch.equal(one[0], other[0])
    assert one[1]["param_groups"] == other[1]["param_groups"]
    states = one[1]["state"][0], other[1]["state"][0]
    assert states[0].keys() == states[1].keys()
    for ours, theirs in zip(*(s.values() for s in states)):
        assert type(ours) is type(theirs)
        if isinstance(ours, torch.Tensor):
            assert (ours.dtype, ours.device) == (theirs.dtype, theirs.device) and torch.equal(ours, theirs)
        else:
            assert ours == theirs == 3


@pytest.mark.parametrize("name", ["adamw", "adamw_torch", "adamw_8bit"])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [1500, 9999, 10240])
def test_the_same_bits_and_the_same_state_dict(name, grad_dtype, n, monkeypatch):
    one, other = both(name, grad_dtype, "cpu", n, 1024, monkeypatch)
    check(one, other)


def test_state_of_a_step_in_one_piece_goes_on_in_chunks_and_back(monkeypatch):
    _, (param, saved) = both("adamw", torch.bfloat16, "cpu", 5000, 1024, monkeypatch)
    plain, chunked = torch.nn.Parameter(param.detach().clone()), torch.nn.Parameter(param.detach().clone())
    grad = torch.randn(5000)
    for p in (plain, chunked):
        optimizer = optim.build_optimizer("adamw", [{"params": [p]}], optim.Options(device="cpu", **SETTINGS))
        optimizer.load_state_dict(copy.deepcopy(saved))
        p.grad = grad.clone()
        if p is chunked:
            taker = chunks.Chunks(optimizer, lambda q, group, o=optimizer: chunks.begin_adamw(o, q, group))
            taker.hand_over(p, [grad.clone()])
        optimizer.step()
        assert optimizer.state[p]["step"] == 4
    assert torch.equal(plain, chunked)


def test_a_parameter_whose_gradient_was_not_handed_over_is_an_error():
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = optim.build_optimizer("adamw", [{"params": [param]}], optim.Options(device="cpu", **SETTINGS))
    chunks.Chunks(optimizer, lambda p, group: chunks.begin_adamw(optimizer, p, group))
    with pytest.raises(KeyError):
        optimizer.step()
