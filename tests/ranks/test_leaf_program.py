"""--leaf_blocks of launch/train.py: same bits, and a checkpoint that knows nothing of it but what auto is to do."""

import json
import shutil

import pytest

from tests.ranks.test_train import TRAIN, demo, environment, flags, rows_of, run_forked, scripts  # noqa: F401

NUMBERS = ("step", "loss", "grad_norm", "lr")


def train(demo, out, **more):  # noqa: F811
    usual = {
        "ds_config": "ds_configs/zero3.json",
        "gradient_checkpointing": True,
        "no_export": True,
        "no_preflight": True,
        "save_steps": 2,
    }
    said = run_forked([TRAIN, *flags(demo, out, **{**usual, **more})], world=2)
    decided = {d["path"]: d for d in json.loads((out / "run.json").read_text())["decisions"]}["leaf_blocks"]
    config = json.loads((out / "ds_config.resolved.json").read_text())
    assert (decided["value"] == "on") == (config["zero_optimization"].get("leaf_module") == {"classes": ["LlamaDecoderLayer"]})
    return (
        [[row[n] for n in NUMBERS] for row in rows_of(out)],
        f"{decided['value']}, {decided['source']}: {decided['reason']}",
        said,
    )


def begun(whole, out):
    """A folder that goes on from step 2 of another run."""
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoint-4")
    return {"resume_from_checkpoint": "auto"}


def test_bits_and_what_a_resume_does(demo, tmp_path):  # noqa: F811
    """A CPU's seconds are not planned, so auto says off: that it goes on with leaf blocks is what the checkpoint kept."""
    kept = "as in the run that it goes on from"
    whole, how, _ = train(demo, tmp_path / "on", leaf_blocks="on")
    assert how == "on, flag: --leaf_blocks" and [row[0] for row in whole] == [1, 2, 3, 4]
    again, how, said = train(demo, tmp_path / "auto", **begun(tmp_path / "on", tmp_path / "auto"))
    assert how == f"on, plan: {kept}" and again == whole and f"leaf_blocks auto: on ({kept})" in said
    off, how, _ = train(demo, tmp_path / "off", leaf_blocks="off", **begun(tmp_path / "on", tmp_path / "off"))
    assert how == "off, flag: --leaf_blocks" and off == whole


@pytest.mark.parametrize(
    "more, words",
    [
        ({"ds_config": "ds_configs/zero2.json"}, "leaf_blocks on needs zero_optimization.stage 3, not 2"),
        (
            {"leaf_blocks": "maybe"},
            "leaf_blocks: invalid choice: 'maybe'",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_built(demo, tmp_path, more, words):  # noqa: F811
    out = tmp_path / "out"
    said = run_forked([TRAIN, *flags(demo, out, **{"leaf_blocks": "on", "ds_config": "ds_configs/zero3.json", **more})], 2)
    assert words in said and not out.exists()
