"""One folder, any number of ranks, stage and placement: a few of the pairs that `python -m tests.ranks.reshard` runs in full."""

import pytest

from tests.ranks.reshard import NAMES, covering, grid


@pytest.mark.parametrize("optimizer", NAMES)
def test_B26_state_comes_back_bit_for_bit_on_other_ranks_stages_and_placements(rank_pool, tmp_path, optimizer):
    answers = grid(rank_pool, tmp_path, optimizer, covering(optimizer, 2 if optimizer == "muon" else 1))
    assert len(answers) >= 3 and not [a for a in answers if a["wrong"]]
    assert optimizer.endswith("8bit") or {a["how"] for a in answers} == {"equal"}
