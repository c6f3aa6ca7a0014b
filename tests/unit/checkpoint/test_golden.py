"""A checkpoint written by version 1 of the format stays readable, byte for byte. Never write these files anew: add new ones."""

import json
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
    assert cli.main(["verify", str(GOLDEN)]) == 0 and "whole. Step 12, 1 rank," in capsys.readouterr().out


def test_verify_calls_nothing_damaged_that_is_no_checkpoint(tmp_path, capsys):
    """A model folder was DAMAGED; a checkpoint whose COMMIT is gone, under its own name or not, is."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").touch()
    assert cli.main(["verify", str(model)]) == 2
    said = capsys.readouterr().err
    assert "is no checkpoint of bigtrain" in said and "bigtrain inspect" in said and "DAMAGED" not in said
    for name, file in (("checkpoint-3", "run.json"), ("mine", "rank-00000-of-00001.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
        assert cli.main(["verify", str(tmp_path / name)]) == 1
        assert "DAMAGED" in capsys.readouterr().err
    assert cli.main(["verify", str(tmp_path)]) == 1


def test_inspect_lists_tensors_and_who_would_read_what(capsys):
    """--world_size and --all were taken for a checkpoint, and did nothing."""
    assert cli.main(["inspect", str(GOLDEN), "--world_size", "2"]) == 0
    said = capsys.readouterr().out
    assert "written by 1 rank, " in said and "  user: note x\n" in said
    assert "  w  [3, 100]  master F32, state1 U8" in said and "  frozen  [7]  weight BF16" in said
    assert "rank 1 of 2 (ZeRO-3) would read 0.0 MiB of rank-00000-of-00001.safetensors" in said
    assert cli.main(["inspect", str(GOLDEN), "--world_size", "2", "--json"]) == 0
    reads = json.loads(capsys.readouterr().out)["reads"]
    # of 300 fp32 and 300 codes 150 each, of two fp32 one, of seven bf16 four and three
    assert reads == [
        {"rank-00000-of-00001.safetensors": 150 * 5 + 4 + 4 * 2},
        {"rank-00000-of-00001.safetensors": 150 * 5 + 4 + 3 * 2},
    ]
    assert cli.main(["inspect", str(GOLDEN), "--world_size", "0"]) == 2
