"""Reading straight into GPU memory: every element arrives, whatever the sizes, places, threads and types."""

import time

import pytest
import torch

from bigtrain.weights.read import PINNED_BYTES, Reader, ReadOp, staging_ahead

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_a_read_fills_exactly_its_destination_on_the_gpu(tmp_path, threads, wanted):
    content = torch.randn(20 << 20).bfloat16()
    file = tmp_path / "f"
    file.write_bytes(content.view(torch.uint8).numpy().tobytes())
    dest = torch.zeros(content.numel(), dtype=wanted, device="cuda")
    pieces = [(3, 5), (5, 10_000_003), (10_000_100, 19_000_001)]
    with Reader(threads) as reader:
        for _ in range(2):  # staging memory is let go between runs
            dest.zero_()
            count = reader.run([ReadOp(str(file), 2 * a, torch.bfloat16, dest[a:b]) for a, b in reversed(pieces)])
    filled = torch.zeros(content.numel(), dtype=wanted)
    for a, b in pieces:
        filled[a:b] = content[a:b].to(wanted)
    assert torch.equal(dest.cpu(), filled) and count == sum(2 * (b - a) for a, b in pieces)


def test_a_reader_uses_the_staging_memory_that_was_made_ahead(tmp_path):
    file = tmp_path / "f"
    file.write_bytes(bytes(3 * PINNED_BYTES))
    dest = torch.ones(3 * PINNED_BYTES, dtype=torch.uint8, device="cuda")
    with staging_ahead(dest.device, 1 << 30):
        deadline = time.monotonic() + 20
        before = -1
        while before != (before := torch.cuda.host_memory_stats()["num_host_alloc"]) and time.monotonic() < deadline:
            time.sleep(0.5)  # until no more is made
    with Reader(1) as reader:
        reader.run([ReadOp(str(file), 0, torch.uint8, dest)])
    assert not dest.any() and torch.cuda.host_memory_stats()["num_host_alloc"] == before
