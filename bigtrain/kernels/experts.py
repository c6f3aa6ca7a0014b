"""Routed experts by grouped products, with what stands around these products made once and kept as little as possible.

transformers' grouped experts gather a token's row for each of its experts and, for experts with biases, a bias for each row; backward
then sorts and adds rows one by one, in bf16, and what each operation made is kept. Here a token's rows are told by their places, so
that gathering and summing are each other's backward; a bias's gradient is a product with the matrix of who chose whom; a route's
weight goes into the gate, before the second product, so that its gradient is found beside the gate's. Kept are the tokens and the first
product's result: a token's rows and what the gate let through are made again in backward.

    hidden [tokens, width] -> rows [tokens * k, width], by expert -> gate and up -> weight x gated -> rows of the second product -> their sum
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.utils._triton import has_triton_package

logger = logging.getLogger(__name__)

NAME = "bigtrain_grouped"


class Routes(NamedTuple):
    """Who goes where.

    Attributes:
        order: int64 [rows], the route (token * k + choice) of each row, rows of one expert after each other.
        token: int64 [rows], the token of each row.
        place: int64 [tokens, k], the row of each route.
        expert: int64 [rows].
        ends: int32 [experts], where the rows of each expert end.
    """

    order: torch.Tensor
    token: torch.Tensor
    place: torch.Tensor
    expert: torch.Tensor
    ends: torch.Tensor


def routes(chosen: torch.Tensor, experts: int) -> Routes:
    """Routes of int [tokens, k], the experts that each token chose. Nothing waits for the device."""
    expert, order = torch.sort(chosen.flatten(), stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    ends = torch.searchsorted(
        expert, torch.arange(experts, device=expert.device, dtype=expert.dtype), right=True, out_int32=True
    )
    return Routes(order, order // chosen.shape[1], place.view(chosen.shape), expert, ends)


def _sum_rows(rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    if rows.is_cuda and has_triton_package():
        return _kernels().sum_rows(rows.contiguous(), place)
    return rows[place].sum(1, dtype=torch.promote_types(rows.dtype, torch.float32)).to(rows.dtype)


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("bigtrain.kernels.experts_triton")


class _First(torch.autograd.Function):
    """[tokens, width] times each row's expert: [rows, out]. The rows of `hidden` are gathered again in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, at: Routes, transposed: bool) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.at, ctx.transposed = at, transposed
        return _product(hidden.index_select(0, at.token), _matrix(weight, transposed), at.ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight = ctx.saved_tensors
        at, grad = ctx.at, grad.contiguous()
        to_hidden = to_weight = None
        if ctx.needs_input_grad[0]:
            to_hidden = _sum_rows(_product(grad, _matrix(weight, ctx.transposed).transpose(1, 2), at.ends), at.place)
        if ctx.needs_input_grad[1]:
            to_weight = _weight_grad(hidden.index_select(0, at.token), grad, ctx.transposed, at.ends)
        return to_hidden, to_weight, None, None


class _Second(torch.autograd.Function):
    """What the gate lets through of [rows, 2 width], times each route's weight and each row's expert, summed up: [tokens, out].

    Keeps its inputs; what goes into the product is made again in backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        given: torch.Tensor,
        bias: Any,
        share: torch.Tensor,
        weight: torch.Tensor,
        at: Routes,
        gate: Any,
        transposed: bool,
    ) -> Any:
        ctx.save_for_backward(given, bias, share, weight)
        ctx.at, ctx.gate, ctx.transposed = at, gate, transposed
        through = _kernels().gated(given, bias, at.expert, share, gate)
        return _sum_rows(_product(through, _matrix(weight, transposed), at.ends), at.place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        given, bias, share, weight = ctx.saved_tensors
        at = ctx.at
        to_rows = grad.contiguous().index_select(0, at.token)
        to_through = _product(to_rows, _matrix(weight, ctx.transposed).transpose(1, 2), at.ends)
        to_weight = None
        if ctx.needs_input_grad[3]:
            through = _kernels().gated(given, bias, at.expert, share, ctx.gate)
            to_weight = _weight_grad(through, to_rows, ctx.transposed, at.ends)
            del through
        del to_rows
        to_given, to_share = _kernels().gated_backward(to_through, given, bias, at.expert, share, ctx.gate)
        to_bias = None if not ctx.needs_input_grad[1] else _who(at.expert, bias.shape[0], to_given.dtype).T @ to_given
        return to_given, to_bias, to_share.to(share.dtype), to_weight, None, None, None


class _Collect(torch.autograd.Function):
    """[rows, width] to [tokens, width], the sum of each token's rows in fp32."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, at: Routes) -> torch.Tensor:
        ctx.at = at
        return _sum_rows(rows, at.place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.contiguous().index_select(0, ctx.at.token), None


def _product(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """[rows, in] times the [experts, in, out] of each row's expert; or [in, rows] times [rows, out], one [in, out] for each expert."""
    product = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm  # public since torch 2.10
    return product(rows, matrices, offs=ends)


def _matrix(weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """[experts, in, out]: stored so, or as a linear layer's, [experts, out, in]."""
    return weight if transposed else weight.transpose(1, 2)


def _weight_grad(rows: torch.Tensor, grad: torch.Tensor, transposed: bool, ends: torch.Tensor) -> torch.Tensor:
    return _product(rows.T, grad, ends) if transposed else _product(grad.T, rows, ends)


def _who(expert: torch.Tensor, experts: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, experts], 1 where a row is the expert's."""
    return (expert[:, None] == torch.arange(experts, device=expert.device)).to(dtype)


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' experts interface (integrations/moe.py `use_experts_implementation`).

    Args:
        hidden_states: [tokens, width].
        top_k_index: int [tokens, k], of `self.num_experts`.
        top_k_weights: [tokens, k].

    Returns:
        [tokens, width], what transformers' own implementations compute up to rounding.
    """
    first = self.gate_up_proj if self.has_gate else self.up_proj
    if _is_for_transformers(self, hidden_states, first):
        return _transformers_own(self, hidden_states, top_k_index, top_k_weights)
    at = routes(top_k_index.to(torch.int64), self.num_experts)
    share = top_k_weights.flatten().index_select(0, at.order)
    bias = (self.gate_up_proj_bias if self.has_gate else self.up_proj_bias) if self.has_bias else None
    rows = _First.apply(hidden_states, first, at, self.is_transposed)
    gate = _gate_of(self) if rows.is_cuda and has_triton_package() else None
    if gate is not None:
        out = _Second.apply(rows, bias, share, self.down_proj, at, gate, self.is_transposed)
    else:
        through = _through(self, rows, bias, share, at)
        out = _Collect.apply(_product(through, _matrix(self.down_proj, self.is_transposed), at.ends), at)
    if self.has_bias:
        shares = torch.zeros(top_k_index.shape[0], self.num_experts, dtype=top_k_weights.dtype, device=out.device)
        out = out + shares.scatter_add(1, top_k_index.to(torch.int64), top_k_weights).to(out.dtype) @ self.down_proj_bias
    return out


def _is_for_transformers(module: Any, hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether only transformers' own will do: its experts are shared among ranks or end in a norm, or grouped products do not take these values."""
    more = getattr(module, "_is_expert_parallel", False) or getattr(module, "has_post_expert_norm", False)
    dtypes = (torch.bfloat16,) if hidden.is_cuda else (torch.bfloat16, torch.float32)
    sides = (*weight.shape[1:], *module.down_proj.shape[1:])
    fits = hidden.dtype == weight.dtype and weight.dtype in dtypes and all(n % 8 == 0 for n in sides)
    old = hidden.is_cuda and torch.cuda.get_device_capability(hidden.device) < (8, 0)
    return bool(more) or not fits or old or torch.compiler.is_compiling()


def _through(self: Any, rows: torch.Tensor, bias: torch.Tensor | None, share: torch.Tensor, at: Routes) -> torch.Tensor:
    """What goes into the second product, by the module's own operations."""
    if bias is not None:
        rows = rows + _who(at.expert, self.num_experts, rows.dtype) @ bias
    made = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    return (made * share.unsqueeze(-1)).to(made.dtype)


def _gate_of(module: Any) -> Any:
    """The kernel's words for a module's gate; None: another, by its own operations."""
    if not module.has_gate:
        return None
    gate, own = _kernels().Gate, type(module)._apply_gate
    if own is _interface()._default_apply_gate:
        return gate() if type(module.act_fn).__name__ in ("SiLU", "SiLUActivation") else None
    # Among its bases too: adapters on experts make a class of their own below it.
    if any(
        (c.__module__, c.__name__) == ("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts")
        for c in type(module).__mro__
    ):
        return gate(float(module.alpha), float(module.limit), 1.0, True)
    return None


@functools.cache
def _interface() -> Any:
    return importlib.import_module("transformers.integrations.moe")


def use_grouped_experts(model: torch.nn.Module) -> int:
    """Have experts that transformers would run by grouped products run by these instead; returns how many modules are now.

    liger-kernel's experts are given back: on an H200 they took 1.1 (Qwen3-MoE) and 1.45 times (Mixtral) the whole step's time, and
    minutes of a first step to be tuned. Experts that a user gave another implementation (`experts_implementation`), and classes of
    others, are left as they are.
    """
    try:
        moe = _interface()
        needed = ("ALL_EXPERTS_FUNCTIONS", "grouped_mm_experts_forward", "_default_apply_gate")
        missing = [name for name in needed if not hasattr(moe, name)]
    except ImportError as error:
        missing = [str(error)]
    if missing:
        logger.info("experts run as they are: this version of transformers lacks %s", ", ".join(missing))
        return 0
    global _transformers_own  # by its name, as torch.compile does not trace an import
    _transformers_own = moe.grouped_mm_experts_forward
    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    found = [module for module in model.modules() if _is_of_interface(module)]
    for module in found:
        if module._get_name() == _LIGERS:
            del module.forward, module._get_name  # of the instance; below them are the class's
        module.config._experts_implementation = NAME  # type: ignore[union-attr]
    return len(found)


_LIGERS = "LigerExperts"
_transformers_own: Any = None


def _is_of_interface(module: torch.nn.Module) -> bool:
    has = all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "num_experts", "config"))
    replaced = "forward" in vars(module) and module._get_name() != _LIGERS
    if not has or replaced or not any(c.__module__.startswith("transformers.") for c in type(module).__mro__):
        return False
    return getattr(module.config, "_experts_implementation", None) in ("grouped_mm", NAME)
