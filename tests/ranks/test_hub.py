"""A hub that some ranks reach and others do not: all read the same."""

import pytest
from huggingface_hub import constants

from bigtrain import ranks
from bigtrain.errors import BigtrainError
from bigtrain.models import hub


def _looks(folder, hosts, silent):
    """Which ranks asked the hub, and whether this one goes on without it; `hosts`: local ranks, `silent`: ranks that hear nothing."""
    asked = []

    def unreachable(*_):
        asked.append(ranks.rank())
        return "no answer" if ranks.rank() in silent else ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(hosts[ranks.rank()]))
        patch.setattr(hub, "_unreachable", unreachable)
        patch.setattr(hub, "_heard", [])
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_CACHE", folder)
        try:
            hub.look_for("some/model")
            return asked, constants.HF_HUB_OFFLINE
        except BigtrainError as error:
            return asked, "no answer" in str(error)


def test_one_rank_of_each_host_asks_and_all_do_alike(rank_pool, tmp_path):
    run, folder = rank_pool(2).run, str(tmp_path)
    assert run(_looks, folder, (0, 1), (1,)) == [([0], False), ([], False)]  # rank 1 need not reach it
    assert run(_looks, folder, (0, 0), (1,)) == [([0], True), ([1], True)]  # nothing is in the cache: refused on both
    (tmp_path / "models--some--model" / "snapshots" / "0").mkdir(parents=True)
    assert run(_looks, folder, (0, 0), (1,)) == [([0], True), ([1], True)]
