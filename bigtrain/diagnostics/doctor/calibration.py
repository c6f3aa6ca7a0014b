"""Measured rates, stored for the planner, which uses them without being told to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bigtrain.diagnostics.doctor.comm import Attempt, places_found
from bigtrain.diagnostics.doctor.finding import Finding, ok, warning
from bigtrain.diagnostics.doctor.native import Probed
from bigtrain.plan.roofline import rates_file, rates_from


def rates_found(probed: Probed | None, attempt: Attempt | None) -> dict[str, float]:
    """Names and values of `bigtrain.plan.roofline.Rates` that were measured; what was not is left to its default."""
    out: dict[str, float] = {}
    if probed is not None:
        for part in ("host", "device"):
            out |= {k: float(v) for k, v in probed.rates.get(part, {}).items() if k != "error"}
        adam = probed.ops.get("cpu_adam", {}).get("cpu_adam_s_per_elem")
        if adam is not None:
            # The 8-bit stand-in is taken at twice that, as in the planner's own defaults.
            out |= {"cpu_adam_s_per_elem": float(adam), "cpu_adam_8bit_s_per_elem": 2 * float(adam)}
    # Between hosts a ring is as slow as the network: only ranks of one host measure the link between cards.
    if attempt is not None and attempt.passed and len({p.host for p in places_found(attempt)}) == 1:
        links = [s.link_bytes_s for s in attempt.stories if s.link_bytes_s]
        out |= {"link_bytes_s": min(links)} if links else {}
    return out


def save(rates: dict[str, float], file: Path) -> Finding:
    """Write the rates, whole or not at all; earlier measurements of other rates are kept."""
    name = "calibration"
    try:
        known: dict[str, Any] = {**_earlier(file), **rates}
        rates_from(known)
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}.draft")
        draft.write_text(json.dumps({k: known[k] for k in sorted(known)}, indent=2) + "\n")
        os.replace(draft, file)
    except OSError as error:
        remedy = "bigtrain doctor --save FILE, in a folder that you can write to"
        return warning(name, f"rates could not be stored: {error.strerror}", file, "a file", remedy)
    used = "bigtrain plan uses them" if file == rates_file() else f"bigtrain plan --calibration {file} ..."
    if file == rates_file() and "matmul_flops" not in known:
        used = "no GPU is among them: bigtrain plan goes on with the rates it comes with"
    return ok(name, f"{len(rates)} rates stored", file, "", used)


def _earlier(file: Path) -> dict[str, Any]:
    from bigtrain.errors import UsageError

    try:
        values = json.loads(file.read_text())
        rates_from(values)
    except (OSError, ValueError, AttributeError, UsageError):
        return {}
    return values
