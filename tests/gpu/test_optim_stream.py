"""Optimizer state streamed through a real GPU: the bits of the unstreamed update, exact pinned memory, and overlap."""

import json
import os
import subprocess

import pytest
import torch

from bigtrain.memory.pinned import HostMemory
from bigtrain.optim.lanes import Streams
from bigtrain.optim.split import AdamWSplit
from bigtrain.optim.stream import Stream
from tests import python_path, torchrun
from tests.gpu.processes import on_a_card

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def _cuda():
    return torch.device("cuda", torch.cuda.current_device())


def _busy(matrix, times=20):
    """Keep the compute stream behind, so that whatever does not wait for it is early."""
    for _ in range(times):
        matrix = matrix @ matrix * 1e-3
    return matrix


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "8bit"])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_streams_change_no_bit(moments, ratio):
    """Deferred, brought up early, beside matmuls, with gradients and factor made at the last moment and weights read at once."""
    sizes = (3_000_000, 700_000, 5_000_001)
    generator = torch.Generator(device="cuda").manual_seed(0)
    starts = [(torch.randn(n, device="cuda", generator=generator) * 0.02).bfloat16() for n in sizes]
    plain, streamed = ([torch.nn.Parameter(s.clone()) for s in starts] for _ in range(2))
    one, two = (AdamWSplit(p, moments=moments, **SETTINGS) for p in (plain, streamed))
    two.stream = Stream(two.layout, Streams(_cuda()), _cuda(), ratio=ratio, chunk_bytes=4 << 20)
    two.stream.deferred = True
    plan = two.stream.plan(streamed)
    last = {id(p): max(i for i, c in enumerate(plan.chunks) if c.param is p) for p in streamed}
    matrix = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    for step in range(5):
        reads = []
        for a, b in zip(plain, streamed):
            two.stream.wait_for(plan, last[id(b)])
            reads.append((a.detach().double().sum(), b.detach().double().sum()))
        two.stream.prefetch()
        _busy(matrix)
        grads = [torch.randn(n, device="cuda", generator=generator).bfloat16() for n in sizes]
        factor = torch.rand((), device="cuda", generator=generator)
        for optimizer, params in ((one, plain), (two, streamed)):
            optimizer.grad_factor = factor
            for param, grad in zip(params, grads):
                optimizer.hand_over(param, [grad[:1000].clone(), grad[1000:].clone()])
            optimizer.step()
        two.stream.begin()
        del grads, factor
        torch.cuda.empty_cache() if step == 2 else None
        junk = [
            torch.full((n,), 7.0, device="cuda", dtype=torch.bfloat16) for n in sizes
        ]  # takes memory that was freed too soon
        del junk
        assert all(x == y for x, y in reads), step
        if step == 3:
            two.synchronize()
    two.synchronize()
    for a, b in zip(plain, streamed):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))
        for name, value in one.state[a].items():
            if name != "step":
                theirs = two.state[b][name]
                assert theirs.device.type == "cpu" and torch.equal(value.cpu().view(-1), theirs), name


def test_pinned_memory_is_of_exact_size_and_copies_run_asynchronously():
    n = 100_000_001
    memory = HostMemory({"a": (n, torch.uint8)}, pin=True)
    assert memory.pinned and memory._size == -(-n // 4096) * 4096
    tensor = memory.tensors["a"]
    assert tensor.is_pinned()
    there = torch.empty(n, dtype=torch.uint8, device="cuda")
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    _busy(matrix, 50)  # tens of milliseconds
    done = torch.cuda.Event()
    there.copy_(tensor, non_blocking=True)
    done.record()
    assert not done.query()  # the call came back before the copy, which waits behind the matmuls
    done.synchronize()


def _seconds(work, repeats=3):
    work()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def test_both_directions_of_the_bus_are_used_at_once():
    n = 1 << 28
    param = torch.nn.Parameter(torch.zeros(n, dtype=torch.bfloat16, device="cuda"))
    grad = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    optimizer = AdamWSplit([param], moments="8bit", **SETTINGS)
    optimizer.stream = Stream(optimizer.layout, Streams(_cuda()), _cuda())

    def step():
        optimizer.hand_over(param, [grad])
        optimizer.step()

    whole = _seconds(step)
    host = next(iter(optimizer.stream._memory.values())).tensors["low"]
    device = torch.empty_like(host, device="cuda")
    up = _seconds(lambda: device.copy_(host, non_blocking=True)) * 2  # low is half of the bytes
    down = _seconds(lambda: host.copy_(device, non_blocking=True)) * 2
    print(f"step {whole:.3f} s, up alone {up:.3f} s, down alone {down:.3f} s")
    assert whole < 0.8 * (up + down)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("optimizer", ["adamw_split", "adamw_split_bf16", "adamw_split_8bit"])
def test_an_engine_with_offload_trains_as_without(tmp_path, optimizer, stage):
    found = [on_a_card(train, tmp_path / str(offload), optimizer, stage, offload) for offload in (False, True)]
    plain, host = found
    assert plain[:2] == host[:2]
    assert plain[2] == ["cuda"] and host[2] == ["cpu"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("optimizer", ["adamw_split", "adamw_split_8bit"])
def test_two_cards_that_give_each_other_chunks_train_as_those_that_gather_once(tmp_path, optimizer):
    """Forward runs beside the update and the other card's weights: who reads one too early has another loss."""
    found = []
    for offload in (False, True):
        file, root = tmp_path / f"story-{offload}.json", tmp_path / str(offload)
        code = (
            "import json, os; from bigtrain import zero; zero.init_distributed(timeout_s=200)\n"
            "from tests.gpu.test_optim_stream import train\n"
            f"told = train({str(root)!r}, {optimizer!r}, 2, {offload}, 2048)\n"
            f"open({str(file)!r} + os.environ['RANK'], 'w').write(json.dumps(told))"
        )
        (tmp_path / "story.py").write_text(code)
        env = {**os.environ, "PYTHONPATH": python_path(), "DS_ACCELERATOR": "cuda"}
        command = [*torchrun(2), str(tmp_path / "story.py")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append([json.loads((tmp_path / f"{file.name}{rank}").read_text()) for rank in (0, 1)])
    plain, host = found
    assert [one[:2] for one in plain] == [one[:2] for one in host]
    assert {tuple(one[2]) for one in host} == {("cpu",)}


def train(root, optimizer, stage, offload, width=512):
    """Losses of a short story with a save, a load and an evaluation; sums of the masters; where the state lies."""
    from bigtrain.engine import Engine
    from bigtrain.models import build_model
    from tests.ranks.tiny import TinyLM, config, rows

    cfg = config(stage, bf16=True, micro=1, accumulation=1)
    if offload:
        cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    model = build_model(lambda: TinyLM(width=width, blocks=6), ds_config=cfg, seed=1)
    engine = Engine(model, ds_config=cfg, optimizer=optimizer, learning_rate=1e-3, max_grad_norm=0.5, hang_s=None)

    def mine(step):
        return rows(step, 4)[engine.rank :: engine.world_size]

    seen = [engine.train_step(mine(s)).loss for s in range(3)]
    engine.save_checkpoint(root)
    seen += [engine.train_step(mine(s)).loss for s in range(3, 5)]
    engine.load_checkpoint(root)
    seen += [engine.train_step(mine(s)).loss for s in range(3, 5)]
    seen.append(engine.evaluate(mine(9)).loss)
    inner = engine.deepspeed.basic_optimizer
    places = sorted({t.device.type for s in inner.state.values() for t in s.values() if isinstance(t, torch.Tensor)})
    masters = [float(inner.master(p).double().sum()) for p in inner.state]
    engine.close()
    return seen, masters, places


@pytest.mark.parametrize("optimizer, accumulation", [("adamw_split_8bit", 1), ("adamw_split", 3)])
def test_an_engine_whose_gradients_leave_trains_as_without(tmp_path, optimizer, accumulation):
    found = [on_a_card(spill, tmp_path / str(share), optimizer, accumulation, share) for share in (0.0, 0.4, 1.0)]
    stay, some, all_ = found
    assert stay["seen"] == some["seen"] == all_["seen"] and stay["masters"] == some["masters"] == all_["masters"]
    assert stay["held"] == 0 and some["pinned"] and all_["held"] == 2 * all_["elems"]
    print({k: (f["held"], f["peak"]) for k, f in zip((0.0, 0.4, 1.0), found)})
    assert stay["peak"] - all_["peak"] > 0.4 * 2 * all_["elems"]


def spill(root, optimizer, accumulation, share):
    """Losses, norms and masters of a short story with a skipped step, a save, a load and an evaluation; memory."""
    from bigtrain.engine import Engine
    from bigtrain.models import build_model
    from bigtrain.optim import spill as module
    from tests.ranks.tiny import TinyLM, config, rows

    module.GRADIENTS_IN_FLIGHT_BYTES, module.GRADIENT_AREAS = 16 << 20, 2
    cfg = config(2, bf16=True, micro=1, accumulation=accumulation)
    cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    cfg["data_types"] = {"grad_accum_dtype": "bf16"}
    model = build_model(lambda: TinyLM(width=2048, blocks=6), ds_config=cfg, seed=1)
    told = {"learning_rate": 1e-3, "max_grad_norm": 0.5, "hang_s": None, "offload_gradients": share}
    engine = Engine(model, ds_config=cfg, optimizer=optimizer, **told)
    seen = []

    def step(number, poisoned=False):
        weight = engine.module.blocks[3].out.weight
        hook = weight.register_hook(lambda g: g * float("nan")) if poisoned else None
        result = engine.train_step(rows(number, accumulation))
        seen.append([result.loss, str(result.grad_norm), result.applied, result.reason])
        if hook:
            hook.remove()

    for number in range(3):
        step(number)
    torch.cuda.reset_peak_memory_stats()
    step(3)
    peak = torch.cuda.max_memory_allocated()
    step(4, poisoned=True)
    engine.save_checkpoint(root)
    step(5)
    engine.load_checkpoint(root)
    step(5)
    step(6)
    seen.append(engine.evaluate(rows(9, 4)).loss)
    gradients = engine._reduction.stream.gradients
    inner = engine.deepspeed.basic_optimizer
    found = {
        "seen": seen,
        "masters": [float(inner.master(p).double().sum()) for p in inner.state],
        "held": gradients.host_bytes if gradients else 0,
        "pinned": gradients._memory.pinned if gradients else False,
        "elems": sum(p.numel() for p in engine.module.parameters()),
        "peak": peak,
    }
    engine.close()
    return found
