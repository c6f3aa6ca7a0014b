"""A block that runs again in backward: the same gradients as by torch's checkpoint, and complaints where they would not be."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from bigtrain.errors import ModelError
from bigtrain.models.replay import replayed


def by_torch(function, *args, **kwargs):
    return checkpoint(function, *args, use_reentrant=False, **kwargs)


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down, self.dropout = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), dropout

    def forward(self, x, scale=None):
        y = self.down(nn.functional.gelu(self.up(self.norm(x))))
        y = nn.functional.dropout(y, self.dropout) if self.dropout else y
        return x + (y if scale is None else y * scale)


def gradients(run, dropout=0.0, body=None):
    torch.manual_seed(0)
    blocks = [Block(dropout) for _ in range(3)]
    x = torch.randn(4, 8).requires_grad_()
    out, scale = x, torch.full((8,), 0.5)
    for block in blocks:
        out = (body or run)(block, out, scale=scale) if run is not None else block(out, scale=scale)
    torch.rand(3)  # somebody else draws between forward and backward
    out.square().sum().backward()
    return [x.grad, *(p.grad for block in blocks for p in block.parameters()), torch.get_rng_state()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_and_random_states_are_those_without_it_and_those_of_torch(dropout):
    reference = gradients(None, dropout)
    assert same(gradients(replayed, dropout), reference)
    assert same(gradients(by_torch, dropout), reference)


def test_a_card_whose_tensors_come_by_name_gets_its_random_states_back(monkeypatch):
    card = torch.Generator().manual_seed(3)  # stands for that of this rank's GPU
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (card,))
    drawn = []

    def block(x):
        drawn.append(torch.rand(8, generator=card))
        return (x * drawn[-1]).exp()

    x = torch.randn(4, 8).requires_grad_()
    out = replayed(block, x=x)
    torch.rand(1, generator=card)
    out.sum().backward()
    assert len(drawn) == 2 and torch.equal(drawn[0], drawn[1])


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_same_operators_run_as_by_torch():
    seen = []
    for run in (replayed, by_torch):
        with Operators() as operators:
            gradients(run)
        seen.append([n for n in operators.names if "detach" not in n and "equal" not in n])  # of random states
    assert seen[0] == seen[1]


def test_blocks_inside_blocks():
    def outer(run):
        return lambda block, x, scale: run(lambda y, scale: run(block, block(y), scale=scale) * 2, x, scale=scale)

    reference = gradients(replayed, body=lambda block, x, scale: block(block(x), scale=scale) * 2)
    assert not same(reference, gradients(replayed))
    for inside, around in ((replayed, replayed), (by_torch, replayed), (replayed, by_torch)):
        body = lambda b, x, scale: around(lambda y, scale: inside(b, b(y), scale=scale) * 2, x, scale=scale)  # noqa: B023, E731
        assert same(gradients(replayed, body=body), reference)


def test_a_graph_that_is_kept_can_run_backward_twice():
    torch.manual_seed(0)
    block, x = Block(dropout=0.5), torch.randn(4, 8).requires_grad_()
    out = replayed(block, x).sum()
    first = torch.autograd.grad(out, x, retain_graph=True)
    assert same(first, torch.autograd.grad(out, x))


def test_what_was_made_again_is_let_go_as_backward_uses_it():
    kept, alive = [], []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x * 2
            kept.append(weakref.ref(y))
            ctx.save_for_backward(y)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            del y
            alive.append(sum(ref() is not None for ref in kept))
            return grad

    x = torch.ones(3, requires_grad=True)
    replayed(lambda a: Spy.apply(Spy.apply(a)), x).sum().backward()
    assert len(kept) == 4 and alive[-1] <= 1 and not any(ref() is not None for ref in kept)


def test_without_gradients_and_under_autocast():
    block, x = Block(), torch.randn(4, 8)
    with torch.no_grad():
        assert torch.equal(replayed(block, x), block(x))

    def train(run, around_backward):
        x.grad, leaf = None, x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=not around_backward):
            out = run(block, leaf).float().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=around_backward):
            return torch.autograd.grad(out, leaf)

    assert same(train(replayed, False), train(by_torch, False))
    assert same(train(replayed, True), train(by_torch, True))


def test_a_second_run_that_differs_is_told():
    calls = []

    def other_shape(x):
        calls.append(1)
        return (x[: len(x) - len(calls)] * x[: len(x) - len(calls)]).sum()

    with pytest.raises(ModelError, match=r"number 0 was \[3\] torch.float32 on cpu and is \[2\] torch.float32 on cpu"):
        replayed(other_shape, torch.ones(4, requires_grad=True)).backward()

    def fewer(x):
        calls.append(1)
        return x.exp().exp() if len(calls) == 1 else x.exp()

    calls.clear()
    with pytest.raises(ModelError, match="2 were saved in forward, 1 in the second run"):
        replayed(fewer, torch.ones(4, requires_grad=True)).sum().backward()


def test_an_argument_that_is_changed_in_place_is_told():
    x = torch.ones(4, requires_grad=True) * 1
    out = replayed(lambda a: a.exp().exp(), x)
    x.add_(1)
    with pytest.raises(ModelError, match="changed in place"):
        out.sum().backward()
