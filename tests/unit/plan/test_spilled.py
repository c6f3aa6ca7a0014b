"""Gradients that leave the GPU during backward, in the plan: bytes on both sides, seconds, and the least share that fits."""

import pytest

from bigtrain import shapes
from bigtrain.errors import UsageError
from bigtrain.plan import predict
from bigtrain.plan.constants import GRADIENTS_IN_FLIGHT_BYTES
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.inputs import plan_input
from bigtrain.plan.judge import judge
from bigtrain.plan.roofline import Rates, step_time
from bigtrain.plan.spilled import ROOM_SHARE, asked_share, least_share
from bigtrain.plan.zero_settings import ZeroSettings

CARD, HOST = int(79.2 * 2**30), 126 << 30


def _plan(share=0.0, model="llama-20b", device="cuda", **more):
    zero = {"stage": 2, "offload_optimizer": True, "offload_gradients": share}
    settings = ZeroSettings(**{**zero, **{k: more.pop(k) for k in ("stage", "grad_bytes", "offload_optimizer") if k in more}})
    values = {"optimizer": "adamw_split_8bit", "kernels": "liger", **more}
    return plan_input(shapes.config_dict(model), settings=settings, device=device, **values)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_what_leaves_the_gpu_is_on_the_host(accumulation):
    found = {share: predict(_plan(share, accumulation=accumulation)) for share in (0.0, 0.3, 1.0)}
    moved = _plan(0.3).leaving_bytes
    assert 0.3 <= moved / (2 * _plan().parameters.elems) < 0.32
    assert found[0.3].host_pinned_bytes - found[0.0].host_pinned_bytes == moved
    saved = found[0.0].gpu_peak_allocated_bytes - found[0.3].gpu_peak_allocated_bytes
    # With several micro batches a sum comes up again beside the fresh gradient, the largest of which is the embedding's.
    beside = 2 * GRADIENTS_IN_FLIGHT_BYTES if accumulation == 1 else 4 * GRADIENTS_IN_FLIGHT_BYTES + 2 * 128256 * 6144 // 4
    assert moved - beside < saved <= moved
    assert "gradients, kept" not in {row.name for row in found[1.0].gpu.rows}


def test_start_up_and_drawing_hold_the_weights_once():
    found = predict(_plan(0.3, drawn=True))
    weights = 2 * _plan().parameters.elems
    for phase in ("build", "start-up"):
        assert found.gpu.by_phase[phase] < 1.1 * weights
    assert found.host.by_phase["build"] > 2 * weights  # fp32 values, until all are drawn


def test_the_least_share_that_fits():
    share = least_share(_plan(), Hardware(CARD, HOST))
    assert 0.0 < share < 0.5
    less = _plan(share - 0.01)
    assert predict(_plan(share)).gpu_need_bytes() <= CARD
    assert predict(less).gpu_need_bytes() > ROOM_SHARE * CARD
    assert predict(_plan(share)).fits(CARD, HOST) and judge(_plan(share), Hardware(CARD, HOST)).fits
    assert least_share(_plan(), Hardware(141 << 30, HOST)) == 0.0  # fits without
    assert least_share(_plan(), Hardware(30 << 30, HOST)) == 0.0  # not even the weights
    assert least_share(_plan(), Hardware(CARD, 80 << 30)) == 0.0  # no room on the host
    assert least_share(_plan(), Hardware()) == 0.0


@pytest.mark.parametrize("more", [{"stage": 3}, {"grad_bytes": 4}, {"offload_optimizer": False}, {"world_size": 2}])
def test_elsewhere_nothing_can_leave(more):
    assert least_share(_plan(**more), Hardware(CARD, HOST)) == 0.0
    with pytest.raises(UsageError, match="one rank, stage 2"):
        _plan(0.5, **more)


def test_on_a_cpu_nothing_leaves():
    assert _plan(0.5, device="cpu").leaving_bytes == 0


def test_it_costs_the_way_back_up_and_what_backward_does_not_hide():
    rates = Rates()
    with_, without = step_time(_plan(0.5), rates), step_time(_plan(), rates)
    assert 0.0 < with_.total_s - without.total_s < _plan(0.5).leaving_bytes / 40e9
    slow = step_time(_plan(0.5), Rates(d2h_bytes_s=5e9))
    assert slow.communication_s > 1.0


def test_what_the_flag_says():
    assert asked_share("auto") is None and asked_share("0") == 0.0 and asked_share("0.25") == 0.25
    for wrong in ("some", "1.5", "-1", "nan"):
        with pytest.raises(UsageError, match="auto or a share"):
            asked_share(wrong)
