"""Updates in chunks on a card: the fused kernel's bits, and no memory beyond one chunk."""

import pytest
import torch

from bigtrain import optim
from bigtrain.optim import chunks
from tests.unit.optim.test_chunks import SETTINGS, both, check

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", ["adamw", "adamw_torch", "adamw_8bit"])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [9999, 3 * 2**20 + 5])
def test_the_same_bits_and_the_same_state_dict(name, grad_dtype, n, monkeypatch):
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    one, other = both(name, grad_dtype, "cuda", n, 4096 if n < 10_000 else 2**20, monkeypatch)
    check(one, other)


def test_an_update_needs_one_chunk_beside_what_is_kept():
    n = 2**28
    param = torch.nn.Parameter(torch.zeros(n, device="cuda"))
    optimizer = optim.build_optimizer("adamw", [{"params": [param]}], optim.Options(device="cuda", **SETTINGS))
    taker = chunks.Chunks(optimizer, lambda p, group: chunks.begin_adamw(optimizer, p, group))
    taker.grad_factor = torch.tensor(0.5, device="cuda")
    for _ in range(2):
        taker.hand_over(param, [torch.ones(n // 4, dtype=torch.bfloat16, device="cuda") for _ in range(4)])
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
    chunk = 2**25
    assert torch.cuda.max_memory_allocated() - before < (2 + 4) * chunk + 2**22  # in one piece: 4 n
