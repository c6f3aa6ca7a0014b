"""ZeRO-3 on the GPU: slices, the window of gathered weights, the gradient partitions, the step by sub-groups.

Follows deepspeed 0.19.8 runtime/zero/stage3.py, partition_parameters.py and partitioned_param_coordinator.py.
"""

from __future__ import annotations

from bigtrain.plan.constants import MALLOC_MMAP_BYTES, WINDOW_BYTES
from bigtrain.plan.flat import slice_elems, split_groups, sub_groups
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.streamed import hold_buffers
from bigtrain.plan.tape import Tape
from bigtrain.plan.zero_flat import GATHER_ELEMS, update_temporaries

# 'reduce_and_partition' keeps at most this many buckets in flight ('max_param_reduce_events').
_REDUCES_IN_FLIGHT = 1
# '_constant_buffered_norm2' works through 250e6 elements at a time.
_NORM_CHUNK_ELEMS = 250_000_000


class SlicedSharding:
    """Device memory of one rank under stage 3."""

    def __init__(self, plan: PlanInput, tape: Tape):
        self.plan, self.tape, self.zero = plan, tape, plan.told
        self.items, self.layout, self.world = plan.parameters.items, plan.device_layout, plan.world_size
        self.local = [slice_elems(p.elems, self.world) for p in self.items]
        self.total = sum(self.local)
        self.gathered = sum(p.elems for p in self.items if p.elems > self.zero.persistence_elems)
        groups = split_groups(self.items, plan.decay_groups, plan.trains)
        self.subs = sub_groups(self.items, groups, self.world, self.zero.sub_group_elems)
        self.on_gpu = [] if self.zero.offload_optimizer else self.subs
        if self.zero.offload_optimizer and self.zero.ratio < 1:
            self.on_gpu = self.subs[: int((1 - self.zero.ratio) * len(self.subs))]
        self.bucket: list[int] = []
        self.filled = 0
        self.steady, self.staying = False, 0
        self.block_elems, self.reuse = self._reuse_distances()
        # 'reduce_and_partition_stream' and the coordinator's '__allgather_stream'.
        self.side, self.gather = (1, 2) if self.zero.overlap_comm else (0, 0)

    def _reuse_distances(self) -> tuple[dict[str, int], dict[str, int]]:
        """Elements of every block that are gathered, and how many elements pass from its forward to its backward.

        '__params_to_release' walks the recorded trace: the blocks above, the head twice, then every block above again,
        twice where they are recomputed (recompute and backward), once where not.
        """
        limit, sizes = self.zero.persistence_elems, dict[str, int]()
        for p in self.items:
            if p.block is not None and p.elems > limit:
                sizes[str(p.block)] = sizes.get(str(p.block), 0) + p.elems
        head = max((p.elems for p in self.items if p.block is None and len(p.shape) == 2), default=0)
        recomputed = set(
            list(dict.fromkeys(str(p.block) for p in self.items if p.block is not None))[: self.plan.recomputed_blocks]
        )
        passed, distances = 0, dict[str, int]()
        for block, size in reversed(sizes.items()):
            distances[block] = passed + 2 * head
            passed += (3 if block in recomputed else 2) * size
        return sizes, distances

    # Start-up.

    def build(self) -> None:
        if self.plan.drawn:
            return self._draw()
        for i, p in enumerate(self.items):
            self.tape.hold("whole", 2 * p.elems, "weights, one whole parameter")
            if not self.zero.offload_param:
                self.tape.hold(("built", i), 2 * self.local[i], "weights before flattening")
            self.tape.drop("whole")

    def _draw(self) -> None:
        """models/window.py: whole fp32 parameters up to a limit, fp32 slices of the others; rounded when all are there."""
        tape, here = self.tape, not (self.zero.offload_optimizer or self.zero.offload_param)
        whole: list[int] = []
        for i, p in enumerate(self.items):
            tape.hold(("whole", i), 4 * p.elems, "weights, drawn in fp32")
            whole.append(i)
            while len(whole) > 1 and sum(4 * self.items[k].elems for k in whole) > WINDOW_BYTES:
                self._cut(whole.pop(0), here)
        for i in whole:
            self._cut(i, here)
        for i, local in enumerate(self.local):
            if not self.zero.offload_param:
                tape.hold(("built", i), 2 * local, "weights before flattening")
            tape.drop(("drawn", i))

    def _cut(self, i: int, here: bool) -> None:
        if here:
            self.tape.hold(("drawn", i), 4 * self.local[i], "weights, drawn in fp32")
        self.tape.drop(("whole", i))

    def initialise(self) -> None:
        tape = self.tape
        # 'defragment' goes through the host: the slices are gone before the flat buffer is there.
        tape.drop(*(("built", i) for i in range(len(self.items))))
        tape.empty_cache()
        if not self.zero.offload_param:
            tape.hold("slices", 2 * self.total, "weights, bf16")
        for s, size in enumerate(self.on_gpu):
            tape.touch(self.layout.remainder * size, "master, conversion copy")
            tape.hold(("master", s), self.layout.remainder * size, "master")
            if self.zero.offload_optimizer:
                tape.hold(("sub grad", s), 4 * size, "gradients, fp32 for the step")
        if not self.zero.offload_optimizer:
            tape.touch(self.layout.step_grad * max(self.subs), "gradient, zeros at start-up")
        bucket = self.zero.reduce_bucket_elems
        if self.plan.device == "cpu":  # pages that nothing was written to take no memory
            bucket = min(bucket, self.plan.trained_elems)
        tape.hold("bucket", 2 * bucket, "reduce buckets")
        hold_buffers(self.plan, tape)
        if not self.zero.offload_optimizer:
            tape.hold("grads", self.zero.grad_bytes * sum(self.subs), "gradients, kept")
        if self.world > 1:
            persistent = sum(p.elems for p in self.items if p.elems <= self.zero.persistence_elems)
            tape.hold("persistent", 2 * persistent, "weights, persistent")
            tape.touch(2 * self.plan.parameters.largest_elems, "weights, one whole parameter")

    # The window.

    def fetch(self, key: str, members: list[int], *, backward: bool, steady: bool) -> None:
        """Gather the weights of a block: one module at a time in forward, all of them until its backward is done.

        With one rank a gather is a view of the slice and costs nothing, unless the slice lives on the host.
        """
        if self.world == 1 and not self.zero.offload_param:
            return
        whole = [p.elems for p in (self.items[i] for i in members) if p.elems > self.zero.persistence_elems]
        if not whole:
            return
        self.steady = steady
        self.tape.drop(
            ("stays", key[1:]), *(("hole", key[1:], i) for i in members)
        )  # what forward left in place is what backward needs
        row = "weights, gathered" if self.world > 1 else "weights, copied to the GPU"
        size = sum(whole) if backward else max(whole)
        self.tape.hold(("window", key), 2 * size, row, self.gather)
        self._gloo(max(whole))
        if steady:
            # A prefetched bucket is gathered flat and copied apart: twice its size while the handle lives.
            live = sum(whole) + self.staying
            ahead = max(0, min(self.zero.prefetch_elems, self.zero.max_live_elems - live, self.gathered - live))
            self.tape.hold(("ahead", key), (4 if self.world > 1 else 2) * ahead, row, self.gather)

    def _holes(self, block: str) -> None:
        """On CPUs weights are gathered flat and copied apart one after the other in malloc's heap: where the flat buffer was,
        a hole as large stays beside each weight that is kept. Measured: plan_host.md; gone with a fixed mmap threshold."""
        if self.plan.device != "cpu" or self.world == 1:
            return
        for i, p in enumerate(self.items):
            if str(p.block) == block and self.zero.persistence_elems < p.elems < MALLOC_MMAP_BYTES // 2:
                self.tape.hold(("hole", block, i), 2 * p.elems, "holes in the heap")

    def _gloo(self, elems: int) -> None:
        """On CPUs gloo gathers into, and reduces in, a buffer of its own (torch ProcessGroupGloo.cpp; measured)."""
        if self.plan.device == "cpu" and self.world > 1:
            self.tape.touch(2 * elems, "collective's own copy")

    def release(self, key: str) -> None:
        """After a module: its weights go, unless the recorded trace needs them again within the reuse distance."""
        self.tape.drop(("window", key), ("ahead", key))
        block = key[1:]
        if key[0] == "f" and self.steady and self.reuse.get(block, self.zero.max_reuse_elems) < self.zero.max_reuse_elems:
            row = "weights, gathered" if self.world > 1 else "weights, copied to the GPU"
            self.tape.hold(("stays", block), 2 * self.block_elems[block], row, self.gather)
            self._holes(block)
            self.staying += self.block_elems[block]
        elif key[0] == "b" and self.reuse.get(block, self.zero.max_reuse_elems) < self.zero.max_reuse_elems:
            self.staying = max(0, self.staying - self.block_elems[block])

    # Backward.

    def start_backward(self, micro: int, last: bool) -> None:
        self.micro, self.last = micro, last

    def grad(self, i: int) -> None:
        elems = self.items[i].elems
        self.tape.hold(("fresh", i), 2 * elems, "gradients, fresh from autograd")
        if self.filled + elems > self.zero.reduce_bucket_elems:
            self._flush()
        if elems > self.zero.reduce_bucket_elems:
            self.tape.drop(("fresh", i))
            self.tape.hold(("large", i), 2 * elems, "gradients, larger than the bucket")
        else:
            self.tape.drop(("fresh", i))
        self.bucket.append(i)
        self.filled += elems

    def _flush(self) -> None:
        if not self.bucket:
            return
        single = len(self.bucket) == 1 and self.items[self.bucket[0]].elems % self.world == 0
        if not single:
            self.tape.hold("reduce", 2 * self.filled * _REDUCES_IN_FLIGHT, "reduce copy", self.side)
        self._gloo(self.filled)
        if self.zero.offload_optimizer:
            for i in self.bucket:
                self._offload_slice(i)
        self.tape.drop("reduce", *(("large", i) for i in self.bucket))
        self.bucket, self.filled = [], 0

    def _offload_slice(self, i: int) -> None:
        # The slice goes to the host buffer and comes back ('grad_buffer.to'), for the norm and the fp32 cast.
        size = self.local[i]
        self.tape.hold("slice", 2 * size, "gradient, fp32 slice", self.side)
        if self.last:
            self.tape.touch(8 * min(size, _NORM_CHUNK_ELEMS), "gradient norm in fp64", self.side)
            self.tape.touch(4 * size, "gradient, fp32 slice", self.side)
        self.tape.drop("slice")

    def end_backward(self) -> None:
        self._flush()

    # Step.

    def step(self, first: bool) -> None:
        self.tape.phase("norm")
        if not self.zero.offload_optimizer:
            largest = slice_elems(self.plan.largest_trained_elems, self.world)
            self.tape.touch(8 * largest, "gradient norm in fp64")
        self.tape.phase("optimizer step")
        for s, size in enumerate(self.on_gpu):
            if not self.layout.flat_step:
                self.tape.touch(2 * min(size, GATHER_ELEMS), "gradients, flat for the step")
            elif not self.zero.offload_optimizer:
                self.tape.hold("flat grad", self.zero.grad_bytes * size, "gradients, flat for the step")
                if self.layout.step_grad != self.zero.grad_bytes:
                    self.tape.hold("cast", self.layout.step_grad * size, "gradients, fp32 for the step")
                    self.tape.drop("flat grad")
            if first:
                self.tape.hold(("moments", s), self.plan.moment_bytes * size, "moments")
            update_temporaries(self.plan, self.tape, size)
            self.tape.drop("cast", "flat grad")

    def all_gather(self) -> None:
        pass

    def export(self) -> None:
        if self.world > 1 or self.zero.offload_param:
            self.tape.touch(2 * self.plan.parameters.largest_elems, "export, one whole parameter")
