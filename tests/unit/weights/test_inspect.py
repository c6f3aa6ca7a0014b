"""`bigtrain inspect` needs no torch and tells who would read which bytes."""

import argparse
import json
import subprocess
import sys

import pytest

from bigtrain.checkpoint import cli
from bigtrain.errors import UsageError, WeightsError
from bigtrain.weights.header import encode_header
from bigtrain.weights.inspect import inspect_folder
from tests.unit.weights.damage import SHAPES, pristine, write


def run(*arguments):
    parser = argparse.ArgumentParser()
    cli.add_parsers(parser.add_subparsers())
    parsed = parser.parse_args(["inspect", *arguments])
    return parsed.run(parsed)


def test_the_shares_of_all_ranks_are_the_file(tmp_path, capsys):
    folder = write(pristine(), tmp_path)
    total = sum(a * (b[0] if b else 1) * 2 for a, *b in SHAPES.values())
    for world in (1, 2, 3, 4, 50):
        assert sum(share["bytes"] for share in inspect_folder(folder, world)["ranks"]) == total
    assert run(folder, "--world_size", "3") == 0
    text = capsys.readouterr().out
    assert "embed.weight" in text and "rank 2 of 3 reads" in text and "6 tensors (6 x BF16)" in text
    assert run(folder, "--json") == 0
    table = json.loads(capsys.readouterr().out)
    assert {t["name"]: tuple(t["shape"]) for t in table["tensors"]} == SHAPES and table["bytes"] == total


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--world_size 0"):
        run(write(pristine(), tmp_path), "--world_size", "0")
    with pytest.raises(WeightsError, match="no such folder"):
        inspect_folder(str(tmp_path / "absent"), None)
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match="not a folder"):
        inspect_folder(str(tmp_path / "file"), None)


def test_no_torch_is_imported(tmp_path):
    code = (
        "import sys; from bigtrain.checkpoint import cli; from bigtrain.weights.inspect import inspect_folder; "
        f"inspect_folder({write(pristine(), tmp_path)!r}, 2); assert not {{'torch', 'numpy'}} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ten_tensors_are_listed_unless_all_are_asked_for(tmp_path, capsys):
    """Sixty lines drove what the folder holds off the screen."""
    head, _ = encode_header([(f"w{i:02}.weight", "BF16", (1,)) for i in range(12)], {})
    folder = write({"model.safetensors": head + bytes(24)}, tmp_path)
    assert run(folder) == 0
    said = capsys.readouterr().out
    assert "w09.weight" in said and "w10.weight" not in said and "2 more" in said
    assert run(folder, "--all") == 0
    assert "w11.weight" in capsys.readouterr().out
