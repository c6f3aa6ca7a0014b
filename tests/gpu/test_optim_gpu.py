"""The Triton update gives the bits of the CPU path."""

import pytest
import torch

from bigtrain.optim.split import AdamWSplit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = "cuda"


def _gradient(n, generator):
    grad = torch.randn(n, generator=generator) * torch.exp2(torch.randint(-30, 4, (n,), generator=generator).float())
    grad[::97] = 0.0
    grad[5::89] = -0.0
    grad[::101] = 1e-42  # denormal
    return grad


def _compare(moments, grad_dtype, factor, n, steps):
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "moments": moments}
    generator = torch.Generator().manual_seed(0)
    start = (torch.randn(n, generator=generator) * 0.02).bfloat16()
    start[:4] = torch.tensor([0.0, -0.0, 1e-40, -1e-40])
    cpu, gpu = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.to(DEVICE))
    on_cpu, on_gpu = AdamWSplit([cpu], exact_root=True, **settings), AdamWSplit([gpu], **settings)
    for step in range(steps):
        if step % 5 == 2:  # masters on ties of bf16
            master = on_cpu.master(cpu)
            master[100:2100] = ((master[100:2100].view(torch.int32) & ~0xFFFF) | 0x8000).view(torch.float32)
            on_cpu.set_master(cpu, master)
            on_gpu.set_master(gpu, master.to(DEVICE))
        grad = _gradient(n, generator).to(grad_dtype)
        on_cpu.hand_over(cpu, [grad])
        on_gpu.hand_over(gpu, [grad[:1000].to(DEVICE), grad[1000:].to(DEVICE)])
        on_cpu.grad_factor = factor
        on_gpu.grad_factor = None if factor is None else torch.tensor(factor, device=DEVICE)
        on_cpu.step()
        on_gpu.step()
        assert torch.equal(cpu.view(torch.int16), gpu.cpu().view(torch.int16)), step
        for name, value in on_cpu.state[cpu].items():
            if name != "step":
                ours, theirs = value, on_gpu.state[gpu][name].cpu()
                if ours.is_floating_point():
                    bits = torch.int32 if ours.dtype == torch.float32 else torch.int16
                    ours, theirs = ours.view(bits), theirs.view(bits)
                assert torch.equal(ours, theirs), (step, name, int((ours != theirs).sum()))


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "8bit"])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("factor", [None, 0.37])
def test_the_kernel_gives_the_cpu_paths_bits(moments, grad_dtype, factor):
    _compare(moments, grad_dtype, factor, n=100_003, steps=20)


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "8bit"])
def test_a_step_runs_at_the_speed_of_memory(moments):
    n = 1 << 28
    param = torch.nn.Parameter(torch.zeros(n, dtype=torch.bfloat16, device=DEVICE))
    optimizer = AdamWSplit([param], moments=moments)
    param.grad = torch.randn(n, device=DEVICE, dtype=torch.bfloat16)
    optimizer.step()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(5):
        optimizer.step()
    end.record()
    torch.cuda.synchronize()
    seconds = start.elapsed_time(end) / 5e3
    moved = n * {"float32": 26, "bfloat16": 18, "8bit": 14}[moments]
    print(f"{moments}: {seconds / n * 1e9:.4f} s per 1e9 parameters, {moved / seconds / 1e9:.0f} GB/s")
    assert moved / seconds > 0.5e12  # far below any card that runs this: a fall-back to another path would miss it
