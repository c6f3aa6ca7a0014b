"""ZeRO-1 and ZeRO-2 on the GPU: flat groups, gradient buckets, the partition's gradients, the step.

Follows deepspeed 0.19.8 runtime/zero/stage_1_and_2.py in the order in which it allocates. Names in quotes in the
comments are its functions and attributes.
"""

from __future__ import annotations

from collections.abc import Iterable

from bigtrain.plan.constants import CPU_CHUNK_ELEMS, GATHER_ELEMS, GRADIENTS_IN_FLIGHT_BYTES
from bigtrain.plan.gathered import Visit
from bigtrain.plan.groups import FlatGroup, flat_group, heaviest_rank, split_groups
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.states import LAYOUTS, StateLayout
from bigtrain.plan.streamed import Update
from bigtrain.plan.tape import Tape


def build_whole(plan: PlanInput, tape: Tape) -> None:
    """Stages 0 to 2: every parameter whole, as ("built", i). Drawn ones are fp32 until all are there, then rounded in turn.

    Source: models/build.py `_build_fresh`, `_allocate`.
    """
    rows = ["weights before flattening" if trains else "weights, frozen" for trains in plan.trains]
    sizes = [p.elems for p in plan.parameters.items]
    if plan.drawn and not plan.drawn_on_host:
        for i, elems in enumerate(sizes):
            tape.hold(("drawn", i), 4 * elems, "weights, drawn in fp32")
    for i, elems in enumerate(sizes):
        if plan.drawn_on_host:
            tape.touch(4 * elems, "weights, drawn in fp32")
        tape.hold(("built", i), 2 * elems, rows[i])
        tape.drop(("drawn", i))


def chunk_of_gradients(plan: PlanInput, tape: Tape, elems: int, *, apart: bool) -> None:
    """Gradients that the update takes as they are: what one chunk needs in passing.

    Args:
        elems: of the partition.
        apart: they do not follow each other in memory, so those of one chunk are copied together.
    """
    step_grad, grad_bytes = plan.device_layout.step_grad, plan.deepspeed_settings.grad_bytes
    chunk = min(elems, CPU_CHUNK_ELEMS if plan.device == "cpu" and step_grad == 4 else GATHER_ELEMS)
    if apart and not plan.streams:
        tape.hold("joined", grad_bytes * chunk, "gradients, flat for the step")
    if step_grad > grad_bytes:
        tape.hold("cast", step_grad * chunk, "gradients, fp32 for the step")
    tape.drop("joined")
    update_temporaries(plan, tape, chunk)
    tape.drop("cast")


def update_temporaries(plan: PlanInput, tape: Tape, elems: int) -> None:
    """What torch's AdamW makes on a CPU, where it has no fused kernel in use: sqrt(v), and that divided, of what it updates at once.

    Source: torch/optim/adam.py `_single_tensor_adam`: `(exp_avg_sq.sqrt() / bias_correction2_sqrt).add_(eps)`.
    """
    if plan.device == "cpu" and plan.optimizer == "adamw":
        tape.touch(8 * elems, "update in passing")


def gather_groups(plan: PlanInput, tape: Tape, groups: Iterable[FlatGroup]) -> None:
    """What gloo holds on CPUs for the weights after a step (all_gather_into_tensor_dp_groups), a group at once."""
    if plan.device == "cpu" and plan.world_size > 1:
        for group in groups:
            tape.touch(2 * group.padded, "collective's own copy")


def hold_moments(tape: Tape, group: int, size: float) -> None:
    """Two tensors: one of them fits where both do not."""
    for moment in (1, 2):
        tape.hold(("moments", group, moment), size / 2, "moments")


def hold_own_state(layout: StateLayout, tape: Tape, group: int, elems: int) -> None:
    """What an optimizer that makes its state itself makes in its first update, tensor by tensor (optim/split.py `new_state`)."""
    remainder, *moments = layout.parts
    tape.hold(("master", group), remainder * elems, "master")
    for number, size in enumerate(moments):
        tape.hold(("moments", group, number), size * elems, "moments")


class _Owners:
    """Who owns what at stages 1 and 2: the same for every plan of a model on so many ranks.

    Attributes:
        groups: flat, one for each optimizer group. ranks: of each parameter that trains, the ranks that own a part of it.
        heaviest: the rank whose partition touches most elements.
    """

    def __init__(self, plan: PlanInput):
        items, world = plan.parameters.items, plan.world_size
        members = split_groups(items, plan.decay_groups, plan.trains)
        self.groups = [flat_group(items, m, world) for m in members]
        places = [(group, at, i) for group in self.groups for at, i in enumerate(group.members)]
        self.ranks = {i: group.owners(at, items[i].elems) for group, at, i in places}
        self.heaviest = heaviest_rank(items, self.groups, world)
        self._places, self._items = places, items
        self._owned: dict[int, tuple[dict[int, int], int]] = {}

    def owned(self, rank: int) -> tuple[dict[int, int], int]:
        """(elements of each parameter that `rank` owns, elements of all that it owns a part of)."""
        if rank not in self._owned:
            each = {i: group.owned(at, self._items[i].elems, rank) for group, at, i in self._places}
            self._owned[rank] = each, sum(self._items[i].elems for i, elems in each.items() if elems)
        return self._owned[rank]


def owners(plan: PlanInput) -> _Owners:
    """Who owns what, found once for all plans of a model on so many ranks."""
    return plan.parameters.fact(("owners", plan.decay_groups, plan.frozen, plan.world_size), lambda: _Owners(plan))


def ranks_to_plan(plan: PlanInput) -> list[int]:
    """The ranks that may hold most: the one whose partition touches most elements, and the last.

    A rank keeps gradients from the first one on that its partition touches ('grads_in_partition', whole at once). Backward begins
    with the last rank's parameters, when all activations are still there.
    """
    if plan.settings.stage not in (1, 2) or plan.world_size == 1:
        return [0]
    return list(dict.fromkeys((owners(plan).heaviest, plan.world_size - 1)))


class FlatSharding:
    """Device memory of one rank under stage 1 or 2; by default of the one whose partition touches most elements."""

    def __init__(self, plan: PlanInput, tape: Tape, rank: int | None = None):
        self.plan, self.tape, self.zero = plan, tape, plan.deepspeed_settings
        self.items, self.layout = plan.parameters.items, plan.device_layout
        found = owners(plan)
        self.groups, self.owners = found.groups, found.ranks
        self.rank = found.heaviest if rank is None else rank
        self.owned, self.touched = found.owned(self.rank)
        self.compact = self.zero.grad_bytes == 4
        self.stays = self.compact and self.zero.stage == 2 and plan.accumulation > 1 and plan.device == "cuda"  # engine/sums.py
        self.own = LAYOUTS[plan.optimizer].own_offload  # the weights are its masters (bigtrain/zero/startup.py)
        self.alone, self.straight = plan.no_buckets and not self.compact, plan.no_buckets and self.compact
        self.flight: list[tuple[str, int]] = []  # gradients on their way to the host, oldest first
        self.bucket: list[int] = []
        self.filled = 0
        # Without overlap_comm, stage 1 reduces after backward; so does every micro step before the last.
        self.deferred: list[int] = []
        self.side = 1 if self.zero.overlap_comm else 0  # 'reduction_stream'
        self.streamed = Update(plan, tape) if plan.streams else None

    # Start-up.

    def learn(self, visits: list[Visit], recomputed: frozenset[str]) -> None:
        pass

    def build(self) -> None:
        build_whole(self.plan, self.tape)

    def initialise(self) -> None:
        tape, offload = self.tape, self.zero.offload_optimizer
        for g, group in enumerate(self.groups):
            tape.empty_cache()
            if self.plan.leaving:  # made flat on the host
                tape.drop(*(("built", i) for i in group.members))
            tape.hold(("flat", g), 2 * group.padded, "weights, bf16")
            tape.drop(*(("built", i) for i in group.members))
            if self.own:
                continue
            tape.hold("clone", 2 * group.partition, "weights, slice clone")
            if not offload:
                tape.hold(("master", g), self.layout.remainder * group.partition, "master")
            tape.drop("clone")
        if offload:
            tape.hold("offload", 2 * self.plan.largest_trained_elems, "offload buffer on the GPU")
            return
        for g, group in enumerate(self.groups if not self.own else ()):
            tape.hold(("zeros", g), self.layout.step_grad * group.partition, "gradient, zeros at start-up")
        tape.drop(*(("zeros", g) for g in range(len(self.groups))))

    # Forward: the weights are all there.

    def fetch(self, key: str, members: list[int], *, backward: bool, steady: bool) -> None:
        pass

    def release(self, key: str) -> None:
        if self.streamed is not None and key[0] in "fb":  # a backward takes the host twice as long as a forward
            self.streamed.block_asked_for(2.0 if key[0] == "b" else 1.0)

    # Backward.

    def start_backward(self, micro: int, last: bool) -> None:
        self.micro, self.last = micro, last
        self.bucket, self.filled, self.deferred = [], 0, []
        self.written = 0

    def _open_buckets(self) -> None:
        # 'setup_buckets': at the first gradient of every backward, full size whatever is used of it.
        size = 2 if self.zero.stage == 2 else self.zero.grad_bytes
        elems = self.zero.reduce_bucket_elems
        for copy in range(2 if self.zero.overlap_comm else 1):
            self.tape.hold(("bucket", copy), size * elems, "reduce buckets")

    def _write(self, i: int) -> None:
        """On a CPU, pages of a bucket that nothing was written to take no memory."""
        more = min(self.filled, self.zero.reduce_bucket_elems) - self.written
        if self.plan.device == "cpu" and more > 0:
            size = 2 if self.zero.stage == 2 else self.zero.grad_bytes
            self.tape.hold(("written", i), size * more, "reduce buckets")
            self.written += more

    def grad(self, i: int) -> None:
        """Autograd delivers the gradient of parameter `i`, 2 n bytes."""
        if i in self.plan.leaving:
            return self._leave(i)
        if self.alone:
            self.tape.touch(2 * self.items[i].elems, "gradients, fresh from autograd")
            if not self.tape.holds(("own", i)):
                self.tape.hold(("own", i), 2 * self.items[i].elems, "gradients, kept")
            return
        if self.straight:
            self._hold_sums()
            return self.tape.touch(2 * self.items[i].elems, "gradients, fresh from autograd")
        if self.plan.device != "cpu" and not self.tape.holds(("bucket", 0)):
            self._open_buckets()
        if self.zero.stage == 1 and (not self.zero.overlap_comm or not self.last):
            if not self.tape.holds(("full", i)):
                self.tape.hold(("full", i), self.zero.grad_bytes * self.items[i].elems, "gradients, kept")
            self.deferred.append(i)
            return
        if self.plan.device == "cpu" or self.filled + self.items[i].elems > self.zero.reduce_bucket_elems:
            self.tape.hold(("fresh", i), 2 * self.items[i].elems, "gradients, fresh from autograd")
        else:
            self.tape.touch(2 * self.items[i].elems, "gradients, fresh from autograd")
        self.tape.drop(("full", i))  # stage 1: the sum of the earlier micro steps goes into the bucket with it
        self._into_bucket(i)

    def _leave(self, i: int) -> None:
        """optim/spill.py: on the GPU until it is on the host, and the sum of earlier micro steps with it."""
        size = 2 * self.items[i].elems
        keys = [("leaving", i), ("sum", i)][: 2 if self.micro else 1]
        for key in keys:
            self.tape.drop(key)  # of the micro step before, if it is the only one that leaves
            self.flight = [held for held in self.flight if held != key]
            self.tape.hold(key, size, "gradients, on their way")
            self.flight.append(key)
        while len(self.flight) > len(keys) and sum(2 * self.items[j].elems for _, j in self.flight) > GRADIENTS_IN_FLIGHT_BYTES:
            self.tape.drop(self.flight.pop(0))

    def _into_bucket(self, i: int) -> None:
        elems, limit = self.items[i].elems, self.zero.reduce_bucket_elems
        if self.filled + elems > limit:
            self._flush()
        if elems > limit:
            if self.zero.offload_optimizer:
                self.tape.touch(2 * elems, "gradients, larger than the bucket")  # the clone of offload's safety
            self.tape.drop(("fresh", i))  # it is the same memory
            self.tape.hold(("large", i), 2 * elems, "gradients, larger than the bucket")
        self.bucket.append(i)
        self.filled += elems
        self._write(i)
        self.tape.drop(("fresh", i))

    def _flush(self) -> None:
        """'reduce_ipg_grads': reduce what the bucket holds, keep what this rank owns."""
        if not self.bucket:
            return
        if self.compact and any(self.owned[i] for i in self.bucket):
            self._hold_sums(self.side)
        if self._needs_copy():
            self.tape.touch(2 * self.filled, "reduce copy", self.side)
        for i in self.bucket:
            self._keep(i)
        self.bucket, self.filled = [], 0

    def _hold_sums(self, stream: int = 0) -> None:
        """fp32 accumulation: one flat buffer until the step, with offload too; made before the reduction.

        'average_tensor' asks 'get_compact_grad_partition_slice' first; it is added to without a copy (hostgradients.add_to).
        """
        if not self.tape.holds("compact"):
            self.tape.hold("compact", 4 * sum(x.partition for x in self.groups), "gradients, kept", stream)

    def _needs_copy(self) -> bool:
        # 'allreduce_bucket' flattens its slices; a single slice (one owner for all of it) is used as it is.
        if self.plan.world_size == 1:
            return False
        return (self.compact and len(self.bucket) > 1) or len({rank for i in self.bucket for rank in self.owners[i]}) > 1

    def _keep(self, i: int) -> None:
        owned = self.owned[i]
        if self.zero.offload_optimizer and owned and self.last and self.plan.device == "cuda":
            # On a CPU neither copy is made (bigtrain/engine/hostgradients.py).
            self.tape.touch(8 * owned, "gradient norm in fp64", self.side)
            if not self.compact:
                self.tape.touch(4 * owned, "gradient, fp32 slice", self.side)
        if self.compact:
            # '.grad' of large parameters stays to the epilogue.
            if not owned or (self.zero.offload_optimizer and self.last):
                self.tape.drop(("large", i))
            return
        if self.zero.offload_optimizer:
            self.tape.drop(("large", i))
            return
        if owned and not self.tape.holds(("kept grads", self.micro)):
            self.tape.hold(("kept grads", self.micro), 2 * self.touched, "gradients, kept", self.side)
        self.tape.drop(("large", i))

    def end_backward(self) -> None:
        for i in self.deferred if self.last else ():
            self._into_bucket(i)
        self._flush()
        if self.last:
            self.tape.drop(*(("full", i) for i in self.deferred))
            self.deferred = []
        self.tape.drop(
            ("bucket", 0), ("bucket", 1), *((key, i) for key in ("written", "large") for i in range(len(self.items)))
        )
        if self.micro > 0 and self.tape.holds(("kept grads", self.micro)) and self.tape.holds(("kept grads", 0)):
            self.tape.drop(("kept grads", self.micro))  # added to the first micro step's, then freed

    # Step.

    def step(self, first: bool) -> None:
        self.tape.drop(*((key, i) for i in self.plan.leaving for key in ("leaving", "sum")))
        self.flight = []
        if self.zero.offload_optimizer:
            self.tape.phase("optimizer step")
            self._forget_sums()
            return
        self.tape.phase("norm")  # each gradient is summed up without a copy (bigtrain/engine/reduction.py)
        self.tape.phase("optimizer step")
        if self.streamed is not None:
            self._stream()
        for g, group in enumerate(self.groups):
            self._update(g, group.partition, first, last=g == len(self.groups) - 1)

    def _stream(self) -> None:
        """optim/stream.py: one rank's gradients are updated in the order of the model, those of more ranks lie in one buffer."""
        assert self.streamed is not None
        if self.alone:
            grads = [(("own", i), self.items[i].elems) for i in range(len(self.items)) if self.tape.holds(("own", i))]
            return self.streamed.run(grads, apart=True)
        key = "compact" if self.compact else ("kept grads", 0)
        freed = [] if self.stays else [(key, sum(group.partition for group in self.groups))]
        self.streamed.run(freed, apart=False)

    def _update(self, g: int, partition: int, first: bool, last: bool) -> None:
        tape, layout = self.tape, self.layout
        if layout.flat_step:
            self._flat_gradients(partition)
            if last and not self.compact:
                self._forget()
        if first and self.own:
            hold_own_state(layout, tape, g, partition)
        elif first:
            hold_moments(tape, g, self._moment_bytes(g, partition))
        if not layout.flat_step:
            chunk_of_gradients(self.plan, tape, partition, apart=not self.compact)
        if self.plan.optimizer == "muon":
            tape.touch(4 * partition, "muon staging")
        tape.drop("cast", "flat grad")
        if last:
            self._forget()
            self._forget_sums()

    def _flat_gradients(self, partition: int) -> None:
        """'step': flat, then in the master's dtype."""
        tape, step_grad = self.tape, self.layout.step_grad
        if not self.compact:
            tape.hold("flat grad", 2 * partition, "gradients, flat for the step")
            if step_grad == 4:
                tape.hold("cast", 4 * partition, "gradients, fp32 for the step")
                tape.drop("flat grad")
        elif step_grad == 2:
            tape.hold("cast", 2 * partition, "gradients, flat for the step")

    def _forget_sums(self) -> None:
        if not self.stays:
            self.tape.drop("compact")

    def _forget(self) -> None:
        self.tape.drop(("kept grads", 0), ("kept grads", 1))
        if self.alone:
            self.tape.drop(*(("own", i) for i in range(len(self.items))))

    def _moment_bytes(self, g: int, partition: int) -> float:
        group, layout = self.groups[g], self.layout
        if layout.matrix_moments == layout.moments:
            return layout.moments * partition
        owned = [(self.items[i], self.owned[i]) for i in group.members]
        matrix = sum(n for p, n in owned if len(p.shape) > 1 and p.block is not None)
        return layout.matrix_moments * matrix + layout.moments * (partition - matrix)

    def all_gather(self) -> None:
        gather_groups(self.plan, self.tape, self.groups)

    def export(self) -> None:
        pass
