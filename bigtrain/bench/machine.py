"""The machine that a sweep runs on, as its ranks see it; looked at without loading torch."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

from bigtrain.diagnostics.doctor.devices import measure_devices
from bigtrain.errors import UsageError
from bigtrain.plan.cards import card_name
from bigtrain.plan.machine import gpu_memory, host_memory


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where the sweep runs. Sizes in bytes, None: not known (or, for the GPU, none there). `liger`: liger-kernel is installed.

    `transformers`: its version; None: the installed one's. `cards`: nvidia-smi's numbers of those that ranks see, in their order; empty: not known.
    """

    device: str
    card: str
    gpu_bytes: int | None
    host_bytes: int | None
    liger: bool = True
    transformers: str | None = None
    cards: tuple[int, ...] = ()


def this_machine() -> Machine:
    """The GPU by nvidia-smi, without loading torch; the CPU where there is none or DS_ACCELERATOR says so."""
    host = host_memory()
    host_bytes = host.usable_bytes if host else None
    cards = () if os.environ.get("DS_ACCELERATOR") == "cpu" else gpu_memory()
    if not cards:
        return Machine(device="cpu", card=f"CPU, {os.cpu_count()} cores", gpu_bytes=None, host_bytes=host_bytes)
    liger = importlib.util.find_spec("liger_kernel") is not None
    seen = _seen_by_ranks()
    gpu_bytes = min([size for index, size in enumerate(cards) if index in seen] or cards)
    name = next(iter(seen.values()), None) or card_name() or "GPU"
    return Machine(device="cuda", card=name, gpu_bytes=gpu_bytes, host_bytes=host_bytes, liger=liger, cards=tuple(seen))


def _seen_by_ranks() -> dict[int, str]:
    """Number and name of each card that CUDA_VISIBLE_DEVICES leaves; empty where parts of cards (MIG) are meant, or nothing is known.

    Raises:
        UsageError: it leaves none.
    """
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = measure_devices()
    if variable and "MIG-" in variable:
        return {}
    if devices.gpus and not devices.visible:
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES={variable} hides every GPU from the cells: unset it, or name some of "
            f"{','.join(str(gpu.index) for gpu in devices.gpus)}. On the CPU cells run with DS_ACCELERATOR=cpu"
        )
    return {gpu.index: gpu.name for gpu in devices.visible}
