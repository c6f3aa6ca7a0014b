"""Ranks that talk: real processes, real collectives, a real ZeRO-3 step, with a limit; and variations to try when it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigtrain.diagnostics.doctor.devices import check_places
from bigtrain.diagnostics.doctor.finding import Finding, broken, ok
from bigtrain.diagnostics.doctor.rank import STAGES
from bigtrain.hosts.placement import Place
from bigtrain.hosts.ports import free_port

LIMIT_S = 30.0
START_LIMIT_S = 180.0  # importing torch and DeepSpeed, on a cold disk
GRACE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class RankStory:
    """How one rank fared: the stage it was in, its error, its stacks, the last lines it printed.

    `places`: of all ranks if it met them, else its own; empty if it did not get so far.
    """

    rank: int
    stage: str
    error: str | None
    stack: str = ""
    output: str = ""
    places: tuple[Place, ...] = ()
    backend: str | None = None
    link_bytes_s: float | None = None

    @property
    def passed(self) -> bool:
        return self.stage == "done"

    def describe(self) -> str:
        """One line."""
        if self.passed:
            return f"rank {self.rank}: passed"
        return f"rank {self.rank}: in {self.stage}: {self.error or 'no answer within the limit'}"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One try in fresh processes, with `extra` variables; under a launcher `stories` has this process's rank only."""

    world: int
    extra: Mapping[str, str]
    stories: tuple[RankStory, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        return all(s.passed for s in self.stories)

    def words(self) -> str:
        """The variables as words."""
        return " ".join(f"{k}={v}" for k, v in self.extra.items())

    def lines(self) -> str:
        """The variables as shell lines."""
        return "; ".join(f"export {k}={v}" for k, v in self.extra.items())


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Which ranks this process starts: all of them on this host, or its own one under a launcher."""

    world: int
    mine: tuple[int, ...]
    first_local: int
    local_world: int
    master: str
    port: int | None  # None: a free one for each attempt

    @classmethod
    def local(cls, world: int) -> Launch:
        """All ranks on this host."""
        return cls(world=world, mine=tuple(range(world)), first_local=0, local_world=world, master="127.0.0.1", port=None)

    @classmethod
    def from_launcher(cls, env: Mapping[str, str]) -> Launch | None:
        """This process's rank of a launcher's (torchrun, deepspeed, srun with RANK set), None without one."""
        if not all(env.get(k, "").isdigit() for k in ("RANK", "WORLD_SIZE", "MASTER_PORT")) or "MASTER_ADDR" not in env:
            return None
        world, local = int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", env.get("SLURM_LOCALID", "0")))
        local_world = int(env.get("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE", env.get("SLURM_NTASKS_PER_NODE", "1"))))
        return cls(
            world=world, mine=(int(env["RANK"]),), first_local=local, local_world=local_world,
            # The launcher itself listens on its port; all ranks count on from there, one for each attempt.
            master=env["MASTER_ADDR"], port=int(env["MASTER_PORT"]) + 1,
        )  # fmt: skip


# ---------------------------------------------------------------- measuring


def measure_attempt(
    launch: Launch, number: int, extra: Mapping[str, str], limit_s: float = LIMIT_S, env: Mapping[str, str] = os.environ
) -> Attempt:
    """Start this process's ranks, wait for them `limit_s` seconds from when all have imported what they need, end them."""
    begun = time.monotonic()
    port = free_port() if launch.port is None else launch.port + number
    if launch.port is not None:
        limit_s *= 2  # ranks of other hosts may still be in the attempt before
    with tempfile.TemporaryDirectory(prefix="bigtrain-doctor-") as folder:
        processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for i, rank in enumerate(launch.mine):
                values = _rank_environment(launch, rank, launch.first_local + i, port, {**env, **extra})
                command = [sys.executable, "-m", "bigtrain.diagnostics.doctor.rank", folder, str(limit_s)]
                with open(Path(folder, f"log.{rank}"), "wb") as log:
                    processes[rank] = subprocess.Popen(command, stdout=log, stderr=log, env=values, start_new_session=True)
            _await(processes, folder, limit_s)
            codes = {rank: process.poll() for rank, process in processes.items()}
        finally:
            for process in processes.values():
                if process.poll() is None:
                    process.kill()
                process.wait()
        stories = tuple(_story(folder, rank, codes[rank]) for rank in launch.mine)
    return Attempt(world=launch.world, extra=dict(extra), stories=stories, seconds=time.monotonic() - begun)


def _rank_environment(launch: Launch, rank: int, local: int, port: int, env: Mapping[str, str]) -> dict[str, str]:
    values = {k: v for k, v in env.items() if not k.startswith("TORCHELASTIC_")}  # its store belongs to the launcher
    values |= {
        "RANK": str(rank), "WORLD_SIZE": str(launch.world), "LOCAL_RANK": str(local), "MASTER_ADDR": launch.master,
        "LOCAL_WORLD_SIZE": str(launch.local_world), "LOCAL_SIZE": str(launch.local_world), "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "1"), "BIGTRAIN_CONTROL_TIMEOUT_S": str(int(LIMIT_S)),
    }  # fmt: skip
    return values


def _told(folder: str, rank: int) -> dict[str, Any]:
    path = Path(folder, f"rank.{rank}.json")
    return json.loads(path.read_text()) if path.exists() else {"stage": "start", "error": None}


def _await(processes: Mapping[int, subprocess.Popen[bytes]], folder: str, limit_s: float) -> None:
    """Return when all have ended, when one failed and GRACE_S passed, or when time is up: stacks are then on disk."""
    end, started = time.monotonic() + START_LIMIT_S, False
    failed = False
    while time.monotonic() < end:
        codes = [p.poll() for p in processes.values()]
        if all(code is not None for code in codes):
            return
        if not failed and any(codes):
            failed, end = True, min(end, time.monotonic() + GRACE_S)
        if not started and all(_told(folder, rank)["stage"] != "start" for rank in processes):
            started = True
            end = end if failed else time.monotonic() + limit_s + GRACE_S
        time.sleep(0.05)
    for rank, process in processes.items():
        # Before it has registered the handler, the signal would end the process.
        if process.poll() is None and Path(folder, f"rank.{rank}.json").exists():
            process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)


def _story(folder: str, rank: int, code: int | None) -> RankStory:
    told = _told(folder, rank)
    stack, log = Path(folder, f"stack.{rank}"), Path(folder, f"log.{rank}")
    output = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
    error = told["error"]
    if error is None and told["stage"] != "done" and code is not None:
        error = f"the process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
        error += "".join(f": {line.strip()}" for line in output.splitlines()[-1:])
    return RankStory(
        rank=rank, stage=told["stage"], error=error, stack=stack.read_text() if stack.exists() else "", output=output,
        places=tuple(Place(**p) for p in told.get("places", ())),
        backend=told.get("backend"), link_bytes_s=told.get("link_bytes_s"),
    )  # fmt: skip


# ---------------------------------------------------------------- variations

# Stages whose failure another transport may mend.
TRANSPORT = ("meet", "all-reduce", "all-gather", "reduce-scatter", "bandwidth", "leave")


def worst_of(attempt: Attempt) -> RankStory:
    """The rank to blame first: one with an error of its own before one that only waited, then the one that came least far."""
    failed = [s for s in attempt.stories if not s.passed]
    return min(failed, key=lambda s: (s.error is None, STAGES.index(s.stage)))


def places_found(attempt: Attempt) -> list[Place]:
    """Where ranks are, in rank order, as far as any of them could tell."""
    found = {p.rank: p for s in attempt.stories for p in s.places}
    return [found[rank] for rank in sorted(found)]


def variations(backend: str | None, interfaces: Sequence[str]) -> list[dict[str, str]]:
    """Settings to try after a failure, one at a time, then all that only switch transports off."""
    if backend != "nccl":
        return [{"GLOO_SOCKET_IFNAME": name} for name in interfaces]
    off = [{"NCCL_SHM_DISABLE": "1"}, {"NCCL_P2P_DISABLE": "1"}]
    pinned = [{"NCCL_SOCKET_IFNAME": name, "GLOO_SOCKET_IFNAME": name} for name in interfaces]
    all_off = {"NCCL_SHM_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    return [*off, *pinned, {"NCCL_IB_DISABLE": "1"}, {**all_off, **(pinned[0] if pinned else {})}]


def climb(
    attempt: Callable[[int, Mapping[str, str]], Attempt], interfaces: Sequence[str], ladder: bool = True
) -> list[Attempt]:
    """The plain attempt, and if it fails the variations until one passes. Each is in fresh processes."""
    attempts = [attempt(0, {})]
    if attempts[0].passed or not ladder or worst_of(attempts[0]).stage not in TRANSPORT:
        return attempts
    backend = next((s.backend for s in attempts[0].stories if s.backend), None)
    for extra in variations(backend, interfaces):
        attempts.append(attempt(len(attempts), extra))
        if attempts[-1].passed:
            break
    return attempts


# ---------------------------------------------------------------- judging


def check_comm(attempts: Sequence[Attempt]) -> list[Finding]:
    """What the ranks said: where they are, and whether they can train together."""
    first = attempts[0]
    places = places_found(first)
    out = [check_places(places)] if places else []
    backend = next((s.backend for s in first.stories if s.backend), "?")
    needed = f"all stages within {LIMIT_S:.0f} s"
    if first.passed:
        link = max((s.link_bytes_s or 0.0 for s in first.stories), default=0.0)
        measured = f"{first.world} ranks by {backend}, {first.seconds:.1f} s with start-up"
        measured += f", {link / 1e9:.2f} GB/s a link" if link else ""
        what = "all-reduce, all-gather, reduce-scatter and a ZeRO-3 step give the right values"
        return [*out, ok("communication", what, measured, needed)]
    worst = worst_of(first)
    details = "\n".join(_details(s) for s in first.stories)
    tried = "; ".join(f"{a.words()}: {'works' if a.passed else 'fails'}" for a in attempts[1:])
    if tried:
        details += f"\nvariations tried: {tried}"
    good = next((a for a in attempts[1:] if a.passed), None)
    remedy = f"{good.lines()}   (tested: with this it works)" if good else _advice(worst, backend)
    what = f"{backend} over {first.world} ranks fails in {worst.stage}: {worst.error or 'no answer within the limit'}"
    return [
        *out,
        broken(
            "communication",
            what,
            f"{sum(s.passed for s in first.stories)} of {len(first.stories)} ranks passed",
            needed,
            remedy,
            details,
        ),
    ]


def _advice(worst: RankStory, backend: str) -> str:
    if worst.stage == "start":
        return "mend versions and packages as told above: the rank did not get as far as meeting others"
    if backend == "nccl":
        return "none of the known settings helps: NCCL_DEBUG=INFO bigtrain doctor, nvidia-smi topo -m, and dmesg for Xid errors"
    return "none of the known settings helps: see the stacks below, and the findings on interfaces, memory and open files"


def _details(story: RankStory) -> str:
    lines = [story.describe()]
    if not story.passed:
        lines += [f"  | {line}" for line in story.output.splitlines()]
        lines += [f"  {line}" for line in story.stack.splitlines()[:60]]
    return "\n".join(lines)
