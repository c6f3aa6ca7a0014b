"""Optimizer state that lives in host memory and passes through the GPU in chunks, while forward and backward go on.

A step of chunk k is: its state comes up, the update runs, its state goes down. Uploads, updates and downloads have a lane each, so that
both directions of the bus and the update are busy at once; a few buffers of fixed size lie between them. The update is exact:
it starts only when the norm of the whole gradient is known (the clipping factor is read on the device), and whatever reads a
weight waits for the chunk that it lies in. Chunks go in the order in which forward will need them, so the next forward starts
on the first layers while the last are still being updated; the first chunks come up during backward already. Where ranks update a
part of the weights each, a chunk's new weights go to the other ranks as soon as they are there, in the order that all ranks share.

What waits: modules, by hooks of forward (`ForwardWaits`) and of `state_dict`; everything else through `finish` (weights are final for COMPUTE) or
`synchronize` (weights are final and all state is in host memory, for whoever reads or writes it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bigtrain.memory.pinned import HostMemory
from bigtrain.optim.lanes import COMPUTE, DOWN, GATHER, UP, UPDATE, Lanes
from bigtrain.optim.pieces import cut, joined
from bigtrain.optim.spill import SpilledGradients
from bigtrain.optim.table import BLOCK_ELEMS
from bigtrain.optim.waiting import ForwardWaits
from bigtrain.plan.constants import GATHER_ELEMS, STATE_BUFFERS, STATE_CHUNK_BYTES

AHEAD = 8  # chunks asked for beyond those that are on the GPU and those that something waits for: 20 ms of the bus

State = dict[str, torch.Tensor]
# Updates one chunk of a flat parameter in place: weight, gradient, state, where the chunk begins in the parameter.
Update = Callable[[torch.Tensor, torch.Tensor, State, int], None]
# Gives the other ranks what this one has of elements `start` to `end` of a flat parameter, and takes what they have of theirs. Collective.
Share = Callable[[torch.Tensor, int, int], None]


@dataclass(eq=False)
class Chunk:
    """Elements `start` to `end` of one flat parameter.

    Attributes:
        kept: its state stays on the device between steps.
        home: its state in host memory.
        done: mark of its last update.
        seen: mark of the moment when all ranks' elements of this number are updated here; of one rank that is `done`.
        stored: mark of its last download: host memory holds its state.
    """

    param: torch.Tensor
    start: int
    end: int
    kept: bool = False
    home: State | None = None
    done: Any = None
    seen: Any = None
    stored: Any = None


@dataclass(eq=False)
class Buffer:
    """State of one chunk on the device; `free` marks the end of its last use, `ready` that what it is to hold has come up."""

    tensors: State
    free: Any = None
    ready: Any = None


@dataclass
class PendingUpdate:
    """One parameter's update: the gradient in pieces that cover it, the function that updates a chunk, and what else it reads."""

    pieces: Sequence[torch.Tensor]
    update: Update
    reads: Sequence[torch.Tensor] = ()


@dataclass(eq=False)
class ChunkPlan:
    """The chunks that are updated together, in order.

    Attributes:
        asked: how many chunks of this step's update were asked of the lanes.
        waited: up to which chunk, as an index from 0, COMPUTE has waited.
        uploaded: state that is on its way before its update is asked for.
        updates, grads: of this step, and not asked for yet; the latter by parameter and start of chunk.
        share: what gives ranks each other's weights; None where each updates all.
        last: the chunks that the buffers hold when the update is over.
        staying: those of them that are updated, and whose way down waits (see `Stream.store_rest`).
    """

    chunks: list[Chunk]
    share: Share | None = None
    asked: int = 0
    waited: int = -1
    uploaded: dict[Chunk, Buffer] = field(default_factory=dict)
    updates: dict[torch.Tensor, Update] = field(default_factory=dict)
    grads: dict[torch.Tensor, dict[int, list[torch.Tensor]]] = field(default_factory=dict)
    last: frozenset[Chunk] = frozenset()
    staying: list[tuple[Chunk, Buffer]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.asked, self.waited = len(self.chunks), len(self.chunks) - 1


class Stream:
    """Streams the state of an `AdamWSplit`.

    Args:
        layout: names, lengths and dtypes of the state of a parameter of n elements (`AdamWSplit.layout`).
        lanes: where the work runs.
        device: where the parameters are.
        ratio: share of the state that leaves the device between steps.
        pin: page-lock host memory.
        chunk_bytes, buffers: size and number of chunks on the device at a time: a bound on its memory, and on what is
            brought up before the update may start.

    Attributes:
        deferred: the update starts at `begin()`, not inside the optimizer's step: for when nothing between the two reads weights.
        gradients: those that leave the device during backward; None if all stay.
    """

    def __init__(
        self,
        layout: Callable[[int], dict[str, tuple[int, torch.dtype]]],
        lanes: Lanes,
        device: torch.device,
        *,
        ratio: float = 1.0,
        pin: bool = True,
        chunk_bytes: int = STATE_CHUNK_BYTES,
        buffers: int = STATE_BUFFERS,
    ):
        self._layout, self._lanes, self._device = layout, lanes, device
        self._ratio, self._pin = ratio, pin
        block_bytes = sum(n * dtype.itemsize for n, dtype in layout(BLOCK_ELEMS).values())
        self.chunk_elems = min(GATHER_ELEMS, max(1, chunk_bytes // block_bytes) * BLOCK_ELEMS)
        self.deferred = False
        self.gradients: SpilledGradients | None = None
        self._buffers = buffers
        self._pool: list[Buffer] = []
        self._memory: dict[torch.Tensor, HostMemory] = {}
        self._kept: dict[Chunk, State] = {}
        self._jobs: dict[torch.Tensor, PendingUpdate] = {}
        self._plans: dict[torch.Tensor, ChunkPlan] = {}
        self._first: ChunkPlan | None = None

    # ------------------------------------------------------------ what there is

    def plan(
        self,
        params: Sequence[torch.Tensor],
        need: Callable[[torch.Tensor, int, int], int] | None = None,
        share: Share | None = None,
    ) -> ChunkPlan:
        """Cut parameters into chunks that are updated together.

        Args:
            params: flat parameters.
            need: when elements `start` to `end` of a parameter are needed: chunks are updated in this order; None for that of
                the parameters.
            share: collective, so all ranks must have the same chunks in the same order.
        """
        chunks = [
            Chunk(p, at, min(at + self.chunk_elems, p.numel())) for p in params for at in range(0, p.numel(), self.chunk_elems)
        ]
        if need is not None:
            chunks.sort(key=lambda c: need(c.param, c.start, c.end))
        left = (1.0 - self._ratio) * sum(c.end - c.start for c in chunks)
        for chunk in chunks:
            left -= chunk.end - chunk.start
            chunk.kept = left >= 0
        plan = ChunkPlan(chunks, share, last=frozenset([c for c in chunks if not c.kept][-self._buffers :]))
        self._plans.update(dict.fromkeys(params, plan))
        self._first = self._first or plan
        return plan

    def home(self, param: torch.Tensor, state: dict[str, Any]) -> None:
        """Put the state tensors of `param` into host memory of their own; those that do not exist yet are zero there."""
        if param not in self._memory:
            self._memory[param] = HostMemory(self._layout(param.numel()), self._pin)
        for name, tensor in self._memory[param].tensors.items():
            if name in state and state[name] is not tensor:  # loaded from a checkpoint
                tensor.copy_(state[name].view(-1))
            state[name] = tensor

    # ------------------------------------------------------------ a step

    def add(
        self,
        param: torch.Tensor,
        state: dict[str, Any],
        pieces: Sequence[torch.Tensor],
        update: Update,
        reads: Sequence[torch.Tensor] = (),
    ) -> None:
        """Note one parameter's update for `begin`; `reads`: tensors of COMPUTE that the update reads beside the gradient."""
        self.home(param, state)
        if param not in self._plans:
            self.plan([param])
        self._jobs[param] = PendingUpdate(pieces, update, reads)

    def prefetch(self) -> None:
        """Bring up the first chunks of the next update, as many as there are buffers; call when backward begins."""
        plan = self._first
        if plan is None or plan.uploaded or any(c.param not in self._memory for c in plan.chunks):
            return
        self._ask(plan, len(plan.chunks))  # buffers go round in the order of asking
        self.store_rest()
        for chunk in [c for c in plan.chunks if not c.kept][: self._buffers]:
            plan.uploaded[chunk] = self._upload(chunk)

    def ask_rest(self) -> None:
        """Ask the lanes for all of the update under way, if forward did not need it; call when backward begins."""
        for plan in dict.fromkeys(self._plans.values()):
            self._ask(plan, len(plan.chunks))
        self.store_rest()

    def store_rest(self) -> None:
        """Send down what stayed in the last buffers.

        Nobody needs these buffers before backward brings up state again. Sent at once, they would keep the bus to the host
        busy when forward ends, where whatever the host asks of the device (a loss, a number of targets) queues behind them.
        """
        for plan in dict.fromkeys(self._plans.values()):
            staying, plan.staying = plan.staying, []
            for chunk, buffer in staying:
                self._store(chunk, buffer)

    def begin(self) -> None:
        """Start the updates that were added; returns at once. Gradients and factor must be final in COMPUTE's order."""
        jobs, self._jobs = self._jobs, {}
        while jobs:
            plan = self._plans[next(iter(jobs))]
            self._start(plan, {p: jobs.pop(p) for p in list(jobs) if self._plans[p] is plan})

    def _start(self, plan: ChunkPlan, jobs: Mapping[torch.Tensor, PendingUpdate]) -> None:
        self._ask(plan, len(plan.chunks))  # the update before this one, if forward did not need all of it
        self.store_rest()
        self._lanes.wait(UPDATE, self._lanes.mark(COMPUTE))
        if plan.share is not None and plan.chunks[-1].seen is not None:
            self._lanes.wait(UPDATE, plan.chunks[-1].seen)  # the other ranks may still be given what no forward asked for
        if self.gradients is not None:
            self.gradients.expect()
        for tensor in (t for job in jobs.values() for t in job.reads):
            self._lanes.keep(tensor, UPDATE)
        # Views by chunk, and nothing else that holds a gradient: each is freed as its last chunk is asked for.
        plan.grads = {p: dict(cut(job.pieces, self.chunk_elems)) for p, job in jobs.items()}
        plan.updates = {p: job.update for p, job in jobs.items()}
        plan.asked, plan.waited = 0, -1
        # Some at once, else the bus would stand still until forward asks for more. What is collective is all asked for here, where all
        # ranks are: later one of them alone may read weights.
        self._ask(plan, len(plan.chunks) if plan.share else len(plan.uploaded) + AHEAD)

    def _ask(self, plan: ChunkPlan, count: int) -> None:
        """Ask the lanes for the first `count` chunks of the update under way."""
        alone = all(other is plan for other in self._plans.values())  # several plans share the buffers
        for chunk in plan.chunks[plan.asked : count]:
            buffer = plan.uploaded.pop(chunk, None)
            if chunk.param in plan.updates:
                used = self._update(chunk, buffer, plan.updates[chunk.param], plan.grads[chunk.param].pop(chunk.start))
                self._share(chunk, plan.share, updated=True)
                if used is not None and chunk in plan.last and alone:
                    plan.staying.append((chunk, used))
                elif used is not None:
                    self._store(chunk, used)
            else:  # nothing to do for it in this step; a mark all the same, so that marks stay in order
                chunk.done = self._lanes.mark(UPDATE)
                self._share(chunk, plan.share, updated=False)
        plan.asked = max(plan.asked, min(count, len(plan.chunks)))
        if plan.asked == len(plan.chunks):
            plan.updates, plan.grads = {}, {}

    def _update(self, chunk: Chunk, buffer: Buffer | None, update: Update, grads: list[torch.Tensor]) -> Buffer | None:
        """Ask for one chunk's update; the buffer that holds its new state, None if it stays on the device."""
        lanes, area = self._lanes, None
        if self.gradients is not None:
            grads, area = self.gradients.bring(grads)
        buffer = buffer or self._upload(chunk)
        if buffer.ready is not None:
            lanes.wait(UPDATE, buffer.ready)
        weight = chunk.param.detach().view(-1)[chunk.start : chunk.end]
        parts = self._narrow(buffer.tensors, chunk, 0)
        for grad in grads:
            lanes.keep(grad, UPDATE)

        def work() -> None:
            update(weight, joined(grads), parts, chunk.start)

        lanes.run(UPDATE, work)
        chunk.done = lanes.mark(UPDATE)
        if area is not None:
            area.free = chunk.done
        return None if chunk.kept else buffer

    def _share(self, chunk: Chunk, share: Share | None, *, updated: bool) -> None:
        chunk.seen = chunk.done
        if share is not None:
            self._lanes.wait(GATHER, chunk.done)
            if updated:
                self._lanes.run(GATHER, lambda: share(chunk.param, chunk.start, chunk.end))
            chunk.seen = self._lanes.mark(GATHER)  # of every chunk, so that marks stay in order

    def _store(self, chunk: Chunk, buffer: Buffer) -> None:
        lanes, parts = self._lanes, self._narrow(buffer.tensors, chunk, 0)
        lanes.wait(DOWN, chunk.done)
        lanes.run(DOWN, lambda: _copy(self._on_host(chunk), parts))
        chunk.stored = buffer.free = lanes.mark(DOWN)

    def _upload(self, chunk: Chunk) -> Buffer:
        """The chunk's state on its way to the device; the buffer is `ready` when it is there."""
        lanes = self._lanes
        if chunk.kept and chunk in self._kept:
            return Buffer(self._kept[chunk])
        buffer = Buffer(self._room(chunk.end - chunk.start)) if chunk.kept else self._next_buffer()
        if chunk.kept:
            self._kept[chunk] = buffer.tensors
            lanes.wait(UP, lanes.mark(COMPUTE))  # its memory was COMPUTE's until now
        for mark in (buffer.free, chunk.stored):
            if mark is not None:
                lanes.wait(UP, mark)
        lanes.run(UP, lambda: _copy(self._narrow(buffer.tensors, chunk, 0), self._on_host(chunk)))
        buffer.ready = lanes.mark(UP)
        return buffer

    def _next_buffer(self) -> Buffer:
        if len(self._pool) < self._buffers:
            buffer = Buffer(self._room(self.chunk_elems), self._lanes.mark(COMPUTE))
        else:
            buffer = self._pool.pop(0)
        self._pool.append(buffer)
        return buffer

    def _room(self, n: int) -> State:
        return {name: torch.empty(size, dtype=dtype, device=self._device) for name, (size, dtype) in self._layout(n).items()}

    def _on_host(self, chunk: Chunk) -> State:
        if chunk.home is None:
            chunk.home = self._narrow(self._memory[chunk.param].tensors, chunk, chunk.start)
        return chunk.home

    def _narrow(self, tensors: State, chunk: Chunk, at: int) -> State:
        sizes = {name: size for name, (size, _) in self._layout(chunk.end - chunk.start).items()}
        if at == 0 and all(tensors[name].numel() == size for name, size in sizes.items()):
            return tensors
        starts = {name: size for name, (size, _) in self._layout(at).items()}  # chunks start at whole blocks
        return {name: t[starts[name] : starts[name] + sizes[name]] for name, t in tensors.items()}

    # ------------------------------------------------------------ waiting

    def wait_for(self, plan: ChunkPlan, position: int) -> int:
        """COMPUTE goes on only when chunk number `position` of the plan, and with it all before, is updated; up to which it waited."""
        if position > plan.waited:
            self._ask(plan, position + 1 + self._buffers + AHEAD)
            self._lanes.wait(COMPUTE, plan.chunks[position].seen)
            plan.waited = position
        return plan.waited

    def let_update_read(self) -> None:
        """What the current stream does from now on comes after the update under way has read its gradients."""
        self.ask_rest()
        for plan in dict.fromkeys(self._plans.values()):
            if plan.chunks[-1].done is not None:
                self._lanes.wait(COMPUTE, plan.chunks[-1].done)

    def finish(self) -> None:
        """What COMPUTE does from now on sees every weight updated."""
        self.begin()
        for plan in dict.fromkeys(self._plans.values()):
            self.wait_for(plan, len(plan.chunks) - 1)

    def synchronize(self) -> None:
        """Return when every weight is updated and host memory holds all state; it may then be read, and changed."""
        if not self._plans:
            return
        self.finish()
        self.store_rest()
        for chunk, tensors in self._kept.items():
            self._lanes.wait(DOWN, chunk.done)
            self._lanes.run(DOWN, lambda c=chunk, t=tensors: _copy(self._on_host(c), t))  # type: ignore[misc]
        self._lanes.finish()
        self._kept.clear()
        for plan in self._plans.values():
            plan.uploaded.clear()

    def attach(
        self,
        module: torch.nn.Module,
        places: Mapping[torch.Tensor, Sequence[tuple[torch.nn.Parameter, int, int]]],
        share: Share | None = None,
    ) -> None:
        """Update all partitions as one plan that starts at `begin()`, in the order of the model; forward waits by itself.

        Args:
            module: the model.
            places: for each flat partition, the model's parameters in it with their first and last element + 1 there; with
                `share` those in any rank's partition, the same on all ranks.
            share: see `plan`.
        """
        order = {p: i for i, p in enumerate(module.parameters())}

        def held(flat: torch.Tensor, start: int, end: int) -> list[torch.nn.Parameter]:
            return [p for p, first, last in places[flat] if first < end and start < last]

        def need(flat: torch.Tensor, start: int, end: int) -> int:
            return min((order[p] for p in held(flat, start, end)), default=len(order))

        self.deferred = True
        plan = self.plan(list(places), need, share)
        last = {p: i for i, c in enumerate(plan.chunks) for p in held(c.param, c.start, c.end)}
        ForwardWaits(module, last, lambda position: self.wait_for(plan, position)).register()
        for part in module.modules():  # for whoever saves the model without asking the engine for it
            part.register_state_dict_pre_hook(lambda *_: self.finish())


def _copy(to: State, source: State) -> None:
    torch._foreach_copy_(list(to.values()), [source[name] for name in to], non_blocking=True)
