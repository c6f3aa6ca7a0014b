"""The one door to DeepSpeed (pinned: 0.19.8). No other module imports it.

Public symbols used:   deepspeed.initialize, init_distributed, zero.Init, zero.GatheredParameters, ops.adam.DeepSpeedCPUAdam
Internal symbols used: runtime.zero.partition_parameters.ZeroParamStatus, ops.__compatible_ops__
A test in tests/architecture checks that each exists with the arguments used here.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

# deepspeed.zero.Init patches torch.Tensor constructors; torch._dynamo must have been imported before, because transformers
# imports it lazily inside the context and then fails with "Signature mismatch".
import torch._dynamo  # isort: skip

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
import deepspeed
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from bigtrain.errors import ModelError


def init_distributed(timeout_s: float = 1800.0) -> None:
    """Start the process group: NCCL on GPUs, gloo on the CPU; a single process needs no launcher.

    Sets this rank's CUDA device first, so that nothing is ever allocated on another rank's GPU.
    """
    from bigtrain import ranks

    if torch.cuda.is_available():
        torch.cuda.set_device(ranks.local_rank() % torch.cuda.device_count())
    if torch.distributed.is_initialized():
        backend = torch.distributed.get_backend()
    else:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if "RANK" not in os.environ:
            _pretend_single_rank()
    skip_shm_op()
    deepspeed.init_distributed(
        dist_backend=backend, auto_mpi_discovery=False, timeout=datetime.timedelta(seconds=timeout_s), verbose=False
    )


def _pretend_single_rank() -> None:
    """Give torch's env:// rendezvous what a launcher would have set, on a free port."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )


def skip_shm_op() -> None:
    """Do not compile DeepSpeed's shared-memory all-reduce for CPU ranks: about 14 s of every start, for no gain over gloo here."""
    import deepspeed.ops as ops

    for name in list(ops.__compatible_ops__):
        if "shm" in name or name == "deepspeed_shm_comm":
            ops.__compatible_ops__[name] = False


# ---------------------------------------------------------------- parameters: whole or partitioned


def is_partitioned(param: torch.nn.Parameter) -> bool:
    """True if ZeRO-3 owns this parameter (whether or not it is gathered at the moment)."""
    return hasattr(param, "ds_id")


def full_shape(param: torch.nn.Parameter) -> torch.Size:
    """The parameter's shape as the model sees it, partitioned or not."""
    return torch.Size(param.ds_shape) if is_partitioned(param) else param.shape


def full_numel(param: torch.nn.Parameter) -> int:
    """Number of elements as the model sees it, partitioned or not."""
    return int(param.ds_numel) if is_partitioned(param) else param.numel()


@contextlib.contextmanager
def gathered(params: Sequence[torch.nn.Parameter], modifier_rank: int | None = None) -> Iterator[None]:
    """Hold `params` whole inside the block; with `modifier_rank`, that rank's changes are written back to every rank."""
    owned = [p for p in params if is_partitioned(p)]
    with deepspeed.zero.GatheredParameters(owned, modifier_rank=modifier_rank, enabled=bool(owned)):
        yield


def is_available(param: torch.nn.Parameter) -> bool:
    """True if the parameter's data is whole right now."""
    return not is_partitioned(param) or param.ds_status == ZeroParamStatus.AVAILABLE


def partition_of(param: Any) -> tuple[int, int, torch.Tensor]:
    """`(rank, world, flat)` of a ZeRO-3 parameter: this rank's slice, padded to ceil(numel / world) elements, on its device.

    Internal attributes of 0.19.8: ds_tensor, ds_zero_partition_rank, ds_zero_partition_world_size, ds_secondary_tensor.

    Raises:
        ModelError: the slice lives on NVMe, or a second copy of it exists (hpZ), so writing to it would not suffice.
    """
    flat = param.ds_tensor
    location = getattr(flat, "final_location", None)
    if location is not None and str(getattr(location, "value", location)) == "nvme":
        raise ModelError("parameters offloaded to NVMe cannot be read or written in place: use device cpu or none")
    if getattr(param, "ds_secondary_tensor", None) is not None:
        raise ModelError("zero_hpz_partition_size keeps a second copy of each partition, which would be stale: leave it out")
    return int(param.ds_zero_partition_rank), int(param.ds_zero_partition_world_size), flat.data


# ---------------------------------------------------------------- building under zero.Init (owner: models)


# ---------------------------------------------------------------- running (owner: engine)


def initialize(model: torch.nn.Module, config: dict[str, Any], optimizer: Any = None, params: Any = None) -> Any:
    """`deepspeed.initialize`, returning DeepSpeed's engine alone."""
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=params, config=config)
    return engine
