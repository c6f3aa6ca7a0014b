"""A checkpoint written by version 1 of the format stays readable, byte for byte. Never write these files anew: add new ones."""

from pathlib import Path

import torch

from bigtrain import cli
from bigtrain.checkpoint import store
from bigtrain.checkpoint.load import load_slices
from bigtrain.checkpoint.slices import LocalSlice
from bigtrain.checkpoint.verify import verify

GOLDEN = Path(__file__).parent / "golden"


def golden_slices() -> list[LocalSlice]:
    """What was saved: every value is known from its index."""
    weight, codes = torch.arange(300, dtype=torch.float32) / 7, torch.arange(300).to(torch.uint8)
    return [
        LocalSlice(param="w", kind="master", shape=(3, 100), start=0, tensor=weight),
        LocalSlice(param="w", kind="state1", shape=(3, 100), start=0, tensor=codes, flat=("partition-0-0-of-1", 5)),
        LocalSlice(param="partition-0-0-of-1", kind="absmax1", shape=(2,), start=0, tensor=torch.tensor([0.5, 2.0])),
        LocalSlice(param="frozen", kind="weight", shape=(7,), start=0, tensor=torch.arange(7).to(torch.bfloat16)),
    ]


def test_version_1_is_read(capsys):
    opened, problems = verify(GOLDEN)
    assert problems == [] and opened is not None and opened.step == 12
    want = golden_slices()
    got = [LocalSlice(param=s.param, kind=s.kind, shape=s.shape, start=0, tensor=torch.zeros_like(s.tensor)) for s in want]
    load_slices(opened, got)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(want, got))
    assert opened.ranks[0].slices[1].flat == ("partition-0-0-of-1", 5)
    assert store.steps(GOLDEN) == [12]
    assert cli.main(["verify", str(GOLDEN)]) == 0 and "whole. Step 12, 1 ranks" in capsys.readouterr().out
