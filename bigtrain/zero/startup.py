"""What costs memory or time and need not: how allocators grow, and what DeepSpeed does that a run does not need."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bigtrain.plan.constants import MALLOC_MMAP_BYTES

PRODUCTS = 128  # a dense model's step has 15 to 60 shapes, forward and backward
SMALLEST = 1 << 12  # elements: below it nothing is saved
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


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


def map_blocks(env: Mapping[str, str] = os.environ) -> bool:
    """On CPUs, let glibc map every block of `MALLOC_MMAP_BYTES` and more by itself, so that what is freed is gone.

    Left alone, glibc raises that size to the largest block that was ever freed, up to 32 MiB. Matrices, their gradients and logits
    then share one heap, and holes stay beside what lives longer, which no block of another size fits into: 0.55 GiB of 2.72 for a
    rank of two that trains 135 M parameters at stage 3 with offload, more with every micro batch. The price is that pages come anew
    from the system: a fifth more processor time a step there (docs/results/plan_host.md). With a GPU what is large lives there or is
    pinned. Nothing is changed where the user has set malloc up.

    Returns:
        Whether it is so by this call; False where the C library is not glibc.
    """
    told = env.get("MALLOC_MMAP_THRESHOLD_") or "glibc.malloc.mmap_threshold" in env.get("GLIBC_TUNABLES", "")
    if torch.cuda.is_available() or told:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # glibc's own ratio of the two (malloc/malloc.c, free): the end of the heap is not given back and taken again for each block.
    return bool(mallopt(_M_MMAP_THRESHOLD, MALLOC_MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, 2 * MALLOC_MMAP_BYTES))


def forget_products(env: MutableMapping[str, str] = os.environ) -> bool:
    """On CPUs, let oneDNN and torch's own layer above it keep `PRODUCTS` prepared matrix products each instead of 1,024.

    One of bf16 takes about half a megabyte a shape. Experts get another number of tokens in every product: Mixtral's at 512 tokens filled
    550 MB a process in five steps (torch 2.13), 70 with both bounds, and no step took longer. So do rows of many lengths. Both are
    read at the first product.

    Returns:
        Whether it is so by this call; False with a GPU, or where the user has set either.
    """
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    if torch.cuda.is_available() or any(name in env for name in names):
        return False
    env.update(dict.fromkeys(names, str(PRODUCTS)))
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


@contextlib.contextmanager
def less_to_do(deepspeed: Any, model: torch.nn.Module) -> Iterator[None]:
    """Around `deepspeed.initialize`: what DeepSpeed 0.19.8 asks again for every gradient or module, it asks once.

    The host is what a step waits for where a micro batch is small (docs/log.md). Attributes used, beside those that bigtrain/zero lists:
    the accelerator's device_name, device_count, current_stream; at stage 3 a module's pre_bwd_fn and post_bwd_fn.
    """
    accelerator = deepspeed.accelerator.get_accelerator()
    if accelerator.device_name() == "cuda":
        accelerator.current_stream = remembered_stream()
    else:
        count = accelerator.device_count()  # each time a new process of numactl or lscpu, for every bucket of gradients
        accelerator.device_count = lambda: count
    # Ranges around its functions, for a profiler that listens to NVTX and has said so in the environment.
    deepspeed.utils.nvtx.enable_nvtx = any(n in os.environ for n in ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID"))
    with compiled_when_called(deepspeed.runtime.compiler):
        yield
    torchs_linear(deepspeed)  # a model that was not built under zero.Init has gone through DeepSpeed's own
    own = [f for m in model.modules() for f in (m.__dict__.get("pre_bwd_fn"), m.__dict__.get("post_bwd_fn")) if f is not None]
    for function in own:
        _known_signature(function)


def _known_signature(function: Any) -> None:
    """torch's `Function.apply` asks inspect for it in every call, which finds it here."""
    function.forward.__signature__ = inspect.signature(function.forward)


def torchs_linear(deepspeed: Any) -> None:
    """torch.nn.functional.linear computes what torch's own does, at every stage, whatever else this process trains or has trained.

    Stage 3 (`memory_efficient_linear`) replaces it for good and for every module of the process. What DeepSpeed 0.19.8 puts there
    rounds a product before it adds the bias, which torch does not; and it cannot take a weight without elements: "cannot reshape
    tensor of 0 elements into shape [-1, 0]". Its backward is kept for weights that ZeRO-3 owns: it does not hold on to them.
    """
    module = deepspeed.runtime.zero.linear
    if torch.nn.functional.linear is not module.zero3_linear_wrap:
        return
    own = deepspeed.runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses.linear_bk

    class ShardedLinear(module.LinearFunctionForZeroStage3):  # type: ignore[name-defined]
        @staticmethod
        def forward(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return own(input, weight, bias)

    _known_signature(ShardedLinear)

    def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return (ShardedLinear.apply if hasattr(weight, "ds_id") else own)(input, weight, bias)

    torch.nn.functional.linear = linear


def remembered_stream() -> Callable[..., torch.cuda.Stream]:
    """torch.cuda.current_stream that hands out one object a stream: DeepSpeed asks two or three times for each gradient."""
    known: dict[Any, torch.cuda.Stream] = {}

    def current_stream(device_index: int | None = None) -> torch.cuda.Stream:
        here = torch._C._cuda_getCurrentStream(torch.cuda.current_device() if device_index is None else device_index)
        if here not in known:
            known[here] = torch.cuda.Stream(stream_id=here[0], device_index=here[1], device_type=here[2])
        return known[here]

    return current_stream


def ask_cpu_once() -> None:
    """Remember what py-cpuinfo says: DeepSpeed's CPU Adam asks three times, and each answer takes a new Python process."""
    with contextlib.suppress(ImportError):
        import cpuinfo

        if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
            cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
