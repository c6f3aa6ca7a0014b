"""ZeRO-3 on the GPU: slices, the window of gathered weights, the gradient partitions, the step by sub-groups.

Follows deepspeed 0.19.8 runtime/zero/stage3.py, partition_parameters.py and partitioned_param_coordinator.py.
"""

from __future__ import annotations

from collections import Counter, deque

from bigtrain.partition import partition_size
from bigtrain.plan.constants import WINDOW_BYTES
from bigtrain.plan.gathered import Gathered, Recording, Visit
from bigtrain.plan.groups import split_groups, sub_groups
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.leafs import leafs_of_plan
from bigtrain.plan.states import LAYOUTS
from bigtrain.plan.streamed import Update
from bigtrain.plan.tape import Tape
from bigtrain.plan.zero_flat import chunk_of_gradients, hold_moments, hold_own_state

# 'reduce_and_partition' keeps at most this many buckets in flight ('max_param_reduce_events').
_REDUCES_IN_FLIGHT = 1
# '_constant_buffered_norm2' works through 250e6 elements at a time.
_NORM_CHUNK_ELEMS = 250_000_000
# What the device is behind the host, which nothing makes wait but gathers: so many blocks, and elements. Read off what one run reserved
# beyond what it had allocated (8B, four H200, fixed segments: 32.05 and 26.42e9 B). At its limit the allocator waits for the device.
BLOCKS_BEHIND, ELEMS_BEHIND = 6, 1_400_000_000


class SlicedSharding:
    """Device memory of one rank under stage 3."""

    def __init__(self, plan: PlanInput, tape: Tape):
        self.plan, self.tape, self.zero = plan, tape, plan.deepspeed_settings
        self.items, self.layout, self.world = plan.parameters.items, plan.device_layout, plan.world_size
        self.local, self.subs = plan.parameters.fact(
            ("slices", plan.decay_groups, plan.frozen, self.world, self.zero.sub_group_elems), self._slices
        )
        self.total = sum(self.local)
        self.own = LAYOUTS[plan.optimizer].own_offload  # it makes its state itself, in the first update
        self.on_gpu = [] if self.zero.offload_optimizer else self.subs
        if self.zero.offload_optimizer and self.zero.ratio < 1:
            self.on_gpu = self.subs[: int((1 - self.zero.ratio) * len(self.subs))]
        self.bucket: list[int] = []
        self.filled = 0
        self.written = 0  # of the bucket so far, on CPUs
        self.streamed = Update(plan, tape) if plan.streams else None
        self.steady = False
        self.steps = self.visit = 0  # steady micro steps so far, and visits of this one
        self.lent: deque[list[int]] = deque()
        self.lent_elems = 0
        self.unused: list[list[int]] = []  # gathered together ahead, none of them used so far
        self.leafs = leafs_of_plan(plan)
        trained = [i for i in self.leafs if plan.trains[i]]
        self.to_come = Counter(self.leafs[i] for i in trained)  # gradients of each leaf module in its backward
        self.waiting: dict[str, list[int]] = {}
        # 'reduce_and_partition_stream' and the coordinator's '__allgather_stream'.
        self.side, self.gather = (1, 2) if self.zero.overlap_comm else (0, 0)

    def _slices(self) -> tuple[list[int], list[int]]:
        """Elements of each parameter, and of each sub-group, on one rank."""
        groups = split_groups(self.items, self.plan.decay_groups, self.plan.trains)
        local = [partition_size(p.elems, self.world) for p in self.items]
        return local, sub_groups(self.items, groups, self.world, self.zero.sub_group_elems)

    def learn(self, visits: list[Visit], recomputed: frozenset[str]) -> None:
        """The order in which a step comes to blocks and other parts."""
        zero, head = self.zero, any(key == "head" and members for key, members in visits)
        limits = zero.persistence_elems, zero.prefetch_elems, zero.max_live_elems, zero.max_reuse_elems
        named = zero.leaf_classes, zero.leaf_names, zero.leaf_suffixes, bool(self.plan.mlp_tile_tokens)
        self.trace = self.plan.parameters.fact(
            ("gathered", recomputed, head, limits, named),
            lambda: Recording(Gathered(self.items, visits, recomputed, zero, self.leafs)),
        )

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
            if not self.own:
                tape.touch(self.layout.remainder * size, "master, conversion copy")
                tape.hold(("master", s), self.layout.remainder * size, "master")
            if self.zero.offload_optimizer:
                tape.hold(("sub grad", s), 4 * size, "gradients, fp32 for the step")
        if not self.zero.offload_optimizer:
            tape.touch(self.layout.step_grad * max(self.subs), "gradient, zeros at start-up")
        if self.plan.device != "cpu":  # there pages that nothing was written to take no memory: see `grad`
            tape.hold("bucket", 2 * self.zero.reduce_bucket_elems, "reduce buckets")
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
        self.steady = steady
        if steady:
            return self._fetch_by_trace(members)
        whole = [i for i in members if self.items[i].elems > self.zero.persistence_elems]
        if whole:
            together = Counter[str | int]()  # elements of each module
            for i in whole:
                together[self.leafs.get(i, i)] += self.items[i].elems
            most = max(together.values())
            self.tape.hold(("window", key), 2 * (together.total() if backward else most), self._row(), self.gather)
            if self.leafs and self.world > 1:
                self.tape.touch(2 * most, self._row(), self.gather)  # gathered flat, and copied apart
            self._gloo(max(self.items[i].elems for i in whole))

    def _row(self) -> str:
        return "weights, gathered" if self.world > 1 else "weights, copied to the GPU"

    def _fetch_by_trace(self, members: list[int]) -> None:
        row = self._row()
        for group in self.trace.micro_step(self.steps)[self.visit].gathered:
            for i in group:
                self.tape.hold(("whole", i), 2 * self.local[i] * self.world, row, self.gather)
            self._gloo(max(self.items[i].elems for i in group))
            if len(group) > 1 and self.world > 1:
                self.unused.append(group)
        for group in [g for g in self.unused if any(i in members for i in g)]:
            # Gathered flat, and copied apart when the first of them is needed ('AllGatherCoalescedHandle.wait').
            self.tape.touch(2 * sum(self.local[i] * self.world for i in group), row, self.gather)
            self.unused.remove(group)

    def _lend(self, params: list[int]) -> None:
        """Compute still reads what the host releases ('free_param': record_stream); it is some blocks behind."""
        self.tape.lend(*(("whole", i) for i in params))
        self.lent.append(params)
        self.lent_elems += sum(self.items[i].elems for i in params)
        while len(self.lent) > BLOCKS_BEHIND or self.lent_elems > ELEMS_BEHIND:
            back = self.lent.popleft()
            self.lent_elems -= sum(self.items[i].elems for i in back)
            self.tape.returned(*(("whole", i) for i in back))

    def _gloo(self, elems: int) -> None:
        """On CPUs gloo gathers into, and reduces in, a buffer of its own (torch ProcessGroupGloo.cpp; measured)."""
        if self.plan.device == "cpu" and self.world > 1:
            self.tape.touch(2 * elems, "collective's own copy")

    def release(self, key: str) -> None:
        """After a module: its weights go, unless the recorded trace needs them again within the reuse distance."""
        if self.world == 1 and not self.zero.offload_param:
            return
        if not self.steady:
            return self.tape.drop(("window", key))
        stop = self.trace.micro_step(self.steps)[self.visit]
        self.visit += 1
        self._lend(stop.released)

    # Backward.

    def start_backward(self, micro: int, last: bool) -> None:
        self.micro, self.last = micro, last

    def grad(self, i: int) -> None:
        """Of a leaf module all wait for the last ('reduce_leaf_module_grads')."""
        self.tape.hold(("fresh", i), 2 * self.items[i].elems, "gradients, fresh from autograd")
        if i not in self.leafs:
            return self._reduce(i)
        waiting = self.waiting.setdefault(self.leafs[i], [])
        waiting.append(i)
        if len(waiting) == self.to_come[self.leafs[i]]:
            for ready in sorted(waiting):
                self._reduce(ready)
            waiting.clear()

    def _reduce(self, i: int) -> None:
        elems = self.items[i].elems
        if self.filled + elems > self.zero.reduce_bucket_elems:
            self._flush()
        more = min(self.filled + elems, self.zero.reduce_bucket_elems) - self.written
        if self.plan.device == "cpu" and more > 0:
            self.tape.hold(("written", self.written), 2 * more, "reduce buckets")
            self.written += more
        self.tape.drop(("fresh", i))
        if elems > self.zero.reduce_bucket_elems:
            self.tape.hold(("large", i), 2 * elems, "gradients, larger than the bucket")
        self.bucket.append(i)
        self.filled += elems

    def _flush(self) -> None:
        if not self.bucket:
            return
        single = len(self.bucket) == 1 and self.items[self.bucket[0]].elems % self.world == 0
        if not single:
            self.tape.hold("reduce", 2 * self.filled * _REDUCES_IN_FLIGHT, "reduce copy", self.side)
        self._gloo(self.filled)
        if self.zero.grad_bytes == 4:  # reduced in bf16, then cast ('__avg_scatter_grads')
            self.tape.hold("summands", 4 * sum(self.local[i] for i in self.bucket), "gradient, fp32 slice", self.side)
        if self.zero.offload_optimizer:
            for i in self.bucket:
                self._offload_slice(i)
        self.tape.drop("reduce", "summands", *(("large", i) for i in self.bucket))
        self.bucket, self.filled = [], 0

    def _offload_slice(self, i: int) -> None:
        # The slice goes to the host buffer and comes back ('grad_buffer.to'), for the norm and the fp32 cast.
        size, kept = self.local[i], self.zero.grad_bytes
        self.tape.hold("slice", kept * size, "gradient, fp32 slice", self.side)
        if self.last:
            self.tape.touch(8 * min(size, _NORM_CHUNK_ELEMS), "gradient norm in fp64", self.side)
            self.tape.touch(4 * size if kept == 2 else 0, "gradient, fp32 slice", self.side)
        self.tape.drop("slice")

    def end_backward(self) -> None:
        self._flush()
        if self.steady:
            self.steps, self.visit = self.steps + 1, 0
            self.tape.returned(*(("whole", i) for lent in self.lent for i in lent))  # the reduction is waited for
            self.lent.clear()
            self.lent_elems = 0

    # Step.

    def step(self, first: bool) -> None:
        self.tape.phase("norm")
        if not self.zero.offload_optimizer:
            largest = partition_size(self.plan.largest_trained_elems, self.world)
            self.tape.touch(8 * largest, "gradient norm in fp64")
        self.tape.phase("optimizer step")
        if self.streamed is not None:
            self.streamed.run([], apart=False)  # 'averaged_gradients' are views of one buffer that stays
        for s, size in enumerate(self.on_gpu):
            if self.layout.flat_step and not self.zero.offload_optimizer:
                self.tape.hold("flat grad", self.zero.grad_bytes * size, "gradients, flat for the step")
                if self.layout.step_grad != self.zero.grad_bytes:
                    self.tape.hold("cast", self.layout.step_grad * size, "gradients, fp32 for the step")
                    self.tape.drop("flat grad")
            if first and self.own:
                hold_own_state(self.layout, self.tape, s, size)
            elif first:
                hold_moments(self.tape, s, self.plan.moment_bytes * size)
            if not self.layout.flat_step and not self.zero.offload_optimizer:
                chunk_of_gradients(self.plan, self.tape, size, apart=False)  # views of one buffer, in its order
            self.tape.drop("cast", "flat grad")

    def all_gather(self) -> None:
        pass

    def export(self) -> None:
        if self.world > 1 or self.zero.offload_param:
            self.tape.touch(2 * self.plan.parameters.largest_elems, "export, one whole parameter")
