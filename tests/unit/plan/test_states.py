"""The planner's optimizer table against the one that optimizers are built from: same names, bytes, stages, places."""

import pytest

from bigtrain.errors import UsageError
from bigtrain.plan.states import ALIASES, LAYOUTS, layout_name

table = pytest.importorskip("bigtrain.optim.table", reason="the optimizer table is not in this checkout")


@pytest.mark.parametrize("name", list(table.OPTIMIZERS))
def test_layout_of_every_optimizer_that_can_be_built(name):
    row, layout = table.OPTIMIZERS[name], LAYOUTS[layout_name(name)]
    per_elem = [sum(t.bytes_per_elem / t.elems_per_value for t in ts) for ts in (row.state, row.other_state or row.state)]
    planned = [layout.remainder + layout.matrix_moments, layout.remainder + layout.moments]
    assert [row.master_bytes + n for n in per_elem] == pytest.approx(planned)
    assert row.stages == layout.stages


def test_aliases_lead_to_known_layouts():
    assert set(ALIASES.values()) <= set(LAYOUTS)
    assert layout_name("AdamW") == layout_name(" adamw_torch_fused ") == "adamw"
    with pytest.raises(UsageError, match="no optimizer 'adafactor'"):
        layout_name("adafactor")
