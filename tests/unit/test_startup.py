"""What DeepSpeed copies while it starts: nothing, for an optimizer whose masters are the weights."""

import torch

from bigtrain.startup import SMALLEST, SharedMaster, grow_segments


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
