"""Streamed state: the bits of the unstreamed update, and nothing is read before it is there, however lanes run ahead of each other.

`Ahead` is a machine with lanes that really run apart: work is queued, and which lane goes on next is drawn at random, as far as marks
allow. What a schedule forgets to wait for shows as wrong bits.
"""

import random
import weakref

import pytest
import torch

from bigtrain.memory.pinned import HostMemory
from bigtrain.optim import stream as streams
from bigtrain.optim.lanes import COMPUTE, DOWN, UP, UPDATE, InPlace
from bigtrain.optim.split import AdamWSplit
from bigtrain.optim.stream import Stream
from bigtrain.optim.waiting import who_waits

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Ahead:
    """Lanes as queues. `favour` a lane: it runs as far ahead as it may; None: a random one."""

    def __init__(self, seed, favour=None):
        self.queues = {lane: [] for lane in (UP, UPDATE, DOWN, COMPUTE)}
        self.reached, self.marks = set(), 0
        self.random, self.favour = random.Random(seed), favour
        self.log = []

    def run(self, lane, work):
        self.queues[lane].append(("run", work))
        self._some()

    def mark(self, lane):
        self.marks += 1
        self.queues[lane].append(("mark", self.marks))
        return self.marks

    def wait(self, lane, mark):
        self.queues[lane].append(("wait", mark))

    def keep(self, tensor, lane):
        pass

    def finish(self):
        while self._one():
            pass
        assert not any(self.queues.values()), "lanes wait for each other"

    def _some(self):
        for _ in range(self.random.randrange(6)):
            self._one()

    def _one(self):
        able = [lane for lane, q in self.queues.items() if q and (q[0][0] != "wait" or q[0][1] in self.reached)]
        if not able:
            return False
        lane = self.favour if self.favour in able else self.random.choice(able)
        kind, thing = self.queues[lane].pop(0)
        if kind == "run":
            self.log.append(lane)
            thing()
        elif kind == "mark":
            self.reached.add(thing)
        return True


SIZES = (3000, 700, 5000)


def _pair(moments, lanes, ratio=1.0, chunk_elems=512, buffers=3):
    """The same parameters under an optimizer without a stream and under one with; chunks of at most `chunk_elems`."""
    generator = torch.Generator().manual_seed(1)
    starts = [(torch.randn(n, generator=generator) * 0.02).bfloat16() for n in SIZES]
    plain, streamed = ([torch.nn.Parameter(s.clone()) for s in starts] for _ in range(2))
    optimizer, other = (AdamWSplit(p, moments=moments, exact_root=True, **SETTINGS) for p in (plain, streamed))
    block = sum(n * d.itemsize for n, d in other.layout(256).values())
    other.stream = Stream(
        other.layout, lanes, torch.device("cpu"), ratio=ratio, chunk_bytes=block * (chunk_elems // 256), buffers=buffers
    )
    assert other.stream.chunk_elems == chunk_elems
    return optimizer, plain, other, streamed


def _step(optimizer, params, step, factor):
    optimizer.grad_factor = factor
    for i, param in enumerate(params):
        grad = torch.randn(param.numel(), generator=torch.Generator().manual_seed(100 * step + i))
        optimizer.hand_over(param, [grad[:100], grad[100:650].clone(), grad[650:].clone()])
    optimizer.step()


def _same(optimizer, plain, other, streamed):
    other.synchronize()
    for a, b in zip(plain, streamed):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))
        for name, value in optimizer.state[a].items():
            theirs = other.state[b][name]
            assert value == theirs if name == "step" else torch.equal(value, theirs), name
        assert torch.equal(optimizer.master(a), other.master(b))


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "8bit"])
@pytest.mark.parametrize("ratio", [1.0, 0.6, 0.0])
def test_the_same_bits_as_without(moments, ratio):
    made = _pair(moments, InPlace(), ratio)
    for step in range(4):
        _step(*made[:2], step, 0.5)
        _step(*made[2:], step, 0.5)
    _same(*made)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("favour", [None, UP, UPDATE, DOWN, COMPUTE])
def test_lanes_that_run_apart_change_no_bit(seed, favour):
    """Deferred, with uploads during backward, reads of weights by COMPUTE, skipped steps, and now and then a synchronize."""
    lanes = Ahead(seed, favour)
    draw = random.Random(seed)
    moments, ratio = draw.choice(["float32", "bfloat16", "8bit"]), draw.choice([1.0, 1.0, 0.5])
    optimizer, plain, other, streamed = _pair(moments, lanes, ratio, buffers=draw.choice([1, 2, 3]))
    other.stream.deferred = True
    order = {id(p): i for i, p in enumerate(reversed(streamed))}
    plan = other.stream.plan(streamed, lambda p, start, end: order[id(p)] * 10**6 + start)
    last = {id(p): max(i for i, c in enumerate(plan.chunks) if c.param is p) for p in streamed}
    seen, expected = [], []
    for step in range(6):
        for param in reversed(streamed):  # forward: each module waits, then reads its weight
            other.stream.wait_for(plan, last[id(param)])
            lanes.run(COMPUTE, lambda p=param: seen.append(p.detach().clone()))
        expected += [p.detach().clone() for p in reversed(plain)]
        other.stream.prefetch()  # backward begins
        lanes.run(COMPUTE, lambda: None)
        if step == 3:
            continue  # the norm was not finite: nothing handed over
        factor = torch.zeros(())
        lanes.run(COMPUTE, lambda f=factor, s=step: f.fill_(1.0 / (s + 1)))  # the norm, on the device
        _step(optimizer, plain, step, torch.tensor(1.0 / (step + 1)))
        _step(other, streamed, step, factor)
        other.stream.begin()
        if draw.random() < 0.3:
            other.synchronize()
    _same(optimizer, plain, other, streamed)
    assert len(seen) == len(expected) and all(torch.equal(a, b) for a, b in zip(seen, expected))


def test_a_forgotten_wait_would_be_seen():
    """The machine of the tests above does find races: without the wait before it, a read sees an old weight."""
    lanes = Ahead(0, COMPUTE)
    lanes._some = lambda: None  # only queue
    _, _, other, streamed = _pair("float32", lanes)
    other.stream.deferred = True
    before = streamed[0].detach().clone()
    _step(other, streamed, 0, None)
    other.stream.begin()
    seen = []
    lanes.run(COMPUTE, lambda: seen.append(streamed[0].detach().clone()))
    other.synchronize()
    assert torch.equal(seen[0], before) and not torch.equal(streamed[0], before)


def test_both_directions_and_the_update_are_busy_at_once():
    """While one chunk is updated, the next comes up and the one before goes down: no lane waits for a whole round."""
    lanes = Ahead(0)
    lanes._some = lambda: None  # only queue
    _, _, other, streamed = _pair("8bit", lanes, buffers=3)
    other.stream.deferred = True
    other.stream.plan(streamed)
    _step(other, streamed, 0, None)
    other.stream.finish()
    other.stream.ask_rest()
    now, spans = 0, {lane: [] for lane in (UP, UPDATE, DOWN)}
    while any(lanes.queues.values()):  # each work takes one unit of time; a lane does one at a time
        now += 1
        started = []
        for lane, queue in lanes.queues.items():
            while queue and (queue[0][0] == "mark" or (queue[0][0] == "wait" and queue[0][1] in lanes.reached)):
                kind, mark = queue.pop(0)
                if kind == "mark":
                    lanes.reached.add(mark)
            if queue and queue[0][0] == "run":
                started.append((lane, queue.pop(0)[1]))
        for lane, work in started:
            work()
            spans[lane].append(now)
    chunks = sum(-(-n // 512) for n in SIZES)
    assert all(len(s) == chunks for s in spans.values())
    assert now <= 2 * chunks + 6  # one after the other would take three units a chunk
    both = set(spans[UP]) & set(spans[DOWN])
    assert len(both) > chunks // 3


def test_work_is_asked_for_as_forward_needs_it(monkeypatch):
    """All at once, the CPU would be busy with it while the GPU waits for the first layer to be launched."""
    monkeypatch.setattr(streams, "AHEAD", 2)
    lanes = Ahead(0)
    lanes._some = lambda: None  # only queue
    _, _, other, streamed = _pair("8bit", lanes)
    stream = other.stream
    stream.deferred = True
    plan = stream.plan(streamed)
    _step(other, streamed, 0, None)
    stream.begin()
    updates = lambda: sum(kind == "run" for kind, _ in lanes.queues[UPDATE])  # noqa: E731
    assert updates() == 2
    stream.wait_for(plan, 0)
    assert updates() == 1 + 3 + 2  # what is waited for, as many as there are buffers, and two more
    stream.wait_for(plan, 5)
    assert updates() == 6 + 3 + 2
    stream.wait_for(plan, 3)  # was waited for
    assert updates() == 6 + 3 + 2
    _step(other, streamed, 1, None)
    stream.begin()  # without a forward in between
    assert updates() == len(plan.chunks) + 2


def test_what_the_last_buffers_hold_goes_down_when_backward_begins():
    """Until then whatever the host asks of the device would queue behind it."""
    lanes = Ahead(0)
    _, _, other, streamed = _pair("8bit", lanes, buffers=3)
    stream = other.stream
    stream.deferred = True
    plan = stream.plan(streamed)
    _step(other, streamed, 0, None)
    stream.finish()
    lanes.finish()
    count = len(plan.chunks)
    assert (lanes.log.count(UPDATE), lanes.log.count(DOWN)) == (count, count - 3)
    stream.ask_rest()
    lanes.finish()
    assert lanes.log.count(DOWN) == count
    stream.prefetch()
    _step(other, streamed, 1, None)
    stream.begin()
    other.synchronize()  # whoever reads state on the host finds all of it
    assert lanes.log.count(DOWN) == 2 * count


def test_gradients_are_let_go_as_their_update_is_asked_for(monkeypatch):
    """Held until the end they would lie beside the next forward's activations."""
    monkeypatch.setattr(streams, "AHEAD", 1)
    _, _, other, streamed = _pair("8bit", InPlace(), buffers=1)
    stream = other.stream
    stream.deferred = True
    plan = stream.plan(streamed)
    grads = [torch.zeros_like(p) for p in streamed]
    alive = [weakref.ref(g) for g in grads]
    for param, grad in zip(streamed, grads):
        other.hand_over(param, [grad])
    del grads, grad
    other.step()
    stream.begin()
    first = next(i for i, c in enumerate(plan.chunks) if c.param is not plan.chunks[0].param)
    assert all(ref() is not None for ref in alive)
    stream.wait_for(plan, first - 1)
    assert [ref() is None for ref in alive] == [True, True, False]  # two chunks ahead: all of the second parameter's
    stream.finish()
    assert all(ref() is None for ref in alive)


def test_only_so_many_chunks_come_up_before_the_norm_is_known():
    lanes = Ahead(0)
    _, _, other, streamed = _pair("float32", lanes, buffers=2)
    other.stream.deferred = True
    other.stream.plan(streamed)
    _step(other, streamed, 0, None)
    other.stream.begin()
    other.stream.finish()
    other.stream.ask_rest()
    lanes.finish()
    lanes.log.clear()
    other.stream.prefetch()
    other.stream.prefetch()
    lanes.finish()
    assert lanes.log == [UP, UP]


def test_kept_chunks_do_not_travel_and_are_on_the_host_when_asked_for():
    lanes = Ahead(0)
    optimizer, plain, other, streamed = _pair("float32", lanes, ratio=0.5)
    other.stream.plan(streamed)
    for step in range(3):
        _step(optimizer, plain, step, None)
        _step(other, streamed, step, None)
        lanes.finish()
        if step == 0:
            lanes.log.clear()
    total, up = sum(-(-n // 512) for n in SIZES), lanes.log.count(UP)
    assert 0.4 * total * 2 <= up == lanes.log.count(DOWN) <= 0.6 * total * 2 + 2
    _same(optimizer, plain, other, streamed)


def test_loaded_state_replaces_what_was_brought_up():
    made = _pair("8bit", InPlace(), ratio=0.5)
    optimizer, plain, other, streamed = made
    for step in range(2):
        _step(optimizer, plain, step, None)
    _step(other, streamed, 7, None)
    other.stream.prefetch()
    other.load_state_dict(optimizer.state_dict())
    for a, b in zip(plain, streamed):
        b.data.copy_(a.data)
    for step in range(2, 4):
        _step(optimizer, plain, step, None)
        _step(other, streamed, step, None)
    _same(*made)


def test_a_checkpoints_view_of_the_state_is_host_memory_of_exact_size():
    memory = HostMemory(
        {"a": (3000, torch.int16), "b": (3000, torch.uint8), "c": (12, torch.float32), "d": (0, torch.uint8)}, True
    )
    assert {k: (t.numel(), t.dtype) for k, t in memory.tensors.items()} == {
        "a": (3000, torch.int16), "b": (3000, torch.uint8), "c": (12, torch.float32), "d": (0, torch.uint8)
    }  # fmt: skip
    assert all((t == 0).all() for t in memory.tensors.values())
    assert memory._size == 4096 * 4  # pages, not powers of two: 6,000, 3,000 and 48 bytes


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.norm = torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, 8, bias=False)


def test_every_weight_is_waited_for_before_the_code_that_may_read_it():
    model = Tied()
    waits = {m: set(params) for m, params in who_waits(model).items()}
    assert waits[model] == {model.embed.weight}
    for layer in model.layers:
        assert set(layer.parameters()) <= waits[layer]
    late = {p for m in (model.norm, model.head) for p in m.parameters()}
    assert late <= waits[model.layers[-1]]
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert set(plain.parameters()) == set(who_waits(plain)[plain])


def test_experts_inside_blocks_and_two_towers_are_covered():
    """Nested lists count as part of their block (an expert may not be called); each tower's last block covers what comes later."""

    class Expert(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))

        def forward(self, x):
            return sum(expert(x) for expert in self.experts)

    class Towers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.vision = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))
            self.embed = torch.nn.Embedding(3, 2)
            self.text = torch.nn.ModuleList(Expert() for _ in range(2))
            self.head = torch.nn.Linear(2, 3)

    model = Towers()
    waits = {m: set(params) for m, params in who_waits(model).items()}
    head = set(model.head.parameters())
    assert head <= waits[model.text[-1]] and head <= waits[model.vision[-1]] and head <= waits[model.head]
    assert set(model.text[0].parameters()) == waits[model.text[0]]
    assert not any(module in waits for module in model.text[0].experts)


def test_chunk_sizes_follow_the_bytes():
    for moments, block in (("float32", 10 * 256), ("8bit", 4 * 256 + 8)):
        optimizer = AdamWSplit([torch.nn.Parameter(torch.zeros(1))], moments=moments)
        stream = Stream(optimizer.layout, InPlace(), torch.device("cpu"))
        assert stream.chunk_elems == min(1 << 25, streams.STATE_CHUNK_BYTES // block * 256)
