"""Names that an engine does not have say what there is; those that it has fail with their own errors."""

import pytest
import torch

from bigtrain.engine import Engine
from bigtrain.engine.misuse import NotCopied
from bigtrain.errors import UsageError


class Mine(NotCopied):
    @property
    def half_built(self):
        return self._never_set

    @property
    def faulty(self):
        return None.numel()


def test_a_property_that_fails_tells_its_own_error():
    with pytest.raises(AttributeError, match="'Mine' object has no attribute '_never_set'"):
        _ = Mine().half_built
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'numel'"):
        _ = Mine().faulty
    assert not hasattr(Mine(), "optimizer") and getattr(Mine(), "no_such", 5) == 5


@pytest.mark.parametrize(
    "name, instead",
    [("lr", "write learning_rate=..."), ("weight_decy", "write weight_decay=..."), ("xyz", "it takes ds_config, ")],
)
def test_an_argument_by_another_name_is_told_its_own(name, instead):
    with pytest.raises(UsageError, match=rf"Engine\({name}=...\) is unknown: {instead}"):
        Engine(torch.nn.Linear(2, 2), ds_config={}, **{name: 1e-3})


@pytest.mark.parametrize(
    "args, kwargs, said",
    [
        (
            (torch.nn.Linear(2, 2), torch.optim.AdamW([torch.zeros(2)])),
            {"ds_config": {}},
            r"Engine\(model, AdamW\): the model alone",
        ),
        ((torch.nn.Linear(2, 2),), {}, "no ds_config was given"),
        ((), {"ds_config": {}}, "no model was given"),
    ],
)
def test_arguments_by_their_place_or_left_out_are_told_in_a_sentence(args, kwargs, said):
    """Python's own: takes 2 positional arguments but 3 positional arguments (and 1 keyword-only argument) were given."""
    with pytest.raises(UsageError, match=said):
        Engine(*args, **kwargs)
