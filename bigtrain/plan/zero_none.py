"""Stage 0 on the GPU: DeepSpeed's BF16_Optimizer, which shards the fp32 master and moments but nothing else.

Follows deepspeed 0.19.8 runtime/bf16_optimizer.py: flat bf16 weights, an accumulation buffer of all gradients, one fp32
partition; `bf16.immediate_grad_update` (on by default) moves each gradient into the buffer as it comes.
"""

from __future__ import annotations

from bigtrain.plan.flat import flat_group, split_groups
from bigtrain.plan.gathered import Visit
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.states import LAYOUTS
from bigtrain.plan.tape import Tape
from bigtrain.plan.zero_flat import build_whole, hold_moments, update_temporaries


class WholeSharding:
    """Device memory of one rank under stage 0."""

    def __init__(self, plan: PlanInput, tape: Tape):
        self.plan, self.tape = plan, tape
        self.items, self.layout = plan.parameters.items, LAYOUTS[plan.optimizer]
        members = split_groups(self.items, plan.decay_groups, plan.trains)
        self.groups = [flat_group(self.items, m, plan.world_size) for m in members]

    def learn(self, visits: list[Visit], recomputed: frozenset[str]) -> None:
        pass

    def build(self) -> None:
        build_whole(self.plan, self.tape)

    def initialise(self) -> None:
        for g, group in enumerate(self.groups):
            self.tape.hold(("flat", g), 2 * group.padded, "weights, bf16")
            self.tape.drop(*(("built", i) for i in group.members))
            self.tape.hold("clone", 2 * group.partition, "weights, slice clone")
            self.tape.hold(("master", g), self.layout.remainder * group.partition, "master")
            self.tape.drop("clone")
            self.tape.hold(("grads", g), self.plan.settings.grad_bytes * group.padded, "gradients, kept")

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

    def step(self, first: bool) -> None:
        self.tape.phase("all-reduce")
        if self.plan.world_size > 1:
            elems = min(self.plan.settings.reduce_bucket_elems, self.plan.trained_elems)
            self.tape.touch(self.plan.settings.grad_bytes * elems, "reduce copy")
        self.tape.phase("optimizer step")
        for g, group in enumerate(self.groups):
            if self.plan.settings.grad_bytes == 2 and self.layout.step_grad == 4:
                self.tape.hold("cast", 4 * group.partition, "gradients, fp32 for the step")
            if first:
                hold_moments(self.tape, g, self.plan.moment_bytes * group.partition)
            update_temporaries(self.plan, self.tape, group.partition)
            self.tape.drop("cast")

    def all_gather(self) -> None:
        if self.plan.device == "cpu" and self.plan.world_size > 1:
            for group in self.groups:
                self.tape.touch(2 * group.padded, "collective's own copy")

    def export(self) -> None:
        pass
