"""Which tensors have which dtype, and parameters that are to stay fp32."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.nn.utils.spectral_norm import SpectralNorm

from bigtrain import guards, zero
from bigtrain.checkpoint.live import persistent_buffers
from bigtrain.errors import ModelError
from bigtrain.weights.dtypes import NAMES
from bigtrain.zero import flat


def refuse_other_dtypes(model: torch.nn.Module, bf16: bool) -> None:
    """Refuse trainable parameters in a dtype that the ds_config does not say and that nothing would change.

    DeepSpeed 0.19.8 casts parameters to bf16 where bf16 is enabled, but neither those that are partitioned already nor, where
    it is not, any back to fp32 (runtime/engine.py, `_configure_distributed_model`). An fp32 model that is whole is fine.

    Args:
        model: as it comes to the engine.
        bf16: whether the ds_config enables it.

    Raises:
        ModelError: the model would train in another precision than the ds_config says, or fail in forward under bf16.
    """
    by_hook = [n for n, m in model.named_modules() if any(isinstance(h, SpectralNorm) for h in m._forward_pre_hooks.values())]
    if bf16 and by_hook:
        raise ModelError(
            f"{guards.listing(by_hook)}: torch.nn.utils.spectral_norm multiplies bf16 weights with fp32 vectors, which torch refuses. Use "
            "torch.nn.utils.parametrizations.spectral_norm, or train in fp32 (bf16.enabled false)",
            by_hook,
        )
    wanted = torch.bfloat16 if bf16 else torch.float32
    said, remedy = (
        ("has bf16 enabled", "Build the model with dtype=torch.bfloat16, or write bf16.enabled false to train in fp32.")
        if bf16
        else (
            "has no bf16",
            'Add {"bf16": {"enabled": true}} to train in bf16 with fp32 masters, or build the model with dtype=torch.float32.',
        )
    )
    for name, param in model.named_parameters():
        kept = not bf16 or zero.is_partitioned(param)
        if kept and param.requires_grad and param.is_floating_point() and param.dtype != wanted:
            raise ModelError(
                f"parameter {name} is {_name(param.dtype)} and the ds_config {said}: DeepSpeed would leave it as it is. {remedy}",
                [name],
            )


def refuse_other_kinds(model: torch.nn.Module, stage: int, world_size: int) -> None:
    """Refuse parameters that DeepSpeed 0.19.8 stops at with an assertion, or that ranks would move apart.

    Raises:
        ModelError: a parameter has no values yet, was made in inference mode, is complex, or (a whole one at stage 3) holds integers; an embedding's gradients
            are sparse at a stage that cannot sum them; an embedding rescales its own weights in forward on several ranks; a buffer is of a
            dtype that no checkpoint holds.
    """
    for name, buffer in persistent_buffers(model):
        if buffer.dtype not in NAMES:
            raise ModelError(
                f"buffer {name} is {_name(buffer.dtype)}, which a checkpoint cannot hold: give it another dtype, or leave it out of what is "
                "saved (register_buffer(..., persistent=False))",
                [name],
            )
    for name, param in model.named_parameters():
        if torch.nn.parameter.is_lazy(param):
            raise ModelError(f"parameter {name} is lazy and has no values yet: run the model on one batch before", [name])
        if param.is_inference():
            raise ModelError(
                f"parameter {name} was made under torch.inference_mode(), and torch never trains such: build the model outside of it",
                [name],
            )
        if param.is_complex():
            raise ModelError(
                f"parameter {name} is {_name(param.dtype)}: real numbers alone are trained; keep torch.view_as_real(it) as the parameter, and "
                "make it complex in forward with torch.view_as_complex",
                [name],
            )
        if stage == 3 and not zero.is_partitioned(param) and not param.is_floating_point():
            raise ModelError(
                f"parameter {name} is {_name(param.dtype)}, which stage 3 cannot partition in a model that is whole: build the model with "
                "bigtrain.models.build_model, or make it a buffer (register_buffer)",
                [name],
            )
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) or not module.weight.requires_grad:
            continue
        if module.sparse and stage > 0:
            raise ModelError(
                f"{name} was built with sparse=True: stage {stage} cannot sum sparse gradients. Build it with sparse=False"
            )
        if module.max_norm is not None and (world_size > 1 or stage == 3):
            raise ModelError(
                f"{name} was built with max_norm={module.max_norm}: it rescales its weights in forward, on each rank those of its own tokens, "
                "so that ranks would part. Build it without, and rescale the rows between steps on every rank"
            )


def to_bf16(model: torch.nn.Module, keep: set[str]) -> None:
    """Cast floating parameters to bf16 but for `keep`; modules that own kept ones compute in fp32 and return bf16."""
    kept = set()
    for name, param in model.named_parameters():
        if param.is_floating_point():
            param.data = param.data.to(torch.float32 if name in keep else torch.bfloat16)
        if name in keep:
            kept.add(id(param))
    for module in model.modules():  # not by name: a tied weight has one, and several modules that compute with it
        if any(id(param) in kept for param in module.parameters(recurse=False)):
            _compute_in_fp32(module)


def _compute_in_fp32(module: torch.nn.Module) -> None:
    def enter(_module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)

    def leave(_module: torch.nn.Module, _args: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point() or output.dim() == 0:
            return output  # without dimensions: the loss, from a head that computes it in chunks
        return output.to(torch.bfloat16)

    for param in module.parameters(recurse=False):
        param.data = param.data.float()
    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def dtype_table(module: torch.nn.Module, reduction: Any, settings: Any) -> dict[str, Any]:
    """Counts of tensors by dtype: params, master, grad_accumulation, moments, buffers, keep_in_fp32."""
    params = Counter(_name(p.dtype) for p in module.parameters() if p.requires_grad)
    masters = Counter(_name(m.dtype) for m in flat.masters(reduction.optimizer))
    optimizer = reduction.optimizer
    inner = getattr(optimizer, "inner", None) or getattr(optimizer, "optimizer", optimizer)
    moments = Counter(
        _name(t.dtype) for state in inner.state.values() for t in state.values() if isinstance(t, torch.Tensor) and t.dim() > 0
    )
    return {
        "params": dict(params),
        "master": dict(masters),
        "grad_accumulation": _accumulation(reduction, settings),
        "moments": dict(moments),
        "buffers": dict(Counter(_name(b.dtype) for b in module.buffers())),
        "keep_in_fp32": sorted(n for n, p in module.named_parameters() if p.dtype == torch.float32) if settings.bf16 else [],
    }


def _accumulation(reduction: Any, settings: Any) -> str:
    if reduction.kind == "plain":
        return _name(reduction.optimizer.flat.dtype)
    dtype = getattr(reduction.optimizer, "gradient_accumulation_dtype", None) or getattr(
        reduction.optimizer, "grad_acc_dtype", None
    )
    return _name(dtype) if dtype is not None else ("bfloat16" if settings.bf16 else "float32")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def summary(settings: Any, world_size: int, module: torch.nn.Module, reduction: Any) -> dict[str, Any]:
    """What an engine runs with: stage, batch, optimizer, schedule, dtypes."""
    options, names = settings.options, ("stage", "micro_batch", "accumulation", "optimizer", "scheduler")
    chosen = {name: getattr(settings, name) for name in names} | {"learning_rate": options.lr}
    chosen |= {name: getattr(settings, name) for name in ("warmup_steps", "total_steps", "max_grad_norm")}
    chosen |= {"weight_decay": options.weight_decay}
    loss = "mean over all target tokens of the global batch"
    more = {"world_size": world_size, "offload_optimizer": options.offload is not None, "loss": loss}
    more |= {"offload_gradients": options.offload.gradients} if options.offload and options.offload.gradients else {}
    return {**chosen, **more, "dtypes": dtype_table(module, reduction, settings)}
