"""The ranks of one cell as processes of their own: started, watched, measured from outside, and gone afterwards.

The ranks are started directly, with the variables that every launcher sets: the exit code of each is then known (torchrun
reports 1 for all of them), and a failed rank does not cost the others' time-outs. Each is a session of its own; everything that
they start inherits a mark in the environment, by which it is found and killed, also where it left its session. Should this process be
killed itself (SIGKILL, the kernel short of memory), a guard does that: it reads a pipe, which ends with this process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bigtrain.hosts.ports import free_port

MARK = "BIGTRAIN_BENCH_CELL"
SAMPLE_S = 0.05
GRACE_S = 15.0
_SMI = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits", "-lms", "200"]

_GUARD = "import sys; from bigtrain.bench.processes import end_marked; sys.stdin.read(); end_marked(sys.argv[1])"


@dataclass
class Ended:
    """How the ranks ended.

    Attributes:
        exit_codes: of each rank; negative: killed by that signal. None: it had to be killed here.
        timed_out: the time limit was reached. seconds: wall time.
        rss_bytes, pss_bytes: largest of each rank. RSS: the kernel's own peak (VmHWM), which misses nothing. PSS: that less
            what is shared with others, and at least the most that was sampled (smaps_rollup).
        node_pss_bytes: most of all ranks together at one moment; what falls between two samples (SAMPLE_S) is missed.
        gpu_used_bytes: most on one card by nvidia-smi, what was used before included.
        gpu_used_before_bytes: on the fullest card before the start.
    """

    exit_codes: list[int | None]
    timed_out: bool = False
    seconds: float = 0.0
    rss_bytes: dict[int, int] = field(default_factory=dict)
    pss_bytes: dict[int, int] = field(default_factory=dict)
    node_pss_bytes: int = 0
    gpu_used_bytes: int = 0
    gpu_used_before_bytes: int = 0


def python_path(root: Path) -> str:
    """What a started process finds packages by: `root` first, then what PYTHONPATH held, by which alone dependencies may be found."""
    return os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))


def rank_environment(rank: int, world: int, port: int, mark: str, more: Mapping[str, str]) -> dict[str, str]:
    """What a launcher tells a rank, on top of this process's environment without another launcher's traces."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_"))}
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "LOCAL_SIZE": world,
            "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, MARK: mark}  # fmt: skip
    return {**inherited, **{k: str(v) for k, v in told.items()}, **more}


def run_ranks(
    command: Sequence[str],
    *,
    world: int,
    logs: Path,
    limit_s: float,
    env: Mapping[str, str],
    cwd: Path,
    cards: Sequence[int] = (),
) -> Ended:
    """Run `command` on `world` ranks of this host until all have ended or the time is up; nothing of it is left afterwards.

    Args:
        command: the same on every rank. logs: folder for rank0.log, rank1.log, ... limit_s: seconds before all are killed.
        env: further variables. cwd: working folder of the ranks. cards: whose memory is watched, of the r-th rank the r-th; none:
            the first ones.
    """
    mark, port, begin = uuid.uuid4().hex, free_port(), time.monotonic()
    ended = Ended([None] * world)
    ranks: list[subprocess.Popen[bytes]] = []
    with _CardWatch(cards[:world]) as watch, _guard(mark):
        try:
            for rank in range(world):
                with open(logs / f"rank{rank}.log", "wb") as log:
                    told = rank_environment(rank, world, port, mark, env)
                    ranks.append(subprocess.Popen(command, env=told, cwd=cwd, stdout=log, stderr=subprocess.STDOUT,
                                                  stdin=subprocess.DEVNULL, start_new_session=True))  # fmt: skip
            _watch(ranks, ended, begin + limit_s)
        finally:
            _kill(ranks, mark)
    ended.seconds = time.monotonic() - begin
    ended.gpu_used_bytes, ended.gpu_used_before_bytes = watch.most(world), watch.before(world)
    return ended


def _watch(ranks: Sequence[subprocess.Popen[bytes]], ended: Ended, until: float) -> None:
    """Measure until all ranks have ended, one has failed and the others had their grace, or the time is up."""
    host = _HostWatch()
    while True:
        codes = [process.poll() for process in ranks]
        ended.exit_codes = list(codes)
        host.sample({rank: p.pid for rank, (p, code) in enumerate(zip(ranks, codes)) if code is None}, ended)
        if all(code is not None for code in codes):
            return
        now = time.monotonic()
        if any(codes):  # some code is neither None nor 0
            until = min(until, now + GRACE_S) if not host.failing else until
            host.failing = True
        if now >= until:
            ended.timed_out = not any(codes)
            return
        time.sleep(SAMPLE_S)


class _HostWatch:
    """Resident memory of processes, read from outside."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.failing = False
        self._next_pss = 0.0
        self._shared: dict[int, int] = {}

    def sample(self, pids: Mapping[int, int], ended: Ended) -> None:
        """Resident memory of this moment: cheap, so often; what of it is shared changes little and is read now and then."""
        together = 0
        for rank, pid in pids.items():
            now, peak = _kib(f"/proc/{pid}/status", "VmRSS:", "VmHWM:")
            ended.rss_bytes[rank] = max(ended.rss_bytes.get(rank, 0), peak)
            together += now - self._shared.get(rank, now)
            if rank in self._shared:  # peaks of a moment (a copy in passing) fall between two samples
                ended.pss_bytes[rank] = max(ended.pss_bytes[rank], peak - self._shared[rank])
        ended.node_pss_bytes = max(ended.node_pss_bytes, together)
        begin = time.monotonic()
        if begin < self._next_pss:
            return
        for rank, pid in pids.items():
            rss, pss = _kib(f"/proc/{pid}/smaps_rollup", "Rss:", "Pss:")  # of one moment
            if pss:
                self._shared[rank] = rss - pss
            ended.pss_bytes[rank] = max(ended.pss_bytes.get(rank, 0), pss)
        # Walking the pages of a large process takes a while and holds a lock of it: at most 2 % of the time.
        end = time.monotonic()
        self._next_pss = end + 50 * (end - begin)


def _kib(path: str, *names: str) -> list[int]:
    """Values of a /proc file in bytes; 0 if the process is gone or does not tell."""
    found = dict.fromkeys(names, 0)
    with contextlib.suppress(OSError, ValueError, IndexError), open(path) as file:
        for line in file:
            name = line.partition(":")[0] + ":"
            if name in found:
                found[name] = int(line.split()[1]) * 1024
    return list(found.values())


class _CardWatch:
    """Used memory of the ranks' cards by nvidia-smi, five times a second; nothing where there is none."""

    def __init__(self, cards: Sequence[int]) -> None:
        self._cards = cards
        self._first: dict[int, int] = {}
        self._most: dict[int, int] = {}
        self._process: subprocess.Popen[str] | None = None
        self._ready = threading.Event()

    def __enter__(self) -> _CardWatch:
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(_SMI, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
            self._ready.wait(5)
        return self

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            index, _, used = line.partition(",")
            if index.strip().isdigit() and used.strip().isdigit():
                size = int(used) * 2**20
                self._first.setdefault(int(index), size)
                self._most[int(index)] = max(self._most.get(int(index), 0), size)
                self._ready.set()
        self._ready.set()

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def most(self, world: int) -> int:
        return max((self._most.get(i, 0) for i in self._cards or sorted(self._most)[:world]), default=0)

    def before(self, world: int) -> int:
        return max((self._first.get(i, 0) for i in self._cards or sorted(self._first)[:world]), default=0)


def _kill(ranks: Sequence[subprocess.Popen[bytes]], mark: str) -> None:
    for process in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    end_marked(mark, but=[process.pid for process in ranks])
    for process in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)  # a process in the middle of unpinning 100 GB takes its time to go


def end_marked(mark: str, but: Sequence[int] = (), limit_s: float = 10.0) -> None:
    """Kill everything that carries the mark, and what it starts meanwhile; `but`: process ids that are dealt with already."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        left = [pid for pid in marked(mark) if pid not in but]
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            break
        time.sleep(0.1)


@contextlib.contextmanager
def _guard(mark: str) -> Iterator[None]:
    """A process that ends what is marked when this one is gone, however it went."""
    env = {**os.environ, "PYTHONPATH": python_path(Path(__file__).resolve().parents[2])}
    guard = subprocess.Popen(
        [sys.executable, "-c", _GUARD, mark], env=env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield
    finally:
        guard.kill()  # the ranks are gone
        guard.communicate()


def marked(mark: str) -> Iterator[int]:
    """Process ids of this user that carry the mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes():
                    yield int(entry.name)
