"""GPUs as nvidia-smi sees them, and which rank takes which. Nothing here opens a CUDA context."""

from __future__ import annotations

import glob
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bigtrain.diagnostics.doctor.finding import Finding, broken, ok, warning
from bigtrain.errors import UsageError
from bigtrain.hosts.placement import Place, device_index, refuse_shared_cards, scheduler_conflict
from bigtrain.plan.machine import nvidia_smi, show_bytes

_QUERY = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.used",
    "driver_version",
    "compute_mode",
    "compute_cap",
    "mig.mode.current",
)
# A card with nothing on it shows up to about 1% of its memory as used.
BUSY_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One card. `holders`: (process id, name, bytes) of what uses it."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    driver: str
    compute_mode: str = "Default"
    capability: str = ""
    mig: bool = False
    holders: tuple[tuple[int, str, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Devices:
    """All cards of this host.

    Attributes:
        gpus: every one; visible: those that CUDA_VISIBLE_DEVICES leaves; smi_error: nvidia-smi is there and fails.
        nodes: /dev/nvidia* device files. links: ("GPU0-GPU1", "NV18"). env: the variables that choose cards.
        host: its name.
    """

    gpus: tuple[Gpu, ...]
    visible: tuple[Gpu, ...]
    smi_error: str | None
    nodes: int
    links: tuple[tuple[str, str], ...]
    env: Mapping[str, str]
    host: str


# ---------------------------------------------------------------- measuring


def measure_devices(env: Mapping[str, str] = os.environ) -> Devices:
    """Ask nvidia-smi, if it is there."""
    kept = {
        k: v for k, v in env.items() if k in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "DS_ACCELERATOR")
    }
    nodes, host = len(glob.glob("/dev/nvidia[0-9]*")), socket.gethostname()
    text, error = nvidia_smi(f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits", env=env)
    if text is None:
        return Devices(gpus=(), visible=(), smi_error=error, nodes=nodes, links=(), env=kept, host=host)
    apps, _ = nvidia_smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits", env=env)
    gpus = parse_gpus(text, apps or "")
    topology, _ = nvidia_smi("topo", "-m", env=env) if len(gpus) > 1 else (None, None)
    return Devices(
        gpus=gpus, visible=visible_gpus(gpus, env.get("CUDA_VISIBLE_DEVICES")), smi_error=None, nodes=nodes,
        links=parse_links(topology or ""), env=kept, host=host,
    )  # fmt: skip


def _number(text: str) -> int:
    return int(float(text)) if re.fullmatch(r"[\d.]+", text) else 0


def parse_gpus(cards: str, apps: str) -> tuple[Gpu, ...]:
    """From nvidia-smi's two CSV tables."""
    held: dict[str, list[tuple[int, str, int]]] = {}
    for row in (line.split(", ") for line in apps.splitlines() if line.count(", ") == 3):
        held.setdefault(row[0], []).append((_number(row[1]), row[2], _number(row[3]) * 2**20))
    out = []
    for row in (line.split(", ") for line in cards.splitlines() if line.count(", ") == len(_QUERY) - 1):
        index, uuid, name, total, used, driver, mode, capability, mig = (word.strip() for word in row)
        out.append(Gpu(
            index=_number(index), uuid=uuid, name=name, total_bytes=_number(total) * 2**20, used_bytes=_number(used) * 2**20,
            driver=driver, compute_mode=mode, capability=capability, mig=mig == "Enabled", holders=tuple(held.get(uuid, ())),
        ))  # fmt: skip
    return tuple(out)


def visible_gpus(gpus: Sequence[Gpu], variable: str | None) -> tuple[Gpu, ...]:
    """What CUDA_VISIBLE_DEVICES leaves: as in CUDA, the first entry that does not exist ends the list."""
    if variable is None:
        return tuple(gpus)
    out: list[Gpu] = []
    for word in (w.strip() for w in variable.split(",")):
        found = [g for g in gpus if word == str(g.index) or (word.startswith("GPU-") and g.uuid.startswith(word))]
        if len(found) != 1:
            break
        out.append(found[0])
    return tuple(out)


def parse_links(topology: str) -> tuple[tuple[str, str], ...]:
    """Pairs of cards and their connection from `nvidia-smi topo -m`: NV# is NVLink, PIX/PXB/PHB/NODE/SYS ever farther PCIe."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", topology)
    rows = [line.split() for line in plain.splitlines() if re.match(r"\s*GPU\d+\s", line)]
    if len(rows) < 2:
        return ()
    cards = [row for row in rows if "X" in row]
    links = []
    for i, row in enumerate(cards):
        links += [(f"{row[0]}-GPU{j}", row[1 + j]) for j in range(i + 1, len(cards)) if 1 + j < len(row)]
    return tuple(links)


# ---------------------------------------------------------------- judging


def check_seen(devices: Devices) -> Finding:
    """GPUs are there and visible."""
    name, variable = "gpus", devices.env.get("CUDA_VISIBLE_DEVICES")
    if devices.smi_error:
        remedy = "reload the driver (reboot, or modprobe nvidia); in a container: docker run --gpus all"
        return broken(name, "nvidia-smi fails: driver and kernel module disagree", devices.smi_error, "a list", remedy)
    if not devices.gpus and devices.nodes:
        remedy = "install nvidia-utils of the driver's version; in a container: docker run --gpus all"
        return warning(name, "GPU device files but no nvidia-smi", f"{devices.nodes} device files", "nvidia-smi", remedy)
    if not devices.gpus:
        return ok(name, "none: runs use the CPU", "0")
    measured = f"{len(devices.visible)} of {len(devices.gpus)} visible: {', '.join(g.name for g in devices.gpus)}"
    if not devices.visible:
        remedy = f"unset CUDA_VISIBLE_DEVICES, or export CUDA_VISIBLE_DEVICES={','.join(str(g.index) for g in devices.gpus)}"
        return broken(name, f"CUDA_VISIBLE_DEVICES={variable} hides every GPU", measured, "1 at least", remedy)
    wanted = [w for w in (variable or "").split(",") if w.strip()]
    if len(wanted) > len(devices.visible):
        remedy = f"export CUDA_VISIBLE_DEVICES={','.join(str(g.index) for g in devices.visible)}"
        return broken(name, f"CUDA_VISIBLE_DEVICES={variable} names GPUs that are not there", measured, "existing ones", remedy)
    return ok(name, "visible", measured)


def check_busy(devices: Devices) -> list[Finding]:
    """Free memory of every visible card, and who holds the rest; cards that refuse processes."""
    out = []
    for gpu in devices.visible:
        name, free = f"gpu {gpu.index}", gpu.total_bytes - gpu.used_bytes
        measured = f"{show_bytes(free)} of {show_bytes(gpu.total_bytes)} free"
        idle = [str(g.index) for g in devices.gpus if g.used_bytes <= BUSY_SHARE * g.total_bytes]
        others = f"export CUDA_VISIBLE_DEVICES={','.join(idle)}" if idle else "wait for it"
        holders = "; ".join(f"process {pid} ({what}, {show_bytes(size)})" for pid, what, size in gpu.holders)
        if gpu.compute_mode == "Prohibited":
            fix = f"nvidia-smi -i {gpu.index} -c DEFAULT"
            out.append(broken(name, "its compute mode forbids processes", gpu.compute_mode, "Default", fix))
        elif gpu.used_bytes > BUSY_SHARE * gpu.total_bytes:
            what = f"memory is held by {holders or 'a process that is not visible here (another container?)'}"
            out.append(warning(name, what, measured, "an empty card", f"end that process, or {others}"))
        elif gpu.mig:
            what = "split into MIG instances: NCCL cannot join instances of one card"
            out.append(warning(name, what, measured, "MIG off for several ranks", f"nvidia-smi -i {gpu.index} -mig 0"))
        else:
            out.append(ok(name, "empty", measured))
    return out


def check_links(devices: Devices) -> list[Finding]:
    """How cards are connected."""
    if not devices.links:
        return []
    kinds = sorted({kind for _, kind in devices.links})
    measured = ", ".join(f"{pair} {kind}" for pair, kind in devices.links[:8]) + (" ..." if len(devices.links) > 8 else "")
    if any(kind == "SYS" for kind in kinds):
        advice = "stage 2 moves less than stage 3 over such links: compare with bigtrain plan --calibration"
        return [ok("gpu links", "some pairs meet across CPU sockets", measured, "", advice)]
    return [ok("gpu links", "NVLink" if all(k.startswith("NV") for k in kinds) else "PCIe", measured)]


def planned_places(devices: Devices, ranks: int) -> list[Place]:
    """The card that each of `ranks` ranks on this host would take, by bigtrain's rule."""
    visible = devices.env.get("CUDA_VISIBLE_DEVICES")
    out = []
    for rank in range(ranks):
        gpu = devices.visible[device_index(rank, len(devices.visible))] if devices.visible else None
        out.append(Place(
            rank=rank, host=devices.host, local_rank=rank, device=gpu.name if gpu else "CPU",
            physical=gpu.uuid if gpu else None, visible=visible if gpu else None,
        ))  # fmt: skip
    return out


def check_places(places: Sequence[Place]) -> Finding:
    """Rank -> host -> device; two ranks on one card are named."""
    name, measured = "rank placement", "; ".join(str(p) for p in places)
    try:
        refuse_shared_cards(places)
    except UsageError as error:
        what, remedy = str(error).split("\n", 1)[0], str(error).rsplit("\n", 1)[1]
        pairs: dict[tuple[str, str | None], list[int]] = {}
        for p in places:
            pairs.setdefault((p.host, p.physical), []).append(p.rank)
        doubles = "; ".join(
            f"ranks {', '.join(map(str, r))} on {card} of {host}" for (host, card), r in pairs.items() if len(r) > 1
        )
        return broken(name, f"{what} {doubles}", measured, "one card a rank", remedy)
    return ok(name, "one card a rank" if any(p.physical for p in places) else "on the CPU", measured)


def check_scheduler(devices: Devices) -> list[Finding]:
    """CUDA_VISIBLE_DEVICES against what Slurm gave."""
    conflict = scheduler_conflict(devices.env)
    if conflict is None:
        return []
    remedy = "do not set CUDA_VISIBLE_DEVICES or --num_gpus/--include under Slurm; srun gives each task its cards"
    return [warning("scheduler", conflict, devices.env.get("CUDA_VISIBLE_DEVICES", ""), "the scheduler's cards", remedy)]


def check_devices(devices: Devices) -> list[Finding]:
    """Everything about GPUs short of using them."""
    return [check_seen(devices), *check_busy(devices), *check_links(devices), *check_scheduler(devices)]
