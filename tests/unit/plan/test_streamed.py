"""State that the optimizer streams through the GPU itself: on the host exactly, on the GPU a few buffers."""

import pytest

from bigtrain import shapes
from bigtrain.errors import UsageError
from bigtrain.plan import predict
from bigtrain.plan.constants import STATE_CHUNK_BYTES
from bigtrain.plan.device import device_tape
from bigtrain.plan.inputs import plan_input
from bigtrain.plan.streamed import BOTH_WAYS, IN_FLIGHT, SHARED_HOST, buffers_that_help, early_bytes, host_bytes, seconds
from bigtrain.plan.tape import ALLOC, FREE, PHASE, RETURN
from bigtrain.plan.zero_settings import ZeroSettings


def _plan(optimizer="adamw_split_8bit", device="cuda", ratio=1.0, offload=True, stage=2, buffers=4, **more):
    settings = ZeroSettings(stage=stage, offload_optimizer=offload, ratio=ratio, buffers=buffers)
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
    buffers = 4 * STATE_CHUNK_BYTES
    assert here.gpu_peak_allocated_bytes - there.gpu_peak_allocated_bytes == pytest.approx(state * elems - buffers, rel=0.02)


def test_8b_trains_below_the_caps_of_one_card_and_one_host():
    found = predict(_plan())
    assert found.gpu_peak_allocated_bytes < 47.4 * 2**30 and found.host_peak_bytes < 126 * 2**30


@pytest.mark.parametrize("offload", [True, False])
def test_sums_that_stay_leave_no_hole_for_activations(offload):
    """Made anew each step they would need a second place of 32 GB: the first hole is cut up by the next forward."""
    found = predict(_plan(offload=offload, accumulation=4, kernels="liger", checkpointing="none"))
    assert found.gpu_reserved_bytes - found.gpu_peak_allocated_bytes < 2 * 2**30


def test_a_part_may_stay_on_the_gpu():
    half = predict(_plan(ratio=0.5))
    all_, none = predict(_plan()), predict(_plan(offload=False))
    assert all_.gpu_peak_allocated_bytes < half.gpu_peak_allocated_bytes < none.gpu_peak_allocated_bytes


def test_on_a_cpu_there_is_nothing_to_move():
    assert (
        predict(_plan(device="cpu")).gpu_peak_allocated_bytes
        == predict(_plan(device="cpu", offload=False)).gpu_peak_allocated_bytes
    )


BUS = 50e9
LONG = 100.0  # seconds, of a backward beside which everything comes up that there are buffers for


def test_the_least_number_of_buffers_that_hides_the_traffic():
    forward_s = 0.5
    left = host_bytes(_plan()) - forward_s * BOTH_WAYS * BUS  # what has to come up during backward
    needed = buffers_that_help(_plan(), BUS, BUS, forward_s)
    assert 0 <= needed - IN_FLIGHT - left / STATE_CHUNK_BYTES < 1.01
    assert seconds(_plan(buffers=needed), BUS, BUS, forward_s) == 0.0
    assert seconds(_plan(buffers=needed - IN_FLIGHT - 1), BUS, BUS, forward_s) > 0.0
    assert buffers_that_help(_plan(), BUS, BUS, 100.0) == IN_FLIGHT  # a long forward hides everything


def test_buffers_come_with_the_first_update_and_gradients_come_back_during_forward():
    tape = device_tape(_plan(buffers=8, kernels="liger"))
    phase, made, lent, returned = "", {}, {}, {}
    for kind, slot, size, name in tape.events:
        if kind == PHASE:
            phase = name
        elif kind == ALLOC and name == "optimizer state, on its way" and tape.streams[slot] == 0:
            made[phase] = made.get(phase, 0) + size
        elif kind == FREE and slot in tape.late:
            lent[phase] = lent.get(phase, 0) + size
        elif kind == RETURN:
            returned[phase] = returned.get(phase, 0) + size
    assert list(made) == ["optimizer step"] and made["optimizer step"] == pytest.approx(8 * STATE_CHUNK_BYTES, rel=1e-3)
    gradients = 2 * _plan().parameters.elems
    assert lent == {"optimizer step": pytest.approx(2 * gradients, rel=1e-3)}  # two updates
    assert 0.2 * gradients < returned["steady forward"] < gradients


def test_several_ranks_hide_each_its_part():
    one, two = _plan(), _plan(world_size=2)
    # Half of the bytes, but both share the host's memory; buffers are not divided.
    assert seconds(two, BUS, BUS, 0.0) == pytest.approx(seconds(one, BUS, BUS, 0.0) / 2 / SHARED_HOST, rel=0.1)
    # The first rank's part is the first half of the model: it is needed with the first half of forward.
    assert seconds(two, BUS, BUS, 0.2) == pytest.approx(seconds(two, BUS, BUS, 0.0) - 0.1)
    assert seconds(two, BUS, BUS, 100.0) == 0.0
    assert buffers_that_help(two, BUS, BUS, forward_s=100.0) == IN_FLIGHT


def test_at_stage_3_everything_would_have_to_come_up_early():
    two = _plan(world_size=2, stage=3)
    needed = buffers_that_help(two, BUS, BUS, forward_s=100.0)
    assert needed * STATE_CHUNK_BYTES == pytest.approx(host_bytes(two), rel=0.01)
    assert seconds(two, BUS, BUS, 100.0) > 0.0
    assert early_bytes(_plan(world_size=2, stage=3, buffers=needed), BUS, LONG) >= host_bytes(two)


def test_buffers_are_memory_of_the_gpu_but_never_more_than_there_are_chunks():
    few, more = predict(_plan(buffers=4)), predict(_plan(buffers=44))
    assert more.gpu_peak_allocated_bytes - few.gpu_peak_allocated_bytes == pytest.approx(40 * STATE_CHUNK_BYTES, rel=1e-3)
    assert early_bytes(_plan(buffers=10**6), BUS, LONG) == pytest.approx(host_bytes(_plan()), rel=0.01)


def test_a_short_backward_brings_up_no_more_than_the_bus_carries_meanwhile():
    """OLMoE has 206 chunks for 16 blocks: with a buffer for each, its step was planned 59 % too fast."""
    plan, forward_s, backward_s = _plan(buffers=10**6), 0.1, 0.2
    assert early_bytes(plan, BUS, backward_s) == BUS * backward_s
    moved = (host_bytes(plan) - BUS * backward_s) / (BOTH_WAYS * BUS)
    assert seconds(plan, BUS, BUS, forward_s, backward_s=backward_s) == pytest.approx(moved - forward_s)


def test_weights_on_the_host_are_refused():
    with pytest.raises(UsageError, match="offload_param"):
        plan_input(
            shapes.config_dict("llama-tiny"), optimizer="adamw_split",
            settings=ZeroSettings(stage=3, offload_optimizer=True, offload_param=True),
        )  # fmt: skip
