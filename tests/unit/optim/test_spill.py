"""Gradients that leave during backward: the bits of those that stay, however lanes run ahead of each other (`Ahead`)."""

import itertools
import random

import pytest
import torch

from bigtrain.optim import spill
from bigtrain.optim.lanes import COMPUTE, DOWN, UP, UPDATE, InPlace
from bigtrain.optim.spill import SpilledGradients
from bigtrain.partition import last_share
from tests.unit.optim.test_stream import SIZES, Ahead, _pair, _same

CUTS = ((0, 300, 301, 1500, 3000), (0, 700), (0, 513, 4000, 5000))  # the model's parameters in each flat partition


def _norm(grad):
    return grad.double().square().sum().sqrt()


class Model:
    """Views of flat parameters with gradients that COMPUTE makes, some of them leaving through `gradients`."""

    def __init__(self, flats, lanes, gradients=None):
        self.flats, self.lanes, self.gradients = flats, lanes, gradients
        self.groups = [
            [torch.nn.Parameter(flat.detach()[a:b]) for a, b in itertools.pairwise(cut)] for flat, cut in zip(flats, CUTS)
        ]
        self.seen = []

    @property
    def params(self):
        return [p for group in self.groups for p in group]

    def backward(self, seed, unused=()):
        generator = torch.Generator().manual_seed(seed)
        for i, param in reversed(list(enumerate(self.params))):
            value = torch.randn(param.numel(), generator=generator).bfloat16()
            if i not in unused:
                self._arrive(param, value)

    def _arrive(self, param, value):
        fresh = torch.full_like(param, torch.nan)
        self.lanes.run(COMPUTE, lambda: fresh.copy_(value))
        if param.grad is None:
            param.grad = fresh
        else:
            self.lanes.run(COMPUTE, lambda total=param.grad: total.add_(fresh))
        if self.gradients is not None:
            self.gradients.leave(param, _norm)
            self._reuse()

    def _reuse(self):
        """Memory that was let go is COMPUTE's to write to at once."""
        held = {id(t) for _, tensors in self.gradients._flight for t in tensors}
        for tensor in (t for t in self.seen if id(t) not in held):
            self.lanes.run(COMPUTE, lambda t=tensor: t.fill_(torch.nan))
        self.seen = [t for _, tensors in self.gradients._flight for t in tensors]

    def hand_over(self, optimizer):
        """As engine/reduction.py does; the factor is made of all norms, on the device."""
        if self.gradients is not None:
            self.gradients.settle()
            self._reuse()
        norms, factor = [], torch.full((), torch.nan)
        for flat, group in zip(self.flats, self.groups):
            pieces = []
            for param in group:
                away = self.gradients.take(param) if self.gradients is not None else None
                grad = param.grad if param.grad is not None else torch.zeros_like(param)
                param.grad = None
                pieces.append(grad.detach() if away is None else away[0])
                norms.append((lambda g=grad: _norm(g)) if away is None else (lambda n=away[1]: n))
            optimizer.hand_over(flat, pieces)
        self.lanes.run(COMPUTE, lambda: factor.fill_(1.0 / (1.0 + float(sum(n() for n in norms)))))
        optimizer.grad_factor = factor


def _models(moments, lanes, share, ratio=1.0, buffers=3):
    optimizer, plain, other, streamed = _pair(moments, lanes, ratio, buffers=buffers)
    one, two = Model(plain, InPlace()), Model(streamed, lanes)
    params = two.params
    leaving = [params[i] for i in last_share([p.numel() for p in params], share)]
    two.gradients = SpilledGradients(leaving, lanes, chunk_elems=512)
    other.stream.gradients = two.gradients
    return optimizer, one, other, two


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("favour", [None, UP, UPDATE, DOWN, COMPUTE])
def test_lanes_that_run_apart_change_no_bit(seed, favour, monkeypatch):
    """Accumulation, skipped steps, unused parameters, forwards that wait for a part only, memory reused at once."""
    monkeypatch.setattr(spill, "GRADIENTS_IN_FLIGHT_BYTES", 6000)
    lanes, draw = Ahead(seed, favour), random.Random(seed)
    moments, ratio = draw.choice(["float32", "bfloat16", "8bit"]), draw.choice([1.0, 1.0, 0.5])
    share, micro_batches = draw.choice([0.2, 0.6, 1.0]), draw.choice([1, 2, 3])
    optimizer, one, other, two = _models(moments, lanes, share, ratio, buffers=draw.choice([1, 3, 20]))
    stream = other.stream
    stream.deferred = True
    plan = stream.plan(two.flats)
    seen, expected = [], []
    for step in range(6):
        for number in range(micro_batches):
            for position in range(draw.choice([len(plan.chunks), len(plan.chunks) // 2])):
                stream.wait_for(plan, position)
                chunk = plan.chunks[position]
                part = chunk.param.detach()[chunk.start : chunk.end]
                lanes.run(COMPUTE, lambda p=part: seen.append(p.clone()))
                at = [i for i, flat in enumerate(two.flats) if flat is chunk.param]
                expected.append(one.flats[at[0]].detach()[chunk.start : chunk.end].clone())
            unused = {draw.randrange(8)} if draw.random() < 0.5 else ()
            stream.ask_rest()
            if number == micro_batches - 1 and not two.gradients.holds_sums:
                stream.prefetch()
            for model in (one, two):
                model.backward(1000 * step + number, unused)
        stream.prefetch()
        one.hand_over(optimizer)
        two.hand_over(other)
        if step == 3:  # the norm was not finite
            optimizer._pieces.clear()
            other._pieces.clear()
            continue
        optimizer.step()
        other.step()
        stream.begin()
        if draw.random() < 0.3:
            other.synchronize()
    _same(optimizer, one.flats, other, two.flats)
    assert len(seen) == len(expected) and all(torch.equal(a, b) for a, b in zip(seen, expected))


@pytest.mark.parametrize("forgotten", ["expect", "settle", "read", "sum"])
def test_a_forgotten_wait_would_be_seen(forgotten, monkeypatch):
    """Each wait of the schedule is there for a reason: without it some order of the lanes gives other bits."""
    gradients = SpilledGradients
    if forgotten == "expect":
        monkeypatch.setattr(gradients, "expect", lambda self: None)
        monkeypatch.setattr(gradients, "settle", lambda self: self._flight.clear())
    elif forgotten == "settle":
        monkeypatch.setattr(gradients, "settle", lambda self: self._flight.clear())
    elif forgotten == "read":
        monkeypatch.setattr(gradients, "_read", property(lambda self: None, lambda self, mark: None), raising=False)
    else:
        early = lambda self, place, total: self._lanes.run(UPDATE, lambda: total.copy_(place.host))  # noqa: E731
        monkeypatch.setattr(gradients, "_bring_sum", early)
    with pytest.raises(AssertionError):  # the first order that shows it is enough
        for seed, favour in itertools.product(range(16), (None, UP, UPDATE, DOWN, COMPUTE)):
            test_lanes_that_run_apart_change_no_bit(seed, favour, monkeypatch)


def test_the_fewest_last_parameters_leave():
    params = [torch.nn.Parameter(torch.zeros(n, dtype=torch.bfloat16)) for n in SIZES]
    assert last_share(SIZES, 0.0) == [] and last_share(SIZES, 1.0) == [0, 1, 2]
    assert last_share(SIZES, 0.5) == [2] and last_share(SIZES, 0.6) == [1, 2]
    gradients = SpilledGradients(params[2:], InPlace(), chunk_elems=512)
    assert gradients.host_bytes == 2 * 5000
    for param in params:
        param.grad = torch.ones_like(param)
        gradients.leave(param, _norm)
    assert params[0].grad is not None and params[2].grad is None
    assert gradients.holds_sums and gradients.take(params[0]) is None
    host, norm = gradients.take(params[2])
    assert gradients.owns(host[3:7]) and not gradients.owns(params[0].grad) and float(norm) == pytest.approx(5000**0.5)
    assert not gradients.holds_sums and gradients.take(params[2]) is None
