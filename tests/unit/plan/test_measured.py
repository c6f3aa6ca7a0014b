"""The plan against measured runs. Nothing is fitted to these rows; tolerances are what is promised, not what is seen.

Seen: allocated off by at most 0.2 %, device-used by at most 2.8 % (mean 1.5 %), host by at most 1 % where anything is
offloaded, speed by at most 12 %.
"""

import pytest

from bigtrain.plan import predict, step_time
from tests.unit.plan.measured import HOST_UNIT, MEASURED, SPEED

# Printed to one decimal of 1e9 bytes: 0.15 % of the smallest. 2 % is the promise of the planner.
ALLOCATED, USED_MEAN, USED_WORST, HOST = 0.02, 0.03, 0.08, 0.05


def off(planned, measured):
    return planned / measured - 1


@pytest.mark.parametrize("name", MEASURED)
def test_B45_allocated_peak_of_a_real_run(name):
    plan, allocated, _, _ = MEASURED[name]
    assert abs(off(predict(plan).gpu_peak_allocated_bytes, allocated * 1e9)) <= ALLOCATED


def test_device_used_of_real_runs():
    errors = [abs(off(predict(plan).gpu_used_bytes, used * 1e9)) for plan, _, used, _ in MEASURED.values()]
    assert sum(errors) / len(errors) <= USED_MEAN
    assert max(errors) <= USED_WORST


@pytest.mark.parametrize("name", [name for name in MEASURED if "offload" in name])
def test_host_peak_of_a_real_run(name):
    plan, _, _, host = MEASURED[name]
    phases = predict(plan).host.by_phase
    trained = max(size for phase, size in phases.items() if phase not in ("checkpoint save", "export"))
    assert abs(off(trained, host * HOST_UNIT)) <= HOST


@pytest.mark.parametrize("name", SPEED)
def test_speed_of_a_real_run_is_near_enough_to_rank(name):
    plan = MEASURED[name][0]
    assert abs(off(step_time(plan).tokens_per_s / plan.world_size, SPEED[name])) <= 0.15
