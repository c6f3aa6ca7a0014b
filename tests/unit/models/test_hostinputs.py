"""Inputs of blocks on the host: the pieces in which they lie there."""

import weakref

import pytest
import torch

from bigtrain.models.hostinputs import HostInputs, parts_of
from bigtrain.plan.pinned import pieces


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("shape", [(1, 3), (2, 100, 129), (1, 300, 1001), (0, 8)])
def test_the_parts_are_the_tensor(shape, dtype):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    parts = parts_of(tensor)
    assert [part.nbytes for part in parts] == pieces(tensor.nbytes)
    for part in parts:
        part += 1  # views: what is written into them is in the tensor
    assert torch.equal(torch.cat([*parts, tensor.new_empty(0)]), tensor.flatten())


def test_parts_of_what_does_not_lie_in_one_row_are_its_values():
    tensor = torch.arange(200_000.0).reshape(400, 500).t().requires_grad_()
    parts = parts_of(tensor)
    assert torch.equal(torch.cat(parts), tensor.flatten()) and not parts[0].requires_grad


class _Sent:
    """Stands for what a GPU's input becomes, where there is no GPU: a copy elsewhere."""

    def __init__(self, tensor: torch.Tensor):
        self.values = tensor.detach().clone()

    def take(self) -> torch.Tensor:
        return self.values


def test_an_input_that_was_sent_away_is_held_by_nobody(monkeypatch):
    """Autograd keeps the hooks of what it saves, and all that they name: the inputs of all blocks stayed where they were."""
    monkeypatch.setattr("bigtrain.models.hostinputs._OnHost", _Sent)
    monkeypatch.setattr(HostInputs, "_leaves", lambda self, tensor: tensor.requires_grad)
    monkeypatch.setattr(HostInputs, "_send", lambda self, tensor: _Sent(tensor))
    run, weight = HostInputs(), torch.full((3,), 0.5, requires_grad=True)
    inputs, stream = [], weight * 2
    for _ in range(3):
        inputs.append(weakref.ref(stream))
        stream = run(lambda x: x.sin() * weight, stream)
    assert [one() is None for one in inputs] == [True] * 3
    stream.sum().backward()
    plain = torch.full((3,), 0.5, requires_grad=True)
    stream = plain * 2
    for _ in range(3):
        stream = stream.sin() * plain
    stream.sum().backward()
    assert torch.equal(weight.grad, plain.grad)
