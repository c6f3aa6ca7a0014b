"""adamw_8bit where its library is missing."""

import pytest
import torch

from bigtrain.errors import BuildError
from bigtrain.optim import eight_bit


def test_missing_bitsandbytes_says_what_to_install(monkeypatch):
    monkeypatch.setattr(eight_bit, "bnb", None)
    monkeypatch.setattr(eight_bit, "_why", "No module named 'bitsandbytes'", raising=False)
    with pytest.raises(BuildError, match="pip install 'bitsandbytes"):
        eight_bit.AdamW8bit([torch.nn.Parameter(torch.zeros(2))])
