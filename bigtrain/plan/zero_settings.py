"""What a ds_config says about memory, as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from bigtrain import defaults
from bigtrain.errors import UsageError
from bigtrain.plan.constants import STATE_BUFFERS


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """The memory-relevant part of a ds_config, as numbers. Sizes are elements, as in DeepSpeed's JSON.

    Defaults are DeepSpeed 0.19.8's (runtime/zero/config.py, offload_config.py).

    Attributes:
        stage: 0 to 3.
        offload_optimizer, offload_param: whether these live in host memory; `pin_memory`: page-locked.
        ratio: offload_optimizer.ratio, the share of the state that does. buffers: offload_optimizer.buffer_count.
        offload_gradients: share of the gradients that leaves the GPU during backward; an argument of the run, not in the file.
        reduce_bucket_elems: reduce_bucket_size. overlap_comm, reduce_scatter: as in the file.
        grad_bytes: of an element of the sum of gradients: 4 or 2, by data_types.grad_accum_dtype.
        prefetch_elems, persistence_elems: stage3_prefetch_bucket_size, stage3_param_persistence_threshold.
        max_live_elems, max_reuse_elems: stage3_max_live_parameters, stage3_max_reuse_distance.
        sub_group_elems: sub_group_size.
        bf16_states: bf16.bf16_master_weights_and_grads.
        leaf_classes, leaf_names, leaf_suffixes: leaf_module's classes, names, name_suffixes, as far as the file has them.
        leaf_threshold: stage3_module_granularity_threshold.

    Raises:
        UsageError: values that no stage takes, or not this one.
    """

    stage: int = 3
    offload_optimizer: bool = False
    offload_param: bool = False
    pin_memory: bool = True
    ratio: float = 1.0
    buffers: int = STATE_BUFFERS
    offload_gradients: float = 0.0
    reduce_bucket_elems: int = defaults.BUCKET_ELEMS["reduce_bucket_size"]
    overlap_comm: bool = False
    reduce_scatter: bool = True
    grad_bytes: int = 2
    prefetch_elems: int = defaults.BUCKET_ELEMS["stage3_prefetch_bucket_size"]
    persistence_elems: int = defaults.BUCKET_ELEMS["stage3_param_persistence_threshold"]
    max_live_elems: int = 1_000_000_000
    max_reuse_elems: int = 1_000_000_000
    sub_group_elems: int = 1_000_000_000
    bf16_states: bool = False
    leaf_classes: tuple[str, ...] = ()
    leaf_names: tuple[str, ...] = ()
    leaf_suffixes: tuple[str, ...] = ()
    leaf_threshold: int = 0

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise UsageError(f"zero_optimization.stage is {self.stage!r}: it must be 0, 1, 2 or 3")
        if self.offload_param and self.stage != 3:
            raise UsageError(f"offload_param needs stage 3, not stage {self.stage}")
        if not 0.0 <= self.offload_gradients <= 1.0:
            raise UsageError(f"offload_gradients is {self.offload_gradients!r}: a share from 0 to 1 is needed")
        if self.offload_optimizer and self.stage == 0:
            raise UsageError("offload_optimizer needs stage 1, 2 or 3, not stage 0")


def _elems(block: Mapping[str, Any], key: str, default: int, auto: Mapping[str, int]) -> int:
    value = block.get(key, default)
    if value == "auto":
        value = auto.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UsageError(f"zero_optimization.{key} is {value!r}: a number of elements is needed")
    return int(value)


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Section `key` of a ds_config, empty if it has none.

    Raises:
        UsageError: it is no object.
    """
    block = config.get(key) or {}
    if not isinstance(block, Mapping):
        raise UsageError(f"{key} is {block!r}: the plan needs an object, {{...}}")
    return block


def _buffers(optimizer: Mapping[str, Any]) -> int:
    count = optimizer.get("buffer_count")
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
        raise UsageError(
            f"zero_optimization.offload_optimizer.buffer_count is {count!r}: a whole number of at least 0 is needed"
        )
    return count or STATE_BUFFERS


def _ratio(optimizer: Mapping[str, Any]) -> float:
    ratio = optimizer.get("ratio", 1.0)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0.0 <= ratio <= 1.0:
        raise UsageError(f"zero_optimization.offload_optimizer.ratio is {ratio!r}: a number from 0 to 1 is needed")
    return float(ratio)


def _offload(zero: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    block = section(zero, key)
    device = block.get("device", "none")
    if device == "nvme":
        raise UsageError(f"zero_optimization.{key}.device is 'nvme': the planner covers GPU and host memory only")
    return block if device == "cpu" else None


def _leafs(zero: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """DeepSpeed takes one name for a list of one."""
    names = section(zero, "leaf_module").get(key) or ()
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"zero_optimization.leaf_module.{key} is {names!r}: a list of names is needed")
    return tuple(names)


def settings_from_config(config: Mapping[str, Any], hidden: int) -> ZeroSettings:
    """Read a ds_config; "auto" of buckets stands for `defaults.bucket_elems`.

    Args:
        config: the parsed JSON. hidden: hidden size of the model, for "auto".

    Raises:
        UsageError: a value that the plan needs is wrong, NVMe offload is asked for, or another precision than bf16.
    """
    zero = section(config, "zero_optimization")
    size = partial(_elems, zero, auto=defaults.bucket_elems(hidden))
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or not isinstance(stage, int):
        raise UsageError(f"zero_optimization.stage is {stage!r}: the plan needs a number")
    overlap = zero.get("overlap_comm")
    optimizer, param = _offload(zero, "offload_optimizer"), _offload(zero, "offload_param")
    grad = section(config, "data_types").get("grad_accum_dtype")
    bf16 = section(config, "bf16") or section(config, "bfloat16")
    if bf16.get("enabled") is False:
        raise UsageError(
            "bf16 is not enabled: the planner counts bf16 weights with their fp32 masters, not a run in fp32 or fp16"
        )
    return ZeroSettings(
        stage=stage,
        offload_optimizer=optimizer is not None,
        offload_param=param is not None,
        pin_memory=bool((optimizer or param or {}).get("pin_memory", True)),
        ratio=_ratio(optimizer or {}),
        buffers=_buffers(optimizer or {}),
        reduce_bucket_elems=size("reduce_bucket_size", ZeroSettings.reduce_bucket_elems),
        overlap_comm=(stage == 3) if overlap in (None, "auto") else bool(overlap),
        reduce_scatter=bool(zero.get("reduce_scatter", True)),
        grad_bytes=4 if grad in ("fp32", "float32", "float", "torch.float32") else 2,
        prefetch_elems=size("stage3_prefetch_bucket_size", ZeroSettings.prefetch_elems),
        persistence_elems=size("stage3_param_persistence_threshold", ZeroSettings.persistence_elems),
        max_live_elems=size("stage3_max_live_parameters", ZeroSettings.max_live_elems),
        max_reuse_elems=size("stage3_max_reuse_distance", ZeroSettings.max_reuse_elems),
        sub_group_elems=size("sub_group_size", ZeroSettings.sub_group_elems),
        bf16_states=bool(bf16.get("bf16_master_weights_and_grads")),
        leaf_classes=_leafs(zero, "classes") if stage == 3 else (),
        leaf_names=_leafs(zero, "names") if stage == 3 else (),
        leaf_suffixes=_leafs(zero, "name_suffixes") if stage == 3 else (),
        leaf_threshold=size("stage3_module_granularity_threshold", 0) if stage == 3 else 0,
    )
