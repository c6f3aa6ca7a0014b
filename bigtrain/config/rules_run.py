"""Rules on the file against the run: the batch numbers, and values said twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bigtrain.config.batch import ACCUMULATION, GLOBAL, MICRO, Batch, BatchError, Given, solve_batch
from bigtrain.config.problems import Problem
from bigtrain.config.rules import Context
from bigtrain.config.run import FLAGS, RunValues
from bigtrain.config.schema_core import OPTIMIZERS

BATCH_FIELDS = {MICRO: "micro_batch", ACCUMULATION: "accumulation", GLOBAL: "global_batch"}
SCHEDULE_NAMES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""DeepSpeed's schedules and what the same shape is called on the command line."""
SAME_SCHEDULE = {"constant_with_warmup": "constant"}
SAME_OPTIM = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_bnb_8bit": "adamw_8bit"}
"""Hugging Face spellings of the same things."""

PATHS: dict[str, tuple[str, ...]] = {
    "learning_rate": ("optimizer.params.lr", "scheduler.params.warmup_max_lr"),
    "adam_epsilon": ("optimizer.params.eps",),
    "weight_decay": ("optimizer.params.weight_decay",),
    "warmup_steps": ("scheduler.params.warmup_num_steps",),
    "total_steps": ("scheduler.params.total_num_steps",),
    "max_grad_norm": ("gradient_clipping",),
    "bf16": ("bf16.enabled", "bfloat16.enabled"),
    "micro_batch": (MICRO,),
    "accumulation": (ACCUMULATION,),
    "global_batch": (GLOBAL,),
}
"""Run value -> the places in the file that say the same thing."""
AT_LEAST = {"learning_rate": 0, "adam_epsilon": 0, "weight_decay": 0, "warmup_steps": 0, "max_grad_norm": 0, "total_steps": 1}


@dataclass(frozen=True)
class Conflict:
    """One value said twice, differently."""

    path: str
    file_value: Any
    flag: str
    flag_value: Any

    def problem(self) -> Problem:
        return Problem(self.path, self.file_value, "error",
                       f"the file says {self.file_value!r}, {self.flag} says {self.flag_value!r}",
                       'make them equal, or write "auto" in the file to let the flag decide')  # fmt: skip


def conflicts(ctx: Context) -> Iterator[Conflict]:
    """Every value on which file and command line differ; equal values and "auto" pass."""
    run = ctx.run or RunValues()
    for name, paths in PATHS.items():
        said = getattr(run, name)
        for path in paths if said is not None else ():
            value = ctx.get(path)
            if isinstance(value, bool | int | float) and value != _as_in_file(name, said):
                yield Conflict(path, value, FLAGS[name], said)
    betas = ctx.get("optimizer.params.betas")
    if isinstance(betas, list) and len(betas) == 2:
        for name, value in zip(("adam_beta1", "adam_beta2"), betas):
            if getattr(run, name) is not None and getattr(run, name) != value:
                yield Conflict("optimizer.params.betas", betas, FLAGS[name], getattr(run, name))
    yield from _named(ctx, run)


def left_open(config: Mapping[str, Any], run: RunValues) -> RunValues:
    """`run` without the values that the file contradicts, for callers that settle those themselves."""
    kept = {
        name: value
        for name, value in run.given().items()
        if not any(True for _ in conflicts(Context(config, run=RunValues(**{name: value}))))
    }
    return RunValues(**kept)


def _as_in_file(name: str, said: Any) -> Any:
    """DeepSpeed wants at least one warm-up step, so 0 on the command line is 1 in the file."""
    return max(1, said) if name == "warmup_steps" else said


def _named(ctx: Context, run: RunValues) -> Iterator[Conflict]:
    kind = ctx.get("optimizer.type")
    if (
        run.optim
        and isinstance(kind, str)
        and not run_owns_optimizer(ctx)
        and optim_name(ctx) != SAME_OPTIM.get(run.optim, run.optim)
    ):
        yield Conflict("optimizer.type", kind, FLAGS["optim"], run.optim)
    kind = ctx.get("scheduler.type")
    wanted = SAME_SCHEDULE.get(run.lr_scheduler_type or "", run.lr_scheduler_type)
    if wanted and isinstance(kind, str) and SCHEDULE_NAMES.get(kind, kind) != wanted:
        yield Conflict("scheduler.type", kind, FLAGS["lr_scheduler_type"], run.lr_scheduler_type)
    if run.gradient_checkpointing is False and isinstance(ctx.get("activation_checkpointing"), dict):
        yield Conflict("activation_checkpointing", ctx.get("activation_checkpointing"),
                       FLAGS["gradient_checkpointing"], False)  # fmt: skip


def run_owns_optimizer(ctx: Context) -> bool:
    """The file's optimizer section holds nothing but "auto", so the run may choose another optimizer."""
    params = ctx.get("optimizer.params", {})
    return isinstance(params, dict) and bool(params) and all(v == "auto" for v in params.values())


def optim_name(ctx: Context) -> str | None:
    """What the file's optimizer is called on the command line; DeepSpeed's Adam is AdamW unless told otherwise."""
    kind = ctx.optimizer_type
    if not kind:
        return None
    if kind == "adam" and ctx.get("optimizer.params.adam_w_mode", True) is not False:
        return "adamw"
    return kind if kind in OPTIMIZERS else str(ctx.get("optimizer.type"))


def disagreements(ctx: Context) -> Iterator[Problem]:
    """`conflicts` as problems."""
    for conflict in conflicts(ctx):
        yield conflict.problem()


def numbers(ctx: Context) -> Iterator[Problem]:
    """Rates and counts of the run that no file can hold, nan and infinity among them; a clipping norm may be infinite."""
    run = ctx.run or RunValues()
    for name, least in AT_LEAST.items():
        value = getattr(run, name)
        if value is not None and not (value >= least and (value < float("inf") or name == "max_grad_norm")):
            yield Problem(FLAGS[name], value, "error", "out of range", f"write a number of at least {least}")
    for name in ("adam_beta1", "adam_beta2"):
        value = getattr(run, name)
        if value is not None and not 0 <= value < 1:
            yield Problem(FLAGS[name], value, "error", "out of range", "write a number from 0 up to (not including) 1")


def given_batch(ctx: Context) -> dict[str, Given | None]:
    """The batch numbers of file and run. Where both speak the file is taken; a difference is a conflict anyway."""
    found: dict[str, Given | None] = {}
    for path, name in BATCH_FIELDS.items():
        in_file, said = ctx.number(path), getattr(ctx.run, name) if ctx.run else None
        if in_file is not None and in_file >= 1 and float(in_file).is_integer():
            found[path] = Given(int(in_file), "file" if said is None else "file and flag")
        else:
            found[path] = Given(said, f"flag {FLAGS[name]}") if said else None
    return found


def data_parallel_ranks(ctx: Context, world_size: int) -> int:
    """Ranks that see different rows: the world without its tensor- and sequence-parallel groups."""
    shared = int(ctx.number("tensor_parallel.autotp_size") or 1) * int(ctx.number("sequence_parallel_size") or 1)
    return max(1, world_size // max(1, shared))


def solved(ctx: Context, world_size: int) -> Batch:
    """The batch triple of file and run; BatchError when it does not fit."""
    given = given_batch(ctx)
    return solve_batch(given[MICRO], given[ACCUMULATION], given[GLOBAL], data_parallel_ranks(ctx, world_size))


def batch(ctx: Context) -> Iterator[Problem]:
    """The triple against the world size; without one, whether any world size could fit."""
    bad_flags = [n for n in BATCH_FIELDS.values() if ctx.run and (v := getattr(ctx.run, n)) is not None and v < 1]
    for name in bad_flags:
        yield Problem(FLAGS[name], getattr(ctx.run, name), "error", "must be at least 1", "write 1 or more")
    if bad_flags or any(True for _ in _batch_conflicts(ctx)):
        return
    if ctx.world_size is not None:
        try:
            solved(ctx, ctx.world_size)
        except BatchError as error:
            yield Problem(GLOBAL, ctx.get(GLOBAL), "error", str(error), "change one of the numbers named")
        return
    given = given_batch(ctx)
    total = given[GLOBAL]
    per_rank = (given[MICRO].value if given[MICRO] else 1) * (given[ACCUMULATION].value if given[ACCUMULATION] else 1)  # type: ignore[union-attr]
    if total and total.value % per_rank:
        yield Problem(GLOBAL, total.value, "error",
                      f"not a multiple of micro batch x accumulation ({per_rank}), so no number of ranks fits",
                      f"write {max(1, round(total.value / per_rank)) * per_rank}")  # fmt: skip


def _batch_conflicts(ctx: Context) -> Iterator[Conflict]:
    return (c for c in conflicts(ctx) if c.path in BATCH_FIELDS)


RULES = (batch, disagreements, numbers)
