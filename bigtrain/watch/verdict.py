"""Whose fault it is that nothing moves: a pure decision from what is known of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bigtrain.whereabouts import after

End = Literal["", "died", "left", "failed"]

STOPPED_S = 12.0  # a debugger or a shell may hold a process for a moment
LEFT_S = 3.0  # between a rank's farewell and the others' being stuck for want of it
GRACE_S = 8.0  # for the training thread to raise by itself, with the traceback that the user knows

KILLED = "its process was killed from outside (kill -9, out of memory: see dmesg) or crashed: its own output says more"


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of one rank now.

    Attributes:
        ended: "died": without a word; "left": its program came to its end; "failed": with an error, `why`.
        idle_s: since it last moved, by its own clock. silent_s: since it was last heard. stopped: its process is stopped.
        step, place: as in `Whereabouts`. waiting: in a call that others must join. patient: that call may take long.
        lines: where its training thread is, outermost first, "file:line function". script: the line of the script that it is at.
        collective: the last one that it entered, with its sequence number.
    """

    rank: int
    ended: End = ""
    why: str = ""
    idle_s: float = 0.0
    silent_s: float = 0.0
    stopped: bool = False
    step: int = 0
    place: str = ""
    waiting: bool = False
    patient: bool = False
    module: str = ""
    lines: tuple[str, ...] = ()
    script: str = ""
    collective: str = ""

    def describe(self) -> str:
        """One line about this rank."""
        if self.ended == "died":
            return f"rank {self.rank}: ended without a word, last seen {self._where()}"
        if self.ended == "left":
            return f"rank {self.rank}: its program came to its end {after(self.step)}"
        if self.ended == "failed":
            return f"rank {self.rank}: failed: {self.why}"
        if self.stopped:
            return f"rank {self.rank}: process stopped, last seen {self._where()}"
        if self.silent_s > 5.0:
            return f"rank {self.rank}: silent for {self.silent_s:.0f} s, last seen {self._where()}"
        return f"rank {self.rank}: {'waits ' if self.waiting else ''}{self._where()}, for {self.idle_s:.0f} s"

    def _where(self) -> str:
        text = f"{after(self.step)}: {self.place or 'starting'}"
        text += f", module {self.module}" if self.module else ""
        text += f", called at {self.script}" if self.script else ""
        text += f", last collective {self.collective}" if self.collective else ""
        return text + (f" ({self.lines[-1]})" if self.lines and not self.waiting else "")


@dataclass(frozen=True)
class Verdict:
    """Why the run ends. `grace_s`: how long training threads are given to end by themselves."""

    behind: tuple[int, ...]
    text: str
    grace_s: float


def judge(ranks: Sequence[Known], limit_s: float, silent_limit_s: float) -> Verdict | None:
    """None while all is well.

    Args:
        ranks: everything known, in rank order.
        limit_s: longest time without any movement on any rank.
        silent_limit_s: longest time without a sign of life of a rank's watch, while another rank waits.
    """
    for end, cause in (("failed", ""), ("died", KILLED)):
        gone = [k for k in ranks if k.ended == end]
        if gone:
            return _verdict(gone, f"{_names(gone)} {'failed' if end == 'failed' else 'ended'}: {cause or gone[0].why}", ranks)
    here = [k for k in ranks if not k.ended]
    waiting = [k for k in here if k.waiting and not k.patient and not k.stopped]
    waited_s = max((k.idle_s for k in waiting), default=0.0)
    left = [k for k in ranks if k.ended == "left"]
    if left and waited_s >= LEFT_S:
        return _verdict(left, _left(left, waiting), ranks)
    stopped_s = min(STOPPED_S, limit_s)
    stopped = [k for k in here if k.stopped and k.idle_s >= stopped_s]
    if stopped and waited_s >= stopped_s:
        return _verdict(stopped, f"{_names(stopped)}: the process is stopped (SIGSTOP, a suspended job, Ctrl-Z)", ranks)
    silent = [k for k in here if k.silent_s >= silent_limit_s]
    if silent and waited_s >= min(limit_s, silent_limit_s):
        cause = "no sign of life: the host is unreachable or stands still, or a call holds Python's interpreter lock"
        return _verdict(silent, f"{_names(silent)}: {cause}", ranks)
    if waiting and all(k.idle_s >= limit_s or k.silent_s >= limit_s for k in here):
        return _stuck(here, waiting, ranks)
    return None


def _verdict(behind: Sequence[Known], first: str, ranks: Sequence[Known]) -> Verdict:
    listing = "\n".join(f"  {k.describe()}" for k in ranks)
    grace_s = GRACE_S if any(k.ended for k in behind) else 0.0
    return Verdict(tuple(k.rank for k in behind), f"{first}\n{listing}", grace_s)


def _names(some: Sequence[Known]) -> str:
    return ("rank " if len(some) == 1 else "ranks ") + ", ".join(str(k.rank) for k in some)


def _left(left: Sequence[Known], waiting: Sequence[Known]) -> str:
    waits = waiting[0]
    return (
        f"{_names(left)} came to the end of the program {after(left[0].step)} while {_names(waiting)} "
        f"{after(waits.step)} waits in {waits.place}: give every rank the same number of steps and calls"
    )


def _stuck(here: Sequence[Known], waiting: Sequence[Known], ranks: Sequence[Known]) -> Verdict:
    """All stand still. Behind is who is not where the others wait; then who has made fewer steps; else nobody."""
    idle_s = min(max(k.idle_s, k.silent_s) for k in here)
    head = f"no rank has moved for {idle_s:.0f} s. "
    outside = [k for k in here if not k.waiting]
    if outside:
        return _verdict(outside, head + _why_outside(outside, waiting), ranks)
    fewest = min(k.step for k in here)
    behind = [k for k in here if k.step == fewest]
    if len(behind) < len(here):
        cause = f"{_names(behind)} made {fewest} steps and others {max(k.step for k in here)}: different numbers of steps"
        return _verdict(behind, head + cause, ranks)
    if len({(k.place, k.module) for k in here}) > 1:
        return _verdict(here, head + "The ranks wait at different places: they took different branches of the program", ranks)
    cause = (
        "All wait in the same place: a collective is stuck. Run bigtrain doctor; look at the network, and dmesg for Xid errors"
    )
    return _verdict(here, head + cause, ranks)


def _why_outside(outside: Sequence[Known], waiting: Sequence[Known]) -> str:
    first, waits = outside[0], waiting[0]
    text = f"{_names(outside)}, {after(first.step)}, {what_it_does(first)}, while {_names(waiting)} waits in {waits.place}"
    if waits.place not in OF_A_STEP:
        line = f" at {waits.script}" if waits.script else ""
        return f"{text} {after(waits.step)}. Every rank must make this call: look for an 'if rank == 0' around it{line}"
    ahead = f"{text} of step {waits.step + 1}"
    on_its_way = first.step == waits.step and _told_by(first).startswith(_LOADS)
    return ahead if on_its_way or waits.step < first.step else f"{ahead}: different numbers of steps"


# What is waited in during a step, and by loops that ask all ranks after each; all else are calls between steps.
OF_A_STEP = (
    "the start of engine.train_step()",
    "the forward pass",
    "engine.backward()",
    "engine.step()",
    "an exchange of values",
)

_LOADS = "waits in the data loader"
_SIGNS = (
    (_LOADS, ("torch/utils/data/", "bigtrain/data/", "datasets/")),
    ("is saving", ("bigtrain/checkpoint/", "torch/serialization", "safetensors")),
    ("is in a collective of its own", ("torch/distributed/", "deepspeed/comm/")),
)


def what_it_does(known: Known) -> str:
    """In words, by the files that its training thread is in, the innermost first."""
    return _told_by(known) or f"is {known.place}" + (f" ({known.lines[-1]})" if known.lines else "")


def _told_by(known: Known) -> str:
    for line in reversed(known.lines):
        for words, signs in _SIGNS:
            if any(sign in line for sign in signs):
                return f"{words} ({line})"
    return ""
