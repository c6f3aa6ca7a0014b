"""What recomputed blocks keep on the host, with a stand-in for a card: the order of copies, and tensors as they were. The rest: tests/gpu."""

import contextlib
import types

import pytest
import torch
from torch import nn

from bigtrain.models import hostinputs
from bigtrain.models.hostinputs import HostInputs, OnHost, in_memory_order
from bigtrain.models.recompute import runner
from tests.unit.models.test_recompute import ATTENTION, Count

EVENT = types.SimpleNamespace(synchronize=lambda: None)


class _Torch:
    """torch, whose streams do at once what they are told, and whose memory is never page-locked."""

    def __init__(self):
        stream = types.SimpleNamespace(wait_stream=lambda _: None, wait_event=lambda _: None, record_event=lambda: EVENT)
        self.cuda = types.SimpleNamespace(
            Stream=lambda _: stream, current_stream=lambda _: stream, stream=lambda _: contextlib.nullcontext(), Event=object
        )

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty_like(self, tensor, device, pin_memory):
        assert pin_memory
        return torch.empty_like(tensor, device=device)


@pytest.fixture
def card(monkeypatch):
    """Tensors count as on a card; what is done with them on the host, by the number of tokens (a block's own)."""
    done = []
    monkeypatch.setattr(hostinputs, "torch", _Torch())
    monkeypatch.setattr(hostinputs, "_is_on_card", lambda tensor: True)
    monkeypatch.setattr(hostinputs, "_WORTH_COPYING", 2**10)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    numbers = {}

    def noted(name, method):
        def run(self, *args):
            if name == "down":
                method(self, *args)
                numbers[id(self)] = len(numbers)
                done.append((name, numbers[id(self)]))
            else:
                if self._coming is None:
                    done.append((name, numbers[id(self)]))
                method(self, *args)

        return run

    monkeypatch.setattr(OnHost, "__init__", noted("down", OnHost.__init__))
    monkeypatch.setattr(OnHost, "fetch", noted("up", OnHost.fetch))
    return done


class Block(nn.Module):
    made: list[int]  # weak references to the memory of attention's results

    def __init__(self):
        super().__init__()
        self.made = []
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x, unused=None):
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        self.made.append(attended.untyped_storage()._weak_ref())
        return x + self.out(attended.transpose(1, 2).flatten(2))


def _gradients(run, by_name=False):
    torch.manual_seed(0)
    blocks, x = [Block() for _ in range(3)], torch.randn(2, 24, 32, requires_grad=True)
    y = x
    with Count() as mode:
        for block in blocks:
            y = block(y) if run is None else run(block, x=y, unused=None) if by_name else run(block, y)
        y.square().sum().backward()
    return [x.grad, *(p.grad for block in blocks for p in block.parameters())], mode.counts[ATTENTION]


def test_inputs_and_results_come_back_in_the_order_in_which_they_are_wanted(card):
    wanted, forwards = _gradients(None)
    found, mine = _gradients(runner("offload", 3))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)) and mine == forwards == 3
    # Input and result of each block go down; up come the last block's, and with each its like of the block before.
    down = [("down", n) for n in range(6)]
    assert card == [*down, ("up", 4), ("up", 2), ("up", 5), ("up", 3), ("up", 0), ("up", 1)]
    card.clear()
    found, mine = _gradients(runner("offload_inputs", 3))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)) and mine == 6
    assert [what for what, _ in card] == ["down"] * 3 + ["up"] * 3


def test_inputs_that_come_by_name_leave_too(card):
    """They stayed on the card, all of them."""
    wanted, _ = _gradients(None)
    found, _ = _gradients(runner("offload_inputs", 3), by_name=True)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert card == [*(("down", n) for n in range(3)), ("up", 2), ("up", 1), ("up", 0)]


def test_a_result_lies_as_it_did(card):
    """Attention's output is a view with heads before tokens; what reads it, and the kernel of its backward, go by its strides."""
    one = torch.randn(2, 24, 4, 16).transpose(1, 2)
    sent = HostInputs().send(one)
    assert isinstance(sent, OnHost) and in_memory_order(one).is_contiguous()
    for _ in range(2):
        back = sent.take()
        assert torch.equal(back, one) and back.stride() == one.stride() and back.data_ptr() != one.data_ptr()
    seed = torch.ones(3)
    assert HostInputs().send(seed).data_ptr() == seed.data_ptr()


@pytest.mark.parametrize("policy, there", [("full", False), ("attention", True), ("offload", False)])
def test_results_on_the_host_are_nowhere_else(card, policy, there):
    """Between forward and backward; whatever names the tensor then would keep its memory."""
    block, run = Block(), runner(policy, 1)
    for _ in range(2):  # the first one is checked
        block.made.clear()
        loss = run(block, torch.randn(2, 24, 32, requires_grad=True)).sum()
        assert torch.UntypedStorage._expired(block.made[0]) is not there
        loss.backward()
    assert torch.UntypedStorage._expired(block.made[0])
