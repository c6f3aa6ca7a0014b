"""Faults that used to hang, each for real on two ranks; launch/bench_hang.py has them all, docs/results/hang.md its table."""

import pytest

from tests.ranks import scripts
from tests.ranks.test_train import environment


@pytest.mark.parametrize(
    "stage,cases",
    [
        (2, ["stopped_0", "killed", "loader", "worker", "evaluate"]),
        (3, ["save_at_end", "killed_0", "loss", "uneven"]),
    ],
)
def test_B48_B51_every_rank_ends_and_says_why(stage, cases):
    """Within 30 s of the fault, with a code that is not 0, and rank and cause named: the script checks it."""
    said = scripts.run(["launch/bench_hang.py", "--stages", str(stage), "--cases", *cases], environment())
    assert said.count("| yes |") == len(cases)
