"""Errors of predictions and the planner's choice, computed from rows of a sweep."""

import pytest

from bigtrain.bench import accuracy
from bigtrain.bench.accuracy import accuracy_text, choices, choices_text, halves

GIB = 2**30


def row(
    number, *, allocated=(10.0, 10.0), used=(12.0, 12.5), host=(4.0, 4.0), speed=100.0, planned_s=1.0, micro=1, status="ok"
):
    """(predicted, measured) in GiB; need is the allocated prediction and 1.5 GiB."""
    return {
        "runner": "bigtrain", "status": status, "label": f"cell {number}", "model": "preset:llama-1b", "num_gpus": 1,
        "card": "H100", "code": "abc", "predicted_at": "2026-11-28T00:00:00.000+00:00", "ended": "2026-11-28T00:01:00.000+00:00",
        "settings": {"number": number, "seq_len": 2048, "per_device_train_batch_size": micro,
                     "gradient_accumulation_steps": 4 // micro},
        "predicted": {"gpu_allocated_bytes": int(allocated[0] * GIB), "gpu_used_bytes": int(used[0] * GIB),
                      "config": f"ZeRO-2, {number}", "host_bytes": int(host[0] * GIB), "gpu_need_bytes": int((allocated[0] + 1.5) * GIB), "fits": True,
                      "step_time_s": planned_s},
        "gpu_allocated_bytes": int(allocated[1] * GIB), "gpu_reserved_bytes": int((used[1] - 1) * GIB),
        "gpu_used_bytes": int(used[1] * GIB), "host_pss_bytes": int(host[1] * GIB), "tokens_per_s_per_gpu": speed,
    }  # fmt: skip


def test_halves_are_fixed_and_no_row_is_in_both():
    rows = [row(n) for n in range(9)]
    fit, report = halves(rows)
    assert len(fit) == 5 and len(report) == 4 and not {id(r) for r in fit} & {id(r) for r in report}
    again = halves(rows[::-1])
    assert [r["label"] for r in again[0]] == [r["label"] for r in fit]


def test_constants_come_from_one_half_and_errors_from_the_other():
    fit = [row(n, used=(12.0, 12.5)) for n in range(3)]
    report = [row(9, allocated=(10.2, 10.0), used=(20.0, 20.5)), row(10, allocated=(9.4, 10.0), used=(20.0, 20.0))]
    found = {a.what: a for a in accuracy.accuracy(fit, report)}
    assert found["allocated"].offset_bytes == 0  # nothing in it is a constant
    assert found["allocated"].mean == pytest.approx(0.04) and found["allocated"].worst == pytest.approx(0.06)
    assert found["device-used"].offset_bytes == GIB // 2
    assert found["device-used"].worst == pytest.approx(0.5 / 20, rel=1e-6) and found["host"].worst == 0


def test_promises_that_did_not_hold_are_named():
    rows = [row(1), row(2), {**row(3), "status": "oom"}, {**row(4), "status": "refused"}]
    assert [r["label"] for r in accuracy.broken_promises(rows)] == ["cell 3"]
    assert "ran out of memory: 1. cell 3;" in accuracy_text(rows)


def test_choice_against_brute_force():
    rows = [
        row(1, allocated=(30.0, 30.0), used=(32, 33.0), speed=300.0, planned_s=1.0),
        row(2, allocated=(20.0, 20.0), used=(22, 23.0), speed=200.0, planned_s=1.5, micro=2),
        row(3, allocated=(10.0, 10.0), used=(12, 13.0), speed=210.0, planned_s=2.0, micro=4),
    ]
    found = {c.cap_bytes: c for c in choices(rows, [40 * GIB, 24 * GIB, 5 * GIB])}
    assert found[40 * GIB].chosen == found[40 * GIB].fastest == "cell 1" and found[40 * GIB].share == 1.0
    assert found[24 * GIB].chosen == "cell 2" and found[24 * GIB].fastest == "cell 3"
    assert found[24 * GIB].share == pytest.approx(200 / 210) and found[24 * GIB].fitting == 2
    assert found[5 * GIB].share is None
    text = choices_text(list(found.values()))
    assert "95.2%" in text and "nothing fits" in text and "llama-1b, 1 card(s), 4 rows of 2,048 tokens a step" in text


def test_a_choice_that_would_not_fit_is_no_choice():
    rows = [row(1, allocated=(10.0, 30.0), used=(12, 33.0), planned_s=1.0), row(2, planned_s=2.0)]
    assert choices(rows, [20 * GIB])[0].share == 0.0
    assert "does not fit" in choices_text(choices(rows, [20 * GIB]))


def test_a_configuration_that_was_measured_twice_counts_by_its_newer_row():
    """Buckets that are gone made an older row fast or slow; a cap that changes nothing, more steps and a folder are no other configuration."""
    old, new, other = row(1, speed=300.0, planned_s=1.0), row(1, speed=100.0, planned_s=1.0), row(2, speed=200.0, planned_s=2.0)
    new["model"], new["ended"] = "models/llama-1b", "2026-11-30T00:00:00.000+00:00"
    new["settings"] |= {"gpu_memory_cap": 79.1, "steps": 12}
    for rows in ([old, new, other], [other, new, old]):
        (found,) = choices(rows, [80 * GIB])
        assert (found.fitting, found.share, found.group) == (2, 0.5, "llama-1b, 1 card(s), 4 rows of 2,048 tokens a step")
    assert [
        c.fitting for c in choices([old, {**new, "predicted": {**new["predicted"], "config": "ZeRO-2, half"}}], [80 * GIB])
    ] == [2]
