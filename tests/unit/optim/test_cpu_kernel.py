"""The compiled update gives the bits of the torch path, whatever the moments, the gradient, the sizes and the magnitudes."""

import pytest
import torch

from bigtrain.optim import arithmetic, cpu_kernel, split
from bigtrain.optim.split import AdamWSplit

SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def compiled():
    if (why := cpu_kernel.why_not()) and "no C++ compiler" in why:
        pytest.skip(why)
    assert why is None


def _bits(value):
    return value.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[value.element_size()])


def _gradient(n, generator):
    grad = torch.randn(n, generator=generator) * torch.exp2(torch.randint(-60, 8, (n,), generator=generator).float())
    grad[::97] = 0.0
    grad[5::89] = -0.0
    grad[::101] = 1e-42  # denormal
    return grad


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "8bit"])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("betas, factor, exact", [((0.9, 0.999), None, False), ((0.3, 0.95), 0.37, True)])
def test_equals_the_torch_path(moments, grad_dtype, betas, factor, exact):
    settings = {**SETTINGS, "betas": betas, "moments": moments, "exact_root": exact}
    n = 5 * 8192 + 300
    generator = torch.Generator().manual_seed(0)
    start = (torch.randn(n, generator=generator) * 0.02).bfloat16()
    start[:4] = torch.tensor([0.0, -0.0, 1e-40, -1e-40])
    a, b = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    fast, slow = AdamWSplit([a], compiled=True, **settings), AdamWSplit([b], **settings)
    for step in range(12):
        if step % 5 == 2:  # masters on ties of bf16, even and odd
            master = slow.master(b)
            master[100:2100] = ((master[100:2100].view(torch.int32) & ~0xFFFF) | 0x8000).view(torch.float32)
            slow.set_master(b, master)
            fast.set_master(a, master)
        grad = _gradient(n, generator).to(grad_dtype)
        grad[512:1024] = 0.0
        fast.hand_over(a, [grad])
        slow.hand_over(b, [grad])
        fast.grad_factor = slow.grad_factor = factor
        fast.step()
        slow.step()
        assert torch.equal(_bits(a.data), _bits(b.data)), step
        for name, value in slow.state[b].items():
            if name != "step":
                assert torch.equal(_bits(fast.state[a][name]), _bits(value)), (step, name)


def test_a_tie_survives_an_update_without_change():
    """Gradient and decay zero: the master stays on the tie, and its extra bit with it, in every kind of moments that has one."""
    for moments in ("float32", "bfloat16"):
        param = torch.nn.Parameter(torch.full((20000,), 1.0).bfloat16())
        optimizer = AdamWSplit([param], moments=moments, compiled=True, lr=1e-3, weight_decay=0.0)
        master = torch.full((20000,), 0x3F808000, dtype=torch.int32).view(torch.float32)
        optimizer.set_master(param, master)
        param.grad = torch.zeros_like(param)
        optimizer.step()
        assert torch.equal(optimizer.master(param), master)
        assert torch.signbit(optimizer.state[param]["exp_avg_sq"]).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_the_number_of_threads_changes_nothing(threads):
    before = torch.get_num_threads()
    n = 100_000
    start = torch.randn(n, generator=torch.Generator().manual_seed(3)).bfloat16()
    grad = torch.randn(n, generator=torch.Generator().manual_seed(4))
    found = []
    for count in (2, threads):
        torch.set_num_threads(count)
        param = torch.nn.Parameter(start.clone())
        optimizer = AdamWSplit([param], moments="8bit", compiled=True, **SETTINGS)
        for _ in range(3):
            optimizer.hand_over(param, [grad])
            optimizer.step()
        found.append(optimizer.master(param))
    torch.set_num_threads(before)
    assert torch.equal(*found)


def test_bf16_moments_are_rounded_without_bias_and_a_second_moment_can_fall():
    values = torch.full((200_000,), 1.0 + 0.25 / 128)  # a quarter of the way between two bf16 numbers
    tie = torch.zeros(values.numel(), dtype=torch.bool)
    m, v = arithmetic.round_moments(values, values, tie, 17, arithmetic.salt_of(3))
    for rounded in (m, v):
        up = (rounded > 1.0).double().mean()
        assert abs(up - 0.25) < 0.005, up  # the deviation of a mean of 200,000: 0.001
    assert abs(((m > 1.0) & (v > 1.0)).double().mean() - 0.0625) < 0.005  # the two are drawn apart
    param = torch.nn.Parameter(torch.ones(4096).bfloat16())
    optimizer = AdamWSplit([param], moments="bfloat16", **SETTINGS)
    param.grad = torch.ones_like(param)
    optimizer.step()
    first = optimizer.state[param]["exp_avg_sq"].abs().float().mean()
    param.grad = torch.zeros_like(param)
    for _ in range(100):
        optimizer.step()
    left = optimizer.state[param]["exp_avg_sq"].abs().float().mean() / first
    assert abs(left - 0.999**100) < 0.01, left


def test_a_chunk_in_the_middle_rounds_as_the_whole_does():
    n = 8192
    start = torch.randn(n, generator=torch.Generator().manual_seed(1)).bfloat16()
    grad = torch.randn(n, generator=torch.Generator().manual_seed(2))
    whole, halves = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    one, two = (AdamWSplit([p], moments="bfloat16", compiled=True, **SETTINGS) for p in (whole, halves))
    one.hand_over(whole, [grad])
    one.step()
    state = two.state[halves]
    state.update(two.new_state(halves))
    update = two.next_update(state, two.param_groups[0])
    for begin in (4096, 0):
        here = slice(begin, begin + 4096)
        update(halves.data[here], grad[here], split.part_of(state, begin, begin + 4096), begin)
    assert torch.equal(whole, halves) and torch.equal(one.state[whole]["exp_avg"], state["exp_avg"])


def test_without_a_compiler_the_torch_path_steps_in_and_says_why(monkeypatch, tmp_path, caplog):
    cpu_kernel.why_not.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    try:
        assert cpu_kernel.ready() is False and "no C++ compiler" in caplog.text
    finally:
        cpu_kernel.why_not.cache_clear()
