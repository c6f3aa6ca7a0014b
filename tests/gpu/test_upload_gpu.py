"""A batch reaches the card while copies of other streams keep the bus busy."""

import time

import pytest
import torch

from bigtrain.kernels.upload import to_device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CARD = torch.device("cuda", 0)


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize(
    "source",
    [torch.arange(5000).view(4, 1250), torch.randn(3, 7), torch.tensor(3.5), torch.rand(33) > 0.5,
     torch.arange(100).view(10, 10).t(), torch.arange(9, dtype=torch.uint8)[1:], torch.randn(70000).bfloat16()],
    ids=lambda t: f"{t.dtype}{tuple(t.shape)}",
)  # fmt: skip
def test_the_same_values(source, pin):
    held = []
    source = source.pin_memory() if pin else source
    out = to_device(source, CARD, held)
    torch.cuda.synchronize()
    assert out.device == CARD and out.dtype == source.dtype and torch.equal(out.cpu(), source)
    assert len(held) == 1 and held[0].is_pinned()


def test_it_does_not_wait_for_copies_under_way():
    """4 GB on their way in another stream take 75 ms and more on any bus; the batch must be there in a tenth of that."""
    batch = torch.arange(16384).pin_memory()
    to_device(batch, CARD, [])  # compiles the kernel
    large, there = torch.empty(1 << 30, dtype=torch.uint8).pin_memory(), torch.empty(1 << 30, dtype=torch.uint8, device=CARD)
    other, done = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        for _ in range(4):
            there.copy_(large, non_blocking=True)
    began = time.perf_counter()
    out = to_device(batch, CARD, [])
    done.record()
    done.synchronize()
    mine = time.perf_counter() - began
    assert torch.equal(out.cpu(), batch)
    torch.cuda.synchronize()
    whole = time.perf_counter() - began
    assert whole > 0.04 and mine < whole / 10
