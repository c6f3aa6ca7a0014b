"""What a check says: one line of judgement with the number behind it and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "broken"]
EXIT_CODES: dict[Status, int] = {"ok": 0, "warning": 0, "broken": 1}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was tested.

    Attributes:
        name: stable, for scripts. status: ok, warning (a run works, or works in some cases), broken (a run fails).
        what: the judgement in words. measured, needed: with units; needed is empty where there is no threshold.
        remedy: the command or setting that mends it; with status ok it is advice.
        details: more lines, for example stacks of ranks.
    """

    name: str
    status: Status
    what: str
    measured: str
    needed: str = ""
    remedy: str = ""
    details: str = ""

    def line(self) -> str:
        """All but the details in one line, with the remedy."""
        return f"{self.name}: {self.what} ({self.measured}; needed: {self.needed}). To mend it: {self.remedy}"


def ok(name: str, what: str, measured: object, needed: str = "", advice: str = "") -> Finding:
    """A finding without complaint."""
    return Finding(name=name, status="ok", what=what, measured=str(measured), needed=needed, remedy=advice)


def warning(name: str, what: str, measured: object, needed: str, remedy: str) -> Finding:
    """Something that costs speed, or that fails in some kinds of runs."""
    return Finding(name=name, status="warning", what=what, measured=str(measured), needed=needed, remedy=remedy)


def broken(name: str, what: str, measured: object, needed: str, remedy: str, details: str = "") -> Finding:
    """Something that makes runs fail."""
    return Finding(name=name, status="broken", what=what, measured=str(measured), needed=needed, remedy=remedy, details=details)


def exit_code(findings: Iterable[Finding]) -> int:
    """0: nothing is broken, warnings or not; 1: something is, so that runs would fail."""
    return max((EXIT_CODES[f.status] for f in findings), default=0)
