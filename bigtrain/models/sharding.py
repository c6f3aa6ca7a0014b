"""From a built model to ZeRO-3 parameters, and back for as long as code wants to change it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from bigtrain import ranks, zero
from bigtrain.errors import ModelError
from bigtrain.models.kept import is_kept
from bigtrain.models.window import Window, can_be_parked, gather

DtypeRule = Callable[[str, torch.dtype], torch.dtype]


def dtype_rule(dtype: torch.dtype, keep_in_fp32: Sequence[str] = ()) -> DtypeRule:
    """Floating parameters get `dtype`, except those that are kept in fp32."""

    def rule(name: str, drawn: torch.dtype) -> torch.dtype:
        if not drawn.is_floating_point:
            return drawn
        return torch.float32 if is_kept(name, keep_in_fp32) else dtype

    return rule


def shard(model: torch.nn.Module, window: Window, partitioner: zero.Partitioner, rule: DtypeRule) -> None:
    """Partition every parameter that is not yet; call it after the window's context has ended.

    Raises:
        ModelError: on all ranks, with the names of parameters that cannot be partitioned, have no elements, share memory with
            another one, or got different values on different ranks.
    """
    fresh = [(name, p) for name, p in model.named_parameters() if not zero.is_partitioned(p)]
    _refuse(fresh)
    parked = {name: window.close(p) for name, p in fresh}
    refuse_empty({name: entry.shape for name, entry in parked.items()})
    if window.draw:
        _refuse_different_values({name: entry.sample for name, entry in parked.items()})
    for name, param in fresh:
        entry = parked[name]
        dtype = rule(name, entry.dtype)
        if partitioner.must_see_whole:
            empty = torch.empty(entry.shape, dtype=dtype, device=param.device)
            param.data = empty if entry.shard is None else gather(entry.shard, entry.shape, param.device)
            partitioner.adopt_whole(param, dtype)
        else:
            partitioner.adopt(param, entry.shape, dtype, entry.shard)
        entry.shard = None
    window.restore_others()
    left = [name for name, p in model.named_parameters() if not zero.is_partitioned(p)]
    if left:
        raise ModelError(f"{len(left)} parameters are not partitioned: {', '.join(left[:10])}.", left)


def refuse_empty(shapes: Mapping[str, torch.Size]) -> None:
    """Stage 3 of DeepSpeed 0.19.8 never gathers a parameter without elements, and its forward stops at an assertion.

    Raises:
        ModelError: some parameter has a size of 0, as the weight of nn.Linear(0, n).
    """
    empty = [f"{name} {list(shape)}" for name, shape in shapes.items() if shape.numel() == 0]
    if empty:
        raise ModelError(
            f"{len(empty)} parameters have no elements: {', '.join(empty[:10])}. At stage 3 DeepSpeed cannot train a model that has "
            "such; leave them out of the model, or take stage 0, 1 or 2. If this is a deep copy of a partitioned model, which has none of its "
            "weights: build the model a second time.",
            empty,
        )


def generate_in_step(model: torch.nn.Module) -> None:
    """Let transformers' `generate` go on, on a rank whose text has ended, until all have: each token gathers weights from all ranks.

    It does so by itself where DeepSpeed's config is known to transformers (`synced_gpus` in generation/utils.py, 5.24).
    """
    for module in model.modules():
        if any(cls.__name__ == "GenerationMixin" for cls in type(module).__mro__):
            object.__setattr__(module, "generate", types.MethodType(_generate_in_step, module))


def explain_bare_forward(model: torch.nn.Module) -> None:
    """From now on, what a forward of partitioned weights fails with says that nothing gathers them. Calling it again changes nothing."""
    if "_bigtrain_explains" not in model.__dict__:
        handle = model.register_forward_hook(_explain_bare_forward, always_call=True)
        object.__setattr__(model, "_bigtrain_explains", handle)


def _explain_bare_forward(model: torch.nn.Module, _inputs: Any, output: Any) -> None:
    error = sys.exc_info()[1]  # torch calls this while it handles the error
    if error is None or output is not None or all(zero.is_available(p) for p in model.parameters()):
        return
    hooks = (hook for part in model.modules() for hook in part._forward_pre_hooks.values())
    if not any(str(getattr(hook, "__module__", "")).startswith("deepspeed") for hook in hooks):
        error.add_note(
            "The model's weights are partitioned over the ranks (ZeRO stage 3), and no Engine gathers them for this forward: none was made, or "
            "it was closed. Make one (bigtrain.engine.Engine); for a model that does not train, call it on every rank inside "
            "bigtrain.zero.gathered(list(model.parameters())), or build it without a ds_config, whole on each rank."
        )


def _generate_in_step(self: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("synced_gpus") is None:
        kwargs["synced_gpus"] = True
    return type(self).generate(self, *args, **kwargs)


def _refuse(named: list[tuple[str, Parameter]]) -> None:
    bad = [name for name, p in named if not can_be_parked(p)]
    if bad:
        raise ModelError(
            f"{len(bad)} parameters cannot be partitioned: {', '.join(bad[:10])}. They are lazy (give the layer its input "
            "size), on the meta device (never given values) or quantized; build the layer with real values.",
            bad,
        )
    owner: dict[int, str] = {}
    for name, p in named:
        if p.numel() and p.__dict__.get("_bigtrain_parked") is None:
            other = owner.setdefault(p.data_ptr(), name)
            if other != name:
                raise ModelError(
                    f"{other} and {name} are two parameters over the same memory; sharding would part them without a word. "
                    "Tie them by assigning the same Parameter object: b.weight = a.weight.",
                    [other, name],
                )


def _refuse_different_values(samples: dict[str, int]) -> None:
    everyone = ranks.all_gather_object(samples)
    if any(list(s) != list(samples) for s in everyone):
        counts = [len(s) for s in everyone]
        raise ModelError(
            f"ranks built different models (number of parameters by rank: {counts}). Construct it alike everywhere."
        )
    different = [name for name in samples if any(s[name] != samples[name] for s in everyone)]
    if different:
        raise ModelError(
            f"{len(different)} parameters got different values on different ranks: {', '.join(different[:10])}. The "
            "constructor draws from a generator of its own, or depends on the rank; draw from torch's, numpy's or Python's "
            "global one.",
            different,
        )


def thaw(param: Parameter, window: Window, dtype: torch.dtype | None, values: bool) -> None:
    """Give a partitioned parameter back to a window, as `dtype` (None: as it is), with or without its values."""
    shape = zero.full_shape(param)
    part = zero.Partitioner.release(param)
    window.resume(param, shape, dtype or part.dtype, part if values else None)
