"""The lossless split: every fp32 number survives, and AdamW on it equals AdamW on fp32."""

import bitsandbytes.functional
import pytest
import torch

from bigtrain.errors import UsageError
from bigtrain.optim import arithmetic, cpu_kernel, pieces, split
from bigtrain.optim.split import AdamWSplit

SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def _all_kinds(n=1 << 16):
    """Random bits of every exponent, ties of bf16 on both sides, denormals, zeros of both signs, infinities."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (n,), generator=generator).to(torch.int32)
    ties = (torch.arange(-(2**15), 2**15).to(torch.int32) << 16) + 0x8000
    denormals = torch.arange(-70000, 70000, dtype=torch.int32)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 3.4e38, -3.4e38])
    numbers = torch.cat([bits.view(torch.float32), ties.view(torch.float32), denormals.view(torch.float32), special])
    return numbers[~numbers.isnan()]


def test_every_number_survives_the_split():
    numbers = _all_kinds()
    weight, low, tie = arithmetic.split_master(numbers)
    assert torch.equal(weight.view(torch.int16), numbers.bfloat16().view(torch.int16))
    assert torch.equal(arithmetic.join_master(weight, low, tie).view(torch.int32), numbers.view(torch.int32))
    assert 0 < tie.sum() < 40000


def test_without_the_tie_bit_the_error_is_one_unit_at_ties_only():
    numbers = _all_kinds()
    weight, low, tie = arithmetic.split_master(numbers)
    back = arithmetic.join_master(weight, arithmetic.saturate_low(low, tie))
    off = numbers.view(torch.int32).long() - back.view(torch.int32).long()
    assert torch.equal(off, tie.long())


def test_a_nan_stays_one():
    numbers = torch.tensor([float("nan"), -float("nan")])
    assert arithmetic.join_master(*arithmetic.split_master(numbers)).isnan().all()


def _gradients(n, steps):
    generator = torch.Generator().manual_seed(7)
    for step in range(steps):
        grad = torch.randn(n, generator=generator) * torch.exp2(torch.randint(-30, 4, (n,), generator=generator).float())
        grad[::97] = 0.0
        grad[5::89] = -0.0
        if step == 3:
            grad[::11] = 1e-42  # denormal
        yield grad


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chunk", [1 << 20, 512, "compiled"])
def test_equals_torch_adamw_on_fp32_bit_for_bit_over_50_steps(grad_dtype, chunk, monkeypatch):
    if chunk != "compiled":
        monkeypatch.setitem(split.CHUNK_ELEMS, "cpu", chunk)
    n = 40_000
    start = (torch.randn(n, generator=torch.Generator().manual_seed(1)) * 0.02).bfloat16()
    start[:4] = torch.tensor([0.0, -0.0, 1e-40, -1e-40])
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    optimizer = AdamWSplit([ours], compiled=chunk == "compiled" and cpu_kernel.ready(), **SETTINGS)
    reference = torch.optim.AdamW([theirs], foreach=False, **SETTINGS)
    ties = 0
    for step, grad in enumerate(_gradients(n, 50)):
        grad = grad.to(grad_dtype)
        if step % 10 == 4:  # put masters on ties of bf16, even and odd, on both sides
            with torch.no_grad():
                theirs[100:2100] = ((theirs[100:2100].view(torch.int32) & ~0xFFFF) | 0x8000).view(torch.float32)
            optimizer.set_master(ours, theirs.detach().clone())
        ties += int(torch.signbit(optimizer.state[ours]["exp_avg_sq"]).sum()) if optimizer.state[ours] else 0
        optimizer.hand_over(ours, [grad[:1000], grad[1000:1001], grad[1001:].clone()])
        theirs.grad = grad.float()
        optimizer.step()
        reference.step()
        assert torch.equal(optimizer.master(ours).view(torch.int32), theirs.detach().view(torch.int32)), step
        assert torch.equal(ours.view(torch.int16), theirs.detach().bfloat16().view(torch.int16)), step
    assert torch.equal(optimizer.state[ours]["exp_avg"], reference.state[theirs]["exp_avg"])
    assert torch.equal(optimizer.state[ours]["exp_avg_sq"].abs(), reference.state[theirs]["exp_avg_sq"])
    assert ties > 1000


def test_the_8bit_code_is_bitsandbytes():
    for signed in (True, False):
        codes, *_ = arithmetic.code_tables(signed, torch.device("cpu"))
        assert torch.equal(codes, bitsandbytes.functional.create_dynamic_map(signed))


@pytest.mark.parametrize("signed", [True, False])
def test_encoding_finds_the_nearest_code(signed):
    codes, middles, _ = arithmetic.code_tables(signed, torch.device("cpu"))
    near = torch.cat([middles[:-1].nextafter(torch.tensor(s)) for s in (-9.0, 9.0)] + [middles[:-1], codes])
    values = torch.cat([near, torch.randn(100_000).clamp(-1, 1) * torch.exp2(torch.randint(-25, 1, (100_000,)).float())])
    values = torch.nn.functional.pad(values if signed else values.abs(), (0, -values.numel() % 255)).view(-1, 255)
    values = torch.cat([values, torch.ones(len(values), 1)], dim=1).flatten()  # every block's scale is 1
    index, scale = arithmetic.encode(values, signed)
    expected = torch.bucketize(values, middles[:-1])
    if not signed:
        expected.masked_fill_((expected == 0) & (values > 0), 1)
    assert (scale == 1).all() and torch.equal(index.long(), expected)


@pytest.mark.parametrize("signed", [True, False])
def test_cells_count_the_mid_points_below_a_number(signed):
    _, middles, cells = arithmetic.code_tables(signed, torch.device("cpu"))
    one = 127 << 23
    spread = torch.arange(0, one + 1, 997, dtype=torch.int32)
    found = arithmetic.cell_of(spread.clamp(min=arithmetic.SMALLEST_CELL), signed)
    borders = spread[1:][found.diff() > 0]  # within 997 units above the border of a cell
    near = [t + d for t in (middles[:-1].view(torch.int32) & 0x7FFFFFFF, torch.tensor([0, one])) for d in range(-3, 4)]
    bits = torch.cat([spread, *near, *(borders - d for d in range(998))]).to(torch.int32).clamp_(0, one)
    for numbers in (bits.view(torch.float32), -bits.view(torch.float32)) if signed else (bits.view(torch.float32),):
        assert torch.equal(arithmetic.nearest(numbers, signed), torch.bucketize(numbers, middles[:-1], out_int32=True))
    at = arithmetic.cell_of(middles[127 if signed else 0 : -1].view(torch.int32), signed)
    assert len(cells) == 1 << arithmetic.CELL_BITS[signed] and (at.diff() > 0).all(), "two mid-points in one cell"


def test_8bit_error_is_bounded_and_a_positive_second_moment_is_never_lost():
    values = torch.randn(10_001, generator=torch.Generator().manual_seed(0))
    index, scale = arithmetic.encode(values, signed=True)
    back = arithmetic.decode(index, scale, signed=True)
    whole = scale.repeat_interleave(256)[:10_001]
    # the widest gap between neighbouring codes is 0.0141 of the block's largest value: half of it
    assert ((back - values).abs() / whole).max() <= 0.00705
    squares = values.square() * torch.exp2(torch.randint(-40, 0, (10_001,)).float())
    assert (arithmetic.decode(*arithmetic.encode(squares, signed=False), signed=False)[squares > 0] > 0).all()


def test_8bit_follows_bitsandbytes_with_an_fp32_weight():
    n = 8192
    start = (torch.randn(n, generator=torch.Generator().manual_seed(1)) * 0.02).bfloat16()
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    optimizer, reference = AdamWSplit([ours], moments="8bit", **SETTINGS), bitsandbytes.optim.AdamW8bit([theirs], **SETTINGS)
    generator = torch.Generator().manual_seed(3)
    for _ in range(30):
        grad = torch.randn(n, generator=generator)
        ours.grad, theirs.grad = grad.bfloat16(), grad.bfloat16().float()
        optimizer.step()
        reference.step()
    difference = (optimizer.master(ours) - theirs.detach()).abs()
    # both round moments to the same code; they part where a rounding falls the other way, by far less than a step (1e-3)
    assert difference.mean() < 1e-5 and difference.max() < 3e-3, (difference.mean(), difference.max())
    assert optimizer.state[ours]["state1"].dtype == torch.uint8 and optimizer.state[ours]["absmax1"].shape == (32,)


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "8bit"])
def test_resuming_from_a_state_dict_changes_nothing(moments):
    start = torch.randn(3000).bfloat16()
    grads = [g.bfloat16() for g in _gradients(3000, 6)]
    straight = torch.nn.Parameter(start.clone())
    optimizer = AdamWSplit([straight], moments=moments, **SETTINGS)
    for grad in grads[:3]:
        straight.grad = grad
        optimizer.step()
    resumed = torch.nn.Parameter(straight.detach().clone())
    other = AdamWSplit([resumed], moments=moments, **SETTINGS)
    other.load_state_dict(optimizer.state_dict())
    for grad in grads[3:]:
        straight.grad, resumed.grad = grad, grad
        optimizer.step()
        other.step()
    assert torch.equal(optimizer.master(straight), other.master(resumed))


def test_chunks_start_on_blocks_and_avoid_copies():
    buffer = torch.arange(5000.0)
    views = [buffer[:100], buffer[100:4000].view(39, 100), buffer[4000:]]
    (start, (chunk,)), *rest = pieces.cut(views, 1 << 20)
    assert start == 0 and chunk.data_ptr() == buffer.data_ptr() and not rest
    apart = [buffer[:100].clone(), buffer[100:4000].clone(), buffer[4000:].clone()]
    found = list(pieces.cut(apart, 512))
    assert [s for s, _ in found] == list(range(0, 5000, 512))
    assert torch.equal(torch.cat([pieces.joined(c) for _, c in found]), buffer)


def test_fp32_parameters_are_refused():
    param = torch.nn.Parameter(torch.zeros(3))
    param.grad = torch.ones(3)
    with pytest.raises(UsageError, match="bf16"):
        AdamWSplit([param]).step()
