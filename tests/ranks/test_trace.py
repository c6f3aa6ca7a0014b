"""launch/bench_trace.py to its end: a model and an Engine as launch/train.py makes them, without data."""

import json
import os

from tests import ROOT, python_path
from tests.ranks import scripts


def test_a_step_is_recorded_and_taken_apart(tmp_path):
    """It ended in an AttributeError once a model was told where a turn of its data ends: here there is no data."""
    words = [
        ROOT / "launch/bench_trace.py", "--model", "preset:llama-tiny", "--ds_config", ROOT / "ds_configs/zero2.json", "--micro_batch", 1,
        "--seq_len", 64, "--checkpointing", "none", "--warmup", 3, "--steps", 3, "--out", tmp_path,
    ]  # fmt: skip
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    said = scripts.run(words, env, world=1)
    line = json.loads(next(part for part in reversed(said.splitlines()) if part.startswith("{")))
    assert line["card"] == "cpu" and line["seq_len"] == 64 and len(line["recorded_step_s"]) == 3
    assert all(seconds > 0 for seconds in line["cpu_phases_s"].values())
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".gz"}
