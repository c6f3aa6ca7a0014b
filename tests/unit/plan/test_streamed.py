"""State that the optimizer streams through the GPU itself: on the host exactly, on the GPU a few buffers."""

import pytest

from bigtrain import shapes
from bigtrain.errors import UsageError
from bigtrain.plan import predict
from bigtrain.plan.inputs import ZeroSettings, plan_input
from bigtrain.plan.streamed import BUFFERS, CHUNK_BYTES


def _plan(optimizer="adamw_split_8bit", device="cuda", ratio=1.0, offload=True, stage=2, **more):
    settings = ZeroSettings(stage=stage, offload_optimizer=offload, ratio=ratio)
    return plan_input(
        shapes.config_dict("llama-8b"),
        optimizer=optimizer,
        settings=settings,
        seq_len=4096,
        micro_batch=1,
        device=device,
        **more,
    )


@pytest.mark.parametrize("optimizer, state", [("adamw_split", 10), ("adamw_split_bf16", 6), ("adamw_split_8bit", 4.03125)])
@pytest.mark.parametrize("stage", [2, 3])
def test_the_state_moves_from_the_gpu_to_the_host_without_rounding(optimizer, state, stage):
    here, there = predict(_plan(optimizer, offload=False, stage=stage)), predict(_plan(optimizer, stage=stage))
    elems = _plan().parameters.elems
    assert there.host_pinned_bytes - here.host_pinned_bytes == pytest.approx(state * elems, rel=1e-6)
    assert there.host_peak_bytes > there.host_pinned_bytes
    buffers = BUFFERS * CHUNK_BYTES
    assert here.gpu_peak_allocated_bytes - there.gpu_peak_allocated_bytes == pytest.approx(state * elems - buffers, rel=0.02)


def test_8b_trains_below_the_caps_of_one_card_and_one_host():
    found = predict(_plan())
    assert found.gpu_peak_allocated_bytes < 47.4 * 2**30 and found.host_peak_bytes < 126 * 2**30


def test_a_part_may_stay_on_the_gpu():
    half = predict(_plan(ratio=0.5))
    all_, none = predict(_plan()), predict(_plan(offload=False))
    assert all_.gpu_peak_allocated_bytes < half.gpu_peak_allocated_bytes < none.gpu_peak_allocated_bytes


def test_on_a_cpu_there_is_nothing_to_move():
    assert (
        predict(_plan(device="cpu")).gpu_peak_allocated_bytes
        == predict(_plan(device="cpu", offload=False)).gpu_peak_allocated_bytes
    )


def test_weights_on_the_host_are_refused():
    with pytest.raises(UsageError, match="offload_param"):
        plan_input(
            shapes.config_dict("llama-tiny"), optimizer="adamw_split",
            settings=ZeroSettings(stage=3, offload_optimizer=True, offload_param=True),
        )  # fmt: skip
