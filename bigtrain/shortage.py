"""When a GPU runs out of memory in the middle of a run: what was planned, what is held at that moment, and what would fit.

Out of memory is one rank's alone, so nothing here talks to the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from bigtrain import plan
from bigtrain.errors import BigtrainError
from bigtrain.plan.choose import DEFAULT_OPTIMIZERS, Candidate, choose
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.machine import show_bytes
from bigtrain.plan.predict import Plan
from bigtrain.plan.roofline import step_time

CATEGORIES = ("weights", "gradients", "optimizer states", "activations, buckets, rest")
NEAREST = 3


class Explained:
    """A context around everything that allocates; an out-of-memory error in it prints the table and goes on.

    Attributes:
        planned: the plan of the run, None for a model without formulas.
        gpu_memory_bytes, host_memory_bytes: what the plan was held against.
        model, engine: set as soon as they exist. phase: what is being done, for people.
    """

    def __init__(self, planned: Plan | None, gpu_memory_bytes: int | None, host_memory_bytes: int | None):
        self.planned = planned
        self.limits = gpu_memory_bytes, host_memory_bytes
        self.model: Any = None
        self.engine: Any = None
        self.phase = "building the model"

    def __enter__(self) -> Explained:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            phase = f"step {self.engine.global_step + 1}" if self.engine is not None else self.phase
            print(self.text(phase), file=sys.stderr, flush=True)

    def text(self, phase: str) -> str:
        """The table, and the nearest configurations that fit."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        held = held_bytes(self.model, self.engine, device)
        lines = [f"rank {os.environ.get('RANK', '0')} ran out of GPU memory in {phase}. By category, GiB:"]
        lines += table(held, None if self.planned is None else planned_bytes(self.planned))
        if self.planned is not None:
            lines.append(f"planned: its peak, in phase '{self.planned.gpu.phase}'; held: when the allocation failed")
            lines += self._what_fits(sum(held.values()))
        return "\n".join(lines)

    def _what_fits(self, held: int) -> list[str]:
        assert self.planned is not None
        gpu, host = self.limits
        beyond = max(0, held - self.planned.gpu.bytes)  # the plan was too low by this much at least: so is every other
        try:
            found = nearest(self.planned.input, None if gpu is None else gpu - beyond, host)
        except BigtrainError as error:
            return [f"no other configuration was looked for: {error}"]
        if not found:
            return ["nothing near fits this card: shorten seq_len, take more cards, or see `bigtrain plan --auto`"]
        return ["nearest that fit:", *(f"  {c.describe()}" for c in found)]


def planned_bytes(found: Plan) -> dict[str, int]:
    """The rows of the plan's peak, by category."""
    out = dict.fromkeys(CATEGORIES, 0)
    for row in found.gpu.rows:
        out[_category(row.name)] += row.bytes
    return out


def _category(row: str) -> str:
    if row.startswith("weights"):
        return "weights"
    if row.startswith("gradient"):
        return "gradients"
    return "optimizer states" if row.startswith(("master", "moments", "remainder")) else CATEGORIES[-1]


def held_bytes(model: Any, engine: Any, device: torch.device) -> dict[str, int]:
    """Bytes on `device` by category; on a GPU the last one is what the allocator gave out and nobody else here holds."""
    seen: set[int] = set()
    out = dict.fromkeys(CATEGORIES, 0)
    inner = getattr(getattr(engine, "_ds", None), "optimizer", None)  # DeepSpeed's: looked at after the fact only
    params = list(model.parameters()) if model is not None else []
    parts = (_weights(params), _gradients(params, inner), _states(inner))
    for name, tensors in zip(CATEGORIES, parts):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device == device and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                out[name] += storage.nbytes()
    if device.type == "cuda":
        out[CATEGORIES[-1]] = max(0, torch.cuda.memory_allocated(device) - sum(out.values()))
    return out


def _weights(params: Iterable[Any]) -> Iterator[torch.Tensor]:
    for param in params:
        yield param.data
        if getattr(param, "ds_tensor", None) is not None:
            yield param.ds_tensor.data


def _gradients(params: Iterable[Any], inner: Any) -> Iterator[torch.Tensor]:
    for param in params:
        yield from _tensors((param.grad, getattr(param, "grad_accum", None)))
    for name in ("averaged_gradients", "grad_partitions_flat_buffer"):
        yield from _tensors(getattr(inner, name, None))


def _states(inner: Any) -> Iterator[torch.Tensor]:
    yield from _tensors([group["params"] for group in getattr(inner, "param_groups", ())])
    yield from _tensors(getattr(inner, "state", None))
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        yield from _tensors(getattr(inner, name, None))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in list(value.values()):
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)


def table(held: dict[str, int], planned: dict[str, int] | None) -> list[str]:
    """Lines of `category  planned  held`."""
    rows = [(name, "-" if planned is None else show_bytes(planned[name]), show_bytes(held[name])) for name in CATEGORIES]
    total = "-" if planned is None else show_bytes(sum(planned.values()))
    rows = [("", "planned", "held"), *rows, ("together", total, show_bytes(sum(held.values())))]
    width = max(len(row[0]) for row in rows)
    return [f"  {name:<{width}}  {a:>11}  {b:>11}" for name, a, b in rows]


def nearest(now: PlanInput, gpu_memory_bytes: int | None, host_memory_bytes: int | None) -> list[Candidate]:
    """The fitting configurations that differ least from `now`, the faster first; the global batch stays."""
    choice = choose(
        now,
        gpu_memory_bytes=gpu_memory_bytes,
        host_memory_bytes=host_memory_bytes,
        optimizers=tuple(dict.fromkeys((now.optimizer, *DEFAULT_OPTIMIZERS))),
    )
    mine = Candidate(now, False, "", 0, 0, plan.predict(now, reserve=False), step_time(now)).options

    def differences(candidate: Candidate) -> int:
        return sum(candidate.options[name] != mine[name] for name in mine if name != "accumulation")

    others = [c for c in choice.fitting if differences(c)]
    return sorted(others, key=lambda c: (differences(c), c.time.total_s))[:NEAREST]
