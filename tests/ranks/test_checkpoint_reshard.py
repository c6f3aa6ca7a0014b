"""One folder, any number of ranks, stage and placement: a few of the pairs that `python -m tests.ranks.reshard` runs in full."""

import pytest

from bigtrain.checkpoint import live
from tests.ranks.reshard import NAMES, covering, grid
from tests.ranks.test_checkpoint_engine import _engine, _save_after, _step


@pytest.mark.parametrize("optimizer", NAMES)
def test_B26_state_comes_back_bit_for_bit_on_other_ranks_stages_and_placements(rank_pool, tmp_path, optimizer):
    answers = grid(rank_pool, tmp_path, optimizer, covering(optimizer, 2 if optimizer == "muon" else 1))
    assert len(answers) >= 3 and not [a for a in answers if a["wrong"]]
    assert optimizer.endswith("8bit") or {a["how"] for a in answers} == {"equal"}


def _count_after_a_step(root, offload):
    engine = _engine(2, "adamw", offload=offload, seed=99)
    engine.load_checkpoint(root)
    _step(engine, 3)
    counts = {name: value for entry in live.scalars_of(engine) for name, value in entry["values"].items()}
    engine.close()
    return counts


@pytest.mark.parametrize(("saved", "now", "counts"), [(True, False, ("F32", 4.0)), (False, True, ("int", 4))])
def test_B26_a_run_without_offload_goes_on_from_one_with_it_and_the_other_way_round(rank_pool, tmp_path, saved, now, counts):
    rank_pool(2).run(_save_after, str(tmp_path), 3, "adamw", saved)
    assert rank_pool(1).run(_count_after_a_step, str(tmp_path), now) == [{"step": counts}]
