"""Findings for the eye: one aligned line each, remedies below."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bigtrain.diagnostics.doctor.finding import Finding

_MARK = {"ok": "ok", "warning": "WARNING", "broken": "BROKEN"}


def line(finding: Finding, width: int) -> str:
    """Status, name, judgement, measured value."""
    return f"{_MARK[finding.status]:<7}  {finding.name:<{width}}  {finding.what}: {finding.measured}"


def text(findings: Sequence[Finding], seconds: float) -> str:
    """The whole report."""
    width = max((len(f.name) for f in findings), default=0)
    lines = [line(f, width) for f in findings]
    for status, title in (("broken", "Broken"), ("warning", "Warnings"), ("ok", "Advice")):
        chosen = [f for f in findings if f.status == status and f.remedy]
        if chosen:
            lines += ["", f"{title}:"]
        for f in chosen:
            needed = f" (needed: {f.needed})" if f.needed and status != "ok" else ""
            lines += [f"  {f.name:<{width}}  {f.remedy}{needed}"]
            lines += [f"    {row}" for row in f.details.splitlines()]
    count = Counter(f.status for f in findings)
    lines += [
        "",
        f"{count['broken']} broken, {count['warning']} warning{'s' * (count['warning'] != 1)}, {count['ok']} fine; {seconds:.0f} s",
    ]
    return "\n".join(lines)
