"""A process of its own that measures what needs torch: rates of memory and bus, and DeepSpeed's native parts.

`python -m bigtrain.diagnostics.doctor.probe OUT [--rates] [--ops cpu_adam,...]` writes one JSON object to OUT after each part,
so that what was measured before a crash is not lost. In a process of its own because a failing native library may kill it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bigtrain.errors import BuildError
from bigtrain.stopping import end_process

_MIB = 2**20
ADAM_ELEMS = 8_000_000


def fastest(work: Callable[[], Any], times: int = 5) -> float:
    """Seconds of the fastest of some runs, after one that is not counted."""
    work()
    spent = []
    for _ in range(times):
        begun = time.perf_counter()
        work()
        spent.append(time.perf_counter() - begun)
    return min(spent)


# ---------------------------------------------------------------- rates


def host_rates() -> dict[str, float]:
    """Host memory: bytes read and written in a second, by all cores (elementwise) and by one thread (copy)."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    source = torch.ones(128 * _MIB // 4)  # far larger than the caches
    target = torch.empty_like(source)
    passes = fastest(lambda: torch.mul(source, 1.5, out=target))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    copy = fastest(lambda: target.copy_(source), 3)
    torch.set_num_threads(threads)
    size = 2 * source.nbytes
    return {"host_bytes_s": size / passes, "host_copy_bytes_s": size / copy}


def device_rates() -> dict[str, float]:
    """GPU: pinned and pageable copies each way, copy within the card, a large bf16 matmul; and what launching takes of the host's thread.

    Raises:
        RuntimeError: memory cannot be pinned, or CUDA does not start.
    """
    import torch

    if not torch.cuda.is_available():
        return {}
    size = 256 * _MIB

    def timed(work: Callable[[], Any], times: int = 5) -> float:
        def whole() -> None:
            work()
            torch.cuda.synchronize()

        return fastest(whole, times)

    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    pageable, card = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8, device="cuda")
    other = torch.empty(4 * size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(other)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn_like(a)
    return {
        "h2d_bytes_s": size / timed(lambda: card.copy_(pinned, non_blocking=True)),
        "d2h_bytes_s": size / timed(lambda: pinned.copy_(card, non_blocking=True)),
        "pageable_bytes_s": size / timed(lambda: card.copy_(pageable)),
        "device_bytes_s": 2 * other.nbytes / timed(lambda: target.copy_(other)),
        "matmul_flops": 2 * 8192**3 / timed(lambda: a @ b, 10),
        "operation_s": operation_s("cuda"),
    }


def operation_s(device: str, chain: int = 50) -> float:
    """Seconds of the host's thread for one small operation and its backward, as autograd runs them."""
    import torch

    start = torch.ones(64, 64, device=device, requires_grad=True)
    ones = torch.ones_like(start)

    def there_and_back() -> None:
        x = start
        for _ in range(chain):
            x = x * 2.0
        torch.autograd.grad(x, start, ones)

    if device == "cuda":
        torch.cuda.synchronize()
    return fastest(there_and_back, 20) / chain


# ---------------------------------------------------------------- native parts


def run_cpu_adam() -> dict[str, float]:
    """Load it (compiling if need be), compare a step with torch's AdamW, time it.

    Raises:
        Exception: it does not load; BuildError: it computes something else.
    """
    import torch

    from bigtrain import zero
    from bigtrain.builds import load_op

    begun = time.perf_counter()
    load_op(zero.deepspeed.ops.op_builder.CPUAdamBuilder())
    loaded_s = time.perf_counter() - begun
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    start, grad = torch.linspace(-1, 1, 10_001), torch.linspace(1, -2, 10_001)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    _step(zero.deepspeed.ops.adam.DeepSpeedCPUAdam([ours], adamw_mode=True, **settings), ours, grad)
    _step(torch.optim.AdamW([theirs], **settings), theirs, grad)  # type: ignore[arg-type]
    _compare(ours.data, theirs.data)
    large = torch.nn.Parameter(torch.zeros(ADAM_ELEMS))
    large.grad = torch.ones_like(large)
    optimizer = zero.deepspeed.ops.adam.DeepSpeedCPUAdam([large], **settings)
    return {"seconds": loaded_s, "cpu_adam_s_per_elem": fastest(optimizer.step) / ADAM_ELEMS}


def run_fused_adam() -> dict[str, float]:
    """DeepSpeed's fused Adam on the GPU, as above."""
    import torch

    from bigtrain import zero

    begun = time.perf_counter()
    start = torch.linspace(-1, 1, 10_001, device="cuda")
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizer = zero.deepspeed.ops.adam.FusedAdam([ours], lr=1e-2, adam_w_mode=True, weight_decay=0.1)
    loaded_s = time.perf_counter() - begun
    _step(optimizer, ours, torch.ones_like(start))
    _step(torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1), theirs, torch.ones_like(start))
    _compare(ours.data, theirs.data)
    return {"seconds": loaded_s}


def run_async_io() -> dict[str, float]:
    """Write and read a file through DeepSpeed's asynchronous I/O (NVMe offload; bigtrain itself does not use it)."""
    import torch

    from bigtrain import zero

    builder = zero.deepspeed.ops.op_builder.AsyncIOBuilder()
    if not builder.is_compatible(verbose=False):
        raise BuildError("libaio or its header is missing")
    begun = time.perf_counter()
    handle = builder.load(verbose=False).aio_handle(block_size=_MIB, queue_depth=4, single_submit=False, overlap_events=True,
                                                    intra_op_parallelism=1)  # fmt: skip
    loaded_s = time.perf_counter() - begun
    source, target = torch.arange(_MIB, dtype=torch.uint8), torch.zeros(_MIB, dtype=torch.uint8)
    with tempfile.TemporaryDirectory() as folder:
        handle.sync_pwrite(source, f"{folder}/x")
        handle.sync_pread(target, f"{folder}/x")
    _compare(source, target)
    return {"seconds": loaded_s}


def _step(optimizer: Any, param: Any, grad: Any) -> None:
    for _ in range(2):
        param.grad = grad.clone()
        optimizer.step()


def _compare(ours: Any, theirs: Any) -> None:
    # Two fp32 implementations of one formula, two steps: each rounds about ten times, relative 2^-24 each.
    difference = (ours.double() - theirs.double()).abs().max().item()
    if not difference <= 1e-5:
        raise BuildError(f"it computes something else: largest difference {difference:g}")


OPS: dict[str, Callable[[], dict[str, float]]] = {
    "cpu_adam": run_cpu_adam,
    "fused_adam": run_fused_adam,
    "async_io": run_async_io,
}


def main(argv: list[str] | None = None) -> int:
    """Measure what the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--rates", action="store_true")
    parser.add_argument("--ops", default="")
    args = parser.parse_args(argv)
    done: dict[str, Any] = {"rates": {}, "ops": {}}
    todo: list[tuple[str, str, Callable[[], dict[str, float]]]] = []
    if args.rates:
        todo += [("rates", "host", host_rates), ("rates", "device", device_rates)]
    todo += [("ops", op, OPS[op]) for op in args.ops.split(",") if op]
    for part, name, work in todo:
        done["now"] = name
        _write(args.out, done)
        try:
            done[part][name] = work()
        except Exception as error:
            from bigtrain.builds import first_cause

            done[part][name] = {"error": str(error) if isinstance(error, BuildError) else first_cause(error)}
    done["now"] = None
    _write(args.out, done)
    return 0


def _write(path: str, value: Any) -> None:
    draft = Path(f"{path}.draft")
    draft.write_text(json.dumps(value))
    os.replace(draft, path)


if __name__ == "__main__":
    end_process(main())
