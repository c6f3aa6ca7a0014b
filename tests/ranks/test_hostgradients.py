"""Offload on a CPU without a copy of every gradient in passing: what DeepSpeed's own way gives, with less memory."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bigtrain.engine import Engine, hostgradients, reduction
from bigtrain.engine.hostgradients import NORM_PIECE_ELEMS
from tests.ranks.tiny import TinyLM, config, rows, share

WIDTH = 192  # the largest matrix has more elements than a piece of the norm


class Largest(TorchDispatchMode):
    """Most elements of a fresh fp64 tensor, and of an fp32 copy of a bf16 one."""

    def __init__(self):
        super().__init__()
        self.fp64 = self.fp32 = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            if out.dtype == torch.float64:
                self.fp64 = max(self.fp64, out.numel())
            elif out.dtype == torch.float32 and args[0].dtype == torch.bfloat16:
                self.fp32 = max(self.fp32, out.numel())
        return out


def _train(accumulation, offload, own):
    """(weights, norms, largest fp64 copy, largest fp32 copy) of three steps; `own`: DeepSpeed left as it is."""
    kept = reduction.HostGradients, reduction.add_to
    if own:
        reduction.HostGradients = lambda optimizer: None
        reduction.add_to = lambda output, source: None if output is None else output.add_(source.to(output.dtype))
    try:
        torch.manual_seed(0)
        more = {"offload_optimizer": {"device": "cpu"}} if offload else {}
        settings = config(2, micro=2, accumulation=accumulation, reduce_bucket_size=1_000_000, **more)
        engine = Engine(TinyLM(WIDTH), ds_config=settings, learning_rate=1e-2, max_grad_norm=0.0)
        held = Largest()
        norms = []
        for step in range(3):
            batches = share(rows(step, n=4 * accumulation, length=16), engine.rank, engine.world_size, accumulation)
            with held:
                norms.append(engine.train_step(batches).grad_norm)
        weights = torch.cat([p.detach().reshape(-1) for p in engine.module.parameters()])
        engine.close()
        return weights, norms, held.fp64, held.fp32
    finally:
        reduction.HostGradients, reduction.add_to = kept


@pytest.mark.parametrize("accumulation, offload", [(1, True), (2, True), (2, False)])
def test_the_same_training_without_copies_of_whole_gradients(rank_pool, accumulation, offload):
    ours = rank_pool(2).run(_train, accumulation, offload, False)
    own = rank_pool(2).run(_train, accumulation, offload, True)
    for (weights, norms, fp64, fp32), (weights0, norms0, fp640, fp320) in zip(ours, own):
        assert torch.equal(weights, weights0)
        assert norms == pytest.approx(norms0, rel=1e-6)  # one sum in fp64, in another order; told in fp32
        assert fp64 <= NORM_PIECE_ELEMS and fp32 < fp320
        assert fp640 > NORM_PIECE_ELEMS or not offload


def test_adding_makes_no_copy_of_the_whole_even_within_torch():
    """The kernel's own mark of the most that was resident: a conversion inside of an operator of torch shows in nothing else."""
    output, source = torch.ones(1 << 25), torch.full((1 << 25,), 0.5, dtype=torch.bfloat16)

    def grown(add):
        Path("/proc/self/clear_refs").write_text("5")  # the mark is what is resident now
        before = resident("VmRSS")
        add(output, source)
        return resident("VmHWM") - before

    assert grown(hostgradients.add_to) < 32 << 20 < grown(lambda a, b: a.add_(b))
    assert torch.equal(output, torch.full((1 << 25,), 2.0))


def resident(name):
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024


def test_the_norm_does_not_depend_on_the_pieces():
    grad = torch.randn(3 * NORM_PIECE_ELEMS + 7, dtype=torch.bfloat16)
    assert hostgradients.norm_of(grad) == pytest.approx(float(grad.double().norm()), rel=1e-12)
