"""DeepSpeed's pickles: what is read of them, and that nothing runs."""

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from bigtrain.errors import WeightsError
from bigtrain.weights.deepspeed_folder import unpickle


class _ByName:
    """Pickled as Python 3.11.2 (Debian 12) pickles a member of an enum."""

    def __init__(self, owner, name):
        self.reduced = getattr, (owner, name)

    def __reduce__(self):
        return self.reduced


def test_a_stage_that_was_pickled_by_name_is_read(tmp_path):
    torch.save({"zero_stage": _ByName(ZeroStageEnum, "gradients"), "x": torch.ones(2)}, tmp_path / "a.pt")
    found = unpickle(str(tmp_path / "a.pt"))
    assert int(found["zero_stage"]) == 2 and found["x"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("owner, name", [(ZeroStageEnum, "__class__"), (torch.Tensor, "backward")])
def test_no_other_attribute_is_looked_up(tmp_path, owner, name):
    torch.save({"zero_stage": _ByName(owner, name)}, tmp_path / "a.pt")
    with pytest.raises(WeightsError, match="getattr of"):
        unpickle(str(tmp_path / "a.pt"))
