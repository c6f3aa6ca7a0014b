"""launch/train.py on every GPU of this host."""

import json
import sys

import pytest
import torch

from tests.ranks.test_train import ROOT, check_output_folder, demo, environment, flags, run  # noqa: F401  (demo is a fixture)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("config", ["zero2", "zero3_offload", "zero3_offload_all"])
def test_every_gpu(demo, tmp_path, config):  # noqa: F811
    out, cards = tmp_path / "out", torch.cuda.device_count()
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(cards), "launch/train.py"]
    command = [*launcher, *flags(demo, out, ds_config=f"ds_configs/{config}.json", max_steps=6)]
    said = run(command, DS_ACCELERATOR="cuda")
    rows = check_output_folder(out, 6)
    assert f"{cards} rank{'s' * (cards != 1)} over nccl" in said
    assert all(r["gpu_reserved_bytes"] >= r["gpu_allocated_bytes"] > 0 for r in rows)
    places = json.loads((out / "run.json").read_text())["placement"]
    assert len({p["physical"] for p in places}) == cards
    known = rows[-1]["mfu"]
    assert known is None or 0 < known < 1
