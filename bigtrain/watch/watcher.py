"""The watch itself: a thread that hears the other ranks, judges, reports, and ends the process when nothing else will."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from bigtrain.watch import stacks
from bigtrain.watch.mesh import Address, Mesh, process_status, start_tick
from bigtrain.watch.verdict import OF_A_STEP, Known, Verdict, judge
from bigtrain.whereabouts import HERE, called_from

log = logging.getLogger(__name__)

EXIT_HANG = 1
LEARNED: Literal["learned"] = "learned"
Limit = float | Literal["learned"]
# Without a limit by the user: so many times the longest pause seen on any rank, within bounds. Before the first step nothing is
# known: kernels are compiled, files are read for the first time.
FACTOR, LEAST_S, MOST_S, FIRST_S = 20.0, 120.0, 1800.0, 600.0
SILENT_S = 20.0  # a watch speaks every second; a call that holds Python's lock for so long is no training step
BEAT_S, TICK_S = 1.0, 0.2
DETAIL_S = 2.0  # idle for so long, a rank says where exactly it is
NOTICE_S, NOTICE_STEP_S = 5.0, 30.0


class Pulse:
    """How long the training thread has not moved: neither noted anything nor left the call that it is in."""

    def __init__(self, ident: int):
        self._ident = ident
        self._seen = (HERE.moved, stacks.signature(ident))
        self.since = time.monotonic()
        self.longest_s = 0.0

    def idle_s(self) -> float:
        """Seconds without movement, now."""
        now, seen = time.monotonic(), (HERE.moved, stacks.signature(self._ident))
        if seen != self._seen:
            if HERE.started:
                self.longest_s = max(self.longest_s, now - self.since)
            self._seen, self.since = seen, now
        return now - self.since


class Watcher:
    """One rank's watch.

    Args:
        mesh: lines to the others. everyone: their addresses.
        rank: this rank. ident: the thread that trains.
        limit: seconds without movement, or LEARNED.
        end: ends the process with an exit code.
    """

    def __init__(
        self, mesh: Mesh, everyone: Sequence[Address], rank: int, ident: int, limit: Limit, end: Callable[[int], Any] = os._exit
    ):
        self._thread = threading.Thread(target=self._run, daemon=True, name="bigtrain-watch")
        self.limit = limit
        self.names: dict[int, str] = {}
        self._mesh, self._everyone, self._rank, self._ident, self._exit = mesh, everyone, rank, ident, end
        self._pulse = Pulse(ident)
        self._known = {a.rank: Known(rank=a.rank) for a in everyone if a.rank != rank}
        self._heard_at = dict.fromkeys(self._known, time.monotonic())
        self._longest_s, self._all_started = 0.0, False
        self._stepping: dict[int, bool] = {}
        self._to_say: list[dict[str, Any]] = []
        self._said, self._quit = threading.Event(), threading.Event()
        self._detail: tuple[int, dict[str, Any]] = (-1, {})
        self._noticed = -1
        self.verdict: Verdict | None = None
        self._decided_at = 0.0
        self.over = False  # this rank has failed, and is about to end

    # ------------------------------------------------------------ called by the training thread

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    @property
    def watching(self) -> bool:
        """The thread runs."""
        return self._thread.is_alive()

    def say(self, message: dict[str, Any], wait_s: float = 1.0) -> None:
        """Tell all other watches; returns when it is on its way."""
        self._said.clear()
        self._to_say.append(message)
        if self.watching and threading.current_thread() is not self._thread:
            self._said.wait(wait_s)

    def stop(self) -> None:
        """Say farewell and end the thread."""
        self.say({"ended": "left", "step": HERE.step})
        self._quit.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def seen(self) -> dict[int, str]:
        """What is known of each other rank."""
        return {r: k.describe().split(": ", 1)[1] for r, k in self._known.items()}

    def lost(self) -> dict[int, str]:
        """Those that have ended."""
        return {r: said for r, said in self.seen().items() if self._known[r].ended}

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        beaten = ticked = time.monotonic()
        while not self._quit.is_set():
            try:
                now = time.monotonic()
                if now - ticked > SILENT_S / 2:
                    self._forgive(now - ticked)
                ticked = now
                for rank, message in self._mesh.poll(TICK_S):
                    self._hear(rank, message)
                self._speak()
                if now - beaten >= min(BEAT_S, self.limit_s / 4):
                    beaten = now
                    self._mesh.say(self._beat())
                    self._look()
            except Exception:  # the watch must not end a run that trains
                log.warning("the watch of rank %d stumbled:\n%s", self._rank, traceback.format_exc())
                self._quit.wait(5.0)
        self._speak()
        self._mesh.poll(0.0)
        self._mesh.close()

    @property
    def limit_s(self) -> float:
        """Seconds without movement after which the run ends."""
        if self.limit != LEARNED:
            return float(self.limit)
        if not self._all_started:
            return FIRST_S
        return min(MOST_S, max(LEAST_S, FACTOR * max(self._longest_s, self._pulse.longest_s)))

    def _forgive(self, gap_s: float) -> None:
        """This process itself was stopped, or starved of its cores: nobody else is to blame for the gap."""
        self._pulse.since += gap_s
        self._heard_at = {r: t + gap_s for r, t in self._heard_at.items()}

    def _speak(self) -> None:
        while self._to_say:
            self._mesh.say(self._to_say.pop(0))
        self._said.set()

    def _hear(self, rank: int, message: dict[str, Any] | None) -> None:
        if rank not in self._known:
            return
        self._heard_at[rank] = time.monotonic()
        before = self._known[rank]
        if message is None:
            self._known[rank] = before if before.ended else replace(before, ended="died")
            self._look()
        elif "verdict" in message:
            self._adopt(message["verdict"])
        elif "ended" in message:
            told = {k: message[k] for k in ("ended", "why", "step") if k in message}
            if before.ended != "failed":  # the farewell that follows says less
                self._known[rank] = replace(before, **told)
        elif not before.ended:
            self._longest_s = max(self._longest_s, float(message.pop("longest_s")))
            self._stepping[rank] = bool(message.pop("started"))
            self._all_started = HERE.started and len(self._stepping) == len(self._known) and all(self._stepping.values())
            self._known[rank] = replace(before, **{**message, "lines": tuple(message["lines"])}, silent_s=0.0)

    def _beat(self) -> dict[str, Any]:
        idle_s = self._pulse.idle_s()
        told = {
            "idle_s": idle_s, "step": HERE.step, "place": HERE.place, "waiting": HERE.waiting,
            "patient": HERE.patient_until > time.monotonic(), "longest_s": self._pulse.longest_s, "started": HERE.started,
            "module": "", "lines": (), "script": "", "collective": "",
        }  # fmt: skip
        return {**told, **self._details()} if idle_s >= DETAIL_S else told

    def _details(self) -> dict[str, Any]:
        """Looked up once for each time that the rank stands still."""
        if self._detail[0] != HERE.moved:
            script = called_from(sys._current_frames().get(self._ident))[1]
            found = {"lines": stacks.lines(self._ident), "script": script, "collective": stacks.last_collective()}
            self._detail = HERE.moved, {**found, "module": stacks.module_in(self._ident, self.names)}
        return self._detail[1]

    def _everybody(self) -> list[Known]:
        """Everything known now, this rank included, in rank order."""
        now, mine = time.monotonic(), self._beat()
        told = {k: v for k, v in mine.items() if k not in ("longest_s", "started")}
        found = {self._rank: Known(rank=self._rank, **told)}
        for rank, known in self._known.items():
            silent_s = now - self._heard_at[rank]
            idle_s = known.idle_s + silent_s
            found[rank] = replace(known, silent_s=silent_s, idle_s=idle_s, stopped=silent_s > 3.0 and self._is_stopped(rank))
        reached = self._mesh.reached
        # A rank that could never be reached is none that fell silent.
        return [found[r] for r in sorted(found) if r == self._rank or r in reached or found[r].ended]

    def _is_stopped(self, rank: int) -> bool:
        other = self._everyone[rank]
        return other.pids == self._everyone[self._rank].pids and process_status(other.pid) == ["T", other.started]

    # ------------------------------------------------------------ judging and ending

    def _look(self) -> None:
        everybody = self._everybody()
        if self.verdict is None:
            found = judge(everybody, self.limit_s, max(SILENT_S, min(self.limit_s, LEAST_S)) if self._tolerant else SILENT_S)
            if found is not None:
                self._decide(found, everybody)
            else:
                self._notice(everybody)
        if self.verdict is not None and time.monotonic() - self._decided_at >= self.verdict.grace_s:
            self._end(everybody)

    @property
    def _tolerant(self) -> bool:
        return self.limit == LEARNED or float(self.limit) > SILENT_S

    def _adopt(self, told: Mapping[str, Any]) -> None:
        if self.verdict is None:
            self._decide(Verdict(tuple(told["behind"]), str(told["text"]), float(told["grace_s"])), self._everybody())

    def _decide(self, verdict: Verdict, everybody: Sequence[Known]) -> None:
        self.verdict, self._decided_at = verdict, time.monotonic()
        self._mesh.say({"verdict": asdict(verdict)})
        if not self.over and not any(k.ended in ("failed", "left") for k in everybody if k.rank in verdict.behind):
            self._report(everybody)

    def _survivors(self, everybody: Sequence[Known]) -> list[int]:
        return [k.rank for k in everybody if not k.ended and not k.stopped and k.silent_s < SILENT_S / 2]

    def _end(self, everybody: Sequence[Known]) -> None:
        """Report, and leave: first of all what other ranks are to hear, last what no other rank will do."""
        assert self.verdict is not None
        folder = self._report(everybody)
        end = time.monotonic() + 0.5  # others take the verdict over, so that all say the same
        while time.monotonic() < end:
            for rank, message in self._mesh.poll(0.1):
                self._hear(rank, message)
        first = self._rank == min(self._survivors(everybody), default=self._rank)
        text = self.verdict.text if first else self.verdict.text.splitlines()[0]
        print(f"bigtrain: {'' if first else f'[rank {self._rank}] '}the run ends: {text}\nStacks and last collectives of "
              f"every rank: {folder}", file=sys.stderr, flush=True)  # fmt: skip
        self._kill_the_stopped(everybody)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        self._exit(EXIT_HANG)

    def _kill_the_stopped(self, everybody: Sequence[Known]) -> None:
        """A stopped process cannot end itself, and launchers ask it to in vain."""
        mine = self._everyone[self._rank]
        on_host = [r for r in self._survivors(everybody) if self._everyone[r].pids == mine.pids]
        for known in everybody if self._rank == min(on_host, default=self._rank) else ():
            other = self._everyone[known.rank]
            lost = known.stopped or known.silent_s >= SILENT_S
            if lost and not known.ended and other.pids == mine.pids and start_tick(other.pid) == other.started:
                with contextlib.suppress(OSError):
                    os.kill(other.pid, signal.SIGKILL)

    def _report(self, everybody: Sequence[Known]) -> Path:
        """OUT/hang/rank-<r>.txt of this rank, and summary.txt by the first rank that lives."""
        folder = Path(HERE.folder or ".").absolute() / "hang"
        assert self.verdict is not None
        record = stacks.flight_record()
        mine = next(k for k in everybody if k.rank == self._rank)
        mine = replace(mine, module=stacks.module_in(self._ident, self.names), collective=stacks.last_collective(record))
        text = "\n".join([self.verdict.text, "", mine.describe(), "", "Python stacks:", stacks.all_threads()])
        calls = (
            "\n".join(f"  {stacks.spelled(e)}, {e.get('state', '?')}" for e in record[-20:]) or "  the flight recorder is off"
        )
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"rank-{self._rank}.txt").write_text(f"{text}\nlast collectives, oldest first:\n{calls}\n")
            if record:
                (folder / f"rank-{self._rank}.flight.json").write_text(json.dumps(record))
            if self._rank == min(self._survivors(everybody), default=self._rank):
                (folder / "summary.txt").write_text(self.verdict.text + "\n")
        return folder

    def _notice(self, everybody: Sequence[Known]) -> None:
        """Say once for each wait that it is long, and for whom."""
        waiting = [k for k in everybody if k.waiting and not k.patient and not k.ended]
        if not waiting or waiting[0].rank != self._rank or self._noticed == HERE.moved:
            return
        mine = waiting[0]
        alone = HERE.started and mine.place not in OF_A_STEP
        late = [k for k in everybody if not k.ended and not k.patient and k.place != mine.place]
        if late and mine.idle_s >= (NOTICE_S if alone else min(NOTICE_STEP_S, self.limit_s / 2)):
            self._noticed = HERE.moved
            log.warning("rank %d has waited %.0f s in %s for:\n%s", mine.rank, mine.idle_s, mine.place,
                        "\n".join(f"  {k.describe()}" for k in late[:8]))  # fmt: skip
