"""Parts that plans share, laid side by side: the same ledger as of the whole tape."""

import pytest

from bigtrain import shapes
from bigtrain.plan import ZeroSettings, plan_input
from bigtrain.plan.allocator import replay
from bigtrain.plan.choose import _families
from bigtrain.plan.device import device_tape
from bigtrain.plan.shared import _activations, _micro_steps, enough_bytes, steady_ledger
from bigtrain.plan.states import LAYOUTS
from bigtrain.plan.zero_flat import ranks_to_plan


def base(name, world=1, **values):
    return plan_input(shapes.config_dict(name), world_size=world, **{"seq_len": 256, **values})


def assert_same(plan):
    for rank in ranks_to_plan(plan):
        tape = device_tape(plan, rank=rank)
        assert tape.ledger().peak_bytes < (enough := enough_bytes(plan, rank))
        assert not replay(tape, enough).short_bytes
        assert steady_ledger(plan, rank) == device_tape(plan, rank=rank, steady_only=True).ledger(), (plan.settings, rank)


CHANGES = (
    {"micro_batch": 8},
    {"micro_batch": 8, "grad_bytes": 2},
    {"accumulation": 4, "kernels": "liger", "reduce_bucket_elems": 10**8},
    {"accumulation": 3, "grad_bytes": 2, "loss": "chunked", "overlap_comm": False},
    {"accumulation": 2, "checkpointing": "selective", "checkpoint_blocks": 1, "buffers": 9},
    {"checkpointing": "offload", "frozen": ("model.embed_tokens",), "sub_group_elems": 10**6},
)


@pytest.mark.parametrize("name, world", [("llama-tiny", 1), ("llama-tiny", 2), ("mixtral-tiny", 3), ("llama-50m", 2)])
def test_the_ledger_is_that_of_the_whole_tape(name, world):
    settings = ZeroSettings(grad_bytes=4, overlap_comm=True, reduce_bucket_elems=10**6)
    start = base(name, world, settings=settings, drawn=world < 3)
    for number, family in enumerate(_families(start, tuple(LAYOUTS))):
        for change in CHANGES[number % 2 :: 2] if name == "llama-50m" else CHANGES:
            assert_same(family.but(**change))


@pytest.mark.parametrize("name", ["llama-50m", "qwen2.5-vl-7b", "gpt-neox-20b"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_that_leave_and_stage_0(name, accumulation):
    settings = ZeroSettings(stage=2, offload_optimizer=True, overlap_comm=True)
    plan = base(name, optimizer="adamw_split_8bit", settings=settings, accumulation=accumulation, kernels="liger")
    for change in ({"offload_gradients": 0.4}, {"offload_gradients": 1.0}, {"buffers": 30, "micro_batch": 8}):
        assert_same(plan.but(**change))
    assert_same(base(name, 2, settings=ZeroSettings(stage=0), accumulation=accumulation))


def test_each_side_is_played_once_for_plans_that_differ_in_the_other():
    plan = base("llama-tiny", 2, settings=ZeroSettings(stage=2), optimizer="adamw", seq_len=64)
    _activations.cache_clear()
    _micro_steps.cache_clear()
    for tokens in (64, 128, 256):
        for optimizer in ("adamw", "adamw_8bit", "adamw_split"):
            steady_ledger(plan.but(seq_len=tokens, optimizer=optimizer), 0)
    assert _activations.cache_info().misses == 4  # and once for the calls
    assert _micro_steps.cache_info().misses == 1
