"""The stages that keep gradients of whole parameters in fp32: 0, and 1 with fp32 accumulation."""

from __future__ import annotations

from collections.abc import Iterable

from bigtrain.plan.gathered import Visit
from bigtrain.plan.groups import split_groups
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.states import LAYOUTS
from bigtrain.plan.tape import Tape
from bigtrain.plan.zero_flat import build_whole, gather_groups, hold_moments, owners, update_temporaries

# 'allreduce_no_retain' takes gradients together until it has more than so many (runtime/engine.py MEMORY_OPT_ALLREDUCE_SIZE).
REDUCED_AT_ONCE_ELEMS = 500_000_000


def copied_elems(tensors: Iterable[int]) -> int:
    """Most elements of gradients that are copied together to be reduced, of tensors with so many elements, in their order.

    A tensor that is reduced by itself is not copied (torch `_flatten_dense_tensors`).
    """
    most = filled = count = 0
    for elems in tensors:
        filled, count = filled + elems, count + 1
        most = max(most, filled if count > 1 else 0)
        if filled > REDUCED_AT_ONCE_ELEMS:
            filled = count = 0
    return most


class WholeSharding:
    """Device memory of one rank under stage 0: fp32 masters, moments and sums of everything on every rank (bigtrain/engine/master.py)."""

    def __init__(self, plan: PlanInput, tape: Tape):
        self.plan, self.tape = plan, tape
        self.items, self.layout = plan.parameters.items, LAYOUTS[plan.optimizer]

    def learn(self, visits: list[Visit], recomputed: frozenset[str]) -> None:
        pass

    def build(self) -> None:
        build_whole(self.plan, self.tape)

    def initialise(self) -> None:
        trained = self.plan.trained_elems
        for i, item in enumerate(self.items):  # they stay where they were built
            self.tape.drop(("built", i))
            self.tape.hold(("weights", i), 2 * item.elems, "weights, bf16")
        self.tape.hold("master", self.layout.remainder * trained, "master")
        self.tape.hold("grads", 4 * trained, "gradients, kept")

    def fetch(self, key: str, members: list[int], *, backward: bool, steady: bool) -> None:
        pass

    def release(self, key: str) -> None:
        pass

    def start_backward(self, micro: int, last: bool) -> None:
        pass

    def grad(self, i: int) -> None:
        self.tape.touch(2 * self.items[i].elems, "gradients, fresh from autograd")

    def end_backward(self) -> None:
        pass

    def sums(self) -> list[int]:
        """Elements of each tensor of sums, in the order in which they are reduced."""
        groups = split_groups(self.items, self.plan.decay_groups, self.plan.trains)
        return [self.items[i].elems for group in groups for i in group]

    def reduce(self) -> None:
        self.tape.phase("all-reduce")
        self.tape.touch(4 * copied_elems(self.sums()), "reduce copy")
        self.tape.phase("optimizer step")

    def step(self, first: bool) -> None:
        self.reduce()
        if first:
            hold_moments(self.tape, 0, self.plan.moment_bytes * self.plan.trained_elems)
        update_temporaries(self.plan, self.tape, self.plan.largest_trained_elems)

    def all_gather(self) -> None:
        pass

    def export(self) -> None:
        pass


class Bf16Sharding(WholeSharding):
    """Stage 1 with fp32 accumulation: DeepSpeed's BF16_Optimizer, which shards masters and moments.

    Follows deepspeed 0.19.8 runtime/bf16_optimizer.py: flat bf16 weights, an fp32 buffer of all gradients. With
    `bf16.immediate_grad_update` off, as it is by default, the bf16 gradients stay until the step: each backward ends with adding them
    to the buffer, the next begins with setting them to zero.
    """

    def __init__(self, plan: PlanInput, tape: Tape):
        super().__init__(plan, tape)
        self.groups = owners(plan).groups

    def initialise(self) -> None:
        for g, group in enumerate(self.groups):
            self.tape.hold(("flat", g), 2 * group.padded, "weights, bf16")
            self.tape.drop(*(("built", i) for i in group.members))
            self.tape.hold("clone", 2 * group.partition, "weights, slice clone")
            self.tape.hold(("master", g), self.layout.remainder * group.partition, "master")
            self.tape.drop("clone")
            self.tape.hold(("grads", g), 4 * group.padded, "gradients, kept")

    def sums(self) -> list[int]:
        return [group.padded for group in self.groups]

    def grad(self, i: int) -> None:
        if self.tape.holds(("fresh", i)):  # autograd adds to what an earlier micro batch has left
            self.tape.touch(2 * self.items[i].elems, "gradients, fresh from autograd")
        else:
            self.tape.hold(("fresh", i), 2 * self.items[i].elems, "gradients, fresh from autograd")

    def end_backward(self) -> None:
        self.tape.touch(4 * self.plan.largest_trained_elems, "gradient, fp32 slice")

    def step(self, first: bool) -> None:
        self.reduce()
        for g, group in enumerate(self.groups):
            if first:
                hold_moments(self.tape, g, self.plan.moment_bytes * group.partition)
            update_temporaries(self.plan, self.tape, group.partition)
        self.tape.drop(*(("fresh", i) for i in range(len(self.items))))

    def all_gather(self) -> None:
        gather_groups(self.plan, self.tape, self.groups)
