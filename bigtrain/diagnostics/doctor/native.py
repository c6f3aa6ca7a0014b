"""DeepSpeed's native parts and the rates of this machine, measured by a process of its own (probe.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bigtrain.diagnostics.doctor.finding import Finding, broken, ok, warning

LIMIT_S = 600.0  # a cold compile of CPU Adam takes 45 s on two idle cores


@dataclass(frozen=True, kw_only=True)
class Probed:
    """What the probe brought back.

    Attributes:
        rates: {"host": {...}, "device": {...}}; ops: {"cpu_adam": {...}}: numbers by name, or {"error": text}.
        died: how the process ended before its time, with its last words; during: what it was at.
    """

    rates: Mapping[str, Mapping[str, float | str]] = field(default_factory=dict)
    ops: Mapping[str, Mapping[str, float | str]] = field(default_factory=dict)
    died: str | None = None
    during: str | None = None


def measure_native(rates: bool, ops: Sequence[str], scratch: bool, env: Mapping[str, str] = os.environ) -> Probed:
    """Run the probe; with `scratch` it compiles everything anew in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="bigtrain-doctor-") as folder:
        # The rates are those of the whole host, not of one rank's share of its cores.
        out, values = Path(folder, "probe.json"), {k: v for k, v in env.items() if k != "OMP_NUM_THREADS"}
        if scratch:
            values["TORCH_EXTENSIONS_DIR"] = str(Path(folder, "extensions"))
        command = [sys.executable, "-m", "bigtrain.diagnostics.doctor.probe", str(out), "--ops", ",".join(ops)]
        died = None
        with open(Path(folder, "log"), "w+") as log:
            try:
                code = subprocess.run(
                    command + ["--rates"] * rates, stdout=log, stderr=log, timeout=LIMIT_S, check=False, env=values
                ).returncode
                died = f"exit code {code}" if code > 0 else f"signal {-code}" if code else None
            except subprocess.TimeoutExpired:
                died = f"no end after {LIMIT_S:.0f} s"
            log.seek(0)
            last = [line.strip() for line in log.read().splitlines() if line.strip()][-1:]
        found = json.loads(out.read_text()) if out.exists() else {}
    return Probed(
        rates=found.get("rates", {}), ops=found.get("ops", {}), during=found.get("now"),
        died=died and ": ".join([died, *last]),
    )  # fmt: skip


# ---------------------------------------------------------------- judging

_LOSS = {
    "cpu_adam": "runs with offload_optimizer fall back to torch's AdamW, several times slower a step",
    "fused_adam": "DeepSpeed's FusedAdam cannot be used; bigtrain itself does not need it",
    "async_io": "NVMe offload cannot be used; bigtrain itself does not need it",
}
_FIX = {
    "cpu_adam": "mend compiler, ninja and cache as told above; then bigtrain doctor --build",
    "fused_adam": "CUDA_HOME: a toolkit of torch's version; a readable TORCH_CUDA_ARCH_LIST; then bigtrain doctor --build",
    "async_io": "apt-get install libaio-dev; then bigtrain doctor --build",
}


def check_op(op: str, probed: Probed) -> Finding:
    """One native part: loaded, run, and compared with torch. The first error is the one shown."""
    result, needed = probed.ops.get(op), "loads, runs, agrees with torch"
    if result is None:
        if probed.during not in (op, None):
            return warning(op, "not tried", f"the process ended before, in {probed.during}", needed, "mend that first")
        why = probed.died or "it did not run"
        return broken(
            op, f"it ends the process: {_LOSS[op]}", why, needed, "rm -r ~/.cache/torch_extensions and run doctor again"
        )
    if "error" in result:
        say = broken if op == "cpu_adam" else warning
        return say(op, _LOSS[op], result["error"], needed, _FIX[op])
    measured = f"ready after {result['seconds']:.1f} s"
    if "cpu_adam_s_per_elem" in result:
        measured += f", {result['cpu_adam_s_per_elem'] * 1e9:.3g} s a step for 1e9 parameters"  # type: ignore[operator]
    return ok(op, needed, measured, needed)


_UNITS = {
    "host_bytes_s": "host memory, all cores",
    "host_copy_bytes_s": "host memory, one thread",
    "h2d_bytes_s": "pinned host to GPU",
    "d2h_bytes_s": "pinned GPU to host",
    "pageable_bytes_s": "pageable host to GPU",
    "device_bytes_s": "GPU memory",
}
# A PCIe gen4 link of 16 lanes does 25e9, gen5 53e9; less than 10e9 is a card in a narrow slot or a throttled link.
SLOW_BUS_BYTES_S = 10e9


def check_rates(probed: Probed) -> list[Finding]:
    """Measured bandwidths; pinned memory that cannot be had is told as what it is."""
    out: list[Finding] = []
    for part, values in probed.rates.items():
        if "error" in values:
            remedy = "ulimit -l unlimited; or pin_memory false in the offload blocks; nvidia-smi for what holds the card"
            name = "pinned memory and GPU" if part == "device" else "host memory speed"
            what = "allocating pinned host memory or using the GPU fails" if part == "device" else "measuring fails"
            out.append(broken(name, what, values["error"], "works", remedy))
            continue
        for key, value in values.items():
            number = float(value)
            if key == "matmul_flops":
                out.append(ok("GPU matmul", "measured", f"{number / 1e12:.0f} TFLOP/s in bf16"))
            elif key == "operation_s":
                out.append(
                    ok("launching", "measured", f"{1e6 * number:.1f} us of the host for a small operation and its backward")
                )
            elif key in ("h2d_bytes_s", "d2h_bytes_s") and number < SLOW_BUS_BYTES_S:
                remedy = "nvidia-smi -q | grep -A4 'PCIe Generation': another slot, or bind ranks to the GPU's NUMA node"
                out.append(
                    warning(_UNITS[key], "slow bus", f"{number / 1e9:.1f} GB/s", f"{SLOW_BUS_BYTES_S / 1e9:.0f} GB/s", remedy)
                )
            else:
                out.append(ok(_UNITS.get(key, key), "measured", f"{number / 1e9:.1f} GB/s"))
    return out
