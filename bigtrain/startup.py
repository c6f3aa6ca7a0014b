"""What costs memory or time at the start: how torch's allocator grows, and what DeepSpeed does that a run does not need."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

SMALLEST = 1 << 12  # elements: below it nothing is saved


def grow_segments(env: Mapping[str, str] = os.environ) -> bool:
    """Let torch's allocator map memory page by page into segments that grow, so that what is freed in pieces serves any request.

    With fixed segments an 8B run with streamed optimizer state held 3.8 GiB that no request fitted into, and died of it under
    its cap (H200, torch 2.11). Nothing is changed where the user has set the allocator up. To be called before memory is taken.

    Returns:
        Whether segments grow by this call.
    """
    if not torch.cuda.is_available() or any(env.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        return False
    if getattr(torch._C, "_accelerator_getAllocatorSettings", str)():  # by the program, or by an engine before
        return False
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return True


class SharedMaster(TorchFunctionMode):
    """While DeepSpeed 0.19.8's ZeRO-1/2 optimizer is built with bf16 masters: these are the weights, and zeros take one element.

    `stage_1_and_2.py` `__init__` clones each flat bf16 partition as its master, then makes zeros of that size as its first gradient:
    with the weights themselves 6 bytes a parameter, where `flat.alias_master` gives up the clone right after, and the gradient
    is given up at the end of `__init__`. A clone of a flat bf16 tensor is that tensor here; nothing else in there makes one.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.clone and not kwargs and _large(args[0].dim(), args[0].numel(), args[0].dtype):
            return args[0]
        if func is torch.zeros and len(args) == 1 and isinstance(args[0], int) and _large(1, args[0], kwargs.get("dtype")):
            return torch.zeros(1, **kwargs).expand(args[0])
        return func(*args, **kwargs)


def _large(dims: int, elems: int, dtype: Any) -> bool:
    return dims == 1 and elems >= SMALLEST and dtype == torch.bfloat16


@contextlib.contextmanager
def compiled_when_called(compiler: Any) -> Iterator[None]:
    """What is decorated with `compiler.compile()` inside is compiled when it is called first; `compiler`: DeepSpeed's module.

    Each engine of DeepSpeed 0.19.8 imports its Muon (`runtime/zero/muon/original_muon.py`), whose three compiled functions import
    torch's inductor on every rank, and nobody calls them unless the optimizer is that Muon.
    """
    real = compiler.compile
    compiler.compile = lambda: functools.partial(_later, real)
    try:
        yield
    finally:
        compiler.compile = real


def _later(real: Callable[[], Callable[..., Any]], function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = functools.cache(lambda: real()(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


def ask_cpu_once() -> None:
    """Remember what py-cpuinfo says: DeepSpeed's CPU Adam asks three times, and each answer takes a new Python process."""
    with contextlib.suppress(ImportError):
        import cpuinfo

        if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
            cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
