"""The planner against the rows of docs/results/plan_accuracy_rows.jsonl and plan_later_rows.jsonl: H200, launch/benchmark.py.

The planner was corrected by the first twenty of them, and its host constant by the twelve before the last six (docs/results/plan_accuracy.md); this
keeps it so.
"""

import json
import statistics
import unittest.mock
from pathlib import Path

import bench_plan
import pytest

from bigtrain.bench import prediction
from bigtrain.bench.machine import Machine
from bigtrain.plan.constants import process_bytes
from tests import ROOT

ROWS = ROOT / "docs/results/plan_accuracy_rows.jsonl"
LATER, FAMILIES = ROWS.with_name("plan_later_rows.jsonl"), ROWS.with_name("plan_family_rows.jsonl")
GIB = 2**30
AT_ONCE = 20  # the first rows are of one card each, two runs at a time on one host, which share library code
# Promised of a sweep: mean and worst, of what this suite can hold it to.
PROMISED = {
    "gpu_allocated_bytes": ("gpu_allocated_bytes", 0.02, 0.06),
    "gpu_used_bytes": ("gpu_used_bytes", 0.03, 0.08),
    "host_bytes": ("host_pss_bytes", 0.05, 0.09),  # the worst compiled its kernels, the first run on that machine
}


# Several micro batches at stage 2 of one card, whose gradients went through buckets then: they are added to their sums as they come now.
BUCKETS = (5, 16, 28, 36, 37)


kernels = prediction.kernels


def predicted(row, gpu_bytes, host_bytes=250 * GIB, chosen_anew=False):
    """Of what the row's run did: the blocks and buffers that it had, unless they are to be chosen anew."""
    model = Path(row["settings"]["model_name_or_path"]).name.removeprefix("preset:")
    row = {**row, "settings": {**row["settings"], "model_name_or_path": "preset:" + model}}
    if chosen_anew:
        row = {**row, "predicted": {"leaf blocks": "leaf blocks" in row["predicted"]["config"]}}
    machine = Machine(
        device="cuda",
        card=row["card"],
        gpu_bytes=gpu_bytes,
        host_bytes=host_bytes,
        transformers=row["versions"]["transformers"],
    )
    # Cells ran with the loss of all logits that are fused today.
    ran = {"loss": "full"} if ", full loss" in row["predicted"].get("config", "") else {}
    with unittest.mock.patch.object(prediction, "kernels", lambda *of: {**kernels(*of), **ran}):
        return prediction.prediction(bench_plan.cell_again(row), machine)


@pytest.fixture(scope="module")
def planned():
    """(row as measured, what is predicted for its cell now): the models are presets here, without files."""
    found = []
    for row in map(json.loads, ROWS.read_text().splitlines()):
        said = predicted(row, 140 * GIB)
        if len(found) < AT_ONCE:
            said["host_bytes"] += process_bytes("cuda", 2) - process_bytes("cuda", 1)
        found.append((row, said))
    return found


@pytest.mark.parametrize("number", PROMISED)
def test_memory_is_near_what_was_measured(planned, number):
    measured, mean, worst = PROMISED[number]
    rows = [pair for i, pair in enumerate(planned) if i not in BUCKETS]
    errors = [abs(said[number] / row[measured] - 1) for row, said in rows]
    assert len(errors) == 39
    assert sum(errors) / len(errors) <= mean
    assert max(errors) <= worst


def used_is_said(said, row, within):
    """Rows with several micro batches at stage 2 were measured when sums of gradients found a new place in each step: up to 26 GiB more."""
    error = said["gpu_used_bytes"] / row["gpu_used_bytes"] - 1
    moved = row["ds_config"]["zero_optimization"]["stage"] == 2 and row["settings"].get("gradient_accumulation_steps", 1) > 1
    assert error <= within and (moved or error >= -within), row["label"]


def test_allocated_is_what_was_measured():
    """Rows of today's code paths, among them blocks as leaf modules and 348,160 tokens with the inputs on the host; nothing is fitted to them."""
    rows = list(map(json.loads, LATER.read_text().splitlines()))[7:]
    assert len(rows) == 28
    for row in rows:
        limits = row["predicted"]
        said = predicted(row, limits["gpu_limit_bytes"], limits["host_limit_bytes"])
        error = said["gpu_allocated_bytes"] / row["gpu_allocated_bytes"] - 1
        no_buffers_yet = row["settings"]["steps"] == 1  # the state's first update makes them
        assert -0.001 <= error <= (0.008 if no_buffers_yet else 0.001), row["label"]
        assert row["settings"].get("gpu_memory_cap") != 24 or said["fits"]  # which ran
        if row["settings"]["ds_config"] == "zero2":
            used_is_said(said, row, 0.015)


def memory_is_said(name, allocated, used):
    """(row, what is predicted of it) of the rows of a file that ran, all within these shares of what was measured."""
    found = []
    for row in map(json.loads, ROWS.with_name(name).read_text().splitlines()):
        if row["status"] == "ok":
            said = predicted(row, row["predicted"]["gpu_limit_bytes"], row["predicted"]["host_limit_bytes"])
            assert abs(said["gpu_allocated_bytes"] / row["gpu_allocated_bytes"] - 1) <= allocated, row["label"]
            used_is_said(said, row, used)
            found.append((row, said))
    return found


def test_windows_and_two_cards_are_allocated_as_measured():
    """Phi-3 and Gemma 3 once kernels kept their windows, and 1B on two cards; nothing is fitted to these."""
    assert len(memory_is_said("plan_newest_rows.jsonl", allocated=0.003, used=0.05)) == 8


# Their attention went through a dense mask and repeated keys, which it does no more.
MASKED = ("phi-3", "gemma-3")


def test_families_that_liger_kernel_does_not_know_are_planned_with_transformers_own_kernels():
    """GPT-NeoX was planned with liger-kernel's (-3.6 to +2.3 %); Qwen3 has them. Nothing is fitted to these rows."""
    rows = [
        row for row in map(json.loads, FAMILIES.read_text().splitlines()) if not any(name in row["model"] for name in MASKED)
    ]
    assert len(rows) == 4
    for row in rows:
        said = predicted(row, row["predicted"]["gpu_limit_bytes"], row["predicted"]["host_limit_bytes"])
        error = said["gpu_allocated_bytes"] / row["gpu_allocated_bytes"] - 1
        # At stage 3 a recomputed block of GPT-NeoX held 128 MiB that are not explained.
        least = -0.006 if "zero3" in row["label"] else -0.001
        assert least <= error <= 0.001, row["label"]
        used_is_said(said, row, 0.02)
        assert ("hf kernels, fused loss" in said["config"]) == ("qwen3" not in row["model"])


def test_stages_rank_as_they_ran(planned):
    """Same model, tokens and checkpointing on one card: stage 2 before 0, 1 and 3, and a micro batch of four before four of one."""
    seconds = {row["label"]: said["step_time_s"] for row, said in planned if row["num_gpus"] == 1}
    for fast, slow in (
        ("zero2, no ckpt, llama-1b, seq 4096, mb 4, ga 1", "zero3, no ckpt, llama-1b, seq 4096, mb 4, ga 1"),
        ("zero2, no ckpt, llama-1b, seq 2048, mb 4, ga 1", "zero1, no ckpt, llama-1b, seq 2048, mb 4, ga 1"),
        ("zero2, ckpt, llama-1b, seq 4096, mb 4, ga 1", "zero0, ckpt, llama-1b, seq 4096, mb 4, ga 1"),
        ("zero2, no ckpt, llama-1b, seq 4096, mb 4, ga 1", "zero2, no ckpt, llama-1b, seq 4096, mb 1, ga 4"),
    ):
        assert seconds[fast] < seconds[slow]


@pytest.mark.parametrize("part, median", [(range(26), 0.045), (range(26, 38), 0.055), (range(38, 44), 0.045)])
def test_steps_take_about_as_long(planned, part, median):
    """Every other row, over all files, is in the fit of the host's and the card's constants (docs/results/plan_accuracy.md)."""
    rows = [planned[i] for i in part if i not in BUCKETS]
    errors = [abs(said["step_time_s"] / row["step_time_s"]["median"] - 1) for row, said in rows]
    assert statistics.median(errors) <= median


# GPT-2 joined the rows of its attention then; of leaf blocks that are recomputed at stage 3, 176 MiB are not explained (docs/results/plan_accuracy.md).
KNOWN = {("gpt2-xl", "zero2"): -0.022, ("smollm2-1.7b", "zero3_offload_all"): -0.047}


def test_eleven_more_families_are_allocated_as_measured():
    """What they were planned wrong was mended by derivation: Falcon's bias, stage 1's copies; nothing is fitted to these.

    Without Granite's at stage 2, which had liger-kernel's cross entropy of all its logits: no run has it any more.
    """
    rows = list(map(json.loads, ROWS.with_name("plan_held_out_2_rows.jsonl").read_text().splitlines()))
    rows = [row for row in rows if row["status"] == "ok" and "zero2, seq 4096, granite-3-2b" not in row["label"]]
    assert len(rows) == 19
    for row in rows:
        row["settings"].setdefault("leaf_blocks", "auto")
        said = predicted(row, row["predicted"]["gpu_limit_bytes"], row["predicted"]["host_limit_bytes"])
        error = said["gpu_allocated_bytes"] / row["gpu_allocated_bytes"] - 1
        least = KNOWN.get((Path(row["model"]).name, row["settings"]["ds_config"]), -0.003)
        assert least <= error <= 0.001, row["label"]


# Blocks as leaf modules at stage 3, by what is not explained; GPT-J, whose plan knew of no scores when it ran and took other buffers.
KNOWN_3 = {
    ("zero3_offload", "nemotron-mini-4b"): -0.006,
    ("zero3_offload", "stablelm-2-1.6b"): -0.006,
    ("zero2_offload", "gpt-j-6b"): -0.03,
}


def test_ten_more_families_are_allocated_as_measured():
    """Bloom and GPT-J were planned 2 to 3.3 % too low, without all of a softmax's backward; nothing is fitted to these."""
    rows = list(map(json.loads, ROWS.with_name("plan_held_out_3_rows.jsonl").read_text().splitlines()))
    rows = [row for row in rows if row["status"] == "ok" and "command" not in row["model"]]  # whose loss goes in chunks since
    assert len(rows) == 20
    for row in rows:
        row["settings"].setdefault("leaf_blocks", "auto")
        said = predicted(row, row["predicted"]["gpu_limit_bytes"], row["predicted"]["host_limit_bytes"])
        error = said["gpu_allocated_bytes"] / row["gpu_allocated_bytes"] - 1
        least = KNOWN_3.get((row["settings"]["ds_config"], Path(row["model"]).name), -0.0035)
        assert least <= error <= 0.0015, row["label"]


def test_what_the_allocator_did_at_its_limit_in_each_step_was_planned():
    """1B on two H200 capped at 24 GiB: two returns a step, and 20 % longer ones than without."""
    rows = list(map(json.loads, ROWS.with_name("plan_two_cards_rows.jsonl").read_text().splitlines()))
    capped = [row for row in rows if row["settings"].get("gpu_memory_cap")]
    assert [row["gpu_alloc_retries"] for row in capped] == [2, 2]
    row = capped[1]
    limits = row["predicted"]["gpu_limit_bytes"], row["predicted"]["host_limit_bytes"]
    said, today = predicted(row, *limits), predicted(row, *limits, chosen_anew=True)
    assert abs(said["step_time_s"] / row["step_time_s"]["median"] - 1) <= 0.1
    assert "4 of 16 blocks" in said["config"] and "5 of 16 blocks" in today["config"]
    assert today["step_time_s"] < 0.8 * said["step_time_s"]


def test_without_fused_kernels_products_are_as_fast_and_the_rest_is_counted():
    """Fused kernels' share of the large product for all, and operators' bytes: Pythia with its own kernels was planned 17 % too slow."""
    rows = [json.loads(line) for file in (ROWS, LATER, FAMILIES) for line in file.read_text().splitlines()]
    rows = [
        r
        for r in rows
        if r["settings"].get("use_liger_kernel") is False or (r["settings"]["ds_config"] == "zero2" and r in rows[-2:])
    ]
    assert len(rows) == 3
    for row in rows:
        said = predicted(row, 140 * GIB)
        assert "hf kernels" in said["config"]
        error = said["step_time_s"] / row["step_time_s"]["median"] - 1
        assert abs(error) <= 0.05, row["label"]


def test_experts_by_grouped_products_and_compiled_attention_are_allocated_as_measured():
    """gpt-oss, Qwen3-MoE, Mixtral, OLMoE, Gemma 2; stages 2 and 3, nothing or all or but products recomputed, state on the host. Four of the ten
    were planned before the plan knew of these experts; of the seconds, what grouped products reach is gpt-oss's, traced."""
    pairs = memory_is_said("plan_experts_rows.jsonl", allocated=0.001, used=0.035)
    assert len(pairs) == 10
    for row, said in pairs:
        # Stage 3's copies of large experts on one card are not counted (-27 %), and that run's host was faster than is assumed (+23 %).
        if row["settings"]["ds_config"] == "zero2":
            assert abs(said["step_time_s"] / row["step_time_s"]["median"] - 1) <= 0.15, row["label"]


def test_logits_that_are_scaled_or_capped_and_more_on_two_cards_are_allocated_as_measured():
    """Command-R7B, Granite and Gemma 2 with their loss in chunks, a fifth block of 1B at 24 GiB; nothing is fitted to these."""
    assert len(memory_is_said("plan_newest_2_rows.jsonl", allocated=0.003, used=0.035)) == 13
