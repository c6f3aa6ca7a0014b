"""Optimizer state that the optimizer itself keeps on the host and streams through the GPU (bigtrain/optim/stream.py)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence

from bigtrain.partition import partition_size
from bigtrain.plan.constants import GATHER_ELEMS, GRADIENT_AREAS, STATE_CHUNK_BYTES
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.states import LAYOUTS
from bigtrain.plan.tape import Tape

# Both directions of the bus at once move less than each alone: 44 of 53 GB/s measured on an H100 (PCIe gen5).
BOTH_WAYS = 0.83
# Ranks of one host share what its memory gives. H200, state of adamw_split_8bit, GB/s each way: one rank 50; two at once 36 up and 49 down, four 31
# (0.43 s where one rank's bytes took 0.27; docs/performance.md).
SHARED_HOST = 0.65
# Streams of the tape: 0 is forward's and backward's, 1 and 2 are DeepSpeed's.
UPDATE_STREAM = 3
# While the host asks for a block's forward the bus brings about so many chunks up and down (9 ms at 3 ms each). Read off what one
# run reserved beyond what it had allocated (8B, 80 buffers, nothing recomputed, H200, fixed segments: 112.2 and 101.8e9 B).
CHUNKS_A_BLOCK = 3.0
# Chunks in flight beside those that came up early.
IN_FLIGHT = 4
# Tensors of one chunk's state: low bits, two moments, their scales.
MOST_PARTS = 5


def bytes_per_elem(plan: PlanInput) -> float:
    """Of state: the 16 missing bits of the weight, and the moments."""
    layout = LAYOUTS[plan.optimizer]
    return layout.remainder + layout.moments


def chunk_elems(plan: PlanInput) -> float:
    """Elements whose state is one chunk."""
    return min(GATHER_ELEMS, STATE_CHUNK_BYTES / bytes_per_elem(plan))


class Update:
    """What an update that streams its state does to the GPU's tape.

    Buffers are made one by one by the first update, so they lie where backward has left room. Gradients are read on the
    update's own stream: whoever asks for their memory gets it when that stream has passed them (`record_stream`), and forward runs
    far ahead of it.
    """

    def __init__(self, plan: PlanInput, tape: Tape):
        self.plan, self.tape = plan, tape
        self.chunk, self.chunks, self.buffers = chunk_elems(plan), chunks(plan), buffers_used(plan)
        self.lent: deque[tuple[float, Hashable]] = deque()  # at which chunk each comes back, and its key
        self.passed = 0.0
        self.made = 0

    def run(self, grads: Sequence[tuple[Hashable, int]], *, apart: bool) -> None:
        """One update.

        Args:
            grads: keys that the tape holds gradients by, and elements, in the order of the update.
            apart: they do not follow each other in memory, so those of one chunk are copied together.
        """
        self.everything_passed()
        # What came up during backward is updated at once.
        self.passed = min(self.buffers, 2 * CHUNKS_A_BLOCK * self.plan.block_count)
        grads, at, done = list(grads), 0, 0
        for number in range(self.chunks):
            self._make_buffer(number)
            if apart:
                self.tape.touch(2 * self.chunk, "optimizer state, on its way", UPDATE_STREAM)
            done += self.chunk  # type: ignore[assignment]
            while grads and at + grads[0][1] <= done:
                key, elems = grads.pop(0)
                at += elems
                self._lend(number, key)
        for key, _ in grads:
            self._lend(self.chunks, key)

    def _make_buffer(self, number: int) -> None:
        if number < self.made or number >= self.buffers:
            return
        self.made += 1
        for part, size in enumerate(LAYOUTS[self.plan.optimizer].parts):
            self.tape.hold(("streamed", number, part), size * self.chunk, "optimizer state, on its way")
        room = min(2 * self.chunk, self.plan.leaving_bytes - 2 * number * self.chunk)
        if number < GRADIENT_AREAS and room > 0:
            self.tape.hold(("returning", number), room, "gradients, on their way")

    def _lend(self, chunk: float, key: Hashable) -> None:
        self.tape.lend(key)
        self.lent.append((chunk, key))

    def block_asked_for(self, times: float = 1.0) -> None:
        """The host has asked for all of a block's forward (`times` it, for a backward): the update went on meanwhile."""
        self.passed += times * CHUNKS_A_BLOCK
        while self.lent and self.lent[0][0] < self.passed:
            self.tape.returned(self.lent.popleft()[1])

    def everything_passed(self) -> None:
        """The host has waited for the device: it reads the gradients' norm at each step."""
        self.tape.returned(*(key for _, key in self.lent))
        self.lent.clear()


def host_bytes(plan: PlanInput) -> float:
    """Page-locked memory of one rank, of exactly the size of its state; what stays on the GPU has its place there too."""
    return bytes_per_elem(plan) * partition_size(plan.trained_elems, plan.world_size)


def chunks(plan: PlanInput) -> int:
    """Of one rank's state, without what stays on the GPU."""
    return math.ceil(plan.settings.ratio * partition_size(plan.trained_elems, plan.world_size) / chunk_elems(plan))


def buffers_used(plan: PlanInput) -> int:
    """Buffers are made as they are needed: never more than there are chunks."""
    return min(plan.settings.buffers, chunks(plan))


def early_bytes(plan: PlanInput, h2d_bytes_s: float, backward_s: float) -> float:
    """What comes up during a step's last backward already: as much as there are buffers for, and as it has time for."""
    return min(buffers_used(plan) * chunk_elems(plan) * bytes_per_elem(plan), backward_s * h2d_bytes_s * _share(plan))


def seconds(plan: PlanInput, h2d_bytes_s: float, d2h_bytes_s: float, forward_s: float, backward_s: float = math.inf) -> float:
    """What one step's traffic adds to it: up and down at once, less what came up early.

    Stages 1 and 2 hide it behind the next forward, which takes `forward_s`; at stage 3 the step waits for it. What ranks give each
    other is counted as where the state is on the card: beside forward it still takes the card's time.
    """
    early = early_bytes(plan, h2d_bytes_s, backward_s)
    moved = max(0.0, update_bytes(plan) - early) / _both_ways(plan, h2d_bytes_s, d2h_bytes_s)
    return max(0.0, moved - _hiding_s(plan, forward_s))


def _both_ways(plan: PlanInput, h2d_bytes_s: float, d2h_bytes_s: float) -> float:
    """Bytes a second and direction of one rank, both directions at once."""
    return BOTH_WAYS * min(h2d_bytes_s, d2h_bytes_s) * _share(plan)


def _share(plan: PlanInput) -> float:
    return SHARED_HOST if plan.ranks_per_node > 1 else 1.0


def _hiding_s(plan: PlanInput, forward_s: float) -> float:
    """Partitions follow each other in the order of the model: the first rank's is needed whole when its share of forward is done."""
    return forward_s / plan.world_size if plan.settings.stage in (1, 2) else 0.0


def update_bytes(plan: PlanInput) -> float:
    """What comes up the bus for one update: state, and the gradients that left."""
    return plan.settings.ratio * host_bytes(plan) + plan.leaving_bytes


def leaving_s(plan: PlanInput, h2d_bytes_s: float, d2h_bytes_s: float, backward_s: float) -> float:
    """What gradients that leave add to one step's backwards, which take `backward_s` each: they go down beside it.

    From the second micro batch on the sums so far come up at the same time.
    """
    down = plan.leaving_bytes / d2h_bytes_s  # of one rank, as leaving gradients are
    both = plan.leaving_bytes / _both_ways(plan, h2d_bytes_s, d2h_bytes_s)
    return max(0.0, down - backward_s) + (plan.accumulation - 1) * max(0.0, both - backward_s)


def buffers_that_help(plan: PlanInput, h2d_bytes_s: float, d2h_bytes_s: float, forward_s: float) -> int:
    """The least number of buffers with which the traffic costs no time, as `seconds` counts it."""
    hidden = _hiding_s(plan, forward_s) * _both_ways(plan, h2d_bytes_s, d2h_bytes_s)
    early = max(0.0, update_bytes(plan) - hidden)
    return min(chunks(plan), math.ceil(early / (chunk_elems(plan) * bytes_per_elem(plan))) + IN_FLIGHT)
