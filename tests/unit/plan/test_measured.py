"""The plan against measured runs. Nothing is fitted to these rows; tolerances are what is promised, not what is seen.

Measured with fixed segments. Seen: allocated off by at most 0.2 %, device-used by at most 2.8 % (mean 1.5 %), host by at most 1 % where anything is
offloaded, speed by at most 12 %.
"""

import dataclasses
import json

import pytest

from bigtrain import shapes
from bigtrain.bench.machine import Machine
from bigtrain.plan import ZeroSettings, plan_input, predict, step_time
from bigtrain.plan.device import Run
from bigtrain.plan.states import LAYOUTS
from bigtrain.plan.tape import Tape
from tests.unit.plan.measured import HOST_UNIT, MEASURED, SPEED

# Printed to one decimal of 1e9 bytes: 0.15 % of the smallest. 2 % is the promise of the planner.
ALLOCATED, USED_MEAN, USED_WORST, HOST = 0.02, 0.03, 0.08, 0.05


def off(planned, measured):
    return planned / measured - 1


@pytest.fixture
def raw_deepspeed(monkeypatch):
    """The rows of `MEASURED` had the gradients of a partition flat, and in fp32 in one piece, as DeepSpeed makes them."""
    monkeypatch.setitem(LAYOUTS, "adamw", dataclasses.replace(LAYOUTS["adamw"], flat_step=True))


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.usefixtures("raw_deepspeed")
def test_B45_allocated_peak_of_a_real_run(name):
    plan, allocated, _, _ = MEASURED[name]
    assert abs(off(predict(plan).gpu_peak_allocated_bytes, allocated * 1e9)) <= ALLOCATED


@pytest.mark.usefixtures("raw_deepspeed")
def test_device_used_of_real_runs():
    errors = [abs(off(predict(plan).gpu_used_bytes, used * 1e9)) for plan, _, used, _ in MEASURED.values()]
    assert sum(errors) / len(errors) <= USED_MEAN
    assert max(errors) <= USED_WORST


@pytest.mark.parametrize("name", [name for name in MEASURED if "offload" in name])
@pytest.mark.usefixtures("raw_deepspeed")
def test_host_peak_of_a_real_run(name):
    plan, _, _, host = MEASURED[name]
    phases = predict(plan).host.by_phase
    trained = max(size for phase, size in phases.items() if phase not in ("checkpoint save", "export"))
    assert abs(off(trained, host * HOST_UNIT)) <= HOST


@pytest.mark.parametrize("name", SPEED)
def test_speed_of_a_real_run_is_near_enough_to_rank(name):
    plan = MEASURED[name][0]
    assert abs(off(step_time(plan).tokens_per_s / plan.world_size, SPEED[name])) <= 0.15


def ours(name, ranks, stage, blocks, buffers=None, expandable=False):
    """A run of launch/train.py: adamw_split_8bit, liger, seq 4096, micro batch 4, accumulation 1, buckets as in ds_configs/."""
    d = shapes.config_dict(name)["hidden_size"]
    sizes = {1: 200_000_000, 2: 200_000_000, 3: d * d}
    settings = ZeroSettings(
        stage=stage, offload_optimizer=buffers is not None, buffers=buffers or 4, overlap_comm=True,
        reduce_bucket_elems=sizes[stage], prefetch_elems=int(0.9 * d * d), persistence_elems=10 * d,
    )  # fmt: skip
    checkpointing = "full" if blocks else "none"
    return plan_input(
        shapes.config_dict(name), settings=settings, world_size=ranks, micro_batch=4, kernels="liger", optimizer="adamw_split_8bit",
        checkpointing=checkpointing, checkpoint_blocks=blocks or None, drawn=True, expandable=expandable,
    )  # fmt: skip


# H200, fixed segments, torch 2.11: (allocated, reserved, device-used) in 1e9 bytes. Those whose peak is not at the loss, which is
# computed in another way since.
OURS = {
    "8B, 80 buffers": (ours("llama-8b", 1, 2, 0, 80), 101.81, 112.19, 113.65),
    "two cards, 8B, all recomputed, 91 buffers": (ours("llama-8b", 2, 2, 32, 91), 44.38, 47.63, 49.57),
    "two cards, 1B": (ours("llama-1b", 2, 2, 0), 26.63, 29.41, 31.32),
}


@pytest.mark.parametrize("name", OURS)
def test_streamed_and_two_card_runs_as_measured(name):
    plan, allocated, reserved, used = OURS[name]
    found = predict(plan)
    assert abs(off(found.gpu_peak_allocated_bytes, allocated * 1e9)) <= 0.002
    # Where nothing is short the allocator keeps what it need not: 4.1 % more than it was thought to in the run with 91 buffers.
    assert abs(off(found.gpu_reserved_bytes, reserved * 1e9)) <= 0.042
    assert abs(off(found.gpu_used_bytes, used * 1e9)) <= 0.042


def test_a_capped_run_needs_more_where_segments_are_fixed():
    """3B with 16 of 28 blocks recomputed died of fragmentation under a cap of 33.5 GiB, and was said to fit: 31.95 GiB needed."""
    fixed, growing = (predict(ours("llama-3b", 1, 2, 16, 32, expandable=e)) for e in (False, True))
    assert fixed.gpu.bytes == growing.gpu.bytes and growing.fits(int(33.5 * 2**30), None)
    assert fixed.gpu_need_bytes() > growing.gpu_need_bytes() + 2**29
    for plan in (fixed, growing):
        assert plan.gpu_least_bytes() < plan.gpu_need_bytes()
        assert plan.gpu_need_bytes() <= plan._card(plan.gpu_reserved_bytes)


class Unsharded:
    """No ZeRO: bf16 weights, `states` bytes of optimizer state a parameter, every gradient kept until the step."""

    def __init__(self, plan, tape, states):
        self.plan, self.tape, self.states = plan, tape, states
        tape.hold("weights", 2 * plan.parameters.elems, "weights, bf16")

    def learn(self, visits, recomputed):
        pass

    def fetch(self, key, members, *, backward, steady):
        pass

    def release(self, key):
        pass

    def start_backward(self, micro, last):
        pass

    def grad(self, i):
        self.tape.hold(("grad", i), 2 * self.plan.parameters.items[i].elems, "gradients, kept")

    def end_backward(self):
        pass

    def step(self, first):
        self.tape.phase("optimizer step")
        if first:
            self.tape.hold("moments", self.states * self.plan.parameters.elems, "moments")
        self.tape.drop(*(("grad", i) for i in range(len(self.plan.parameters.items))))


# H100, no ZeRO, 3B, sequences of 4,096, micro batch 4, checkpointing, flash attention, bf16 fused AdamW (4 B a state):
# peak allocated in 1e9 bytes. These rows test activations, logits and the fused loss by themselves.
@pytest.mark.parametrize("kernels, peak", [("hf", 47.8), ("liger", 27.5)])
def test_activations_of_a_real_run_without_zero(kernels, peak):
    plan = plan_input(
        shapes.config_dict("llama-3b"),
        micro_batch=4,
        kernels=kernels,
        settings=ZeroSettings(stage=0),
        checkpointing="full",
    )
    tape = Tape()
    shards = Unsharded(plan, tape, states=4)
    run = Run(plan, tape, shards)
    for step in range(2):
        run.micro_steps(steady=step > 0)
        shards.step(first=step == 0)
    assert abs(off(tape.ledger().peak_bytes, peak * 1e9)) <= 0.03


# Two gloo ranks on CPUs, 165 M parameters (llama-360m with 12 layers), 256 tokens, checkpointing, optimizer offloaded,
# buckets of 5e7: peak PSS of ranks 0 and 1 in bytes, over three steps (transformers 5.24, torch 2.13, DeepSpeed 0.19.8).
# Stage 3 of that time is not comparable: since then the heap is trimmed after start-up, and large blocks are no part of it.
@pytest.mark.parametrize("stage, peaks", [(2, (2997729280, 2876738560))])
def test_host_peak_of_two_cpu_ranks(stage, peaks):
    config = {**shapes.config_dict("llama-360m"), "num_hidden_layers": 12}
    zero = ZeroSettings(stage=stage, offload_optimizer=True, reduce_bucket_elems=50_000_000)
    plan = plan_input(config, settings=zero, world_size=2, seq_len=256, decay_groups=False, device="cpu")
    phases = predict(plan).host.by_phase
    trained = max(size for phase, size in phases.items() if phase not in ("checkpoint save", "export"))
    assert abs(off(2 * trained, sum(peaks))) <= HOST


# The same by launch/train.py on presets of 135 M and 360 M parameters: peak of a rank's VmHWM less what it shares, in docs/results/plan_host.md.
@pytest.mark.parametrize("name, ds_config, seq_len, accumulation, peak", [
    ("llama-135m", "zero3", 512, 1, 2_224_254_976), ("llama-135m", "zero2_offload", 128, 4, 2_856_072_192),
    ("llama-135m", "zero3_offload", 128, 4, 2_384_190_464), ("llama-135m", "zero3_offload_all", 128, 4, 2_333_715_456),
    ("llama-135m", "zero2", 128, 4, 2_430_995_456), ("llama-135m", "zero3", 128, 4, 2_069_988_352),
    ("llama-360m", "zero3_offload", 128, 4, 5_330_142_208),
])  # fmt: skip
def test_host_peak_of_a_rank_of_the_training_program(name, ds_config, seq_len, accumulation, peak):
    from bigtrain.bench import grid, prediction

    values = {"model": f"preset:{name}", "ds_config": ds_config, "num_gpus": 2, "seq_len": seq_len, "gradient_checkpointing": True,
              "micro_batch": 1, "accumulation": accumulation}  # fmt: skip
    machine = Machine(device="cpu", card="CPU", gpu_bytes=None, host_bytes=None)
    said = prediction.prediction(grid.expand(values)[0], machine)["host_bytes"]
    assert abs(off(said, peak)) <= HOST


GPT2 = {"model_type": "gpt2"}  # 124 M, dropout as the class has it
QWEN2 = {"model_type": "qwen2", "hidden_size": 768, "num_hidden_layers": 16, "num_attention_heads": 12, "num_key_value_heads": 2,
         "intermediate_size": 3072, "vocab_size": 100_000, "tie_word_embeddings": True}  # fmt: skip


# Held out: nothing was fitted to them. Both attention with dropout on CPUs, and one gradient that is most of a bucket, were 6 to 20 % off.
@pytest.mark.parametrize("config, ds_config, seq_len, recomputes, optim, peak", [
    (GPT2, "zero2", 512, False, "adamw", 2_517_320_704), (GPT2, "zero3", 512, False, "adamw", 3_013_165_056),
    (QWEN2, "zero2", 256, True, "adamw_split_8bit", 2_012_252_160), (QWEN2, "zero2", 256, True, "adamw_torch", 2_844_147_712),
    (QWEN2, "zero2_offload", 256, True, "adamw_8bit", 3_268_832_256),
])  # fmt: skip
def test_host_peak_of_other_families_and_optimizers(tmp_path, config, ds_config, seq_len, recomputes, optim, peak):
    from bigtrain.bench import grid, prediction

    (tmp_path / "config.json").write_text(json.dumps(config))
    values = {"model": str(tmp_path), "ds_config": ds_config, "num_gpus": 2, "seq_len": seq_len, "gradient_checkpointing": recomputes,
              "micro_batch": 1, "accumulation": 1, "optim": optim}  # fmt: skip
    machine = Machine(device="cpu", card="CPU", gpu_bytes=None, host_bytes=None)
    assert abs(off(prediction.prediction(grid.expand(values)[0], machine)["host_bytes"], peak)) <= HOST
