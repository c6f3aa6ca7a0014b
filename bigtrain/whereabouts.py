"""What this process is doing, for the watch: noted by the parts that do it, read by a thread beside them. Plain Python.

One record a process, because a process is one rank. Noting costs a few hundred nanoseconds and no lock: a reader that sees half
of a note sees a place and the step of the moment before.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from types import FrameType


class Whereabouts:
    """Where the training thread is.

    Attributes:
        place: what it is doing, for people.
        step: optimizer steps done.
        moved: grows with everything that is a sign of life.
        waiting: it is in a call that other ranks must join.
        patient_until: `time.monotonic()` up to which this wait is meant to last; 0.0 for a wait like any other.
        started: at least one step has been made, so that the time a step takes is known.
        folder: where reports go, once that is known.
    """

    def __init__(self) -> None:
        self.place = "starting"
        self.step = 0
        self.moved = 0
        self.waiting = False
        self.patient_until = 0.0
        self.started = False
        self.folder: str | None = None

    def at(self, place: str) -> None:
        """Note a place outside of any call that others must join."""
        self.place, self.waiting = place, False
        self.moved += 1

    def touch(self) -> None:
        """A sign of life from any thread."""
        self.moved += 1

    def stepped(self, step: int) -> None:
        """A step is done."""
        self.step, self.started = step, True
        self.at("between steps")

    @contextlib.contextmanager
    def together(self, place: str, patience_s: float | None = None) -> Iterator[None]:
        """Inside, this rank needs the others; `patience_s`: how long it is meant to wait for work that others do first."""
        before = self.place, self.waiting, self.patient_until
        self.place, self.waiting = place, True
        self.patient_until = 0.0 if patience_s is None else time.monotonic() + patience_s
        self.moved += 1
        try:
            yield
        finally:
            if self.place == place:  # else what happened inside has said where this rank is now
                self.place, self.waiting, self.patient_until = before
            self.moved += 1


def called_from(frame: FrameType | None = None) -> tuple[str, str]:
    """(the function of bigtrain that a script has called, "file:line" of the script); each "" where there is none.

    Args:
        frame: where to look from, outwards; by default the caller's.
    """
    door, script, here = "", None, sys._getframe(1) if frame is None else frame
    while here is not None:
        part, name = here.f_globals.get("__name__", "").partition(".")[0], here.f_code.co_qualname
        if part == "bigtrain":
            door, script = door if "<locals>" in name else name.removesuffix(".__init__"), None
        elif script is None and part not in ("torch", "contextlib"):  # whose decorators stand between the two
            script = here
        here = here.f_back  # type: ignore[assignment]
    return door, f"{os.path.basename(script.f_code.co_filename)}:{script.f_lineno}" if script is not None else ""


def after(step: int) -> str:
    """Where `step` optimizer steps are done: logs and metrics.jsonl call the first of them step 1."""
    return f"after step {step}" if step else "before step 1"


HERE = Whereabouts()
