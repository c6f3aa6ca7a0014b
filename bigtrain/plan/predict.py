"""The plan of a run: bytes on GPU and host of one rank and of one host, row by row, with the moment of the peak."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from bigtrain.plan.allocator import least_limit, replay
from bigtrain.plan.constants import CUDA_CONTEXT_BYTES, GPU_MARGIN, HOST_MARGIN, nccl_bytes
from bigtrain.plan.device import device_tape, device_tapes
from bigtrain.plan.family_others import VISION_LANGUAGE
from bigtrain.plan.host import host_tape, page_locked_bytes
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.leafs import leaf_notes
from bigtrain.plan.machine import show_bytes
from bigtrain.plan.resident import one_memory
from bigtrain.plan.rows import formula, source
from bigtrain.plan.shared import enough_bytes, steady_ledger
from bigtrain.plan.states import LAYOUTS
from bigtrain.plan.tape import Ledger, Tape
from bigtrain.plan.zero_flat import ranks_to_plan

# Phases that come after the steps: what a run's metrics show does not include them.
AFTER_STEPS = ("checkpoint save", "export")


@dataclass(frozen=True)
class Row:
    """One line of a plan: `bytes` at the moment of the peak, how it is computed, where that was read."""

    name: str
    bytes: int
    formula: str
    source: str


@dataclass(frozen=True)
class Tree:
    """Rows that sum exactly to `bytes`; `phase` is where the peak is; `by_phase` is the most in each phase."""

    name: str
    bytes: int
    phase: str
    rows: tuple[Row, ...]
    by_phase: dict[str, int]

    @property
    def steps_bytes(self) -> int:
        """The most until the last step has ended: without checkpoints and the export."""
        return max((size for phase, size in self.by_phase.items() if phase not in AFTER_STEPS), default=self.bytes)


@dataclass(frozen=True)
class Plan:
    """What one rank and one host will hold. All numbers are bytes.

    Attributes:
        input: what was planned.
        gpu: tree of the allocated peak ("allocated" as torch.cuda.max_memory_allocated counts).
        gpu_reserved_bytes: as torch.cuda.max_memory_reserved counts, on the card that was given.
        gpu_used_bytes: as the driver counts: reserved + CUDA context + NCCL.
        host: tree of one rank's peak resident memory.
        ranks_per_node: ranks that share the host.
        tapes: of the ranks that may need most, from the first step on; made when they are needed if there are none.
    """

    input: PlanInput
    gpu: Tree
    gpu_reserved_bytes: int
    gpu_used_bytes: int
    host: Tree
    ranks_per_node: int
    tapes: tuple[Tape, ...] = field(default=(), repr=False, compare=False)

    @property
    def gpu_peak_allocated_bytes(self) -> int:
        return self.gpu.bytes

    @property
    def host_peak_bytes(self) -> int:
        """One rank's."""
        return self.host.bytes

    @property
    def host_node_bytes(self) -> int:
        """All ranks of one host together."""
        return self.host.bytes * self.ranks_per_node

    @property
    def rows(self) -> tuple[Tree, ...]:
        """GPU and host as trees."""
        return (self.gpu, self.host)

    @property
    def host_pinned_bytes(self) -> int:
        """One rank's page-locked memory."""
        return page_locked_bytes(self.input)

    @cached_property
    def gpu_floor_bytes(self) -> int:
        """The least that the caching allocator must be allowed to reserve for the run.

        Less than `gpu_reserved_bytes`: at its limit the allocator gives back what is free. More than what is allocated: what lies
        between blocks in use cannot be given back.
        """
        if self.input.device == "cpu":
            return 0
        floors = (least_limit(t, t.ledger().peak_bytes, expandable=self.input.expandable) for t in self._whole_tapes)
        return max(floors)

    @property
    def _whole_tapes(self) -> tuple[Tape, ...]:
        return self.tapes or tuple(device_tapes(self.input))

    def _card(self, reserved: int) -> int:
        """A card on which so much can be reserved, with the margin."""
        return int((reserved + CUDA_CONTEXT_BYTES + nccl_bytes(self.input.world_size)) * (1 + GPU_MARGIN))

    def gpu_least_bytes(self, spared: tuple[str, ...] = ()) -> int:
        """What a card must have for what is allocated alone; quick to tell, and less can never do.

        `spared`: beginnings of rows that are left out, for a bound on plans that differ in them only.
        """
        held = sum(row.bytes for row in self.gpu.rows if not row.name.startswith(spared)) if spared else self.gpu.bytes
        return self._card(held)

    def gpu_need_bytes(self) -> int:
        """What a card must have: the least with which the allocator gets by, and what lives outside of it, with the margin."""
        return self._card(self.gpu_floor_bytes)

    def host_need_bytes(self) -> int:
        """What a host must have for its ranks, with the margin."""
        return int(self.host_node_bytes * (1 + HOST_MARGIN))

    def fits(self, gpu_memory_bytes: int | None, host_memory_bytes: int | None) -> bool:
        """Whether card and host hold it, with the margins of `plan.constants`; None: not a limit."""
        if host_memory_bytes is not None and self.host_need_bytes() > host_memory_bytes:
            return False
        if gpu_memory_bytes is None or self.input.device == "cpu":
            return True
        return self.gpu_least_bytes() <= gpu_memory_bytes and self._plays_on(gpu_memory_bytes) is not None

    def returns(self, gpu_memory_bytes: int | None) -> int:
        """How often in each step the allocator meets the limit of this card, which holds the plan, and gives memory back."""
        if gpu_memory_bytes is None or self.input.device == "cpu" or not self._plays_on(gpu_memory_bytes):
            return 0  # not even with the margin taken off
        if gpu_memory_bytes not in self._returned:
            plan, limit = self.input, gpu_memory_bytes - beside_the_tape(self.input)
            tapes = (
                device_tape(plan, rank=rank, steps=3) for rank in ranks_to_plan(plan)
            )  # a second step's may be its first moments'
            self._returned[gpu_memory_bytes] = max(replay(tape, limit, expandable=plan.expandable).returns for tape in tapes)
        return self._returned[gpu_memory_bytes]

    @cached_property
    def _returned(self) -> dict[int, int]:
        return {}

    @cached_property
    def _played(self) -> dict[int, bool | None]:
        return {}

    def _plays_on(self, gpu_memory_bytes: int) -> bool | None:
        """Whether the allocator meets the limit of this card, less the margin; None if it does not get by.

        A search asks for some plans again and again.
        """
        if gpu_memory_bytes not in self._played:
            self._played[gpu_memory_bytes] = self._plays(gpu_memory_bytes)
        return self._played[gpu_memory_bytes]

    def _plays(self, gpu_memory_bytes: int) -> bool | None:
        plan, limit = self.input, int(gpu_memory_bytes / (1 + GPU_MARGIN)) - beside_the_tape(self.input)
        ranks = [rank for rank in ranks_to_plan(plan) if not plan.expandable or enough_bytes(plan, rank) > limit]
        meets = False
        for tape in self.tapes or (device_tape(plan, rank=rank) for rank in ranks):
            most = replay(tape, expandable=plan.expandable).unmet_bytes
            if most <= limit:
                continue
            meets = True
            if least_limit(tape, tape.ledger().peak_bytes, expandable=plan.expandable, most_bytes=most) > limit:
                return None
        return meets

    @property
    def save_copy_bytes(self) -> int:
        """Host memory of a rank, beside everything else, while a checkpoint is written beside training; at most, and where there is room.

        A whole master, or the bf16 weight with its remainder, and moments; of what is frozen, the bf16 weight.
        """
        plan, layout = self.input, LAYOUTS[self.input.optimizer]
        of_one = layout.remainder + (2 if layout.own_offload else 0) + layout.moments
        frozen_elems = plan.parameters.elems - plan.trained_elems
        return int((of_one * plan.trained_elems + 2 * frozen_elems) / plan.world_size)

    @property
    def notes(self) -> tuple[str, ...]:
        """What this plan does not know exactly, or does not count, in words."""
        plan, found = self.input, list[str]()
        if plan.parameters.kind == "shapes":
            found.append("activations are an estimate: only a list of shapes is known")
        elif not plan.geometry.exact:
            found.append(f"activations are an estimate: blocks of '{plan.parameters.kind}' were not counted tensor by tensor")
        if plan.parameters.kind in VISION_LANGUAGE:
            found.append("images are counted as their text tokens: the vision tower's own activations are not in the plan")
        found += leaf_notes(plan)
        since = "from the second step on" if plan.device == "cuda" else "while it is written"
        found.append(
            f"a checkpoint beside training takes up to {show_bytes(self.save_copy_bytes)} more of the host for each rank {since}, if there is "
            "room; what there is no room for keeps the next update waiting for the disk"
        )
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values, for `--json` and for storing beside a run."""
        plan = self.input
        return {
            "model": {"kind": plan.parameters.kind, "parameters": plan.parameters.elems},
            "world_size": plan.world_size,
            "micro_batch": plan.micro_batch,
            "seq_len": plan.seq_len,
            "accumulation": plan.accumulation,
            "optimizer": plan.optimizer,
            "checkpointing": plan.checkpointing,
            "checkpoint_blocks": plan.recomputed_blocks,
            "mlp_tile_tokens": plan.mlp_tile_tokens,
            "kernels": plan.kernels,
            "loss": plan.loss_kind,
            "zero": {k: getattr(plan.settings, k) for k in plan.settings.__dataclass_fields__},
            "gpu_peak_allocated_bytes": self.gpu.bytes,
            "gpu_reserved_bytes": self.gpu_reserved_bytes,
            "gpu_floor_bytes": self.gpu_floor_bytes,
            "gpu_used_bytes": self.gpu_used_bytes,
            "gpu_need_bytes": self.gpu_need_bytes(),
            "host_peak_bytes": self.host.bytes,
            "host_steps_bytes": self.host.steps_bytes,
            "host_node_bytes": self.host_node_bytes,
            "host_pinned_bytes": self.host_pinned_bytes,
            "host_need_bytes": self.host_need_bytes(),
            "save_copy_bytes": self.save_copy_bytes,
            "notes": list(self.notes),
            "trees": [_tree_json(tree) for tree in self.rows],
        }


def _tree_json(tree: Tree) -> dict[str, Any]:
    rows = [{"name": r.name, "bytes": r.bytes, "formula": r.formula, "source": r.source} for r in tree.rows]
    return {"name": tree.name, "bytes": tree.bytes, "phase": tree.phase, "rows": rows, "by_phase": tree.by_phase}


def _tree(name: str, ledger: Ledger) -> Tree:
    rows = [Row(row, size, formula(row), source(row)) for row, size in ledger.rows.items()]
    rows.sort(key=lambda row: -row.bytes)
    return Tree(name, ledger.peak_bytes, ledger.peak_phase, tuple(rows), ledger.by_phase)


def beside_the_tape(plan: PlanInput) -> int:
    """Of a card: what a process holds that no tape shows."""
    return CUDA_CONTEXT_BYTES + nccl_bytes(plan.world_size)


def predict(plan: PlanInput, *, gpu_memory_bytes: int | None = None, reserve: bool = True) -> Plan:
    """Simulate the run and read the ledgers.

    Args:
        plan: what to simulate.
        gpu_memory_bytes: of the card, or the cap: there the allocator gives back what is free, so that no more is reserved
            unless the run cannot do with it; None: no limit.
        reserve: also replay the caching allocator and the first step; without it "reserved" is the allocated peak, and
            the same peaks are found in a tenth of the time.
    """
    host = host_tape(plan)
    if plan.device == "cpu":
        tapes = device_tapes(plan, steady_only=not reserve)
        together = max((one_memory(tape, host).ledger() for tape in tapes), key=lambda found: found.peak_bytes)
        nothing = Ledger(0, together.peak_phase, {}, {}, 0)
        return Plan(plan, _tree("GPU", nothing), 0, 0, _tree("host", together), plan.ranks_per_node)
    tapes = device_tapes(plan) if reserve else []
    ledgers = [tape.ledger() for tape in tapes] or [steady_ledger(plan, rank) for rank in ranks_to_plan(plan)]
    gpu_tree = _tree("GPU", max(ledgers, key=lambda found: found.peak_bytes))
    limit = None if gpu_memory_bytes is None else gpu_memory_bytes - beside_the_tape(plan)
    reserved = max(replay(tape, limit, expandable=plan.expandable).peak_bytes for tape in tapes) if reserve else gpu_tree.bytes
    used = reserved + beside_the_tape(plan)
    return Plan(plan, gpu_tree, reserved, used, _tree("host", host.ledger()), plan.ranks_per_node, tuple(tapes))


@lru_cache(maxsize=1024)  # a search comes back to the same plans; none keeps its tapes
def quick(plan: PlanInput) -> Plan:
    """`predict` without what is reserved."""
    return predict(plan, reserve=False)
