"""Faults that used to hang, each for real on two ranks; launch/bench_hang.py has them all, docs/results/hang.md its table."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import python_path
from tests.ranks.test_train import environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "stage,cases",
    [
        (2, ["stopped_0", "killed", "loader", "evaluate"]),
        (3, ["save_at_end", "killed_0", "loss", "uneven"]),
    ],
)
def test_B48_B51_every_rank_ends_and_says_why(stage, cases):
    """Within 30 s of the fault, with a code that is not 0, and rank and cause named: the script checks it."""
    command = [sys.executable, "launch/bench_hang.py", "--stages", str(stage), "--cases", *cases]
    env = environment(PYTHONPATH=python_path())
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert done.stdout.count("| yes |") == len(cases)
