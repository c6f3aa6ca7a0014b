"""How a block is run whose activations are not kept: recomputed as a whole, in its cheap parts, or from an input on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from bigtrain.errors import ModelError
from bigtrain.models.hostinputs import HostInputs
from bigtrain.models.replay import replayed
from bigtrain.models.tiles import inside_tile

Policy = Literal["full", "selective", "offload"]
# Called as `run(function, *args, **kwargs)`: what `function(*args, **kwargs)` gives, with less kept for backward.
Runner = Callable[..., Any]

# Matrix products by the name of the operator. What attention computes is recognised by its name, see `_is_kept`.
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
        policy: "full": only the inputs are kept, everything is recomputed. "selective": results of matrix products and of
            attention are kept too, the rest is recomputed. "offload": as full, with the input kept in host memory.
        blocks: how many blocks will use it.

    Raises:
        ModelError: there is no such policy.
    """
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ModelError(f"checkpointing policy {policy!r}: it must be one of {', '.join(POLICIES)}", [str(policy)])
    return POLICIES[policy](blocks)


def _full(blocks: int) -> Runner:
    return replayed


def _selective(blocks: int) -> Runner:
    return functools.partial(checkpoint, use_reentrant=False, context_fn=_KeptProducts(blocks).contexts)


def _offload(blocks: int) -> Runner:
    return HostInputs()


POLICIES: dict[str, Callable[[int], Runner]] = {"full": _full, "selective": _selective, "offload": _offload}


class _KeptProducts:
    """Makes the pair of contexts of each call of a selective block.

    torch's own `create_selective_checkpoint_contexts` notices writes into what it keeps only where torch makes them, and counts
    every operator, so that a recompute may meet none more often than forward did; gathering weights under ZeRO-3 runs operators
    too. Here only the operators that are kept are counted, and what they gave is compared with what it was.

    Args:
        blocks: the first so many calls check that nobody wrote into what was kept (once for each block). A kernel that torch
            does not see may: liger's rotary embedding turns the queries in place, and a recompute would turn them again.
    """

    def __init__(self, blocks: int):
        self._checks_left = blocks

    def contexts(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """(context of forward, context of the recompute)."""
        checked, self._checks_left = self._checks_left > 0, max(0, self._checks_left - 1)
        kept: dict[str, list[Any]] = {}
        return _Keep(kept, checked), _Replay(kept)


class _Keep(TorchDispatchMode):
    def __init__(self, kept: dict[str, list[Any]], checked: bool):
        super().__init__()
        self._kept, self._checked = kept, checked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if _is_kept(func) and not _drops(func, args, kwargs) and not inside_tile():
            # Another tensor on the same bytes: autograd hangs its graph on the one that is returned.
            mine = tree_map_only(torch.Tensor, torch.Tensor.detach, out)
            self._kept.setdefault(str(func), []).append((mine, _fingerprint(mine) if self._checked else None))
        return out


class _Replay(TorchDispatchMode):
    def __init__(self, kept: dict[str, list[Any]]):
        super().__init__()
        self._source, self._kept = kept, dict[str, list[Any]]()

    def __enter__(self) -> Any:
        # Forward has run by now. What is taken out here is freed as the backward of the block goes on.
        self._kept = {name: results[::-1] for name, results in self._source.items()}
        self._source.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_kept(func) or _drops(func, args, kwargs) or inside_tile():
            return func(*args, **kwargs)
        results = self._kept.get(str(func))
        if not results:
            raise ModelError(
                f"checkpointing policy selective: {func} ran more often in the recompute than in forward, or backward ran twice "
                "over one forward: take policy full for this model",
                [str(func)],
            )
        out, before = results.pop()
        if before is not None and _fingerprint(out) != before:
            raise ModelError(
                f"checkpointing policy selective: something wrote in place into a result of {func} that was kept for backward; "
                "gradients would be wrong: take policy full for this model",
                [str(func)],
            )
        return out


@functools.cache
def _is_kept(func: Any) -> bool:
    name = str(getattr(getattr(func, "_schema", None), "name", func)).lower()
    if name in _PRODUCTS:
        return True
    return ("attention" in name or "attn" in name) and "backward" not in name


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
    found = [(a.name, at) for at, a in enumerate(schema.arguments) if a.name in ("dropout_p", "dropout")] if schema else []
    return found[0] if found else None


def _fingerprint(result: Any) -> list[int]:
    """For each tensor a sum of its bytes, weighed by their place (turning only moves values); it waits for the device."""
    found: list[int] = []
    tree_map_only(torch.Tensor, lambda tensor: found.append(_weighed_sum(tensor)), result)
    return found


# Bytes weighed at a time: 64 MiB of integers in passing.
_WEIGHED = 2**22


def _weighed_sum(tensor: torch.Tensor) -> int:
    data = tensor.contiguous().view(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    weights = torch.arange(1, min(_WEIGHED, data.numel()) + 1, device=data.device)
    for at, part in enumerate(data.split(_WEIGHED)):
        total += (at + 1) * (part * weights[: part.numel()]).sum()
    return int(total)
