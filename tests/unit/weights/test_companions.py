"""The small files beside exported weights."""

from types import SimpleNamespace

import pytest

from bigtrain.weights.companions import also_end_at


@pytest.mark.parametrize("before, after", [(None, 7), (2, [2, 7]), ([2, 3], [2, 3, 7]), (7, 7), ([2, 7], [2, 7])])
def test_the_end_of_a_turn_is_added_to_what_ends_generation_and_nothing_goes(before, after):
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=before))
    also_end_at(model, None)
    assert model.generation_config.eos_token_id == before
    also_end_at(model, 7)
    assert model.generation_config.eos_token_id == after
    also_end_at(SimpleNamespace(), 7)
