"""Resolving steps: `zero_optimization`, old spellings, flags about the optimizer, machines without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigtrain.config.generate import FALLBACK, NEVER_PRINT, bucket_sizes
from bigtrain.config.resolve_steps import AUTO, Work
from bigtrain.config.rules import Z, gpu_only_keys
from bigtrain.config.schema import MISSING, Key
from bigtrain.config.schema_core import NEVER_READ
from bigtrain.config.schema_sections import ROOT
from bigtrain.config.structure import is_comment, params_key

CPU_OPTIMIZERS = {"adam": "DeepSpeedCPUAdam", "adamw": "DeepSpeedCPUAdam", "lion": "DeepSpeedCPULion"}
"""What DeepSpeed itself uses when the states are offloaded."""
TESTED = {"adam", "adamw", "lion", "muon", "lamb", "adagrad"}


def modernise(work: Work) -> None:
    """Old spellings become current ones, comments go, whole numbers become integers."""
    if isinstance(work.get(Z), bool):
        work.set(Z, {"stage": int(work.get(Z))}, "file", "the oldest form of the section")
    if work.get(Z) is None:
        work.set(f"{Z}.stage", 0, "default", "the file has no zero_optimization: stage 0")
    for name in [n for n in work.config if is_comment(n) or n in NEVER_READ]:
        work.drop(name, "default", "DeepSpeed does not read it")
    zero = work.config[Z]
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if zero.pop(old, None) is True:
            work.set(f"{Z}.{new}", {"device": "cpu"}, "file", f"{old} is the old spelling")
    zero.pop("cpu_offload_use_pin_memory", None)
    if (gather := zero.pop("stage3_gather_fp16_weights_on_model_save", None)) is not None:
        work.set(f"{Z}.stage3_gather_16bit_weights_on_model_save", gather, "file", "the current name of the key")
    if "aio" in work.config and "thread_count" in work.config["aio"]:
        work.drop("aio.thread_count", "default", "DeepSpeed no longer reads it")
    work.config = _tidy(work.config, ROOT, "")


def _tidy(body: Mapping[str, Any], table: Key, path: str) -> dict[str, Any]:
    """The same content with canonical names and true integers (5e8 is a float in JSON)."""
    out: dict[str, Any] = {}
    for name, value in body.items():
        row = table.lookup(name)
        canonical, key = row if row else (name, None)
        here = f"{path}.{name}" if path else name
        if here in ("optimizer.params", "scheduler.params"):
            key = params_key(path, body)
        if isinstance(value, Mapping) and key is not None:
            value = _tidy(value, key, here)
        elif key is not None and key.kind == "int" and isinstance(value, float):
            value = int(value)
        elif key is not None and key.kind == "bool" and value in (0, 1):
            value = bool(value)
        elif canonical == "stage" and isinstance(value, float):
            value = int(value)
        out[canonical] = value
    return out


def buckets(work: Work) -> None:
    """Hugging Face's formulas for bucket sizes left "auto"."""
    hidden = work.model.hidden_size if work.model else None
    formula = {"reduce_bucket_size": "h x h", "stage3_prefetch_bucket_size": "0.9 x h x h",
               "stage3_param_persistence_threshold": "10 x h"}  # fmt: skip
    sizes = bucket_sizes(work.model)
    for name in FALLBACK:
        if work.get(f"{Z}.{name}") != AUTO:
            continue
        if hidden:
            work.set(f"{Z}.{name}", sizes[name], "model", f"{formula[name]} elements, hidden size {hidden}")
        else:
            work.set(f"{Z}.{name}", sizes[name], "default", "no hidden size known: DeepSpeed's default")
    for name, value in list(work.config[Z].items()):
        row = ROOT.keys[Z].keys.get(name)
        if value == AUTO and row is not None and row.auto != "native":
            if name == "stage3_gather_16bit_weights_on_model_save":
                work.set(f"{Z}.{name}", True, "default", "so that DeepSpeed can save 16-bit weights too")
            elif row.default in (None, MISSING):
                work.drop(f"{Z}.{name}", "default", "DeepSpeed decides")
            else:
                work.set(f"{Z}.{name}", row.default, "default", "DeepSpeed's default")


def optimizer_flags(work: Work) -> None:
    """The flags DeepSpeed wants for this optimizer with this offload, set for the user (DeepSpeed#7524)."""
    name = work.run.optim or ""
    offloaded = work.ctx.offload("offload_optimizer") != "none"
    own = CPU_OPTIMIZERS.get(name)
    if offloaded and own and work.get("optimizer.params.torch_adam") is not True:
        work.say("optimizer", own, "default", "states are offloaded, so the step runs on the CPU with DeepSpeed's "
                 "own optimizer; the other way out is zero_force_ds_cpu_optimizer false")  # fmt: skip
    elif offloaded and work.get("zero_force_ds_cpu_optimizer", True) is not False:
        work.set("zero_force_ds_cpu_optimizer", False, "default",
                 f"{name} is not DeepSpeed's CPU Adam, and DeepSpeed would refuse it with offload")  # fmt: skip
    if work.ctx.stage > 0 and name not in TESTED and work.get("zero_allow_untested_optimizer") is not True:
        work.set("zero_allow_untested_optimizer", True, "default", f"DeepSpeed does not list {name}")
    if name == "muon" and work.ctx.stage == 3 and work.get(f"{Z}.reduce_scatter", True) is True:
        work.set(f"{Z}.reduce_scatter", False, "default", "Muon at stage 3 needs it off")


def without_gpu(work: Work) -> None:
    """On a machine without a GPU, options that need one are written as off."""
    if work.device != "cpu":
        return
    for path, key in gpu_only_keys(ROOT):
        parent, name = path.rsplit(".", 1)
        section = work.get(parent)
        value = section.get(name, key.default) if isinstance(section, dict) else MISSING
        implied = name == "overlap_comm" and work.ctx.stage > 0
        if value is not MISSING and value != key.cpu_value and (value is not None or implied):
            work.set(path, key.cpu_value, "device", "needs a GPU; this machine has none")
    adam = work.run.optim in ("adam", "adamw") and "optimizer" in work.config
    if adam and work.ctx.offload("offload_optimizer") == "none" and work.open("optimizer.params.torch_adam"):
        work.set("optimizer.params.torch_adam", True, "device", "DeepSpeed's fused Adam needs a GPU")


def housekeeping(work: Work) -> None:
    """Printing, and keys without an effect on training that must not stay open."""
    if work.open("steps_per_print"):
        work.set("steps_per_print", NEVER_PRINT, "default", "bigtrain prints its own progress")
    if work.open("wall_clock_breakdown"):
        work.set("wall_clock_breakdown", False, "default", "it synchronises at every step")
    if work.open("timers.throughput.enabled"):
        reason = (
            "it waits for the whole device twice a micro step, also for an optimizer update that runs beside the next forward"
        )
        work.set("timers.throughput.enabled", False, "default", reason)
