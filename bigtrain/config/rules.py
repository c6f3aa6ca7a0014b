"""The second half of linting: what a table row cannot say. Values against each other, the stage, the run, the world.

Each rule is a function from a Context to problems, listed in RULES at the end. The lines of DeepSpeed that a rule
repeats are those of 0.19.8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bigtrain.config.problems import Problem
from bigtrain.config.run import RunValues
from bigtrain.config.schema import MISSING, Key
from bigtrain.config.schema_sections import ROOT
from bigtrain.config.schema_zero import STAGE_1_2, STAGE_3, ZERO
from bigtrain.config.shape import ModelShape
from bigtrain.config.structure import params_key

Z = "zero_optimization"


@dataclass(frozen=True)
class Context:
    """A file and what is known about the run around it. Look-ups never raise, whatever the file holds."""

    config: Mapping[str, Any]
    world_size: int | None = None
    model: ModelShape | None = None
    run: RunValues | None = None
    device: str = "cuda"

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a dotted path."""
        node: Any = self.config
        for part in path.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return default
            node = node[part]
        return node

    def number(self, path: str) -> float | None:
        """The number at a path; None when there is none, or "auto", or something else."""
        value = self.get(path)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    @property
    def stage(self) -> int:
        stage = self.get(f"{Z}.stage", 0)
        return int(stage) if stage in (0, 1, 2, 3) else 0

    def offload(self, what: str) -> str:
        """`none`, `cpu` or `nvme`, for what = `offload_optimizer` or `offload_param`; old spellings count too."""
        device = self.get(f"{Z}.{what}.device")
        if device in ("cpu", "nvme"):
            return device
        old = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}[what]
        return "cpu" if self.get(f"{Z}.{old}") is True else "none"

    @property
    def bf16(self) -> bool:
        """bf16 is on, or will be once its "auto" is filled in."""
        block = self.get("bf16", self.get("bfloat16"))
        return isinstance(block, Mapping) and block.get("enabled") in (True, 1, "auto") and not self.fp16

    @property
    def fp16(self) -> bool:
        return self.get("fp16.enabled") is True

    @property
    def optimizer_type(self) -> str:
        kind = self.get("optimizer.type")
        return kind.lower() if isinstance(kind, str) else ""

    def condition(self, name: str) -> bool:
        return CONDITIONS[name](self)


CONDITIONS: dict[str, Callable[[Context], bool]] = {
    STAGE_3: lambda c: c.stage == 3,
    STAGE_1_2: lambda c: c.stage in (1, 2),
    ZERO: lambda c: c.stage > 0,
    "stage 1": lambda c: c.stage == 1,
    "stage 2": lambda c: c.stage == 2,
    "offload_optimizer": lambda c: c.offload("offload_optimizer") != "none",
    "offload_param": lambda c: c.offload("offload_param") != "none",
    "offload_optimizer on nvme": lambda c: c.offload("offload_optimizer") == "nvme",
    "offload_param on nvme": lambda c: c.offload("offload_param") == "nvme",
    "offload on nvme": lambda c: "nvme" in (c.offload("offload_optimizer"), c.offload("offload_param")),
    "super_offload": lambda c: c.get(f"{Z}.offload_optimizer.super_offload") is True,
    "muon": lambda c: c.optimizer_type == "muon" or bool(c.run and c.run.optim == "muon"),
    "bf16 enabled": lambda c: c.bf16,
    "fp16 enabled": lambda c: c.fp16,
    "torch_adam": lambda c: c.get("optimizer.params.torch_adam") is True,
    "flops_profiler enabled": lambda c: c.get("flops_profiler.enabled") is True,
    "deepcompile": lambda c: c.get("compile.deepcompile") is True,
}
"""Conditions a key may need (`Key.needs`); the name is what the message says."""


def idle_keys(ctx: Context) -> Iterator[Problem]:
    """Keys that do nothing with this stage, offload or precision."""
    yield from _idle(ctx, ctx.config, ROOT, "")


def _idle(ctx: Context, body: Mapping[str, Any], table: Key, path: str) -> Iterator[Problem]:
    for name, value in body.items():
        found = table.lookup(name)
        if found is None or found[1].refused:
            continue
        here = f"{path}.{name}" if path else name
        key = params_key(path, body) if here in ("optimizer.params", "scheduler.params") else found[1]
        missing = [need for need in key.needs if not ctx.condition(need)]
        if missing and value not in (key.default, None) and not here.startswith("fp16."):
            yield Problem(here, value, "note", f"does nothing: it needs {' and '.join(missing)}; {_situation(ctx)}",
                          "remove it, or leave it: it is harmless")  # fmt: skip
        elif not missing and key.kind == "section" and isinstance(value, Mapping):
            yield from _idle(ctx, value, key, here)


def _situation(ctx: Context) -> str:
    return f"this file has stage {ctx.stage}, optimizer offload {ctx.offload('offload_optimizer')}"


def gpu_only(ctx: Context) -> Iterator[Problem]:
    """Options that mean nothing without a GPU; resolving drops them."""
    if ctx.device != "cpu":
        return
    for path, key in gpu_only_keys(ROOT):
        value = ctx.get(path, MISSING)
        if value is not MISSING and value not in (key.cpu_value, None):
            yield Problem(path, value, "note", "needs a GPU; this run has none",
                          f"dropped for this run ({path.rsplit('.', 1)[-1]} {str(key.cpu_value).lower()})")  # fmt: skip
    if ctx.fp16:
        yield Problem("fp16.enabled", True, "error", "fp16 needs a GPU", "write bf16.enabled true, fp16.enabled false")


def gpu_only_keys(table: Key, path: str = "") -> Iterator[tuple[str, Key]]:
    """(path, row) of every GPU-only key, by its canonical spelling."""
    for name, key in table.keys.items():
        here = f"{path}.{name}" if path else name
        if key.gpu_only:
            yield here, key
        yield from gpu_only_keys(key, here)
