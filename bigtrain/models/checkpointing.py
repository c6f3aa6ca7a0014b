"""Activation checkpointing that is really on: recompute blocks in backward instead of keeping their activations."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Sequence
from typing import Any

import torch

from bigtrain.errors import ModelError
from bigtrain.models import inplace
from bigtrain.models.recompute import Policy, Runner, runner
from bigtrain.weights.companions import configs_with_cache

logger = logging.getLogger(__name__)


def enable_activation_checkpointing(
    model: torch.nn.Module,
    block_classes: Sequence[type | str] | type | str | None = None,
    blocks: int | None = None,
    policy: Policy = "full",
) -> int:
    """Recompute blocks in backward (non-reentrant); parameters keep their names.

    Args:
        model: a transformers model, or any module if `block_classes` is given.
        block_classes: classes, or names of classes, each instance of which is recomputed as a whole. None: the blocks that
            the transformers model itself declares.
        blocks: how many of them, the first ones in the order of `model.modules()`; the others keep their activations. None: all.
        policy: what of a recomputed block is kept: see `bigtrain.models.recompute.runner`.

    Returns:
        How many blocks are recomputed; 0 comes with a warning, because memory use is then unchanged.

    Raises:
        ModelError: no module has a class of that name; there are fewer blocks than that; unknown policy.
    """
    disable_cache(model)
    if block_classes is None:
        found = declared_blocks(model)
    else:
        found = blocks_of(model, [block_classes] if isinstance(block_classes, (type, str)) else list(block_classes))
    # The last blocks are those that keep. At the start of backward the sum is the same whichever they are, but there the last
    # block is worked on first: were it recomputed, its activations would come on top of everything that is kept. As it is, what
    # the last blocks keep is freed before the first recompute, which then needs less than what has gone.
    count = _checked_number(blocks, len(found), model)
    if count == 0:
        logger.warning(
            "activation checkpointing was asked for, but nothing in %s got wrapped: memory use is unchanged. Name the "
            "repeated block's class; repeated classes here: %s.",
            type(model).__name__,
            ", ".join(_repeated_classes(model)) or "none",
        )
    run = runner(policy, count)
    if policy == "selective":
        inplace.copy_before_rotary(model)
    if block_classes is None:
        _switch_declared(model, found, count, run)
    else:
        for at, block in enumerate(found):
            _wrap(block, run if at < count else None)
    info = getattr(model, "bigtrain_info", None)
    if info is not None:
        info.checkpointed_blocks = count
    return count


def _checked_number(asked: int | None, there: int, model: torch.nn.Module) -> int:
    if asked is not None and (isinstance(asked, bool) or not isinstance(asked, int)):
        raise ModelError(f"{asked!r} blocks are to be recomputed: give a whole number, or None for all")
    if asked is None or there == 0:
        return there
    if not 0 < asked <= there:
        raise ModelError(
            f"{asked} blocks are to be recomputed, and {type(model).__name__} has {there}: give a number from 1 to {there}"
        )
    return asked


def declared_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks that a transformers model can recompute; of a model without such, the modules that have the switch."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        return []
    from transformers.modeling_layers import GradientCheckpointingLayer

    able = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
    return [m for m in able if isinstance(m, GradientCheckpointingLayer)] or able


def _switch_declared(model: torch.nn.Module, found: list[torch.nn.Module], count: int, run: Runner) -> None:
    if not found:
        return
    if count < len(found) and not _is_layer(found[0]):
        raise ModelError(
            f"{type(model).__name__} recomputes all of its blocks or none: name the block's class (block_classes) to recompute "
            f"{count} of them",
        )
    # transformers 5.24 renamed it; 5.17 knows only the older name.
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            module._gradient_checkpointing_func = run  # type: ignore[assignment]
    for block in found[count:]:
        block.gradient_checkpointing = False  # type: ignore[assignment]


def _is_layer(module: torch.nn.Module) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer)


def blocks_of(model: torch.nn.Module, classes: list[type | str]) -> list[torch.nn.Module]:
    """Every module of these classes, in the order of `model.modules()`.

    Raises:
        ModelError: something else is among them, or no module has a class of that name.
    """
    if wrong := [c for c in classes if not isinstance(c, (str, type))]:
        raise ModelError(f"block_classes holds {wrong[0]!r}: give classes, or names of classes")
    names = {c for c in classes if isinstance(c, str)}
    kinds = tuple(c for c in classes if isinstance(c, type))
    known = set().union(*(_class_names(m) for m in model.modules()))
    unknown = sorted(names - known)
    if unknown:
        raise ModelError(
            f"no module of class {', '.join(unknown)} in {type(model).__name__}; repeated classes here: "
            f"{', '.join(_repeated_classes(model)) or 'none'}.",
            unknown,
        )
    return [m for m in model.modules() if isinstance(m, kinds) or names & _class_names(m)]


def _wrap(block: torch.nn.Module, run: Runner | None) -> None:
    """From now on `run` runs the block; None: it keeps its activations."""
    block._bigtrain_runner = run  # type: ignore[assignment]
    if run is not None and "_bigtrain_inner_forward" not in block.__dict__:
        block._bigtrain_inner_forward = block.__dict__.get("forward")  # type: ignore[assignment]
        block.forward = types.MethodType(_checkpointed_forward, block)


def _class_names(module: torch.nn.Module) -> set[str]:
    cls = type(module)
    return {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"}


def _checkpointed_forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs inside the module's __call__, so that DeepSpeed's hooks on the block itself stay outside of the recompute."""
    inner = self.__dict__["_bigtrain_inner_forward"] or functools.partial(type(self).forward, self)
    run = self.__dict__["_bigtrain_runner"]
    return run(inner, *args, **kwargs) if run is not None and torch.is_grad_enabled() else inner(*args, **kwargs)


def _repeated_classes(model: torch.nn.Module) -> list[str]:
    counts: dict[str, int] = {}
    for module in model.modules():
        if next(module.children(), None) is not None and not isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            counts[type(module).__name__] = counts.get(type(module).__name__, 0) + 1
    return [name for name, n in sorted(counts.items(), key=lambda item: -item[1]) if n > 1][:5]


def disable_cache(model: torch.nn.Module) -> bool | None:
    """Switch `use_cache` off for training; what it was stays in `model.bigtrain_info.use_cache`, for exports."""
    config = getattr(model, "config", None)
    before = _use_cache(config)
    info = getattr(model, "bigtrain_info", None)
    if info is not None and info.use_cache is None:
        info.use_cache = before
    for part in configs_with_cache(config):
        part.use_cache = False
    return before


def _use_cache(config: Any) -> bool | None:
    found = configs_with_cache(config)
    return bool(found[-1].use_cache) if found else None
