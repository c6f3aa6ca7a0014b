"""How long `bigtrain doctor` takes, cold and warm, and what it finds in environments that are broken on purpose.

    python launch/bench_doctor.py --table docs/results/doctor.md

Cold: an empty cache of compiled extensions, and an empty one of the doctor's own. Warm: the same command once more. The broken
environments are those of tests/unit/diagnostics/test_doctor_broken.py: each test breaks something, looks for the finding, applies
the remedy that was printed, and looks again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bigtrain.bench.processes import python_path
from bigtrain.diagnostics.pages import put_table

ROOT = Path(__file__).resolve().parents[1]
BROKEN = "tests/unit/diagnostics/test_doctor_broken.py"


def timed(cache: Path, folder: Path) -> dict[str, Any]:
    """One run of the doctor: seconds as seen from outside, its own table."""
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(cache), "PYTHONPATH": python_path(ROOT)}
    command = [
        sys.executable,
        "-m",
        "bigtrain",
        "doctor",
        "--json",
        "--dir",
        str(folder),
        "--save",
        str(folder / "machine.json"),
    ]
    begun = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=False)
    return {**json.loads(done.stdout), "wall_s": time.perf_counter() - begun}


def broken_environments(record: Path) -> tuple[list[dict[str, Any]], int]:
    """What each test found first and last, and pytest's exit code."""
    env = {**os.environ, "BIGTRAIN_DOCTOR_RECORD": str(record), "PYTHONPATH": python_path(ROOT)}
    code = subprocess.run([sys.executable, "-m", "pytest", "-q", BROKEN], cwd=ROOT, env=env, check=False).returncode
    calls: dict[str, list[dict[str, Any]]] = {}
    for line in record.read_text().splitlines() if record.exists() else ():
        told = json.loads(line)
        calls.setdefault(told["test"], []).append({f["name"]: f for f in told["findings"]})
    found = []
    for test, looks in calls.items():
        after = {n: f["status"] for n, f in looks[-1].items()} if len(looks) > 1 else {}
        # Findings that the test is not about are the same before and after.
        broken = [f for n, f in looks[0].items() if f["status"] == "broken" and after.get(n) != "broken"]
        found += [{"test": test.split("::test_")[-1], "after": after.get(f["name"], "not tried"), **f} for f in broken]
    return found, code


def table(cold: dict[str, Any], warm: dict[str, Any], found: list[dict[str, Any]], code: int) -> str:
    """The page."""

    def count(run: dict[str, Any]) -> str:
        status = [f["status"] for f in run["findings"]]
        return f"{len(status)} findings: {status.count('broken')} broken, {status.count('warning')} warnings"

    lines = [
        "# bigtrain doctor: time, and broken environments",
        "",
        f"Written by `launch/bench_doctor.py` on {os.cpu_count()} CPU cores, Python {platform.python_version()}.",
        "",
        "| `bigtrain doctor --json` | seconds | promised | result |",
        "|---|---|---|---|",
        f"| cold: nothing compiled | {cold['wall_s']:.1f} | 90 | {count(cold)} |",
        f"| warm | {warm['wall_s']:.1f} | 20 | {count(warm)} |",
        "",
        f"Environments broken on purpose ({BROKEN}, {'all pass' if code == 0 else 'SOME FAIL'}): what was found, and the status after "
        "the remedy.",
        "",
        "| environment | finding | says | measured | remedy | after it |",
        "|---|---|---|---|---|---|",
    ]
    for f in found:
        cells = [f["test"].replace("_", " "), f["name"], f["what"], f["measured"], f"`{f['remedy']}`", f["after"]]
        lines.append("| " + " | ".join(str(c).replace("|", "/").replace("\n", " ") for c in cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """0 if it was fast enough and every broken environment was found and mended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        cold, warm = (timed(Path(folder, "extensions"), Path(folder)) for _ in range(2))
        print(f"cold {cold['wall_s']:.1f} s, warm {warm['wall_s']:.1f} s", flush=True)
        found, code = broken_environments(Path(folder, "record"))
    text = table(cold, warm, found, code)
    if args.table:
        put_table(args.table, text)
    else:
        print(text)
    return 0 if code == 0 and cold["wall_s"] < 90 and warm["wall_s"] < 20 else 1


if __name__ == "__main__":
    sys.exit(main())
