"""One rank on a card: gradients stay where autograd puts them, and what is not finite in them is named all the same."""

import pytest
import torch

from tests.gpu.processes import on_a_card

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_gradient_that_is_not_finite_is_named_and_its_step_skipped(accumulation):
    alone, summing, name, applied, reasons, norms = on_a_card(train, accumulation)
    assert alone and not summing  # the norms' pass over the gradients is the only one
    assert applied == [True, False, True]
    assert name in reasons[1] and not reasons[0] and not reasons[2]
    assert norms[0] > 0 and norms[2] > 0


def train(accumulation):
    """Three steps, the second with a NaN in one parameter's gradient of its first micro batch."""
    from bigtrain.engine import Engine
    from bigtrain.models import build_model
    from tests.ranks.tiny import TinyLM, config, rows

    cfg = config(2, bf16=True, micro=1, accumulation=accumulation)
    cfg["data_types"] = {"grad_accum_dtype": "bf16"}
    model = build_model(lambda: TinyLM(width=64, blocks=3), ds_config=cfg, seed=1)
    engine = Engine(model, ds_config=cfg, optimizer="adamw_split", learning_rate=1e-3, hang_s=None)
    name, param = list(engine.module.named_parameters())[3]
    poison = [False]

    def spoil(grad):
        bad, poison[0] = poison[0], False
        return grad * float("nan") if bad else grad

    param.register_hook(spoil)
    results = []
    for step in range(3):
        poison[0] = step == 1
        results.append(engine.train_step(rows(step, accumulation)))
    how = engine._reduction.alone, engine._parts.flags.summing
    engine.close()
    return *how, name, [r.applied for r in results], [r.reason for r in results], [r.grad_norm for r in results]


def test_deepspeed_gets_the_current_stream_as_torch_says_it():
    assert on_a_card(streams) == [True, True, True, True]


def streams():
    """Whether the streams are torch's own, inside and outside of another stream, and one object each."""
    from bigtrain.zero.startup import remembered_stream

    current = remembered_stream()
    before, other = current(), torch.cuda.Stream()
    right = [before == torch.cuda.current_stream()]
    with torch.cuda.stream(other):
        right.append(current() == other)
    return [*right, current(0) == torch.cuda.default_stream(0), current() is before]


def test_sums_of_gradients_stay_where_they_are_and_nothing_is_reserved_beside_them():
    places, reserved, allocated = on_a_card(summed)
    assert len(set(places)) == 1
    # Beside what is allocated at the peak: pages of 20 MiB begun, of few pools. A second buffer of sums would be 512 MiB.
    assert reserved - allocated < 256 << 20


def summed():
    """Six steps of two micro batches, state on the host: (places of the sums, peaks of reserved and allocated bytes)."""
    from bigtrain.engine import Engine
    from bigtrain.models import build_model
    from tests.ranks.tiny import TinyLM, config, rows

    cfg = config(2, bf16=True, micro=1, accumulation=2)
    cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    cfg["data_types"] = {"grad_accum_dtype": "fp32"}
    model = build_model(lambda: TinyLM(width=2048, blocks=4), ds_config=cfg, seed=1)  # 134e6 parameters
    engine = Engine(model, ds_config=cfg, optimizer="adamw_split", learning_rate=1e-3, hang_s=None)
    places = []
    for step in range(6):
        engine.train_step(rows(step, 2, length=2048))
        places += [kept.flat_partition.data_ptr() for kept in engine._reduction._kept_sums._kept.values()]
    peaks = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    engine.close()
    return places, *peaks
