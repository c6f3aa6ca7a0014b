"""The one door to DeepSpeed (pinned: 0.19.8). Nothing outside of this folder imports it.

Public symbols used:   deepspeed.initialize, init_distributed, zero.Init, zero.GatheredParameters, ops.adam.DeepSpeedCPUAdam,
Internal symbols used: runtime.zero.partition_parameters.ZeroParamStatus, ops.__compatible_ops__, accelerator.get_accelerator,
                       ops.op_builder.CPUAdamBuilder, git_version_info.installed_ops, runtime.zero.linear.LinearFunctionForZeroStage3, .zero3_linear_wrap;
                       runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer, runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3,
                       runtime.bf16_optimizer.BF16_Optimizer, utils.set_z3_leaf_modules, utils.logger, utils.nvtx.enable_nvtx;
                       runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator._clean_inflight_param_registry (of the
                       stage 3 optimizer's parameter_offload.get_param_coordinator(), .forward_hooks, .backward_hooks);
                       runtime.engine.DeepSpeedEngine._broadcast_model (leaves out what has `ds_optim_param`), runtime.compiler
   for checkpoints:    runtime.fp16.loss_scaler.LossScaler, utils.tensor_fragment.fragment_address, runtime.zero.config.ZeroStageEnum
   building:           zero.Init._convert_to_deepspeed_param, ._partition, ._enable_mem_efficient_linear, .local_device,
                       .remote_device, .pin_memory, .param_swapper, .zero_param_process_group, .quantized_weights, .quantized_nontrainable_weights;
                       runtime.zero.partition_parameters.free_param, .zero_init_context, .InsertPostInitMethodToModuleSubClasses;
                       runtime.swap_tensor.partitioned_param_swapper.PartitionedParamStatus; utils.set_z3_leaf_module
   for the doctor:     ops.adam.FusedAdam, ops.op_builder.AsyncIOBuilder, which it takes from `zero.deepspeed`
Objects of DeepSpeed are handed on; `bigtrain.zero.flat` and `bigtrain.engine.reduction` list what they use and substitute on them.
A test in tests/architecture checks that each exists with the arguments used here.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

# deepspeed.zero.Init patches torch.Tensor constructors; torch._dynamo must have been imported before, because transformers
# imports it lazily inside the context and then fails with "Signature mismatch".
import torch._dynamo  # isort: skip

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
import deepspeed
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from bigtrain import ranks
from bigtrain.errors import ModelError, RanksDisagreeError, UsageError
from bigtrain.hosts import meeting, network, rollcall
from bigtrain.hosts.ports import free_port
from bigtrain.meeting import Point, meet
from bigtrain.whereabouts import HERE
from bigtrain.zero import startup
from bigtrain.zero.adam import cpu_adam as cpu_adam
from bigtrain.zero.adam import replay_cpu_adam as replay_cpu_adam
from bigtrain.zero.adam import why_no_cpu_adam as why_no_cpu_adam
from bigtrain.zero.building import Partitioner as Partitioner
from bigtrain.zero.building import inside_zero_init as inside_zero_init


def init_distributed(timeout_s: float = 1800.0, meet_s: float | None = None, words: Sequence[str] = ()) -> None:
    """Start the process group: NCCL on GPUs, gloo on the CPU; a single process needs no launcher.

    Sets this rank's CUDA device first, so that nothing is ever allocated on another rank's GPU.

    Args:
        timeout_s: longest wait of a collective.
        meet_s: longest wait for the slowest rank to come here, where no launcher looks after all: several hosts, srun, processes by
            hand. By default `timeout_s`: a script may do work of its own on one rank first. With `words` 2 minutes where all are
            known to be on one host, else 10.
        words: of a program whose ranks start alike, its command line, so that a rank of another job is known as one.

    Raises:
        UsageError: the launcher's variables cannot be used, or the port is another process's.
        RanksDisagreeError: some rank did not come in time; names it, on all that came.
    """
    if torch.distributed.is_initialized():
        _start(timeout_s)
        return
    limit_s = timeout_s if meet_s is None and not words else meet_s
    try:
        with meeting.meeting_port():
            _start(timeout_s, rollcall.roll_call(limit_s, words=words))
    except RuntimeError as error:
        if (told := meeting.explain_port(error)) is not None:
            raise told from error
        raise


def _start(timeout_s: float, store: torch.distributed.Store | None = None) -> None:
    """The process group; `store`: where the ranks have met already, else they meet as the launcher's environment says."""
    # DeepSpeed 0.19.8 calls collectives by names that torch 2.13 renames: nothing that a user could do about it.
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use `torch.distributed", category=FutureWarning)
    startup.map_blocks()
    startup.forget_products()
    if torch.cuda.is_available():
        device = ranks.device()
        torch.cuda.set_device(device)
        startup.grow_segments()
        os.environ.setdefault("LOCAL_RANK", str(device.index))  # DeepSpeed binds NCCL to it, and takes 0 without it
    os.environ.setdefault("LOCAL_RANK", str(ranks.local_rank()))  # without it DeepSpeed's engine is refused by an assertion
    if torch.distributed.is_initialized():
        backend = str(torch.distributed.get_backend())
    else:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if "RANK" not in os.environ:
            _pretend_single_rank()
    skip_shm_op()
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "512")  # torch's flight recorder: the last collectives, for `bigtrain.watch`
    if network.several():
        network.choose_interface()
    if store is not None and not torch.distributed.is_initialized():
        bound_to = ranks.device() if torch.cuda.is_available() else None  # NCCL is bound to it, as DeepSpeed itself does
        torch.distributed.init_process_group(
            backend, store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
            timeout=datetime.timedelta(seconds=timeout_s), device_id=bound_to,
        )  # fmt: skip
    deepspeed.init_distributed(
        dist_backend=backend, auto_mpi_discovery=False, timeout=datetime.timedelta(seconds=timeout_s), verbose=False
    )


def _pretend_single_rank() -> None:
    """Give torch's env:// rendezvous what a launcher would have set, on a free port."""
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
    )


def skip_shm_op() -> None:
    """Do not compile DeepSpeed's shared-memory all-reduce for CPU ranks: about 14 s a start, no gain over gloo here."""
    import deepspeed.ops as ops

    for name in list(ops.__compatible_ops__):
        if "shm" in name or name == "deepspeed_shm_comm":
            ops.__compatible_ops__[name] = False


# ---------------------------------------------------------------- parameters: whole or partitioned


def is_partitioned(param: torch.nn.Parameter) -> bool:
    """True if ZeRO-3 owns this parameter (whether or not it is gathered at the moment)."""
    return hasattr(param, "ds_id")


_READS = ("norm", "sum", "abs", "square", "pow", "isnan", "isfinite", "tolist")  # of no elements: 0, nothing, nowhere a NaN


def refuse_empty_reads(model: torch.nn.Module) -> None:
    """Let what is read of ZeRO-3's parameters while they are partitioned fail: it would be read of empty tensors, without a word.

    `copy.deepcopy` of them, or of a module that has some, and methods such as `p.norm()`; not torch's functions, nor `p.data`.
    What is gathered is copied and read as before: peft copies a layer that way.
    """
    for param in model.parameters():
        if is_partitioned(param):
            param.__deepcopy__ = functools.partial(_copied, weakref.ref(param))  # type: ignore[method-assign]
            for name in _READS:
                setattr(param, name, functools.partial(_read, weakref.ref(param), name))


def _copied(ref: Any, memo: dict[int, Any]) -> Any:
    param = ref()
    if not is_available(param):
        raise UsageError(
            f"copy.deepcopy at stage 3: a weight of shape {list(full_shape(param))} is partitioned over the ranks, and its copy would be empty. "
            "A frozen twin (reference, teacher) is made beside the model, in the callable given to build_model: "
            "bigtrain.models.frozen_module(...). Or take stage 0, 1 or 2. Values alone are copied inside bigtrain.zero.gathered(params)."
        )
    return type(param).__deepcopy__(param, memo)


def _read(ref: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    param = ref()
    if not is_available(param):
        raise UsageError(
            f"{name}() of a weight at stage 3: its {list(full_shape(param))} elements are partitioned over the ranks, and none is here. Read it "
            "inside `with bigtrain.zero.gathered([param]):`, on every rank; for a penalty on weights give Engine(weight_decay=...), or use stage 0, 1 or 2."
        )
    return getattr(type(param), name)(param, *args, **kwargs)


def full_shape(param: Any) -> torch.Size:
    """The parameter's shape as the model sees it, partitioned or not."""
    return torch.Size(param.ds_shape) if is_partitioned(param) else param.shape


def full_numel(param: Any) -> int:
    """Number of elements as the model sees it, partitioned or not."""
    return int(param.ds_numel) if is_partitioned(param) else param.numel()


_before_reading: list[Any] = []


def before_reading(finish: Callable[[], None]) -> None:
    """Call the bound method `finish` before weights are gathered, as long as its object lives."""
    _before_reading.append(weakref.WeakMethod(finish))


_fetchers: list[Any] = []  # of ZeRO-3 in every engine: each waits for what was fetched ahead, and lets go of it


def _call_living(methods: list[Any]) -> None:
    methods[:] = [ref for ref in methods if ref() is not None]
    for ref in methods:
        ref()()


@contextlib.contextmanager
def gathered(params: Sequence[torch.nn.Parameter], modifier_rank: int | None = None) -> Iterator[None]:
    """Hold `params` whole inside the block; with `modifier_rank`, that rank's changes are written back to every rank.

    Every rank calls it, with the same `params`. Where ZeRO-3 owns none of them there is nothing to exchange.

    Raises:
        RanksDisagreeError: before anything is gathered, on every rank that came: another is elsewhere, or gathers other weights.
    """
    owned = [p for p in params if is_partitioned(p)]
    if owned:
        _same_gathering(owned, modifier_rank)
    _call_living(_before_reading)
    if any(p.ds_status == ZeroParamStatus.INFLIGHT for p in owned):  # type: ignore[attr-defined]
        # An evaluation fetches ahead for a backward that does not come. GatheredParameters would neither wait for these nor let them go.
        _call_living(_fetchers)
    with deepspeed.zero.GatheredParameters(owned, modifier_rank=modifier_rank, enabled=bool(owned)):
        yield
        for param in owned if modifier_rank is not None else ():
            param.bigtrain_delivered = param._version  # type: ignore[attr-defined]


def _same_gathering(owned: Sequence[Any], modifier_rank: int | None) -> None:
    """Other sizes would be taken for these, or end in an abort in gloo; DeepSpeed gathers in the order of `ds_id`."""
    shapes = [tuple(p.ds_shape) for p in sorted(owned, key=lambda p: p.ds_id)]
    mine = (zlib.crc32(repr(shapes).encode()), len(shapes), -1 if modifier_rank is None else modifier_rank)
    told = meet(Point.GATHERED, HERE.step, 0, mine)
    if any(row != told[0] for row in told[1:]):
        by_rank = {r: f"{n} weights, modifier_rank={None if m < 0 else m}" for r, (_, n, m) in enumerate(told)}
        listing = "\n".join(f"  rank {r}: {text}" for r, text in by_rank.items())
        raise RanksDisagreeError(
            f"bigtrain.zero.gathered() got other weights, or another modifier_rank, on some ranks; here {len(shapes)} of shapes "
            f"{shapes[:4]}:\n{listing}\nEvery rank must gather the same weights in the same order.",
            by_rank,
        )


def is_available(param: Any) -> bool:
    """True if the parameter's data is whole right now."""
    return not is_partitioned(param) or bool(param.ds_status == ZeroParamStatus.AVAILABLE)


def on_nvme(param: Any) -> bool:
    """True if this rank's slice of a ZeRO-3 parameter lives in a file."""
    location = getattr(getattr(param, "ds_tensor", None), "final_location", None)
    return location is not None and str(getattr(location, "value", location)) == "nvme"


def slice_of(param: Any) -> tuple[int, torch.Tensor]:
    """`(start, flat)`: the elements of a ZeRO-3 parameter that this rank owns, from number `start` on, in place; without the padding."""
    size, numel = int(param.ds_tensor.ds_numel), full_numel(param)
    start = min(int(param.ds_zero_partition_rank) * size, numel)
    return start, param.ds_tensor.detach().view(-1)[: min(size, numel - start)]


def partition_of(param: Any) -> tuple[int, int, torch.Tensor]:
    """`(rank, world, flat)` of a ZeRO-3 parameter: this rank's slice, padded to ceil(numel / world) elements, on its device.

    Internal attributes of 0.19.8: ds_tensor, ds_zero_partition_rank, ds_zero_partition_world_size, ds_secondary_tensor.

    Raises:
        ModelError: the slice lives on NVMe, or a second copy of it exists (hpZ), so writing to it would not suffice.
    """
    if on_nvme(param):
        raise ModelError("parameters offloaded to NVMe cannot be read or written in place: use device cpu or none")
    if getattr(param, "ds_secondary_tensor", None) is not None:
        raise ModelError("zero_hpz_partition_size keeps a second copy of each partition, which would be stale: leave it out")
    return int(param.ds_zero_partition_rank), int(param.ds_zero_partition_world_size), param.ds_tensor.data


# ---------------------------------------------------------------- running


def initialize(
    model: torch.nn.Module, config: dict[str, Any], optimizer: Any = None, params: Any = None, through_host: bool = False
) -> Any:
    """DeepSpeed's engine; `through_host`: ZeRO-1/2 flattens weights there, as where the GPU has no room for a second copy."""
    _pickle_stages_by_value()
    accelerator = deepspeed.accelerator.get_accelerator()
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    if through_host:
        accelerator.available_memory = lambda *_: 0
    try:
        with _odd_ones_sent_apart(model, stage), startup.less_to_do(deepspeed, model):
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=params, config=config)
    finally:
        accelerator.__dict__.pop("available_memory", None)
    if optimizer_kind(engine.optimizer) == "zero3":
        fetcher = engine.optimizer.parameter_offload.get_param_coordinator()
        _fetchers.append(weakref.WeakMethod(fetcher._clean_inflight_param_registry))
        _watch_only_what_is_gathered(model, engine.optimizer.parameter_offload)
        _gather_in_every_backward(model)
    return engine


def _watch_only_what_is_gathered(model: torch.nn.Module, offload: Any) -> None:
    """Take ZeRO-3's hooks off modules without parameters: an activation, a dropout.

    Not those that a script has told of another module's (`deepspeed.zero.register_external_parameter`): it is gathered for them.

    DeepSpeed 0.19.8 counts their calls in its trace of the modules. Where ranks differ in them, as in a loop over those experts that
    have tokens, one rank drops its trace and gathers by itself what the others gather together: all stand still.
    """
    bare = [module for module in model.modules() if next(module.parameters(), None) is None and not module._external_params]
    theirs = {id(hooks) for module in bare for hooks in (module._forward_pre_hooks, module._forward_hooks)}
    for handle in (*offload.forward_hooks, *offload.backward_hooks):
        if id(handle.hooks_dict_ref()) in theirs:
            handle.remove()


def _gather_in_every_backward(model: torch.nn.Module) -> None:
    """Let a second backward through one forward gather weights too: of `torch.autograd.grad(loss, x, retain_graph=True)`, then the loss.

    DeepSpeed 0.19.8 gathers once for each output of a forward, by a count that here does not run out; what is there already is not
    gathered again. It lets go of them after the first alone: the second holds the whole model until it ends.
    """
    for module in model.modules():
        module.applied_pre_backward_ref_cnt = 2**62  # type: ignore[assignment]


@contextlib.contextmanager
def _odd_ones_sent_apart(model: torch.nn.Module, stage: int) -> Iterator[None]:
    """Rank 0's parameters without dimensions (CLIP's `logit_scale`), or with strides of their own (channels_last), sent here.

    DeepSpeed 0.19.8 broadcasts whole parameters as bytes and fails on these: "self.dim() cannot be 0 to view BFloat16 as
    Byte", "self.stride(-1) must be 1 to view Float as Byte". It leaves out what carries `ds_optim_param`, but at stage 3, where
    strides do not outlive the first partitioning anyway.
    """
    odd = {n: p for n, p in model.named_parameters() if not is_partitioned(p) and (p.dim() == 0 or not p.is_contiguous())}
    if stage == 3 and (scalars := [n for n, p in odd.items() if p.dim() == 0]):
        raise ModelError(
            f"DeepSpeed cannot partition parameters without dimensions ({', '.join(scalars)}) of a finished model: build it with "
            "bigtrain.models.build_model(source, ds_config=...), where source is what makes the module."
        )
    for p in odd.values() if stage == 3 else ():
        p.data = p.data.contiguous()
    apart = [] if stage == 3 else list(odd.values())
    for p in apart:
        value = p.data.to(ranks.device()).reshape(-1)
        torch.distributed.broadcast(value.view(torch.uint8), 0)
        p.data.copy_(value.view(p.shape))
        p.ds_optim_param = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for p in apart:
            del p.ds_optim_param  # type: ignore[attr-defined]


def optimizer_kind(optimizer: Any) -> str:
    """Which of DeepSpeed's wrappers this is: "zero12", "zero3", "bf16" (stage 1 with fp32 accumulation), or "plain"."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    for kind, cls in (("zero12", DeepSpeedZeroOptimizer), ("zero3", DeepSpeedZeroOptimizer_Stage3), ("bf16", BF16_Optimizer)):
        if isinstance(optimizer, cls):
            return kind
    return "plain"


def set_leaf_modules(model: torch.nn.Module, classes: Sequence[type]) -> int:
    """ZeRO-3: let modules of these classes gather all their parameters at once, whatever runs inside; how many there are."""
    return len(deepspeed.utils.set_z3_leaf_modules(model, list(classes), raise_if_not_found=False))


def mark_leaf(module: torch.nn.Module) -> None:
    """ZeRO-3 gathers this module's parameters all at once and does not look inside."""
    deepspeed.utils.set_z3_leaf_module(module, True)


def leaf_of(param: torch.nn.Parameter) -> torch.nn.Module | None:
    """The ZeRO-3 leaf module that this parameter is gathered with, if it is in one."""
    return getattr(param, "ds_z3_leaf_module", None)


def is_persistent(param: torch.nn.Parameter) -> bool:
    """True if ZeRO-3 keeps this parameter whole between uses (it is below `stage3_param_persistence_threshold`)."""
    return bool(getattr(param, "ds_persist", False))


def _pickle_stages_by_value() -> None:
    """DeepSpeed's files hold its ZeroStageEnum. Python 3.11.2 pickles a member by `getattr`, which no restricted unpickler runs."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    ZeroStageEnum.__reduce_ex__ = lambda self, protocol: (type(self), (self.value,))


def checkpoint_classes() -> list[Any]:
    """Classes of DeepSpeed's own that its checkpoint files hold: the allow-list for reading them with restricted unpickling."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, ZeroStageEnum, fragment_address]
