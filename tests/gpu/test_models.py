"""Building on GPUs: values drawn there equal a plain build there, and no rank touches another rank's device."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests import python_path

pytestmark = pytest.mark.gpu

_BUILD = """
import sys, torch
from bigtrain import zero
from bigtrain.models import build_model
from bigtrain.models.seeding import seeded
from bigtrain.models.source import resolve

with seeded(3), torch.device("cuda"):
    reference = resolve("preset:llama-50m").construct()
for p in reference.parameters():
    p.data = p.data.bfloat16()
for stage in (0, 3):
    model = build_model("preset:llama-50m", ds_config={"zero_optimization": {"stage": stage}}, seed=3)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        with zero.gathered([p]):
            assert torch.equal(p.data, q.data), (stage, name)
    for (name, a), (_, b) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
        assert a.device.type == "cuda" and a.dtype == b.dtype and torch.equal(a, b), (stage, name)
"""

_FROZEN = """
import json, os, sys, torch
from torch import nn
from bigtrain import ranks
from bigtrain.models import build_model, frozen_module

class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(4096, 8192)

class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher = frozen_module(Teacher, sys.argv[1])
        self.head = nn.Linear(8192, 8)

model = build_model(Student, ds_config={"zero_optimization": {"stage": int(sys.argv[2])}})
import pynvml
pynvml.nvmlInit()
handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(2)]
ranks.barrier("everything is loaded")
holders = [[p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(h)] for h in handles]
mine = [os.getpid() in pids for pids in holders]
allocated = [torch.cuda.memory_allocated(i) for i in range(2)]
ranks.barrier("everybody has looked")
open(f"{sys.argv[3]}.{ranks.rank()}", "w").write(json.dumps([mine, allocated]))
"""


def _environment(**more):
    kept = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "DS_ACCELERATOR")}
    return {**kept, "PYTHONPATH": python_path(), **more}


def test_values_drawn_on_the_gpu_equal_a_plain_build_there():
    done = subprocess.run([sys.executable, "-c", _BUILD], env=_environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_frozen_checkpoint_saved_on_gpu_0_reaches_no_other_ranks_gpu_without_LOCAL_RANK(tmp_path, stage):
    pytest.importorskip("pynvml")
    values = {"w.weight": torch.ones(8192, 4096, device="cuda:0"), "w.bias": torch.ones(8192, device="cuda:0")}
    torch.save({"state_dict": values}, tmp_path / "teacher.ckpt")
    del values
    command = [sys.executable, "-c", _FROZEN, str(tmp_path / "teacher.ckpt"), str(stage), str(tmp_path / "out")]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29610 + stage)}
    running = [
        subprocess.Popen(command, env=_environment(RANK=str(r), **place), stderr=subprocess.PIPE, text=True) for r in range(2)
    ]
    for process in running:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors[-3000:]
    for rank in range(2):
        mine, allocated = json.loads((tmp_path / f"out.{rank}").read_text())
        assert mine == [rank == 0, rank == 1] and allocated[1 - rank] == 0 and allocated[rank] > 0
