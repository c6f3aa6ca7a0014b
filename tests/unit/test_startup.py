"""What DeepSpeed copies, compiles and asks while it starts: no more than a run needs."""

import importlib.util
import types
from pathlib import Path

import pytest
import torch

from bigtrain.startup import SMALLEST, SharedMaster, ask_cpu_once, compiled_when_called, grow_segments


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
