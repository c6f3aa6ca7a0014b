"""A token-wise module computed over tiles of tokens, in forward and in backward.

A feed-forward part makes tensors of tokens by intermediate size: gate, up, activation, product, and a gradient of each. At 131,072
tokens of an 8B model each of them is 3.8 GB in bf16. Here they exist for one tile at a time: forward keeps the module's input, and
backward runs each tile once more and differentiates it at once.

Weight gradients of the tiles are summed in fp32 and rounded to the weight's dtype once, so that they come as close as without tiles
whatever the number of tiles, and each parameter gets one gradient from autograd, so that whoever waits for gradients (ZeRO's
reduction, sums over micro steps, gradients that leave the GPU) sees one.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from bigtrain.errors import ModelError


def install(module: torch.nn.Module, tokens: int) -> None:
    """From now on the module runs over tiles of so many tokens; fewer than that, in one piece as before.

    Args:
        module: its forward takes one tensor [..., width] and gives one, each token for itself.
        tokens: of one tile, over all rows of a batch together.
    """
    module._bigtrain_tile_tokens = tokens  # type: ignore[assignment]
    if "_bigtrain_whole_forward" not in module.__dict__:
        module._bigtrain_whole_forward = module.__dict__.get("forward")  # type: ignore[assignment]
        module.forward = types.MethodType(_tiled_forward, module)


def is_installed(module: torch.nn.Module) -> bool:
    """Whether the module runs over tiles."""
    return "_bigtrain_tile_tokens" in module.__dict__


def inside_tile() -> bool:
    """Whether a tile is being computed: nothing of it is worth keeping, backward makes it again."""
    return getattr(_running, "tiles", 0) > 0


_running = threading.local()


@contextlib.contextmanager
def _tile() -> Iterator[None]:
    _running.tiles = getattr(_running, "tiles", 0) + 1
    try:
        yield
    finally:
        _running.tiles -= 1


def _asking(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The tensor, as one that wants a gradient if anything in the module does."""
    if x.requires_grad or not torch.is_grad_enabled() or not any(p.requires_grad for p in module.parameters()):
        return x
    return x.detach().requires_grad_()


def _tiled_forward(self: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """Runs inside the module's __call__, so that ZeRO's hooks on the module see it run once: weights are gathered once."""
    tokens = self.__dict__["_bigtrain_tile_tokens"]
    if hidden_states.shape[:-1].numel() <= tokens:
        return _whole(self)(hidden_states)
    if self.training and (found := random_parts(self)):
        raise ModelError(
            f"{found[0]}: in tiles, backward would draw other random numbers than forward. {_DROPOUT_REMEDY}", found
        )
    x = _asking(self, hidden_states)
    if not torch.is_grad_enabled() or not x.requires_grad:
        return _in_tiles(self, x.detach(), tokens)
    kept = _Kept.apply(x)
    return _Tiled.apply(self, tokens, kept.grad_fn, kept, *self.parameters())


_DROPOUT_REMEDY = "Set it to 0 in the model's config, or leave mlp_tile_tokens out"


def random_parts(module: torch.nn.Module) -> list[str]:
    """Names of what draws random numbers in training inside a module, with how much."""
    return [
        f"{name or type(module).__name__} is a {type(part).__name__} of {part.p}"
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.modules.dropout._DropoutNd) and part.p > 0
    ]


def _whole(module: torch.nn.Module) -> Any:
    return module.__dict__["_bigtrain_whole_forward"] or functools.partial(type(module).forward, module)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[tokens, width]"""
    return x.reshape(-1, x.size(-1))


def _run(module: torch.nn.Module, part: torch.Tensor, dimensions: int) -> torch.Tensor:
    """What the module makes of [tokens, width], given to it with as many dimensions as it is used to."""
    with _tile():
        out = _whole(module)(part.view(*[1] * (dimensions - 2), *part.shape))
    return _rows(out)


def _in_tiles(module: torch.nn.Module, x: torch.Tensor, tokens: int) -> torch.Tensor:
    """Made in its own shape and filled by rows: a view, as what a Function returns, nobody may change in place (Falcon adds to it)."""
    made: torch.Tensor | None = None
    at = 0
    for part in _rows(x).split(tokens):
        out = _run(module, part, x.dim())
        if made is None:
            made = out.new_empty(*x.shape[:-1], out.size(1))
        _rows(made)[at : at + part.size(0)] = out
        at += part.size(0)
    assert made is not None
    return made


class _Kept(torch.autograd.Function):
    """Keeps its argument for `_Tiled`, before that computes anything.

    A recompute ends as soon as the last tensor that was kept is made again: mostly this one, so that it does not run the tiles.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, module: torch.nn.Module, tokens: int, kept: Any, x: torch.Tensor, *params: torch.Tensor
    ) -> torch.Tensor:
        ctx.module, ctx.tokens, ctx.kept, ctx.params = module, tokens, kept, params
        ctx.versions = [p._version for p in params]
        ctx.autocast = _Autocast(x.device.type)
        return _in_tiles(module, x, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.versions != [p._version for p in ctx.params]:
            raise ModelError(
                f"a weight of {type(ctx.module).__name__} was changed in place between forward and backward: gradients would be "
                "wrong. Change weights after the backward of all that was computed with them"
            )
        (x,) = ctx.kept.saved_tensors
        trained = [p for p, wanted in zip(ctx.params, ctx.needs_input_grad[4:]) if wanted]
        of_x, of_trained = _gradients(ctx.module, ctx.tokens, x, grad, trained, ctx.autocast)
        given = iter(of_trained)
        return (None, None, None, of_x, *(next(given) if wanted else None for wanted in ctx.needs_input_grad[4:]))


class _Autocast:
    """What autocast is at this moment, to be so again."""

    def __init__(self, device: str):
        self._how = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))

    def again(self) -> torch.autocast:
        device, dtype, enabled = self._how
        return torch.autocast(device, dtype=dtype, enabled=enabled)


def _gradients(
    module: torch.nn.Module,
    tokens: int,
    x: torch.Tensor,
    grad: torch.Tensor,
    trained: Sequence[torch.Tensor],
    autocast: _Autocast,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Of the input, and of each trained parameter (None where the module does not use it)."""
    rows, at = _rows(x), 0
    of_x = torch.empty_like(rows)
    sums: list[torch.Tensor | None] = [None] * len(trained)
    for part, of_part in zip(rows.split(tokens), _rows(grad).split(tokens)):
        with torch.enable_grad(), autocast.again():
            inside = part.detach().requires_grad_()
            out = _run(module, inside, x.dim())
        found = torch.autograd.grad(out, [inside, *trained], of_part, allow_unused=True)
        del out
        if found[0] is None:
            of_x[at : at + part.size(0)] = 0
        else:
            of_x[at : at + part.size(0)] = found[0]
        at += part.size(0)
        _add(sums, found[1:])
        del found  # before the next tile makes its own
    return of_x.view(x.shape), _rounded(sums, trained)


def _add(sums: list[torch.Tensor | None], found: Sequence[torch.Tensor | None]) -> None:
    """To the sums, which are fp32 where the gradients are of fewer bits."""
    for i, one in enumerate(found):
        if one is None:
            continue
        so_far = sums[i]
        if so_far is None:
            sums[i] = one.to(torch.promote_types(one.dtype, torch.float32), copy=True)
        else:
            so_far.add_(one)


def _rounded(sums: list[torch.Tensor | None], trained: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    out: list[torch.Tensor | None] = []
    for i, param in enumerate(trained):
        so_far, sums[i] = sums[i], None  # freed one by one
        out.append(None if so_far is None else so_far.to(param.dtype))
    return out
