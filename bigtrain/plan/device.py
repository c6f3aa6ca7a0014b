"""One rank's GPU through a run: build, start-up, two steps (the first and a steady one), save, export; as a tape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from bigtrain.plan import experts
from bigtrain.plan.activations import BlockBytes, block_bytes, embedding_backward, norm_kept, norm_passing
from bigtrain.plan.constants import CUBLAS_WORKSPACE_BYTES
from bigtrain.plan.family_kept import HALVES, NORM_LAST, TWO_TABLES
from bigtrain.plan.gathered import Visit
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.losses import Losses
from bigtrain.plan.moved import NO_ROTARY
from bigtrain.plan.parts import parts_of
from bigtrain.plan.tape import Tape
from bigtrain.plan.zero_flat import FlatSharding, ranks_to_plan
from bigtrain.plan.zero_none import Bf16Sharding, WholeSharding
from bigtrain.plan.zero_sliced import SlicedSharding


class Sharding(Protocol):
    """What a ZeRO stage does to the tape at each point of a run, in the order in which a run comes to them."""

    def learn(self, visits: list[Visit], recomputed: frozenset[str]) -> None:
        """Before anything: in which order a step fetches which weights, and which visits of them are recomputations."""

    def build(self) -> None:
        """The model is built."""

    def initialise(self) -> None:
        """DeepSpeed starts: masters, flat weights, buffers."""

    def fetch(self, key: str, members: list[int], *, backward: bool, steady: bool) -> None:
        """The weights `members` are needed for the visit `key`; `steady`: not in the first step."""

    def release(self, key: str) -> None:
        """The visit is over."""

    def start_backward(self, micro: int, last: bool) -> None:
        """The backward of a micro step begins, the last of its step or not."""

    def grad(self, i: int) -> None:
        """Autograd delivers the gradient of parameter `i`."""

    def end_backward(self) -> None:
        """A backward is over: what waits in buckets is reduced."""

    def step(self, first: bool) -> None:
        """The optimizer updates the weights; the first time its moments are made."""

    def all_gather(self) -> None:
        """After the update every rank has all weights again."""

    def export(self) -> None:
        """The model is written out."""


def sharding(plan: PlanInput, tape: Tape, rank: int | None = None) -> Sharding:
    """The simulation of the plan's stage; `rank` matters where ranks differ, at stages 1 and 2."""
    if plan.settings.stage == 1 and plan.deepspeed_settings.grad_bytes == 4 and not plan.settings.offload_optimizer:
        return Bf16Sharding(plan, tape)
    if plan.settings.stage in (1, 2):
        return FlatSharding(plan, tape, rank)
    return SlicedSharding(plan, tape) if plan.settings.stage == 3 else WholeSharding(plan, tape)


# Smaller tensors are not told apart: what a run reserves does not depend on where they lie.
_PIECE = 2**20
# Phases of a micro step, from the first update on.
MICRO_STEP = ("steady forward", "loss", "loss backward", "backward", "bucket flush")


class Run:
    """Forward and backward over the blocks; everything that is not about parameters and gradients."""

    def __init__(self, plan: PlanInput, tape: Tape, shards: Sharding):
        self.plan, self.tape, self.shards = plan, tape, shards
        self.g, self.t = plan.geometry, plan.tokens
        self.blocks = plan.parameters.blocks
        self.parts = plan.parameters.fact("parts", lambda: parts_of(plan.parameters))
        self.before, self.after = self.parts.before, self.parts.after
        self.head = self.parts.head if self.g.vocab else []
        self.tied = bool(plan.parameters.tied)
        self.losses = Losses(plan, tape, self.head, self.tied, self._open_backward, self._grad)
        self.costs = {
            b: block_bytes(self.g, self.t, plan.kernels, b, plan.seq_len, plan.device, plan.tile_tokens)
            for b in self._distinct_blocks()
        }
        tile = plan.tile_tokens
        self.of_tile = {
            b: block_bytes(self.g, tile, plan.kernels, b, tile, plan.device) for b in (self._distinct_blocks() if tile else ())
        }
        self.recomputed = set(list(self.blocks)[: plan.recomputed_blocks])
        of_attention = map(sum, plan.of_attention)
        self.results = {b: self._cost(b).results if plan.checkpointing == "selective" else next(of_attention, 0)
                        for b in self.blocks if b in self.recomputed}  # fmt: skip
        shards.learn(self._visits(), frozenset(f"b{block}" for block in self.recomputed))

    def _visits(self) -> list[Visit]:
        """Everything whose weights are fetched, in the order of a step."""
        forward = [(f"f{block}", members) for block, members in self.blocks.items()]
        backward = [(f"b{block}", members) for block, members in reversed(self.blocks.items())]
        return [("embedding", self.before), *forward, ("head", self.head), *backward, ("embedding", self.before)]

    def _distinct_blocks(self) -> list[int]:
        return list(self.blocks) if len(self.g.unlike) > 1 else [0]

    def _cost(self, block: int) -> BlockBytes:
        return self.costs.get(block) or self.costs[0]

    def _grad(self, i: int) -> None:
        """Autograd delivers a gradient, unless the parameter is frozen."""
        if self.plan.trains[i]:
            self.shards.grad(i)

    def _open_backward(self) -> None:
        self.shards.start_backward(self.micro, self.last)

    # Forward.

    def forward(self, steady: bool) -> None:
        tape, g, t = self.tape, self.g, self.t
        tape.phase("steady forward" if steady else "first forward")
        if not tape.holds("workspace") and self.plan.device == "cuda":
            tape.hold("workspace", CUBLAS_WORKSPACE_BYTES, "cuBLAS workspace")
        tape.hold("batch", 24 * t, "batch")
        tape.hold("rotary", self._rotary_bytes(), "rotary tables")
        tape.hold("scores", g.keeps.scores * t * self.plan.seq_len * g.heads, "bias of all scores")
        tape.hold("masks", 2 * g.keeps.causal_masks * t * self.plan.seq_len, "causal masks")
        self.shards.fetch("embedding", self.before, backward=False, steady=steady)
        tape.hold(("stream", 0), 2 * t * g.hidden, "activations, embedding and final norm")
        self.shards.release("embedding")
        for block, members in self.blocks.items():
            self._block_forward(block, members, steady)
        tape.hold("final norm", norm_kept(g, t, self.plan.kernels), "activations, embedding and final norm")
        # The last block's output is among what the norm keeps, the embedding's among the first block's.
        tape.drop(("stream", 0))
        if not self.recomputed:
            tape.drop("masks")

    def _rotary_bytes(self) -> int:
        """Cosines and sines in bf16, made once for all blocks, or for those of a sliding window and the others."""
        g, kind = self.g, self.plan.parameters.kind
        return 0 if kind in NO_ROTARY else (2 if kind in TWO_TABLES else 1) * 2 * 2 * self.t * g.query // g.heads

    def _block_forward(self, block: int, members: list[int], steady: bool) -> None:
        cost = self._cost(block)
        self.shards.fetch(f"f{block}", members, backward=False, steady=steady)
        if block in self.recomputed:
            row = "activations, in passing"
            self.tape.touch(cost.forward_extra, row)
            self._touch_scores(cost, cost.forward_attention, row)
            self._keep_input(block)
        else:
            self._keep_block(block)
            self.tape.touch(self._beside_kept(cost), "activations, in passing")
        self.shards.release(f"f{block}")

    def _beside_kept(self, cost: BlockBytes, again: bool = False) -> int:
        """Most that a forward with gradients holds beside what it keeps: with fused kernels a block's output alone.

        Measured on an H200, Llama 3B, 16,384 tokens: 0.101e9 B beside 1.478e9 kept. A recompute (`again`) ends before its last product,
        with no more than attention's output beside it (models/replay.py), and in a block with a norm behind that with the norm's copies.
        """
        if self.plan.kernels == "liger" and not self.of_tile and self.plan.parameters.kind in HALVES:
            return max(cost.stream, 2 * cost.feed)
        if cost.in_passing:  # bigtrain's experts: what the last product reads, and its results, beside their sum
            return cost.stream + cost.in_passing + cost.feed - cost.shared
        if self.g.keeps.own_experts and cost.chosen:  # clamped up, the bias of each row; its results are not there yet
            return max(cost.stream, 3 * cost.feed - cost.chosen)
        if again and not self.of_tile and self.g.norms <= 2:
            return max(cost.stream, cost.chosen)
        if self.of_tile:
            return cost.stream + 3 * cost.feed if self.plan.kernels == "liger" else cost.forward_extra
        # Of a feed-forward part all is kept; RMSNorms in fp32 have more in passing.
        return (
            cost.stream
            if self.plan.kernels == "liger"
            else cost.forward_extra - (1 if self.g.gated and self.g.rms else 3) * cost.feed
        )

    def _keep_input(self, block: int) -> None:
        """What stays of a block that is recomputed."""
        cost, tape = self._cost(block), self.tape
        tape.hold(("checkpoint", block), cost.stream, "checkpoints")
        tape.hold(("results", block), self.results[block], "activations, kept results")
        if self.plan.offloads_inputs:
            # The copy of the block before has arrived on the host by the end of this one.
            tape.drop(*((what, before) for what in ("checkpoint", "results") for before in self.recomputed if before != block))

    def _bring_back(self, block: int) -> None:
        """models/hostinputs.py: what this block keeps, and what the one before it does, which comes next."""
        if self.plan.offloads_inputs:
            for wanted in (block, block - 1):
                if wanted in self.recomputed and not self.tape.holds(("checkpoint", wanted)):
                    self.tape.hold(("checkpoint", wanted), self._cost(wanted).stream, "checkpoints")
                    self.tape.hold(("results", wanted), self.results[wanted], "activations, kept results")

    def _keep_block(self, block: int, again: bool = False) -> None:
        """`again`: of a recompute, whose input is there as the checkpoint; a norm that keeps its input as it is keeps that one."""
        cost, tape = self._cost(block), self.tape
        there = cost.stream if again and (self.plan.kernels == "liger" or not self.g.rms) else 0
        tape.hold(("norm1", block), cost.first_norm - there, "activations, norms")
        self._hold_in_pieces(("attention", block), cost.attention, cost.scores or cost.attention, "activations, attention")
        self._touch_scores(cost, cost.scores_passing, "activations, in passing")
        tape.hold(("norm2", block), cost.second_norm, "activations, norms")
        tape.hold(("routing", block), cost.routing - 2 * cost.chosen, "activations, experts")
        for key in experts.keys(block):
            tape.hold(key, cost.chosen, "activations, experts")
        self._keep_feed_forward(block, cost)

    def _hold_in_pieces(self, key: tuple[object, ...], size: int, largest: int, row: str) -> list[tuple[object, ...]]:
        """Tensors of a size that there can be, so that the allocator's replay finds room for them as it does in a run."""
        keys, most = _pieces(key, size, largest), max(largest, _PIECE)
        for number, one in enumerate(keys):
            self.tape.hold(one, min(most, size - number * most), row)
        return keys

    def _touch_scores(self, cost: BlockBytes, size: int, row: str) -> None:
        self.tape.drop(*self._hold_in_pieces(("scores",), size, cost.scores or size, row))

    def _keep_feed_forward(self, block: int, cost: BlockBytes) -> None:
        tape = self.tape
        tape.hold(("gate", block), cost.gate, "activations, feed-forward")
        tape.hold(("middle", block), cost.middle, "activations, feed-forward")
        tape.hold(("product", block), cost.product, "activations, feed-forward")

    # Loss.

    def loss(self, steady: bool) -> None:
        """Forward and backward of the head and the cross entropy."""
        self.tape.phase("loss")
        self.shards.fetch("head", self.head, backward=True, steady=steady)
        if self.g.vocab:
            self.losses.run()
        else:
            self._open_backward()
        self.shards.release("head")
        self.tape.touch(norm_passing(self.g, self.t, self.plan.kernels), "backward, norm temporaries")
        self.tape.drop("final norm")
        for i in reversed(self.after):
            if i not in self.head:
                self._grad(i)

    # Backward over the blocks.

    def backward(self, steady: bool) -> None:
        tape = self.tape
        tape.phase("backward")
        tape.hold("dstream", 2 * self.t * self.g.hidden, "backward, residual stream")
        for block in reversed(self.blocks):
            self._block_backward(block, steady)
        tape.drop("scores", "masks")
        self.shards.fetch("embedding", self.before, backward=False, steady=steady)
        for i in reversed(self.before):
            if self.plan.trains[i]:
                size = embedding_backward(self.plan.parameters.items[i].shape, self.t, self.plan.device)
                self.tape.touch(size, "gradients, fresh from autograd")
                if i in self.head and self.losses.sum_is_apart:
                    both = 2 * 2 * self.plan.parameters.items[i].elems
                    self.tape.touch(both, "gradients, fresh from autograd")
            if i in self.head:
                self.tape.drop("tied")
            if i not in self.head or self.tied:
                self._grad(i)
        self.shards.release("embedding")
        self.tape.drop("dstream", "batch", "rotary")
        self.tape.phase("bucket flush")
        self.shards.end_backward()

    def _block_backward(self, block: int, steady: bool) -> None:
        tape, cost, members = self.tape, self._cost(block), self.blocks[block]
        self.shards.fetch(f"b{block}", members, backward=True, steady=steady)
        experts.before_backward(tape, cost)
        if block in self.recomputed:
            self._bring_back(block)
            tape.drop(("results", block))  # the same bytes are among what follows
            self._keep_block(block, again=True)
            tape.touch(self._beside_kept(cost, again=True), "activations, in passing")
        feed, attention, rest = self.parts.of_block[block]
        if self.plan.parameters.kind in NORM_LAST:
            tape.touch(cost.norm_extra, "backward, norm temporaries")
        if self.of_tile:
            self._tiles_backward(block, feed)
        elif cost.chosen or cost.in_passing:
            experts.backward(tape, self.plan.parameters.items, block, cost, feed, self._grad)
        else:
            self._feed_forward_backward(block, cost, feed, self._grad)
        tape.touch(cost.norm_extra, "backward, norm temporaries")
        tape.drop(("norm2", block))
        # Tensors of about the stream's size, or of scores that no fused kernel spares.
        extra, row = cost.attention_extra, "backward, attention gradients"
        parts = self._hold_in_pieces(("dattention",), extra, max(cost.stream, cost.scores), row)
        tape.drop(*_pieces(("attention", block), cost.attention, cost.scores or cost.attention))
        for i in reversed(attention):
            self._grad(i)
        tape.drop(*parts)
        tape.touch(cost.norm_extra, "backward, norm temporaries")
        tape.drop(("norm1", block), ("checkpoint", block))
        for i in reversed(rest):
            self._grad(i)
        self.shards.release(f"b{block}")

    def _tiles_backward(self, block: int, feed: list[int]) -> None:
        """models/tiles.py: tile by tile, with the gradients of its weights; then all of their sums are handed over."""
        tape, cost, trained = self.tape, self.of_tile.get(block) or self.of_tile[0], [i for i in feed if self.plan.trains[i]]
        # Gradients of the input, and one tile's output.
        tape.hold("dtiles", self._cost(block).stream + cost.stream, "backward, feed-forward gradients")

        def deliver(i: int) -> None:
            if self.plan.trains[i]:
                tape.hold(("of tile", i), 2 * self.plan.parameters.items[i].elems, "gradients of one tile")

        for number in range(2):  # the sums are there from the first tile's end on
            self._keep_feed_forward(block, cost)
            self._feed_forward_backward(block, cost, feed, deliver)
            for i in trained if number == 0 else ():
                tape.hold(("sum", i), 4 * self.plan.parameters.items[i].elems, "gradients of tiles, fp32 sums")
            tape.drop(*(("of tile", i) for i in trained))
        for i in trained:
            deliver(i)
            tape.drop(("sum", i))
        for i in reversed(feed):
            tape.drop(("of tile", i))
            self._grad(i)
        tape.drop("dtiles")

    def _feed_forward_backward(self, block: int, cost: BlockBytes, feed: list[int], grad: Callable[[int], None]) -> None:
        tape, row, items = self.tape, "backward, feed-forward gradients", self.plan.parameters.items
        count = 2 if feed and items[feed[-1]].name.endswith(".bias") else 1
        last, others = feed[-count:], feed[:-count]
        tape.hold("dproduct", cost.feed, row)
        for i in last:
            grad(i)
        if cost.gate or cost.middle:  # otherwise the activation's backward needs its output, the last product's input
            tape.drop(("product", block))
        if self.plan.kernels == "liger" and cost.middle:  # gate and up become their own gradients
            tape.drop("dproduct")
        else:
            if cost.middle:
                tape.hold("dmiddle", 2 * cost.feed, row)
                tape.drop("dproduct", ("middle", block))
            tape.hold("dgate", cost.feed, row)
            tape.touch(cost.feed * self.g.keeps.derivative // 2, row)
            tape.drop("dproduct", ("gate", block), ("product", block))
        tape.hold("dinput", 2 * cost.stream, row)
        for i in reversed(others):
            grad(i)
        tape.drop("dmiddle", "dgate", "dinput", ("middle", block), ("gate", block), ("routing", block), *experts.keys(block))

    def micro_steps(self, steady: bool) -> None:
        """Of one step; two stand for any number of them."""
        count = min(self.plan.accumulation, 2)
        for self.micro in range(count):
            self.last = self.micro == count - 1
            self.forward(steady)
            self.loss(steady)
            self.backward(steady)


def _pieces(key: tuple[object, ...], size: int, largest: int) -> list[tuple[object, ...]]:
    return [(*key, number) for number in range(-(-size // max(largest, _PIECE)))]


def device_tapes(plan: PlanInput, *, steady_only: bool = False) -> list[Tape]:
    """The GPU's tapes of the ranks that may hold most: one where all ranks hold the same."""
    return [device_tape(plan, rank=rank, steady_only=steady_only) for rank in ranks_to_plan(plan)]


def device_tape(plan: PlanInput, *, rank: int | None = None, steady_only: bool = False, steps: int = 2) -> Tape:
    """The GPU's tape of one rank; by default the one that holds most in the end.

    Two steps stand for all: in the first the moments appear and nothing is prefetched; in the second both are there. What the allocator does
    in each step shows in a third.
    `steady_only` leaves the first step out, which never holds more than a later one.
    """
    tape = Tape()
    shards = sharding(plan, tape, rank)
    run = Run(plan, tape, shards)
    tape.phase("build")
    shards.build()
    tape.phase("start-up")
    shards.initialise()
    if steady_only:
        shards.step(first=True)
    for step in range(1 if steady_only else 0, steps):
        tape.steady_from = len(tape.kinds)
        run.micro_steps(steady=step > 0)
        shards.step(first=step == 0)
        if step == 0:
            tape.phase("all-gather")
            shards.all_gather()
    finish(tape, shards)
    return tape


def finish(tape: Tape, shards: Sharding) -> None:
    """The end of the last step, and what comes after it."""
    tape.phase("all-gather")
    shards.all_gather()
    tape.phase("checkpoint save")
    tape.phase("export")
    shards.export()
