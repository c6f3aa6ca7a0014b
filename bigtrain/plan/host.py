"""One rank's host memory through a run, as a tape: pinned blocks, pageable states, copies in passing.

Follows deepspeed 0.19.8 like the GPU side. Pinned blocks come from torch's CachingHostAllocator, which rounds every
block up to a power of two and gives nothing back to the system.
"""

from __future__ import annotations

from collections.abc import Hashable

from bigtrain.partition import partition_size
from bigtrain.plan import streamed
from bigtrain.plan.constants import (
    READ_BUFFER_BYTES,
    SAVE_BUFFER_BYTES,
    pieces,
    pinned_bytes,
    process_bytes,
    process_start_bytes,
)
from bigtrain.plan.groups import flat_group, heaviest_rank, split_groups, sub_groups
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.states import LAYOUTS
from bigtrain.plan.tape import Tape

_PAGE = 4096


class _Host:
    def __init__(self, plan: PlanInput):
        self.plan, self.zero, self.items = plan, plan.deepspeed_settings, plan.parameters.items
        self.layout, self.tape = LAYOUTS[plan.optimizer], Tape(_PAGE)
        self.groups = split_groups(self.items, plan.decay_groups, plan.trains)
        # On CPU 'pin_memory' does nothing (accelerator/cpu_accelerator.py).
        self.pins = self.zero.pin_memory and plan.device == "cuda"
        self.pinned = 0

    def pin(self, key: Hashable, size: float, row: str, copied: bool = True) -> None:
        """A buffer that is pinned where the settings say so; the rounding is a row of its own.

        `copied`: made in pageable memory first (torch.zeros writes all of it), so that both are there for a moment.
        """
        if self.pins and copied:
            self.tape.hold(("pageable", key), size, "host copies in passing")
        self.tape.hold(key, size, row)
        if self.pins:
            self.pinned += pinned_bytes(size)
            self.tape.hold(("rounding", key), pinned_bytes(size) - int(size), "pinned rounding")
        self.tape.drop(("pageable", key))

    def keep_in_pieces(self, key: Hashable, size: int, row: str) -> None:
        """A tensor that models/hostinputs.py keeps, which pins whatever the settings say."""
        taken = sum(map(pinned_bytes, pieces(size)))
        self.tape.hold(key, size, row)
        self.tape.hold(("rounding", key), taken - size, "pinned rounding")
        self.pinned += taken


class _FlatHost(_Host):
    """Stages 1 and 2 with the optimizer on the host."""

    def __init__(self, plan: PlanInput):
        super().__init__(plan)
        self.flat = [flat_group(self.items, m, plan.world_size) for m in self.groups]

    def initialise(self) -> None:
        tape = self.tape
        for g, group in enumerate(self.flat):
            # The slice comes over in bf16, becomes fp32 in pageable memory, then a pinned copy of that.
            tape.hold("bf16", 2 * group.partition, "host copies in passing")
            tape.hold("fp32", self.layout.remainder * group.partition, "host copies in passing")
            tape.drop("bf16")
            tape.drop("fp32")
            self.pin(("master", g), self.layout.remainder * group.partition, "master, host")
            self.pin(("staging", g), 2 * group.partition, "weights, host staging")
        self.pin("offload", 2 * self.plan.largest_trained_elems, "offload buffer, host")
        for g, group in enumerate(self.flat):
            self.pin(("grads", g), self.layout.step_grad * group.partition, "gradients, host fp32")

    def backward(self) -> None:
        if self.plan.accumulation == 1 or self.zero.grad_bytes == 4:
            return  # one micro step needs no sum; fp32 sums stay on the GPU
        rank = heaviest_rank(self.items, self.flat, self.plan.world_size)
        for group in self.flat:
            for at, i in enumerate(group.members):
                if rank in group.owners(at, self.items[i].elems) and not self.tape.holds(("accumulated", i)):
                    self.pin(("accumulated", i), 2 * self.items[i].elems, "gradients, host accumulated")

    def step(self) -> None:
        for g, group in enumerate(self.flat):
            if not self.tape.holds(("moments", g)):
                self.tape.hold(("moments", g), self.plan.moment_bytes * group.partition, "moments, host")


class _SlicedHost(_Host):
    """Stage 3 with the optimizer, or the optimizer and the weights, on the host."""

    def __init__(self, plan: PlanInput):
        super().__init__(plan)
        world = plan.world_size
        self.local = [partition_size(p.elems, world) for p in self.items]
        self.subs = sub_groups(self.items, self.groups, world, self.zero.sub_group_elems)
        self.on_host = self.subs
        if self.zero.ratio < 1:
            self.on_host = self.subs[int((1 - self.zero.ratio) * len(self.subs)) :]
        if not self.zero.offload_optimizer:
            self.on_host = []

    def build(self) -> None:
        if self.plan.drawn:
            # models/build.py `_target`: fp32 slices wait on the host while values are drawn.
            for i, elems in enumerate(self.local):
                self.tape.hold(("drawn", i), 4 * elems, "weights, drawn in fp32")

    def load(self) -> None:
        self.tape.drop(*(("drawn", i) for i in range(len(self.local))))
        if self.zero.offload_param:
            # Every slice is pinned by itself first; torch keeps those blocks for later pinned requests.
            for i, elems in enumerate(self.local):
                self.pin(("slice", i), 2 * elems, "weights, host")

    def initialise(self) -> None:
        tape = self.tape
        if self.zero.offload_param:
            for g, members in enumerate(self.groups):
                self.pin(("weights", g), 2 * sum(self.local[i] for i in members), "weights, host", copied=False)
            if not self.pins:
                tape.drop(*(("slice", i) for i in range(len(self.local))))
        elif self.plan.device == "cuda":
            tape.touch(2 * sum(self.local), "host copies in passing")  # 'defragment' goes through the host
        for s, size in enumerate(self.on_host):
            tape.hold("converted", self.layout.remainder * size, "host copies in passing")
            tape.hold(("master", s), self.layout.remainder * size, "master, host")
            tape.drop("converted")
        if self.on_host:
            tape.hold("zeros", self.layout.step_grad * max(self.subs), "host copies in passing")
        for s, size in enumerate(self.on_host):
            self.pin(("sub grad", s), self.layout.step_grad * size, "gradients, host fp32")
        tape.drop("zeros")
        if self.zero.offload_optimizer:
            self.pin("flat grads", self.zero.grad_bytes * sum(self.subs), "gradients, host flat")

    def backward(self) -> None:
        pass

    def step(self) -> None:
        for s, size in enumerate(self.on_host):
            if not self.tape.holds(("moments", s)):
                self.tape.hold(("moments", s), self.plan.moment_bytes * size, "moments, host")
            if not self.zero.offload_param and self.plan.device == "cuda":
                # fp32 on the host -> bf16 on the GPU: torch converts on the host first (ATen Copy.cu).
                self.tape.touch(2 * size, "host copies in passing")


def host_tape(plan: PlanInput) -> Tape:
    """The host's tape of one rank."""
    return _simulate(plan).tape


def page_locked_bytes(plan: PlanInput) -> int:
    """Pinned memory of one rank, rounding included: what must be lockable."""
    return _simulate(plan).pinned


def _simulate(plan: PlanInput) -> _Host:
    zero = plan.deepspeed_settings
    host: _Host
    if zero.stage == 3 and (zero.offload_optimizer or zero.offload_param):
        host = _SlicedHost(plan)
    elif zero.offload_optimizer:
        host = _FlatHost(plan)
    else:
        host = _Host(plan)
    tape = host.tape
    tape.phase("build")
    at_start = process_start_bytes(plan.device, plan.ranks_per_node)
    tape.hold("process", at_start, "process")
    if isinstance(host, _SlicedHost):
        host.build()
    if plan.drawn_on_host:
        tape.hold("drawn", 4 * plan.parameters.elems, "weights, drawn in fp32")
    tape.phase("load")
    tape.drop("drawn")
    if isinstance(host, _SlicedHost):
        host.load()
    tape.touch(READ_BUFFER_BYTES, "read buffer")
    tape.phase("start-up")
    if isinstance(host, _FlatHost | _SlicedHost):
        host.initialise()
    elif zero.stage == 3 and plan.device == "cuda":
        local = sum(partition_size(p.elems, plan.world_size) for p in plan.parameters.items)
        tape.touch(2 * local, "host copies in passing")
    if plan.leaving:
        tape.touch(4 * plan.trained_elems, "host copies in passing")  # the weights and their flat copy
    if plan.streams:
        # Mapped and registered, not from the caching allocator: no rounding. From the first step on.
        size = streamed.host_bytes(plan)
        tape.hold("streamed", size, "optimizer state, host")
        tape.hold("leaving", plan.leaving_bytes, "gradients, host")
        host.pinned += int(size) + plan.leaving_bytes if host.pins else 0
    if plan.offloads_inputs:
        for block in range(plan.recomputed_blocks):
            # As autograd saves them, one block at a time; torch keeps the memory for the next step.
            host.keep_in_pieces(("input", block), 2 * plan.tokens * plan.geometry.hidden, "checkpoints, host")
        for block, sizes in enumerate(plan.of_attention):
            for number, size in enumerate(sizes):
                host.keep_in_pieces(("result", block, number), size, "attention results, host")
    tape.phase("first forward")
    tape.hold("kernels", process_bytes(plan.device, plan.ranks_per_node) - at_start, "process")
    for _ in range(2):
        if isinstance(host, _FlatHost | _SlicedHost):
            tape.phase("backward")
            host.backward()
            tape.phase("optimizer step")
            host.step()
    tape.phase("checkpoint save")
    tape.touch(SAVE_BUFFER_BYTES, "save buffer")
    tape.phase("export")
    tape.touch(2 * plan.parameters.largest_elems, "export, one whole parameter")
    return host
