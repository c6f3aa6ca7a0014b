"""A pool of rank processes that lives for the whole pytest run.

Starting ranks for each test costs half a minute; a pool costs a few seconds once, because its ranks are forked from a process
that has imported what they need (`tests.ranks.imported`). A body is a module-level function; it runs on every rank and its
results come back in rank order. When one rank fails, its traceback and every other rank's stack are raised and the pool starts
anew; a body that takes longer than its limit is a failure with a location.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from tests import keep_imports

HANG_S = float(os.environ.get("BIGTRAIN_TEST_HANG_S", "300"))


class RankFailure(AssertionError):
    """Some rank raised, died or hung; the text has every rank's story."""


def forks() -> Any:
    """A context of multiprocessing whose processes are forked from one that has imported all that ranks need.

    Where there is a GPU they begin anew: what CUDA has set up does not survive a fork.
    """
    if torch.cuda.is_available():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.ranks.imported"])
    return context


def _process_settings() -> dict[str, Any]:
    """What a body must leave as it found it, or later tests in the same process compute other bits."""
    return {
        "threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _serve(rank: int, world: int, folder: str, inbox: Any, outbox: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), LOCAL_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0", DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1",
        BIGTRAIN_CONTROL_TIMEOUT_S="60", TOKENIZERS_PARALLELISM="false",
    )  # fmt: skip
    stack = open(f"{folder}/stack.{rank}", "w")  # noqa: SIM115  (held open for the signal handler)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    from bigtrain import ranks, zero
    from bigtrain.whereabouts import HERE

    HERE.folder = folder  # for reports of the watch
    zero.init_distributed()
    ranks.control_group()
    known = keep_imports(0)
    outbox.put((rank, "up", None))
    while (job := inbox.get()) is not None:
        function, args, kwargs = job
        before = _process_settings()
        try:
            result = function(*args, **kwargs)
            assert _process_settings() == before, f"torch's settings before {before}, after {_process_settings()}"
            outbox.put((rank, result, None))
        except BaseException:
            outbox.put((rank, None, traceback.format_exc()))
        torch.set_num_threads(before["threads"])
        known = keep_imports(known)
    torch.distributed.destroy_process_group()


class RankPool:
    """`world` gloo ranks on this machine."""

    def __init__(self, world: int):
        self.world = world
        self._processes: list[Any] = []

    def _start(self) -> None:
        context = forks()
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        self._inboxes = [context.Queue() for _ in range(self.world)]
        self._outbox = context.Queue()
        self._processes = [
            context.Process(target=_serve, args=(r, self.world, self._folder, self._inboxes[r], self._outbox), daemon=True)
            for r in range(self.world)
        ]
        for process in self._processes:
            process.start()
        self._collect(240.0, "starting the ranks")

    def run(self, function: Callable[..., Any], *args: Any, limit_s: float = HANG_S, **kwargs: Any) -> list[Any]:
        """Run `function(*args, **kwargs)` on every rank; its results in rank order.

        Raises:
            RankFailure: if any rank raised, died, or did not answer within `limit_s` seconds.
        """
        if not self._processes:
            self._start()
        for inbox in self._inboxes:
            inbox.put((function, args, kwargs))
        return self._collect(limit_s, getattr(function, "__name__", str(function)))

    def _collect(self, limit_s: float, what: str) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        end = time.monotonic() + limit_s
        while len(results) + len(errors) < self.world and time.monotonic() < end:
            try:
                rank, value, error = self._outbox.get(timeout=0.2)
            except queue.Empty:
                dead = [r for r, p in enumerate(self._processes) if not p.is_alive() and r not in {*results, *errors}]
                for r in dead:
                    errors[r] = f"the process ended with exit code {self._processes[r].exitcode}"
                if dead:
                    end = min(end, time.monotonic() + 5.0)
                continue
            if error is None:
                results[rank] = value
            else:
                errors[rank] = error
                end = min(end, time.monotonic() + 10.0)  # the others may be waiting for it in a collective
        if len(results) == self.world:
            return [results[r] for r in range(self.world)]
        raise RankFailure(self._story(what, errors, results))

    def _story(self, what: str, errors: dict[int, str], results: dict[int, Any]) -> str:
        silent = [r for r in range(self.world) if r not in errors and r not in results]
        for r in silent:
            if self._processes[r].is_alive():
                os.kill(self._processes[r].pid, signal.SIGUSR1)
        time.sleep(0.5 if silent else 0.0)
        parts = [f"{what} on {self.world} ranks:"]
        parts += [f"--- rank {r} raised:\n{text}" for r, text in sorted(errors.items())]
        for r in silent:
            parts.append(f"--- rank {r} did not answer; its stacks:\n{Path(self._folder, f'stack.{r}').read_text()}")
        keep = all(p.is_alive() for p in self._processes) and not silent
        if not keep:
            self.stop()
        return "\n".join(parts)

    def stop(self) -> None:
        """End the ranks; the next `run` starts new ones."""
        for process, inbox in zip(self._processes, self._inboxes if self._processes else []):
            if process.is_alive():
                inbox.put(None)
        end = time.monotonic() + 5.0
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(5)
        self._processes = []


class Pools:
    """Pools by world size, made on first use. Only two are kept alive at once, to bound memory."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world: int) -> RankPool:
        pool = self._pools.pop(world, None) or RankPool(world)
        self._pools[world] = pool
        while len(self._pools) > 2:
            oldest = next(iter(self._pools))
            self._pools.pop(oldest).stop()
        return pool

    def stop(self) -> None:
        for pool in self._pools.values():
            pool.stop()
        self._pools = {}
