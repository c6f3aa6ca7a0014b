"""Rules on precision, optimizer, schedule, clipping, checkpoints and activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bigtrain.config.problems import Problem
from bigtrain.config.rules import Context
from bigtrain.config.schema_core import REMOVED_OPTIMIZERS, REQUIRED_PARAMS
from bigtrain.config.structure import nearest, type_known, type_names

BF16_NAMES = ("bf16", "bfloat16", "torch.bfloat16")
FP32_NAMES = ("fp32", "float32", "float", "torch.float32")
FP16_NAMES = ("fp16", "float16", "half", "torch.float16")


def dtype_name(value: Any) -> str:
    """bf16, fp32 or fp16 for any spelling that DeepSpeed takes; "" for anything else."""
    for short, names in (("bf16", BF16_NAMES), ("fp32", FP32_NAMES), ("fp16", FP16_NAMES)):
        if value in names:
            return short
    return ""


def precision(ctx: Context) -> Iterator[Problem]:
    """Which precision is on, and leftovers of the others."""
    bf16 = ctx.get("bf16.enabled", ctx.get("bfloat16.enabled"))
    if ctx.get("bf16") is not None and ctx.get("bfloat16") is not None:
        yield Problem("bfloat16", ctx.get("bfloat16"), "error", "stands beside bf16, which wins in DeepSpeed",
                      "keep only bf16")  # fmt: skip
    if bf16 is True and ctx.fp16:
        yield Problem("fp16.enabled", True, "error", "bf16 is enabled too; DeepSpeed refuses both",
                      "write fp16.enabled false, or remove the fp16 section")  # fmt: skip
    elif ctx.fp16:
        yield Problem("fp16.enabled", True, "note", "bigtrain trains in bf16 without loss scaling and refuses fp16",
                      "write bf16.enabled true and remove fp16 when training with bigtrain")  # fmt: skip
    if bf16 == "auto":
        yield Problem("bf16.enabled", "auto", "note", 'DeepSpeed by itself reads "auto" as off',
                      "write true, or run `bigtrain config resolve`, which decides it")  # fmt: skip
    if bf16 in (None, False) and ctx.get("fp16.enabled") in (None, False) and not ctx.get("torch_autocast.enabled"):
        yield Problem("bf16.enabled", bf16, "note", "neither bf16 nor fp16 is on: trains in fp32, twice the memory",
                      "write bf16.enabled true unless fp32 is meant")  # fmt: skip
    leftovers = [k for k in ctx.get("fp16", {}) if k != "enabled"] if isinstance(ctx.get("fp16"), Mapping) else []
    if leftovers and not ctx.fp16:
        yield Problem("fp16", ctx.get("fp16"), "note",
                      f"{', '.join(leftovers)}: left over, nothing is scaled unless fp16 is enabled, and bf16 needs "
                      "no loss scaling", "remove the fp16 section")  # fmt: skip


def accumulation_dtype(ctx: Context) -> Iterator[Problem]:
    """data_types against precision and stage (engine.py:get_data_types, _do_optimizer_sanity_check)."""
    grad = dtype_name(ctx.get("data_types.grad_accum_dtype"))
    mode = "bf16" if ctx.bf16 else "fp16" if ctx.fp16 else "fp32"
    if grad and ctx.stage == 0 and grad != mode:
        yield Problem("data_types.grad_accum_dtype", ctx.get("data_types.grad_accum_dtype"), "error",
                      f"DeepSpeed cannot accumulate in {grad} beside {mode} at stage 0 (NotImplementedError)",
                      "write zero_optimization.stage 1, or remove the key")  # fmt: skip
    elif grad and {grad, mode} == {"bf16", "fp16"}:
        yield Problem("data_types.grad_accum_dtype", grad, "error", f"the parameters are {mode}",
                      f"write fp32 or {mode}")  # fmt: skip
    param = dtype_name(ctx.get("data_types.param_dtype"))
    if param and param != mode:
        yield Problem("data_types.param_dtype", param, "error", f"conflicts with the precision in use ({mode})",
                      "remove it")  # fmt: skip


def master_weights(ctx: Context) -> Iterator[Problem]:
    """bf16 master weights and states (base_optimizer.py:_configure_master_weights)."""
    for kind in ("bf16", "fp16"):
        path = f"{kind}.{kind}_master_weights_and_grads"
        if not ctx.on(path):
            continue
        if ctx.stage == 0:
            yield Problem(path, True, "error", "needs ZeRO stage 1, 2 or 3", "write zero_optimization.stage, or false")
        elif not ctx.on("bf16.bf16_optimizer_states") and ctx.offload("offload_optimizer") == "none":
            yield Problem(path, True, "error", "needs optimizer offload, or bf16_optimizer_states",
                          "write offload_optimizer, or remove it")  # fmt: skip
    if ctx.on("bf16.bf16_optimizer_states") and not ctx.on("bf16.bf16_master_weights_and_grads"):
        yield Problem("bf16.bf16_optimizer_states", True, "error", "needs bf16_master_weights_and_grads",
                      "write bf16.bf16_master_weights_and_grads true as well, or remove it")  # fmt: skip


def types(ctx: Context) -> Iterator[Problem]:
    """optimizer.type and scheduler.type."""
    for name in ("optimizer", "scheduler"):
        body = ctx.get(name)
        if not isinstance(body, Mapping):
            continue
        kind = body.get("type")
        if kind is None:
            yield Problem(f"{name}.type", None, "error", f"without a type DeepSpeed ignores the whole {name} section",
                          f"write type, for example {type_names(name)[0]}, or remove the section")  # fmt: skip
        elif kind == "auto" or not isinstance(kind, str):
            continue  # the tables say so already
        elif kind.lower() in REMOVED_OPTIMIZERS:
            yield Problem(f"{name}.type", kind, "error", "removed from DeepSpeed", "write AdamW, Lamb, Lion or Muon")
        elif not type_known(name, kind):
            near = nearest(kind, type_names(name), 0.5)
            yield Problem(f"{name}.type", kind, "error", f"DeepSpeed knows no such {name}",
                          f"write {near}" if near else f"write one of {', '.join(type_names(name)[:6])}")  # fmt: skip
        else:
            yield from _required(name, kind, body)


def _required(name: str, kind: str, body: Mapping[str, Any]) -> Iterator[Problem]:
    params: Any = body.get("params")
    params = params if isinstance(params, Mapping) else {}
    for key in REQUIRED_PARAMS.get(kind, ()) if name == "scheduler" else ():
        if key not in params:
            yield Problem(f"{name}.params.{key}", None, "error", f"{kind} cannot be built without it",
                          f'write {key}, or "auto" to let the run fill it in')  # fmt: skip


def optimizer_values(ctx: Context) -> Iterator[Problem]:
    """Settings that train, but not as meant."""
    lr = ctx.number("optimizer.params.lr")
    if lr == 0:
        yield Problem("optimizer.params.lr", lr, "warning", "with a learning rate of 0 nothing is learned",
                      "write the rate that is meant")  # fmt: skip
    elif lr is not None and lr >= 1 and ctx.optimizer_type in ("adam", "adamw", "lion", "lamb"):
        yield Problem("optimizer.params.lr", lr, "warning", f"far too large for {ctx.get('optimizer.type')}",
                      "write something like 1e-4")  # fmt: skip
    if ctx.on("optimizer.params.amsgrad"):
        yield Problem("optimizer.params.amsgrad", True, "error", "DeepSpeed's optimizers have no AMSGrad variant",
                      "remove it")  # fmt: skip
    offloaded = ctx.offload("offload_optimizer") != "none"
    if offloaded and ctx.optimizer_type == "lamb":
        yield Problem("optimizer.type", ctx.get("optimizer.type"), "error", "Lamb has no CPU version to offload to",
                      "write AdamW, or remove offload_optimizer")  # fmt: skip
    if offloaded and ctx.on("optimizer.params.torch_adam"):
        yield Problem("optimizer.params.torch_adam", True, "note", "the offloaded step runs torch's Adam on the CPU, "
                      "several times slower than DeepSpeedCPUAdam", "remove torch_adam")  # fmt: skip
    if ctx.condition("muon") and ctx.stage == 3 and ctx.get("zero_optimization.reduce_scatter", True) is True:
        # The file contradicts itself only where it names Muon; a run that chooses Muon for it gets it off (optimizer_flags).
        itself = "reduce_scatter" in ctx.get("zero_optimization", {}) and ctx.optimizer_type == "muon"
        yield Problem("zero_optimization.reduce_scatter", True, "error" if itself else "note",
                      "Muon and reduce_scatter cannot be used together at stage 3",
                      "write false" if itself else "dropped for this run (reduce_scatter false)")  # fmt: skip


def schedule_values(ctx: Context) -> Iterator[Problem]:
    """The schedule against itself and against the optimizer."""
    base = "scheduler.params."
    warmup, total = ctx.number(base + "warmup_num_steps"), ctx.number(base + "total_num_steps")
    if warmup is not None and total is not None and warmup > total:
        yield Problem(base + "warmup_num_steps", warmup, "warning",
                      f"longer than the whole run (total_num_steps {total:g}): the full rate is never reached",
                      f"write at most {total:g}")  # fmt: skip
    low, high = ctx.number(base + "warmup_min_lr"), ctx.number(base + "warmup_max_lr")
    if low is not None and high is not None and low > high:
        yield Problem(base + "warmup_min_lr", low, "error", f"above warmup_max_lr {high:g}: the rate would fall",
                      "write 0, or swap them")  # fmt: skip
    lr = ctx.number("optimizer.params.lr")
    if high is not None and lr is not None and high != lr:
        yield Problem(base + "warmup_max_lr", high, "error",
                      f"optimizer.params.lr says {lr:g}; DeepSpeed trains at warmup_max_lr and forgets the other",
                      f"write the same number in both, {high:g} or {lr:g}")  # fmt: skip
    kind = ctx.get("scheduler.type")
    if kind == "WarmupDecayLR" and high is None and ctx.get(base + "warmup_max_lr") != "auto":
        yield Problem(base + "warmup_max_lr", None, "warning",
                      "left out, so DeepSpeed trains at 0.001 whatever optimizer.params.lr says",
                      'write the learning rate, or "auto"')  # fmt: skip


def clipping(ctx: Context) -> Iterator[Problem]:
    """The default that surprises."""
    if "gradient_clipping" not in ctx.config:
        yield Problem("gradient_clipping", None, "note", "left out, so DeepSpeed clips at 1.0",
                      'write the number that is meant (0 for none), or "auto"')  # fmt: skip


def checkpoints(ctx: Context) -> Iterator[Problem]:
    """Flags that break saving."""
    if ctx.on("checkpoint.load_universal"):
        yield Problem("checkpoint.load_universal", True, "warning",
                      "left on, stage 3 saves the model state of rank 0 only, and a plain checkpoint cannot be loaded",
                      "remove it; bigtrain resumes on any number of ranks without it")  # fmt: skip


def activation_checkpointing(ctx: Context) -> Iterator[Problem]:
    """DeepSpeed's block does nothing to a Hugging Face model."""
    block = ctx.get("activation_checkpointing")
    if not isinstance(block, Mapping):
        return
    yield Problem("activation_checkpointing", block, "note",
                  "DeepSpeed alone does nothing with it for a Hugging Face model; bigtrain takes the block as a wish "
                  "and switches the model's own activation checkpointing on",
                  "with bigtrain there is nothing to do; elsewhere pass --gradient_checkpointing")  # fmt: skip


RULES = (precision, accumulation_dtype, master_weights, types, optimizer_values, schedule_values, clipping,
         checkpoints, activation_checkpointing)  # fmt: skip
