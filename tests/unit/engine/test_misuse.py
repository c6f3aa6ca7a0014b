"""Names that an engine does not have say what there is; those that it has fail with their own errors."""

import pytest

from bigtrain.engine.misuse import NotCopied


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
