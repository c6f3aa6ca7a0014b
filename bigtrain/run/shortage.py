"""When a GPU or the host runs out of memory in the middle of a run: what was planned, what is held, and what would fit.

Out of memory on a GPU is one rank's alone, so nothing here meets other ranks. Ranks of one host see the same memory and stop
together; ranks of other hosts hear of it by the watch.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import torch

from bigtrain import plan, watch
from bigtrain.diagnostics.hostwatch import HostWatch
from bigtrain.diagnostics.metrics import ProcessMemory
from bigtrain.errors import BigtrainError, DoesNotFitError
from bigtrain.plan.choose import DEFAULT_OPTIMIZERS, Candidate, choose
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.machine import show_bytes
from bigtrain.plan.predict import Plan, Tree
from bigtrain.plan.roofline import step_time
from bigtrain.plan.room import Room
from bigtrain.zero.held import gradients, states, weights

logger = logging.getLogger(__name__)

CATEGORIES = ("weights", "gradients", "optimizer states", "activations, buckets, rest")
NEAREST = 3
# Ranks of a host see its memory fill at the same time. The first of them says so; all leave together a moment later, so that none
# is ended by its launcher in the middle of a word, or by its peer's absence with another exit code.
_SAYING_S = 1.0


class Explained:
    """A context around everything that allocates. An out-of-memory error in it prints the table and goes on; a host whose
    memory fills up ends the process with the table and exit code 3, before the kernel kills it without a word.

    Attributes:
        planned: the plan of the run, None for a model without formulas.
        hardware: what the plan was held against.
        folder: the run's, for its record; None: there is none.
        model, engine: set as soon as they exist. phase: what is being done, for people.
    """

    def __init__(self, planned: Plan | None, hardware: Hardware, folder: Any = None):
        self.planned = planned
        self.hardware = hardware
        self.folder = folder
        self.model: Any = None
        self.engine: Any = None
        self.phase = "building the model"
        self._would_fit: list[str] | None = None
        self._watch = HostWatch(self._host_fills, self._host_is_full)

    def __enter__(self) -> Explained:
        self._watch.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._watch.stop()
        if isinstance(error, torch.OutOfMemoryError):
            print(self.text(self._now()), file=sys.stderr, flush=True)

    def _now(self) -> str:
        return f"step {self.engine.global_step + 1}" if self.engine is not None else self.phase

    def text(self, phase: str) -> str:
        """The table of the GPU, and the nearest configurations that fit."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        held = held_bytes(self.model, self.engine, device)
        lines = [f"rank {os.environ.get('RANK', '0')} ran out of GPU memory in {phase}. By category, GiB:"]
        lines += table(held, None if self.planned is None else planned_bytes(self.planned.gpu))
        if self.planned is not None:
            lines.append(f"planned: its peak, in phase '{self.planned.gpu.phase}'; held: when the allocation failed")
            gpu = self.hardware.gpu_bytes
            beyond = max(0, sum(held.values()) - self.planned.gpu.bytes)  # the plan was too low by this much, as is any other
            lines += what_fits(self.planned.input, replace(self.hardware, gpu_bytes=None if gpu is None else gpu - beyond))
        return "\n".join(lines)

    def host_text(self, use: Room) -> str:
        """The table of the host, and the nearest configurations that fit."""
        held = held_bytes(self.model, self.engine, torch.device("cpu"))
        resident = ProcessMemory().rss_bytes()
        held[CATEGORIES[-1]] = max(0, resident - sum(held.values()))
        rank = os.environ.get("RANK", "0")
        lines = [f"rank {rank} stops in {self._now()}: host memory is nearly full, {use.describe()}. Of this rank, GiB:"]
        lines += table(held, None if self.planned is None else planned_bytes(self.planned.host))
        if self.planned is not None:
            node, count = self.planned.host_node_bytes, self.planned.ranks_per_node
            lines.append(
                f"planned: its peak, in phase '{self.planned.host.phase}'; all {count} rank(s) of a host: {show_bytes(node)}"
            )
            if use.used_bytes > 1.1 * max(node, resident * count):
                lines.append("more than these ranks hold: other processes share this memory")
            lines += self._would_fit or ["memory filled too fast to look for what would fit: see `bigtrain plan --auto`"]
        return "\n".join(lines)

    def _fits_on_host(self, use: Room) -> list[str]:
        assert self.planned is not None
        beyond = max(0, use.used_bytes - self.planned.host_node_bytes)  # held by others, or more than was planned
        return what_fits(self.planned.input, replace(self.hardware, host_bytes=use.limit_bytes - beyond))

    def _host_fills(self, use: Room) -> None:
        """Look for what would fit while there is room, beside the watch: it takes seconds."""
        if self.planned is not None and os.environ.get("LOCAL_RANK", "0") == "0":
            threading.Thread(target=self._look_for_others, args=(use,), name="bigtrain-nearest", daemon=True).start()

    def _look_for_others(self, use: Room) -> None:
        self._would_fit = self._fits_on_host(use)
        logger.warning("should host memory fill up, %s", "\n".join(self._would_fit))

    def _host_is_full(self, use: Room) -> None:
        """Ends this process: an exception would not reach the main thread in the middle of an allocation."""
        until = time.monotonic() + _SAYING_S
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(self.host_text(use), file=sys.stderr, flush=True)
            watch.failed(DoesNotFitError(f"host memory nearly full, {use.describe()}"))  # for ranks of other hosts
            if self.folder is not None and os.environ.get("RANK", "0") == "0":
                with contextlib.suppress(BigtrainError):
                    self.folder.update_run(outcome=f"stopped: host memory nearly full, {use.describe()}")
        time.sleep(max(0.0, until - time.monotonic()))
        os._exit(DoesNotFitError.exit_code)


def what_fits(now: PlanInput, hardware: Hardware) -> list[str]:
    """Lines about the nearest configurations that fit; takes seconds."""
    try:
        found = nearest(now, hardware)
    except BigtrainError as error:
        return [f"no other configuration was looked for: {error}"]
    if not found:
        more = "take more ranks" if now.device == "cpu" else "take more cards"
        return [f"nothing near fits: shorten --seq_len, {more}, or see `bigtrain plan --auto`"]
    return ["nearest that fit:", *(f"  {c.describe()}" for c in found)]


def planned_bytes(tree: Tree) -> dict[str, int]:
    """The rows of a tree at its peak, by category."""
    out = dict.fromkeys(CATEGORIES, 0)
    for row in tree.rows:
        out[_category(row.name)] += row.bytes
    return out


def _category(row: str) -> str:
    if row.startswith("weights"):
        return "weights"
    if row.startswith("gradient"):
        return "gradients"
    # What is on its way through the GPU is in no optimizer's state, and so not among what is held either.
    return "optimizer states" if row.startswith(("master", "moments", "optimizer state, host")) else CATEGORIES[-1]


def held_bytes(model: Any, engine: Any, device: torch.device) -> dict[str, int]:
    """Bytes on `device` by category; on a GPU the last one is what the allocator gave out and nobody else here holds."""
    seen: set[int] = set()
    out = dict.fromkeys(CATEGORIES, 0)
    inner = getattr(getattr(engine, "_ds", None), "optimizer", None)  # DeepSpeed's: looked at after the fact only
    params = list(model.parameters()) if model is not None else []
    sums = engine._reduction.kept_sums() if inner is not None else []
    parts = (weights(params, inner), itertools.chain(sums, gradients(params, inner)), states(inner))
    for name, tensors in zip(CATEGORIES, parts):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device == device and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                out[name] += storage.nbytes()
    if device.type == "cuda":
        out[CATEGORIES[-1]] = max(0, torch.cuda.memory_allocated(device) - sum(out.values()))
    return out


def table(held: dict[str, int], planned: dict[str, int] | None) -> list[str]:
    """Lines of `category  planned  held`."""
    rows = [(name, "-" if planned is None else show_bytes(planned[name]), show_bytes(held[name])) for name in CATEGORIES]
    total = "-" if planned is None else show_bytes(sum(planned.values()))
    rows = [("", "planned", "held"), *rows, ("together", total, show_bytes(sum(held.values())))]
    width = max(len(row[0]) for row in rows)
    return [f"  {name:<{width}}  {a:>11}  {b:>11}" for name, a, b in rows]


def nearest(now: PlanInput, hardware: Hardware) -> list[Candidate]:
    """The fitting configurations that differ least from `now`, the faster first; the global batch stays."""
    optimizers = tuple(dict.fromkeys((now.optimizer, *DEFAULT_OPTIMIZERS)))
    choice = choose(now.but(checkpoint_blocks=None), hardware, optimizers=optimizers)
    mine = Candidate(now, False, "", 0, 0, plan.predict(now, reserve=False), step_time(now)).options

    def differences(candidate: Candidate) -> int:
        # The number of blocks says whether there is checkpointing at all.
        told = [name for name in mine if name not in ("accumulation", "activation_checkpointing", "checkpointing_policy")]
        return sum(candidate.options[name] != mine[name] for name in told)

    others = [c for c in choice.fitting if differences(c)]
    return sorted(others, key=lambda c: (differences(c), c.time.total_s))[:NEAREST]
