"""What a check finds, and how it is printed: every problem at once, worst first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from bigtrain.errors import ConfigError

Severity = Literal["error", "warning", "note"]
_ORDER = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Problem:
    """One finding.

    Attributes:
        path: dotted path of the key inside the file, for example `zero_optimization.stage`; "" is the file itself.
        value: what stands there now (None when the key is missing).
        severity: `error` refuses the run, `warning` trains but hardly as meant, `note` is worth knowing.
        why: what is wrong, or what will happen.
        fix: what to write instead.
    """

    path: str
    value: Any
    severity: Severity
    why: str
    fix: str

    def __str__(self) -> str:
        shown = "" if self.value is None else f" = {shorten(self.value)}"
        return f"{self.severity:<8}{self.path or '(file)'}{shown}\n        {self.why}\n        -> {self.fix}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return asdict(self)


def shorten(value: Any, limit: int = 80) -> str:
    """`value` as JSON on one line, cut to at most `limit` characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def ordered(problems: Iterable[Problem]) -> list[Problem]:
    """Without repeats, errors first, file order kept within a severity."""
    unique = {(p.path, p.severity, p.why): p for p in problems}
    return sorted(unique.values(), key=lambda p: _ORDER[p.severity])


def report(problems: Sequence[Problem], name: str = "ds_config") -> str:
    """The whole report as text; says so when there is nothing to report."""
    if not problems:
        return f"{name}: no problems found"
    counts = {s: sum(p.severity == s for p in problems) for s in _ORDER}
    head = ", ".join(f"{n} {s}{'s' * (n != 1)}" for s, n in counts.items() if n)
    return f"{name}: {head}\n" + "\n".join(str(p) for p in problems)


def raise_if_errors(problems: Sequence[Problem], name: str = "ds_config") -> None:
    """Raise ConfigError carrying all problems when at least one of them is an error."""
    if any(p.severity == "error" for p in problems):
        raise ConfigError(report(problems, name), problems)
