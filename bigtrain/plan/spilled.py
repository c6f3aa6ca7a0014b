"""Which share of the gradients has to leave the GPU during backward for a plan to fit (bigtrain/optim/spill.py)."""

from __future__ import annotations

import bisect

from bigtrain.errors import UsageError
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.predict import Plan, quick

# Of a card: gradients that leave cost bus time that is idle in backward, a run near the edge may end for want of memory.
ROOM_SHARE = 0.95
STEPS = 100
AUTO = "auto"


def share_problems(text: str) -> list[str]:
    """What is wrong with `--offload_gradients`: one sentence, or none."""
    try:
        sound = text == AUTO or 0.0 <= float(text) <= 1.0
    except ValueError:
        sound = False
    return [] if sound else [f"--offload_gradients must be auto or a share from 0 to 1, got {text!r}"]


def asked_share(text: str) -> float | None:
    """What `--offload_gradients` says; None for auto.

    Raises:
        UsageError: it is neither auto nor a share.
    """
    if problems := share_problems(text):
        raise UsageError(problems[0])
    return None if text == AUTO else float(text)


def least_share(plan: PlanInput, hardware: Hardware) -> float:
    """The least share, in hundredths, with which card and host hold the run; 0.0 if it fits without, or with none.

    The card is filled to `ROOM_SHARE` where that can be reached; else wholly.
    """
    gpu, host = hardware.gpu_bytes, hardware.host_bytes
    if gpu is None or not plan.alone or hardware.holds(_plan(plan, 0)):
        return 0.0
    for room in (int(ROOM_SHARE * gpu), gpu):
        least = 1 + bisect.bisect_left(range(1, STEPS + 1), True, key=lambda n: _plan(plan, n).gpu_least_bytes() <= room)
        found = next((n for n in range(least, STEPS + 1) if _plan(plan, n).fits(room, host)), None)
        if found is not None:
            return found / STEPS
    return 0.0


def _plan(plan: PlanInput, hundredths: int) -> Plan:
    return quick(plan.but(offload_gradients=hundredths / STEPS))
