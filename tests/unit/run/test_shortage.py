"""Out of memory explained: categories of planned and held bytes, and what would fit instead."""

from types import SimpleNamespace

import pytest
import torch

from bigtrain import plan, shapes
from bigtrain.errors import DoesNotFitError
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.roofline import Rates
from bigtrain.run import capacity
from bigtrain.run.shortage import CATEGORIES, Explained, held_bytes, nearest, planned_bytes, table

GIB = 2**30


def planned(**values):
    config = {"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "fp32"}}
    given = {"micro_batch": 4, "seq_len": 4096, "checkpointing": "none", **values}
    return plan.predict(plan.plan_input(shapes.config_dict("llama-3b"), ds_config=config, **given))


def test_planned_categories_sum_to_the_peak():
    found = planned(micro_batch=1, seq_len=1024)  # small enough for the peak to be in backward, with gradients there
    assert sum(planned_bytes(found.gpu).values()) == found.gpu.bytes
    assert all(planned_bytes(found.gpu)[name] > 0.5 * GIB for name in CATEGORIES), found.gpu.phase


def test_state_that_an_optimizer_streams_is_optimizer_state():
    streaming = plan.ZeroSettings(stage=2, offload_optimizer=True, grad_bytes=2)
    found = planned(settings=streaming, optimizer="adamw_split_8bit")
    assert planned_bytes(found.host)["optimizer states"] > 10 * GIB


def test_held_counts_each_storage_once_and_only_on_the_device():
    model = torch.nn.Linear(100, 10, bias=False)
    model.weight.grad = torch.zeros(10, 100)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    reduction = SimpleNamespace(kept_sums=lambda: [model.weight.grad])
    engine = SimpleNamespace(_ds=SimpleNamespace(optimizer=optimizer), _reduction=reduction)
    held = held_bytes(model, engine, torch.device("cpu"))
    # Adam: two moments of 4,000 bytes and its step count; the weight is in its groups too and counts once.
    assert held["weights"] == 4000 and held["gradients"] == 4000 and held["optimizer states"] == 8004
    assert sum(held_bytes(model, engine, torch.device("cuda", 0)).values()) == 0 if not torch.cuda.is_available() else True
    assert sum(held_bytes(None, None, torch.device("cpu")).values()) == 0


def test_nearest_keep_the_batch_fit_and_differ_little():
    now = planned().input
    found = nearest(now, Hardware(80 * GIB, 126 * GIB))
    assert len(found) == 3
    for candidate in found:
        assert candidate.fits and candidate.input.micro_batch * candidate.input.accumulation == 4
    assert found[0].input.settings.stage == 2 and found[0].input.optimizer == "adamw"


def test_nearest_of_a_run_whose_gradients_leave_the_gpu():
    zero = plan.ZeroSettings(stage=2, offload_optimizer=True, offload_gradients=0.5, buffers=30)
    now = plan.plan_input(shapes.config_dict("llama-3b"), settings=zero, optimizer="adamw_split_8bit", micro_batch=4)
    assert len(nearest(now, Hardware(40 * GIB, 126 * GIB))) == 3


def test_an_out_of_memory_error_prints_the_table_and_goes_on(capsys):
    with pytest.raises(torch.OutOfMemoryError), Explained(planned(), Hardware(80 * GIB, 126 * GIB)):
        raise torch.OutOfMemoryError("CUDA out of memory")
    said = capsys.readouterr().err
    assert "ran out of GPU memory in building the model" in said and "nearest that fit:" in said
    assert all(name in said for name in CATEGORIES)
    with pytest.raises(ValueError), Explained(planned(), Hardware()):
        raise ValueError("something else")
    assert capsys.readouterr().err == ""


def test_without_a_plan_there_is_still_what_is_held():
    assert "-" in table(dict.fromkeys(CATEGORIES, GIB), None)[1] and Explained(None, Hardware()).text("step 3")


def test_the_table_of_a_host_that_fills_up():
    from bigtrain.plan.room import Room

    limit = 16 * GIB
    explained = Explained(planned(), Hardware(80 * GIB, limit))
    said = explained.host_text(Room(int(0.98 * limit), limit, "container limit"))
    assert "host memory is nearly full, 15.68 GiB of 16.00 GiB (container limit) are in use, 98%" in said
    assert all(name in said for name in CATEGORIES) and "other processes share this memory" in said
    assert "filled too fast" in said
    explained._look_for_others(Room(int(0.93 * limit), limit, "container limit"))
    assert "nearest that fit:" in explained.host_text(Room(int(0.98 * limit), limit, "container limit"))


def test_a_run_that_does_not_fit_is_refused_with_the_nearest_that_do():
    layout = planned(micro_batch=1, seq_len=1024)
    hardware = Hardware(24 * GIB, 128 * GIB, Rates(h2d_bytes_s=26e9))
    with pytest.raises(DoesNotFitError) as caught:
        capacity.check_fit(layout, hardware)
    said = str(caught.value)
    lines = said[said.index("Nearest that fit:") :].splitlines()[1:4]
    assert [line.strip() for line in lines] == [c.describe() for c in nearest(layout.input, hardware)] and len(lines) == 3
    assert "with rates measured" in said
    assert said.index("DOES NOT FIT") < said.index("no data was read") and "--no_plan" in said
