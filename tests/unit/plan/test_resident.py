"""One memory for a CPU run: both tapes in the order of time, and what malloc's heap keeps."""

import pytest

from bigtrain import shapes
from bigtrain.plan import ZeroSettings, plan_input, predict
from bigtrain.plan.constants import MALLOC_MMAP_BYTES, process_bytes
from bigtrain.plan.device import device_tape
from bigtrain.plan.resident import KEPT_ROW, one_memory
from bigtrain.plan.tape import Tape
from bigtrain.plan.zero_flat import FlatSharding

SMALL, LARGE = 4096, MALLOC_MMAP_BYTES


def tapes(device_events, host_events=()):
    device, host = Tape(), Tape()
    for tape, events in ((device, device_events), (host, host_events)):
        for event in events:
            getattr(tape, event[0])(*event[1:])
    return one_memory(device, host).ledger()


def test_small_blocks_stay_and_serve_small_ones_large_ones_go():
    ledger = tapes([
        ("phase", "steady forward"), ("hold", "a", 3 * SMALL, "x"), ("hold", "big", LARGE, "y"), ("drop", "a", "big"),
        ("phase", "loss"), ("hold", "b", SMALL, "x"), ("phase", "backward"), ("hold", "c", 4 * SMALL, "x"),
    ])  # fmt: skip
    # The heap: 3 units, then 1 of them in use, then 5 units wanted; the large block went back when it was freed.
    assert ledger.by_phase == {"steady forward": 3 * SMALL + LARGE, "loss": 3 * SMALL, "backward": 5 * SMALL}
    assert ledger.final_bytes == 5 * SMALL


def test_the_heap_goes_back_after_build_and_start_up_only():
    ledger = tapes([
        ("phase", "build"), ("touch", 8 * SMALL, "x"), ("phase", "start-up"), ("touch", SMALL, "x"),
        ("phase", "backward"), ("touch", 2 * SMALL, "x"), ("phase", "optimizer step"), ("hold", "m", LARGE, "moments"),
    ])  # fmt: skip
    assert ledger.by_phase["start-up"] == SMALL and ledger.by_phase["backward"] == 2 * SMALL
    assert ledger.rows == {"moments": LARGE, KEPT_ROW: 2 * SMALL}


def test_the_host_acts_at_the_end_of_the_device_phase_of_its_name_once_each_time():
    host = [("phase", "build"), ("hold", "process", LARGE, "process"), ("phase", "optimizer step"), ("touch", LARGE, "copy"),
            ("phase", "optimizer step")]  # fmt: skip
    device = [("phase", "build"), ("phase", "optimizer step"), ("hold", "cast", LARGE, "cast"), ("drop", "cast"),
              ("phase", "optimizer step")]  # fmt: skip
    ledger = tapes(device, host)
    assert ledger.by_phase == {"build": LARGE, "optimizer step": 2 * LARGE}  # the copy comes when the cast is gone


def cpu(stage, world=2, **values):
    settings = ZeroSettings(stage=stage, reduce_bucket_elems=10_000_000, **values.pop("zero", {}))
    given = {"world_size": world, "seq_len": 128, "decay_groups": False, "device": "cpu", **values}
    return plan_input(shapes.config_dict("llama-50m"), settings=settings, **given)


def test_ranks_of_a_host_share_library_code():
    for device in ("cpu", "cuda"):
        one, two, eight = (process_bytes(device, ranks) for ranks in (1, 2, 8))
        assert eight < two < one < 2 * two
    assert predict(cpu(2)).host_node_bytes == 2 * predict(cpu(2)).host.bytes


def largest(plan, row):
    """The largest block of a row, 0 if there is none."""
    return max((size for _, _, size, what in device_tape(plan).events if what == row), default=0)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("device, elems", [("cpu", 2**16), ("cuda", 2**25)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_fp32_master_takes_gradients_a_chunk_at_a_time(stage, device, elems, optimizer):
    plan = cpu(stage, device=device, optimizer=optimizer, world=1)
    assert plan.trained_elems > elems
    assert largest(plan, "gradients, fp32 for the step") == 4 * elems
    # At stage 3 they are views of one buffer.
    assert largest(plan, "gradients, flat for the step") == (0 if stage == 3 else 2 * elems)
    assert largest(plan, "update in passing") == (8 * elems if (device, optimizer) == ("cpu", "adamw") else 0)
    summed = cpu(stage, device=device, optimizer=optimizer, world=1, zero={"grad_bytes": 4})
    assert largest(summed, "gradients, fp32 for the step") == largest(summed, "gradients, flat for the step") == 0


def test_plain_adamw_at_stage_0_on_a_cpu_makes_two_copies_of_a_parameter_in_passing():
    assert largest(cpu(0), "update in passing") == 8 * cpu(0).largest_trained_elems


@pytest.mark.parametrize("stage, zero", [(2, {}), (3, {}), (3, {"offload_optimizer": True, "offload_param": True})])
def test_drawn_weights_are_fp32_while_they_are_built(stage, zero):
    read, drawn = (predict(cpu(stage, zero=zero, drawn=d)).host.by_phase for d in (False, True))
    total = cpu(stage).parameters.elems
    assert drawn["build"] - read["build"] > total  # what is read goes through a buffer instead
    assert {k: v for k, v in drawn.items() if k not in ("build", "start-up")} == {
        k: v for k, v in read.items() if k not in ("build", "start-up")
    }


def flushed(plan):
    """The ledger of one backward's gradients alone, and the rows that were ever held."""
    tape = Tape()
    shards = FlatSharding(plan, tape)
    tape.phase("backward")
    shards.start_backward(0, True)
    for i in reversed(range(len(plan.parameters.items))):
        shards.grad(i)
    shards.end_backward()
    return tape.ledger(), {row for _, _, size, row in tape.events if size}


def test_offload_on_a_cpu_copies_no_gradient_in_passing():
    def plan(device, grad_bytes):
        settings = ZeroSettings(stage=2, offload_optimizer=True, grad_bytes=grad_bytes, reduce_bucket_elems=100_000_000)
        return plan_input(shapes.config_dict("llama-50m"), settings=settings, world_size=2, seq_len=128, device=device)

    passing = {"gradient norm in fp64", "gradient, fp32 slice"}
    for grad_bytes, copies in ((2, passing), (4, {"gradient norm in fp64"})):
        assert flushed(plan("cuda", grad_bytes))[1] & passing == copies
        assert flushed(plan("cpu", grad_bytes))[1] & passing == set()
    total = plan("cpu", 2).parameters.elems
    # The bucket and its copy for the reduction.
    assert flushed(plan("cpu", 2))[0].peak_bytes == 2 * rounded(2 * total)


@pytest.mark.parametrize("offload", [False, True])
def test_the_fp32_sum_is_there_before_what_is_reduced_into_it(offload):
    zero = ZeroSettings(stage=2, offload_optimizer=offload, grad_bytes=4, reduce_bucket_elems=100_000_000)
    plan = plan_input(shapes.config_dict("llama-50m"), settings=zero, world_size=2, device="cpu", decay_groups=False)
    total, (ledger, _) = plan.parameters.elems, flushed(plan)
    assert ledger.rows == {
        "reduce buckets": rounded(2 * total), "reduce copy": rounded(2 * total), "gradients, kept": rounded(4 * total / 2),
    }  # fmt: skip


def test_what_steps_hold_is_without_the_checkpoint_and_the_export():
    plan = plan_input(shapes.config_dict("llama-3b"), settings=ZeroSettings(stage=2))
    host = predict(plan).host
    assert host.bytes == host.by_phase["export"] == -(-process_bytes("cuda", 1) // 4096) * 4096 + 2 * 128_256 * 3072
    assert host.steps_bytes == host.by_phase["first forward"] < host.by_phase["checkpoint save"]


def test_a_process_with_cuda_by_itself():
    """The three H200 runs of docs/results/plan_accuracy.md; the constant is that of other runs."""
    zero = {"stage": 2, "offload_optimizer": True, "pin_memory": True}
    for model, optimizer, buffers, measured in (
        ("llama-20b", "adamw_split_8bit", 199, 84.15e9), ("llama-8b", "adamw_split_8bit", 80, 34.30e9), ("llama-3b", "adamw", 4, 71.81e9),
    ):  # fmt: skip
        settings = ZeroSettings(**zero, buffers=buffers)
        plan = plan_input(
            shapes.config_dict(model), settings=settings, micro_batch=4, kernels="liger", drawn=True, optimizer=optimizer
        )
        assert predict(plan).host.steps_bytes == pytest.approx(measured, rel=0.015)  # seen: 1.1 % at the most


def rounded(size):
    return -(-int(size) // 512) * 512


def test_one_rank_at_stage_2_keeps_gradients_where_they_are():
    def gpu(**values):
        zero = ZeroSettings(stage=2, overlap_comm=True, reduce_bucket_elems=200_000_000)
        return plan_input(shapes.config_dict("llama-1b"), settings=zero, **values)

    alone, two = predict(gpu()), predict(gpu(world_size=2))
    assert not any(row.name == "reduce buckets" for row in alone.gpu.rows)
    assert alone.gpu.by_phase["bucket flush"] < two.gpu.by_phase["bucket flush"] + 8 * gpu().parameters.elems
    chunk, elems = 2**25, gpu().parameters.elems
    # Weights, master, moments and gradients: of those one chunk is copied together, and cast.
    assert alone.gpu.by_phase["optimizer step"] < (2 + 4 + 8 + 2) * 1.02 * elems + (2 + 4) * chunk
    split = predict(gpu(optimizer="adamw_split"))
    # Weights, remainder, moments and gradients: nothing is laid out flat once more.
    assert split.gpu.by_phase["optimizer step"] < (2 + 2 + 8 + 2) * 1.02 * elems + 2 * chunk
