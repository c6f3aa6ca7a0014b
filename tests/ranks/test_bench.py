"""A sweep as a user starts it, on two CPU ranks: real runs, peers on the same inputs, and every way a cell can fail."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from bigtrain.bench.processes import MARK
from tests import ROOT

GRID = {
    "model": "preset:llama-tiny", "ds_config": "zero2", "seq_len": 32, "micro_batch": 2, "steps": 5, "warmup": 2,
    "max_cell_s": 900,
    "cells": [
        {"num_gpus": 2, "runner": ["bigtrain", "raw_deepspeed", "hf_trainer"]},
        {"model": "preset:llama-70b"},  # no such host holds its states: exit 3
        {"env": {"BIGTRAIN_CONTROL_TIMEOUT_S": "nonsense"}},  # ends with a traceback
        {"max_cell_s": 1.5, "seq_len": 48},
    ],
}  # fmt: skip

pytestmark = pytest.mark.timeout(2400)  # a sweep of seven cells, each a start of its own: minutes beside other tests


def start(grid, out):
    path = out.with_suffix(".json")
    path.write_text(json.dumps(grid))
    dropped = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_PORT",
        "MASTER_ADDR",
        "PYTHONPATH",
    )  # the sweep finds its own package
    env = {k: v for k, v in os.environ.items() if k not in dropped} | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bigtrain", "bench", str(path), "--output_dir", str(out)]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """(output folder, rows by what became of them, in order)."""
    out = tmp_path_factory.mktemp("sweep") / "out"
    process = start(GRID, out)
    said, _ = process.communicate(timeout=2300)
    assert process.returncode == 0, said
    return out, lines(out / "rows.jsonl")


def test_failures_are_rows_and_not_the_end(sweep):
    _, rows = sweep
    found = [(r["runner"], r["status"]) for r in rows]
    assert found == [("bigtrain", "ok"), ("raw_deepspeed", "ok"), ("hf_trainer", "ok"), ("bigtrain", "refused"),
                     ("bigtrain", "crash"), ("bigtrain", "timeout")], [r["error"] for r in rows]  # fmt: skip
    assert "DOES NOT FIT" in rows[3]["error"] and rows[3]["exit_codes"] == [3] and rows[3]["predicted"]["fits"] is False
    assert "nonsense" in rows[4]["error"] and rows[5]["exit_codes"] == [None] and rows[5]["wall_s"] < 60


def test_the_same_work_for_every_runner(sweep):
    _, rows = sweep
    for row in rows[:3]:
        assert row["tokens_per_step"] == 2 * 2 * 32 and row["steps_done"] == 5
        assert (
            row["step_time_s"]["n"] == 3
            and row["step_time_s"]["q1"] <= row["step_time_s"]["median"] <= row["step_time_s"]["q3"]
        )
        assert row["tokens_per_s_per_gpu"] == pytest.approx(64 / row["step_time_s"]["median"])
        assert 200 << 20 < row["host_pss_bytes"] <= row["host_rss_bytes"] < 4 << 30
        assert row["host_node_pss_bytes"] > row["host_pss_bytes"]
        # Random tokens of a vocabulary of 512: ln 512 = 6.24; random weights add a little.
        assert 6.0 < row["first_loss"] < 6.8
    assert len({row["formula"] for row in rows[:3]}) == 1


def test_peers_on_a_cpu_compile_no_optimizer(sweep):
    """DeepSpeed's FusedAdam would be compiled by the Trainer's cell: more than four minutes in a new environment."""
    out, _ = sweep
    told = [json.loads(path.read_text()) for path in (out / "cells").glob("*/peer.json")]
    assert len(told) == 2
    for one in told:
        assert all(one[key]["optimizer"]["params"]["torch_adam"] is True for key in ("ds_config", "ds_config_resolved"))


def test_predictions_are_stored_before_the_cell_starts(sweep):
    out, rows = sweep
    told = {p["cell"]: p for p in lines(out / "predictions.jsonl")}
    assert len(told) == 6
    for row in rows:
        assert told[row["cell"]]["predicted"] == row["predicted"]
        assert datetime.fromisoformat(row["predicted_at"]) <= datetime.fromisoformat(row["started"])
    assert rows[0]["predicted"]["fits"] is True and "host_bytes" in rows[0]["prediction_error"]


def test_report_files(sweep):
    out, _ = sweep
    assert "refused" in (out / "report.html").read_text() and (out / "pareto.png").stat().st_size > 10_000
    assert len((out / "rows.csv").read_text().splitlines()) == 7
    assert not list((out / "cells").glob("*/out/model"))  # nothing is exported


def test_finished_cells_are_not_run_again_and_a_stop_leaves_no_process(sweep):
    out, rows = sweep
    process = start({**GRID, "cells": [*GRID["cells"], {"seq_len": 40, "num_gpus": 2}]}, out)
    deadline = time.monotonic() + 60
    while len(lines(out / "predictions.jsonl")) == 6 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75 and "the same command continues" in said
    assert lines(out / "rows.jsonl") == rows  # the interrupted cell has no row, so it runs when the sweep goes on
    assert [p for p in Path("/proc").iterdir() if p.name.isdigit() and _of_this_sweep(p, out)] == []


def _of_this_sweep(process, out):
    try:
        environment = (process / "environ").read_bytes()
        return MARK.encode() in environment and str(out).encode() in environment
    except OSError:
        return False


def test_measure_runs_the_best_candidates_and_puts_the_fastest_first(tmp_path):
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    words = (
        "plan --model preset:llama-tiny --device cpu --seq_len 32 --micro_batch 1 --accumulation 2 --auto --measure 2 --json"
    )
    command = [sys.executable, "-m", "bigtrain", *words.split()]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    measured = said["measured"]
    assert sorted(row["candidate"] for row in measured) == [0, 1] and {row["status"] for row in measured} == {"ok"}, measured
    assert measured[0]["tokens_per_s"] >= measured[1]["tokens_per_s"] > 0
    best = said["fitting"][measured[0]["candidate"]]
    assert measured[0]["ds_config"]["zero_optimization"]["stage"] == best["stage"]
    assert f"--per_device_train_batch_size {best['micro_batch']}" in measured[0]["command"]
