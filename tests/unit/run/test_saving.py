"""What a run saves, and what it does for that beforehand."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from bigtrain.run.saving import Saving


@pytest.mark.parametrize(("saves", "weights_only", "prepared"), [(True, False, 1), (False, False, 0), (True, True, 0)])
def test_host_memory_is_made_once_and_only_for_checkpoints_that_will_be_saved(tmp_path, saves, weights_only, prepared):
    asked: list[Path] = []
    engine = SimpleNamespace(global_step=1, checkpoints=SimpleNamespace(prepare=asked.append))
    args = SimpleNamespace(saves=saves, save_only_model=weights_only, copy_checkpoints_to=None)
    saving = Saving(args, engine, SimpleNamespace(), tmp_path, {})
    for _ in range(3):
        saving.prepare()
    assert asked == [tmp_path] * prepared
