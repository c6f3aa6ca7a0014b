"""How launch/bench_convergence.py judges runs: on losses made up so that the answers are known."""

from pathlib import Path

import bench_convergence as bench
import pytest


def result(name: str, optim: str, loss: float, evaluation: float, seed: int = 1) -> bench.Result:
    return {
        "name": name, "optim": optim, "ds_config": "zero2", "seed": seed, "model": "m", "tokens_per_step": 64, "seq_len": 8,
        "learning_rate": 1e-3, "device": "cpu", "loss": [9.0] * 10 + [loss] * bench.LAST, "eval_loss": evaluation,
        "eval_tokens": 7,
    }  # fmt: skip


def results() -> dict[str, bench.Result]:
    made = {n: result(n, "adamw", 2.0 + i / 10, 3.0 + i / 100, i + 1) for i, n in enumerate(bench.REFERENCES)}
    made["adamw_8bit"] = result("adamw_8bit", "adamw_8bit", 2.25, 3.5)
    made["muon"] = result("muon", "muon", 1.0, 1.0)
    return made


def test_within_is_measured_against_the_references_spread():
    judged, spreads = bench.judge(results())
    assert spreads == pytest.approx((0.2, 0.02))
    near = judged["adamw_8bit"]
    assert near.loss_apart == pytest.approx(0.15) and near.loss_within and near.same_seed_apart == pytest.approx(0.25)
    assert near.evaluation_apart == pytest.approx(0.49) and not near.evaluation_within


def test_the_table_puts_muon_last_and_judges_it_not():
    lines = bench.table(results(), ["adamw-offload"]).splitlines()
    rows = [line for line in lines if line.startswith("| ")][1:]
    assert rows[-1].startswith("| muon ") and "another method" in rows[-1] and "| **no** |" in rows[-2]
    assert lines[-1] == "Failed: adamw-offload."


def test_without_all_references_nothing_is_judged():
    left = results()
    del left["adamw-seed2"]
    with pytest.raises(SystemExit, match="adamw-seed2"):
        bench.judge(left)


def test_every_run_names_a_preset_that_is_there():
    configs = Path(bench.ROOT, "ds_configs")
    runs = bench.all_runs()
    assert all((configs / f"{run.config}.json").exists() for run in runs)
    assert len({run.name for run in runs}) == len(runs) and [run.name for run in runs[:3]] == list(bench.REFERENCES)
    assert bench.smooth([1.0, 3.0]) == [1.0, 2.0]
