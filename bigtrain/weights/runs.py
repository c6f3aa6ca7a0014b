"""Runs: a tensor described as contiguous stretches of other tensors, so that a fused or split tensor can be read in place.

transformers renames, stacks, concatenates and splits tensors between a file and a model (its `core_model_loading`
operations). Most of these only lay stretches of elements one after another. `trace` runs such an operation on `Traced`
tensors that have a shape but no data, and tells which stretches the result consists of; an operation that really shuffles
elements (a transpose, a permutation) gives `None`, and the caller has to convert whole tensors.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MAX_RUNS = 1 << 18  # beyond this, reading whole tensors and converting them is cheaper than many small reads


@dataclass(frozen=True, slots=True)
class Run:
    """`length` elements of tensor `source`, from its flat element `start`."""

    source: str
    start: int
    length: int


def _joined(runs: list[Run]) -> list[Run]:
    """The same elements in as few runs as possible."""
    out: list[Run] = []
    for run in runs:
        last = out[-1] if out else None
        if last is not None and last.source == run.source and last.start + last.length == run.start:
            out[-1] = Run(last.source, last.start, last.length + run.length)
        elif run.length:
            out.append(run)
    return out


class Runs:
    """A flat sequence of elements as runs; `cut` finds a part of it in logarithmic time."""

    __slots__ = ("_ends", "numel", "runs")

    def __init__(self, runs: Sequence[Run]):
        self.runs = _joined(list(runs))
        self._ends: list[int] = []
        self.numel = 0
        for run in self.runs:
            self.numel += run.length
            self._ends.append(self.numel)

    @classmethod
    def whole(cls, source: str, numel: int) -> Runs:
        """All of one tensor."""
        return cls([Run(source, 0, numel)])

    def cut(self, start: int, stop: int) -> list[Run]:
        """The runs of elements `[start, stop)`."""
        out: list[Run] = []
        index = bisect_right(self._ends, start)
        while start < stop and index < len(self.runs):
            run = self.runs[index]
            skip = start - (self._ends[index] - run.length)
            length = min(run.length - skip, stop - start)
            out.append(Run(run.source, run.start + skip, length))
            start += length
            index += 1
        return out


class Traced(torch.Tensor):
    """A meta tensor that knows its `runs` (None: its elements are shuffled in a way that runs cannot say)."""

    runs: Runs | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = super().__torch_function__(func, types, args, kwargs)
        rule = _RULES.get(getattr(func, "__name__", ""))
        results = [item for item in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(item, Traced)]
        for item in results:
            if "runs" not in item.__dict__:
                item.runs = None
        if rule is not None and results:
            for item, runs in zip(results, rule(results, args, kwargs)):
                item.runs = runs
        return out


def traced(source: str, shape: Sequence[int], dtype: torch.dtype) -> Traced:
    """A stand-in for tensor `source`: right shape and dtype, no memory."""
    tensor: Traced = torch.Tensor._make_subclass(Traced, torch.empty(tuple(shape), dtype=dtype, device="meta"))
    tensor.runs = Runs.whole(source, math.prod(shape))
    return tensor


def _same_order(results: list[Traced], args: Any, kwargs: Any) -> list[Runs | None]:
    """One result with the elements of its input in the same order."""
    return [args[0].runs]


def _parts(results: list[Traced], args: Any, kwargs: Any, dim: int) -> list[Runs | None]:
    """Results are consecutive parts of the input along `dim`."""
    tensor: Traced = args[0]
    shape, runs = tensor.shape, tensor.runs
    dim %= max(len(shape), 1)
    outer, inner = math.prod(shape[:dim]), math.prod(shape[dim:])
    if runs is None or outer * len(results) > MAX_RUNS:
        return [None] * len(results)
    stride = math.prod(shape[dim + 1 :])
    found: list[Runs | None] = []
    begin = 0
    for item in results:
        length = (item.shape[dim] if item.dim() == len(shape) else 1) * stride
        found.append(Runs([run for o in range(outer) for run in runs.cut(o * inner + begin, o * inner + begin + length)]))
        begin += length
    return found


def _dim(args: Any, kwargs: Any, position: int) -> int:
    return args[position] if len(args) > position else kwargs.get("dim", 0)


def _chunk(results: list[Traced], args: Any, kwargs: Any) -> list[Runs | None]:
    return _parts(results, args, kwargs, _dim(args, kwargs, 2))


def _unbind(results: list[Traced], args: Any, kwargs: Any) -> list[Runs | None]:
    return _parts(results, args, kwargs, _dim(args, kwargs, 1))


def _cat(results: list[Traced], args: Any, kwargs: Any, stacked: bool = False) -> list[Runs | None]:
    tensors: Sequence[Traced] = args[0]
    dim = _dim(args, kwargs, 1)
    dim %= max(tensors[0].dim() + stacked, 1)
    outer = math.prod(tensors[0].shape[:dim])
    if any(getattr(t, "runs", None) is None for t in tensors) or outer * len(tensors) > MAX_RUNS:
        return [None]
    inners = [math.prod(t.shape[dim:]) for t in tensors]
    return [
        Runs([
            run
            for o in range(outer)
            for t, inner in zip(tensors, inners)
            for run in t.runs.cut(o * inner, (o + 1) * inner)  # type: ignore[union-attr]
        ])
    ]  # fmt: skip


def _stack(results: list[Traced], args: Any, kwargs: Any) -> list[Runs | None]:
    return _cat(results, args, kwargs, stacked=True)


def _index(results: list[Traced], args: Any, kwargs: Any) -> list[Runs | None]:
    """`t[i]`, `t[a:b]` along the first dimension; anything else is not followed."""
    tensor, key = args
    if tensor.runs is None or tensor.dim() == 0 or not isinstance(key, (int, slice)):
        return [None]
    start, stop, step = (key, key + 1, 1) if isinstance(key, int) else key.indices(tensor.shape[0])
    start, stop = (start + tensor.shape[0], stop + tensor.shape[0]) if start < 0 else (start, stop)
    stride = math.prod(tensor.shape[1:])
    return [Runs(tensor.runs.cut(start * stride, stop * stride)) if step == 1 else None]


_RULES: dict[str, Callable[[list[Traced], Any, Any], list[Runs | None]]] = {
    "contiguous": _same_order, "clone": _same_order, "detach": _same_order, "to": _same_order, "view": _same_order,
    "reshape": _same_order, "flatten": _same_order, "unflatten": _same_order, "squeeze": _same_order,
    "unsqueeze": _same_order, "chunk": _chunk, "split": _chunk, "unbind": _unbind, "cat": _cat, "stack": _stack,
    "__getitem__": _index,
}  # fmt: skip
