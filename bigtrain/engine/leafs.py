"""Inputs of ZeRO-3's leaf modules, which DeepSpeed gathers whole: their gradients must wait for the module's backward.

DeepSpeed 0.19.8 reduces the gradients of a leaf module from torch's full backward hook, which torch calls when the gradients of the
module's positional tensors are there. If none of these carries a gradient (nothing before the module trains, or the hidden states
come by keyword), torch calls it as soon as the gradient of the output is there, before the module's backward: weights that are not
gathered then are an error ("Cannot reduce scatter gradients"), others are reduced as zeros.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from bigtrain import zero
from bigtrain.errors import ModelError


def carry_gradients(model: torch.nn.Module) -> list[RemovableHandle]:
    """From now on each leaf module that trains gets a positional tensor that carries a gradient; call it after DeepSpeed's start.

    Raises:
        ModelError: in a forward, on a rank whose leaf module was given no floating tensor that could be made one.
    """
    named = {module: name for name, module in model.named_modules()}
    trained = {zero.leaf_of(p) for p in model.parameters() if p.requires_grad}
    # First of all hooks: DeepSpeed's own counts the tensors that carry gradients.
    return [
        leaf.register_forward_pre_hook(functools.partial(_ask, name), prepend=True, with_kwargs=True)
        for leaf, name in named.items()
        if leaf in trained
    ]


def _ask(
    name: str, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not torch.is_grad_enabled() or any(_carries(x) for x in args):
        return None
    # One that carries a gradient comes before others: it surely is on the way to the output.
    key = next((k for k, x in kwargs.items() if _carries(x)), None)
    if key is None and not any(_could(x) for x in args):
        key = next((k for k, x in kwargs.items() if _could(x)), None)
        if key is None:
            raise ModelError(f"leaf module {_called(name, module)} was given no floating tensor by itself: {_WITHIN}", [name])
    if key is not None:
        args, kwargs = _by_position(name, module, args, dict(kwargs), key)
    if not any(_carries(x) for x in args):
        at = len(args) - 1 if key is not None else next(i for i, x in enumerate(args) if _could(x))
        args = (*args[:at], args[at].detach().requires_grad_(), *args[at + 1 :])
    return args, kwargs


_OUT = (
    "DeepSpeed would reduce its gradients before they are there. Take it out of leaf_module (leaf_modules, "
    "stage3_module_granularity_threshold), or "
)
_REMEDY = _OUT + "hand it its hidden states by position"
_WITHIN = _OUT + "name modules within it, such as its blocks, that are given hidden states by position"


def _called(name: str, module: torch.nn.Module) -> str:
    return f"{name or 'of the whole model'} ({type(module).__name__})"


def _could(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def _carries(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _by_position(
    name: str, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], key: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with the argument `key`, and those before it, by position."""
    allowed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [p for p in list(inspect.signature(type(module).forward).parameters.values())[1:] if p.kind in allowed][
        len(args) :
    ]
    moved: list[Any] = []
    for place in places:
        value = kwargs.pop(place.name, place.default)
        if value is inspect.Parameter.empty:
            break
        moved.append(value)
        if place.name == key:
            return (*args, *moved), kwargs
    raise ModelError(f"leaf module {_called(name, module)} was given {key} by keyword only: {_REMEDY}", [name, key])
