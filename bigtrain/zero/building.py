"""Building models whose parameters are ZeRO-3's from the first one on."""

from __future__ import annotations

import os
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero import partition_parameters

from bigtrain import ranks
from bigtrain.zero import startup

# What a ds_config says about where partitions live; the rest of it may still hold "auto" while a model is built.
_PLACEMENT_KEYS = (
    "stage", "offload_param", "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
    "memory_efficient_linear", "sub_group_size",
)  # fmt: skip


class Partitioner:
    """Turns parameters whose values are known into DeepSpeed's ZeRO-3 parameters, without a broadcast.

    `deepspeed.zero.Init` is used for its bookkeeping only; its context is never entered, so torch stays unpatched.

    Args:
        config: the ds_config, values may still be "auto".
        dtype: of the partitions, by default.
    """

    def __init__(self, config: dict[str, Any], dtype: torch.dtype):
        os.environ.setdefault("LOCAL_RANK", str(ranks.device().index or 0))  # zero.Init reads it without a default
        self._init = deepspeed.zero.Init(config_dict_or_path=_placement_config(config, dtype), dtype=None)
        self._efficient_linear = config.get("zero_optimization", {}).get("memory_efficient_linear", True) is not False

    @property
    def local_device(self) -> torch.device:
        """Where parameters are whole while they are used."""
        return self._init.local_device

    @property
    def partition_device(self) -> torch.device:
        """Where partitions live."""
        remote = self._init.remote_device
        return torch.device("cpu") if str(remote) in ("cpu", "nvme") else torch.device(remote)

    @property
    def must_see_whole(self) -> bool:
        """True where DeepSpeed itself must cut the parameter: NVMe, secondary partitions, quantized partitions."""
        init = self._init
        return bool(
            init.param_swapper or init.zero_param_process_group or init.quantized_weights or init.quantized_nontrainable_weights
        )

    def adopt(self, param: Any, shape: torch.Size, dtype: torch.dtype, values: torch.Tensor | None) -> None:
        """Make `param` a partitioned parameter of `shape` and `dtype` whose own slice holds `values`.

        Args:
            param: any parameter that ZeRO-3 does not own yet; its data is dropped.
            values: this rank's flat slice, padding included; None leaves the slice unset (a loader fills it).
        """
        before = set(param.__dict__)
        param.data = torch.empty((), dtype=dtype, device=self.local_device).expand(shape)
        self._init._convert_to_deepspeed_param(param)
        size = -(-param.ds_numel // param.ds_zero_partition_world_size)
        device = self.local_device if param.ds_persist else self.partition_device
        if values is None:
            part = torch.empty(size, dtype=dtype, device=device)
        else:
            part = values.to(device=device, dtype=dtype)
        if self._init.pin_memory and part.device.type == "cpu" and torch.cuda.is_available():
            part = part.pin_memory()
        param.ds_tensor = part.requires_grad_(False)
        param.ds_tensor.ds_numel = size
        param.ds_tensor.status = PartitionedParamStatus.AVAILABLE
        param.ds_tensor.final_location = None
        param.ds_numel_aligned = size * param.ds_zero_partition_world_size
        partition_parameters.free_param(param)
        param._bigtrain_added = set(param.__dict__) - before

    def adopt_whole(self, param: Any, dtype: torch.dtype) -> None:
        """Let DeepSpeed cut a parameter whose data is whole (see `must_see_whole`)."""
        before = set(param.__dict__)
        param.data = param.data.to(device=self.local_device, dtype=dtype)
        self._init._convert_to_deepspeed_param(param)
        self._init._partition([param])
        param._bigtrain_added = set(param.__dict__) - before

    @staticmethod
    def release(param: Any) -> torch.Tensor:
        """Undo `adopt`: the parameter is plain again (its data is left empty); returns this rank's flat slice."""
        part = param.ds_tensor
        for name in param.__dict__.pop("_bigtrain_added"):
            param.__dict__.pop(name, None)
        return part.data

    def install_efficient_linear(self) -> None:
        """DeepSpeed's own default at stage 3: without it autograd keeps every gathered weight alive from forward to backward."""
        if self._efficient_linear:
            self._init._enable_mem_efficient_linear()
            startup.torchs_linear(deepspeed)


def _placement_config(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The few keys that zero.Init needs, with "auto" left out."""
    section = {k: v for k, v in config.get("zero_optimization", {}).items() if k in _PLACEMENT_KEYS and v != "auto"}
    offload = section.get("offload_param")
    if isinstance(offload, dict):
        section["offload_param"] = {k: v for k, v in offload.items() if v != "auto"}
    out: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": section}
    if dtype in (torch.bfloat16, torch.float16):
        out["bf16" if dtype == torch.bfloat16 else "fp16"] = {"enabled": True}
    if "aio" in config:
        out["aio"] = config["aio"]
    return out


def inside_zero_init() -> bool:
    """True inside a caller's own `with deepspeed.zero.Init()`."""
    return partition_parameters.zero_init_context > 0
