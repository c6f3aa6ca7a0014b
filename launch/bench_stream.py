"""Optimizer state streamed through one GPU: seconds of an update alone, against the bus, and beside matmuls.

    python launch/bench_stream.py [--elems 3.2e9] [--moments 8bit] [--chunk_mib 128] [--buffers 4] [--ratio 1.0]

One JSON line. `step_s` is a whole streamed update; `floor_s` the larger of both directions of the bus for the same bytes, each
measured alone from the same memory; `beside_s` matmuls of about that time and the update together, `matmuls_s` the matmuls alone:
what the update costs when it is hidden is their difference.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from bigtrain.optim.lanes import Streams
from bigtrain.optim.split import AdamWSplit
from bigtrain.optim.stream import Stream


def seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Of one call, once warm, until the device is done."""
    work()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / repeats


def main() -> None:
    """Measure and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elems", type=float, default=3.2e9)
    parser.add_argument("--moments", default="8bit", choices=["float32", "bfloat16", "8bit"])
    parser.add_argument("--chunk_mib", type=int, default=128)
    parser.add_argument("--buffers", type=int, default=4)
    parser.add_argument("--ratio", type=float, default=1.0)
    args = parser.parse_args()
    device, n = torch.device("cuda", torch.cuda.current_device()), int(args.elems)
    param = torch.nn.Parameter(torch.zeros(n, dtype=torch.bfloat16, device=device))
    grad = torch.empty(n, dtype=torch.bfloat16, device=device).normal_()
    optimizer = AdamWSplit([param], lr=1e-4, moments=args.moments)
    stream = Stream(
        optimizer.layout, Streams(device), device, ratio=args.ratio, chunk_bytes=args.chunk_mib << 20, buffers=args.buffers
    )
    optimizer.stream = stream
    optimizer.grad_factor = torch.ones((), device=device)

    def step() -> None:
        optimizer.hand_over(param, [grad])
        optimizer.step()

    begin = time.perf_counter()
    optimizer.state[param].update(optimizer.new_state(param))
    result = {"card": torch.cuda.get_device_name(), "elems": n, "pin_s": time.perf_counter() - begin, "step_s": seconds(step)}
    host = stream._memory[param].tensors
    pinned = stream._memory[param].pinned
    room = {name: torch.empty_like(t[: 1 << 27], device=device) for name, t in host.items()}

    def copy(up: bool) -> None:
        for name, tensor in host.items():
            for piece in tensor.split(1 << 27):
                there = room[name][: piece.numel()]
                there.copy_(piece, non_blocking=True) if up else piece.copy_(there, non_blocking=True)

    up_s = seconds(lambda: copy(True))
    optimizer.synchronize()
    down_s = seconds(lambda: copy(False))  # overwrites the state: last
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    one = seconds(lambda: a @ b, 20)
    count = max(1, int(1.3 * result["step_s"] / one))  # type: ignore[operator]

    def matmuls() -> None:
        for _ in range(count):
            a @ b

    def both() -> None:
        stream.deferred = True
        optimizer.hand_over(param, [grad])
        optimizer.step()
        stream.begin()
        matmuls()
        stream.finish()

    result |= {"pinned": pinned, "up_s": up_s, "down_s": down_s, "floor_s": max(up_s, down_s), "matmuls_s": seconds(matmuls)}
    result |= {"beside_s": seconds(both), "gpu_buffers_bytes": sum(t.nbytes for x in stream._pool for t in x.tensors.values())}
    result |= {"moments": args.moments, "chunk_mib": args.chunk_mib, "buffers": args.buffers, "ratio": args.ratio}
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}))


if __name__ == "__main__":
    main()
