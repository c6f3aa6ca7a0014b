"""How a block is run whose activations are not kept: recomputed as a whole, in its cheap parts, or from an input on the host."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from bigtrain.errors import ModelError
from bigtrain.models.hostinputs import HostInputs, OnHost, in_memory_order
from bigtrain.models.replay import checkpointed, replayed
from bigtrain.models.tiles import inside_tile

logger = logging.getLogger(__name__)

Policy = Literal["full", "attention", "selective", "offload", "offload_inputs"]
# Called as `run(function, *args, **kwargs)`: what `function(*args, **kwargs)` gives, with less kept for backward.
Runner = Callable[..., Any]

# Matrix products by the name of the operator. What attention computes is recognised by its name, see `_is_attention`.
_PRODUCTS = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_grouped_mm",
    "aten::_scaled_mm",
    "aten::convolution",
}


def runner(policy: Policy, blocks: int) -> Runner:
    """What runs a block under this policy.

    Args:
        policy: "full": only the inputs are kept, everything is recomputed. "attention": results of attention are kept too, so that
            it runs once. "selective": those of matrix products as well. "offload": as attention, with inputs and results kept in
            host memory. "offload_inputs": as full, with the inputs kept there.
        blocks: how many blocks will use it.

    Raises:
        ModelError: there is no such policy.
    """
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ModelError(f"checkpointing policy {policy!r}: it must be one of {', '.join(POLICIES)}", [str(policy)])
    return POLICIES[policy](blocks)


def _full(blocks: int) -> Runner:
    return replayed


def _attention(blocks: int) -> Runner:
    kept = _KeptResults("attention", blocks)

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return replayed(kept.around(function), *args, **kwargs)

    return run


def _selective(blocks: int) -> Runner:
    kept = _KeptResults("selective", blocks)
    return functools.partial(checkpointed, context_fn=kept.contexts)


def _offload(blocks: int) -> Runner:
    host = HostInputs()
    host.around = _KeptResults("offload", blocks, host.send).around
    return host


def _offload_inputs(blocks: int) -> Runner:
    return HostInputs()


POLICIES: dict[str, Callable[[int], Runner]] = {
    "full": _full,
    "attention": _attention,
    "selective": _selective,
    "offload": _offload,
    "offload_inputs": _offload_inputs,
}


class _KeptResults:
    """Makes the pair of contexts of each call of a block some of whose results are kept.

    torch's own `create_selective_checkpoint_contexts` notices writes into what it keeps only where torch makes them, and counts
    every operator, so that a recompute may meet none more often than forward did; gathering weights under ZeRO-3 runs operators
    too. Here only the operators that are kept are counted, and what they gave is compared with what it was.

    Args:
        policy: "selective" keeps results of matrix products and of attention, others those of attention.
        blocks: the first so many calls check that nobody wrote into what was kept (once for each block). A kernel that torch
            does not see may: liger's rotary embedding turns the queries in place, and a recompute would turn them again.
        put: what is kept of a tensor: itself, or an `OnHost`.

    Attributes:
        all_products: it is "selective". Results then go as the recompute takes them, so that a second backward over one forward finds
            none. Those of attention alone stay until the block's last tensor goes: they are little of what a block makes again.
        found: something was kept.
    """

    def __init__(self, policy: str, blocks: int, put: Callable[[torch.Tensor], Any] = torch.Tensor.detach):
        self.policy, self.put = policy, put
        self.all_products, self.found = policy == "selective", False
        self._checks_left = blocks

    def contexts(self) -> tuple[Any, Any]:
        """(context of forward, context of the recompute)."""
        checked, self._checks_left = self._checks_left > 0, max(0, self._checks_left - 1)
        if not checked and not self.found:
            self.found = True
            logger.warning(
                "checkpointing policy %s: there is no fused operator without dropout in the recomputed blocks' attention, so nothing "
                "of it is kept: it runs again in backward",
                self.policy,
            )
        kept: dict[str, list[Any]] = {}
        return self.watching(_Keep(self, kept, checked)), _Replaying(self, kept)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of a block: its first run keeps results, later ones find them."""
        if not torch.is_grad_enabled():
            return function
        contexts = list(self.contexts())

        def run(*args: Any, **kwargs: Any) -> Any:
            with contexts.pop(0) if len(contexts) > 1 else contexts[0]:
                return function(*args, **kwargs)

        return run

    def watching(self, mode: TorchDispatchMode) -> Any:
        """The context in which the mode sees every operator whose result is one to keep."""
        return mode if self.all_products else _InAttention(mode)

    def keeps(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the result of this call is one to keep."""
        wanted = _is_attention(func) or (self.all_products and _name(func) in _PRODUCTS)
        return wanted and not _drops(func, args, kwargs) and not inside_tile()


class _InAttention(TorchFunctionMode):
    """Enters a mode for calls of attention alone: one that sees each operator of a block takes its host as long as the block itself.

    What a program calls has attention in its name as the operators have that do it.
    """

    def __init__(self, mode: TorchDispatchMode):
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _says_attention(func):
            return func(*args, **(kwargs or {}))
        with self._mode:
            return func(*args, **(kwargs or {}))


class _Keep(TorchDispatchMode):
    def __init__(self, how: _KeptResults, kept: dict[str, list[Any]], checked: bool):
        super().__init__()
        self._how, self._kept, self._checked = how, kept, checked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if written := _written(func, args, kwargs):
            self._copy_what_lies_in(written)
        out = func(*args, **kwargs)
        if self._how.keeps(func, args, kwargs):
            before = _fingerprint(out) if self._checked else None
            # Another tensor on the same bytes: autograd hangs its graph on the one that is returned.
            mine = tree_map_only(torch.Tensor, self._how.put, out)
            self._kept.setdefault(str(func), []).append((mine, before))
            self._how.found = True
        return out

    def _copy_what_lies_in(self, written: set[int]) -> None:
        """Before a block writes into what is kept (`product.add_(bias)`): the recompute writes there again, and must find it as it was."""

        def copied(one: Any) -> Any:
            return one.clone() if one.untyped_storage().data_ptr() in written else one

        for results in self._kept.values():
            results[:] = [(tree_map_only(torch.Tensor, copied, mine), before) for mine, before in results]


class _Replay(TorchDispatchMode):
    def __init__(self, how: _KeptResults, kept: dict[str, list[Any]]):
        super().__init__()
        self._how, self._kept = how, {name: results[::-1] for name, results in kept.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._how.keeps(func, args, kwargs):
            return func(*args, **kwargs)
        results = self._kept.get(str(func))
        if not results:
            raise ModelError(
                f"checkpointing policy {self._how.policy}: {func} ran more often in the recompute than in forward, or backward ran "
                "twice over one forward: take policy full for this model",
                [str(func)],
            )
        mine, before = results.pop()
        out = _found(mine)
        if before is not None and _fingerprint(out) != before:
            raise ModelError(
                f"checkpointing policy {self._how.policy}: something wrote in place into a result of {func} that was kept for "
                "backward; gradients would be wrong: take policy full for this model",
                [str(func)],
            )
        return out


class _Replaying:
    """The context of a recompute: forward has run by now, and what it kept is there, for each recompute anew."""

    def __init__(self, how: _KeptResults, kept: dict[str, list[Any]]):
        self._how, self._kept = how, kept

    def __enter__(self) -> None:
        self._context = self._how.watching(_Replay(self._how, self._kept))
        if self._how.all_products:
            self._kept.clear()  # what is taken out is freed as the backward of the block goes on
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        del self._context


def _found(kept: Any) -> Any:
    """What was kept, as tensors that nobody else has."""
    return tree_map_only((torch.Tensor, OnHost), lambda one: one.take() if isinstance(one, OnHost) else one.detach(), kept)


def _written(func: Any, args: Any, kwargs: Any) -> set[int]:
    """Where the memory begins that this call writes into: of in-place operators, and of those with `out`."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return set()
    given = [
        args[at] if at < len(args) else kwargs.get(one.name)
        for at, one in enumerate(schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
    ]
    found: set[int] = set()
    tree_map_only(torch.Tensor, lambda tensor: found.add(tensor.untyped_storage().data_ptr()), given)
    return found - {0}


@functools.cache
def _is_attention(func: Any) -> bool:
    """torch's fused kernels, flash-attn's and bigtrain's own operators: all have it in their names."""
    return ("attention" in _name(func) or "attn" in _name(func)) and "backward" not in _name(func)


@functools.cache
def _says_attention(func: Any) -> bool:
    name = str(func).lower()
    return ("attention" in name or "attn" in name) and "flex" not in name  # compiled kernels, which run under no mode


@functools.cache
def _name(func: Any) -> str:
    return str(getattr(getattr(func, "_schema", None), "name", func)).lower()


def _drops(func: Any, args: Any, kwargs: Any) -> bool:
    """Attention with dropout draws random numbers: replayed, later dropouts of the block would draw others than in forward."""
    place = _dropout_place(func)
    if place is None:
        return False
    name, at = place
    return bool(kwargs.get(name, args[at] if at < len(args) else 0.0))


@functools.cache
def _dropout_place(func: Any) -> tuple[str, int] | None:
    schema = getattr(func, "_schema", None)
    # torch says dropout_p, flash-attn's own binding p_dropout.
    found = [(a.name, at) for at, a in enumerate(schema.arguments) if "dropout" in a.name] if schema else []
    return found[0] if found else None


def _fingerprint(result: Any) -> list[int]:
    """For each tensor a sum of its bytes, weighed by their place (turning only moves values); it waits for the device."""
    found: list[int] = []
    tree_map_only(torch.Tensor, lambda tensor: found.append(_weighed_sum(tensor)), result)
    return found


# Bytes weighed at a time: 64 MiB of integers in passing.
_WEIGHED = 2**22


def _weighed_sum(tensor: torch.Tensor) -> int:
    data = in_memory_order(tensor).contiguous().view(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    weights = torch.arange(1, min(_WEIGHED, data.numel()) + 1, device=data.device)
    for at, part in enumerate(data.split(_WEIGHED)):
        total += (at + 1) * (part * weights[: part.numel()]).sum()
    return int(total)
