"""A resumed CPU Adam goes on bit for bit, from any step: its compiled part keeps numbers that no checkpoint holds."""

import pytest
import torch

from bigtrain import zero

UPDATES = 24


@pytest.fixture(scope="module")
def path():
    """(weights after each update, optimizer states after each update) of an unbroken run."""
    why = zero.why_no_cpu_adam()
    if why:
        pytest.skip(why)
    param, optimizer = fresh()
    weights, states = [param.detach().clone()], [{}]
    for update in range(UPDATES):
        go(param, optimizer, update)
        weights.append(param.detach().clone())
        states.append({k: v.clone() if torch.is_tensor(v) else v for k, v in optimizer.state[param].items()})
    return weights, states


def fresh():
    param = torch.nn.Parameter(torch.linspace(-1, 1, 1000))
    adam = zero.cpu_adam([{"params": [param]}], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    return param, adam


def go(param, optimizer, update):
    param.grad = torch.sin(torch.arange(1000.0) * (update + 1))
    optimizer.step()


@pytest.mark.parametrize("step", [1, 2, 3, 5, 8, 13, 21])
def test_resumed_at(path, step):
    weights, states = path
    param, optimizer = fresh()
    param.data.copy_(weights[step])
    optimizer.state[param] = {k: v.clone() if torch.is_tensor(v) else v for k, v in states[step].items()}
    zero.replay_cpu_adam(optimizer)
    for update in range(step, UPDATES):
        go(param, optimizer, update)
        assert torch.equal(param, weights[update + 1]), f"update {update + 1}"


def test_without_the_replay_a_step_differs(path):
    """Why there is one; if this fails, DeepSpeed has mended it and `replay_cpu_adam` can go."""
    weights, states = path
    param, optimizer = fresh()
    param.data.copy_(weights[5])
    optimizer.state[param] = {k: v.clone() if torch.is_tensor(v) else v for k, v in states[5].items()}
    go(param, optimizer, 5)
    assert not torch.equal(param, weights[6])


def test_other_optimizers_need_nothing():
    param = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.AdamW([param])
    param.sum().backward()
    optimizer.step()
    before, weight = {k: v.clone() for k, v in optimizer.state[param].items()}, param.detach().clone()
    zero.replay_cpu_adam(optimizer)
    zero.replay_cpu_adam(None)
    assert all(torch.equal(value, optimizer.state[param][name]) for name, value in before.items())
    assert torch.equal(param, weight)
