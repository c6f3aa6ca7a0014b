"""What DeepSpeed copies, compiles and asks while it starts: no more than a run needs."""

import importlib.util
import os
import platform
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from bigtrain.zero.startup import (
    SMALLEST,
    SharedMaster,
    ask_cpu_once,
    compiled_when_called,
    forget_products,
    grow_segments,
    map_blocks,
)
from tests import python_path


def test_a_flat_bf16_clone_is_the_tensor_itself_and_zeros_take_one_element():
    flat = torch.arange(2 * SMALLEST).bfloat16()
    with SharedMaster():
        part = flat.narrow(0, SMALLEST, SMALLEST).detach().clone().to(device="cpu", dtype=torch.bfloat16)
        zeros = torch.zeros(SMALLEST, dtype=torch.bfloat16, device="cpu")
        others = [flat[:5].clone(), flat.float().clone(), flat.view(2, -1).clone()]
        plain = torch.zeros(SMALLEST, dtype=torch.float32)
    assert part.data_ptr() == flat[SMALLEST:].data_ptr()
    assert zeros.shape == (SMALLEST,) and zeros.untyped_storage().nbytes() == 2 and not zeros.any()
    assert all(o.data_ptr() != flat.data_ptr() for o in others) and plain.untyped_storage().nbytes() == 4 * SMALLEST
    part.requires_grad = True
    part.grad = zeros
    assert flat.clone().data_ptr() != flat.data_ptr()  # afterwards all is as it was


def test_what_deepspeed_decorates_is_compiled_when_it_is_called_first():
    seen = []

    def compile_now(function):
        seen.append(function.__name__)
        return function

    module = types.SimpleNamespace(compile=lambda: compile_now)
    before = module.compile
    with compiled_when_called(module):

        @module.compile()
        def double(x):
            """Twice."""
            return 2 * x

    assert module.compile is before and seen == [] and double.__doc__ == "Twice."
    assert double(3) == 6 and double(x=4) == 8 and seen == ["double"]


def test_deepspeeds_muon_and_cpu_adam_are_what_the_patches_are_for():
    """If this fails, DeepSpeed has changed: measure a start again (`python -X importtime`), the patches may not be needed."""
    folder = Path(importlib.util.find_spec("deepspeed").origin).parent
    muon = (folder / "runtime/zero/muon/original_muon.py").read_text()
    assert "from deepspeed.runtime import compiler" in muon and muon.count("@compiler.compile()") == 3
    assert "cpu_info = get_cpu_info()" in (folder / "ops/adam/cpu_adam.py").read_text()


def test_the_cpu_is_asked_once(monkeypatch):
    cpuinfo = pytest.importorskip("cpuinfo")
    asked = []
    monkeypatch.setattr(cpuinfo, "get_cpu_info", lambda: asked.append(1) or {"vendor_id_raw": "x"})
    for _ in range(2):
        ask_cpu_once()
        assert cpuinfo.get_cpu_info() == {"vendor_id_raw": "x"}
    assert asked == [1]


def test_an_allocator_that_the_user_has_set_up_is_left_alone(monkeypatch):
    told = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "".join(told), raising=False)
    assert not grow_segments({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}) and not grow_segments(
        {"PYTORCH_ALLOC_CONF": "x"}
    )
    assert told == []
    assert grow_segments({}) and told == ["expandable_segments:True"]
    assert not grow_segments({}) and len(told) == 1  # a second engine, or what the program itself has set up


# A block of 24 MiB is freed, which raises glibc's threshold to it. Then come buffers that go and copies of them that stay, each
# larger than the last: none fits into a hole that was left before. Prints MiB that the heap holds and nobody uses.
HOLES = """
import ctypes, sys, torch
from bigtrain.zero.startup import map_blocks

class Info(ctypes.Structure):  # malloc.h: struct mallinfo2, ten sizes
    _fields_ = (("sizes", ctypes.c_size_t * 10),)

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
torch.ones(6 << 20)
if sys.argv[1] == "mapped":
    assert map_blocks()
kept = []
for mib in range(1, 16):
    buffer = torch.ones(mib << 18)
    kept.append(buffer.clone())
    del buffer
print(libc.mallinfo2().sizes[8] >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
@pytest.mark.skipif(torch.cuda.is_available(), reason="on CPUs only")
def test_what_is_freed_on_a_cpu_leaves_no_holes_in_the_heap():
    env = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    env["PYTHONPATH"] = python_path()

    def free_mib(how):
        done = subprocess.run([sys.executable, "-c", HOLES, how], env=env, capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert free_mib("mapped") < 4 < 32 < free_mib("as it is")


def test_malloc_is_left_alone_with_a_gpu_and_where_the_user_has_set_it_up(monkeypatch):
    assert not map_blocks({"MALLOC_MMAP_THRESHOLD_": "65536"})
    assert not map_blocks({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not map_blocks({})


PRODUCTS = """
import ctypes, sys, torch
from bigtrain.zero.startup import forget_products, map_blocks
class Info(ctypes.Structure):  # malloc.h: struct mallinfo2, ten sizes
    _fields_ = (("sizes", ctypes.c_size_t * 10),)

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
map_blocks()
if sys.argv[1] == "bounded":
    assert forget_products()
weight = torch.ones(64, 64, dtype=torch.bfloat16)
for tokens in range(1, 1100):  # oneDNN keeps 1,024
    torch.ones(tokens, 64, dtype=torch.bfloat16) @ weight
print(libc.mallinfo2().sizes[7] >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
@pytest.mark.skipif(torch.cuda.is_available(), reason="on CPUs only")
@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no bf16 products by oneDNN")
def test_products_of_many_shapes_do_not_fill_the_memory():
    env = {k: v for k, v in os.environ.items() if "CACHE_CAPACITY" not in k} | {"PYTHONPATH": python_path()}

    def used_mib(how):
        done = subprocess.run([sys.executable, "-c", PRODUCTS, how], env=env, capture_output=True, text=True, check=True)
        return int(done.stdout)

    # 34 MiB on a processor without AMX, of which 600 shapes are 18; on another these alone were more than 30.
    assert used_mib("bounded") + 15 < used_mib("as it is")


def test_the_users_own_bounds_stay(monkeypatch):
    env = {"LRU_CACHE_CAPACITY": "7"}
    assert not forget_products(env) and env == {"LRU_CACHE_CAPACITY": "7"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not forget_products({})
