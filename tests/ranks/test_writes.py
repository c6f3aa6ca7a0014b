"""Weights that a script writes between steps: the next update goes on from them, and not from what the fp32 masters held."""

import pytest
import torch

from bigtrain.engine import Engine
from bigtrain.errors import RanksDisagreeError
from bigtrain.models import build_model
from bigtrain.zero import gathered
from tests.ranks.tiny import TinyLM, config, rows, share, whole_weights

CASES = [
    (0, {}),
    (1, {}),
    (2, {}),
    (2, {"offload_optimizer": {"device": "cpu"}}),
    (3, {}),
    (3, {"offload_optimizer": {"device": "cpu"}}),
]


def _engine(stage, zero, bf16, rate=3e-3):
    ds_config = config(stage, bf16=bf16, **zero)
    model = build_model(TinyLM, ds_config=ds_config, seed=1, dtype=torch.bfloat16 if bf16 else torch.float32)
    return Engine(model, ds_config=ds_config, learning_rate=rate, total_steps=100, lr_scheduler="constant", weight_decay=0.0)


def _train(engine, first, last):
    return [engine.train_step(share(rows(step), engine.rank, engine.world_size, 1)).loss for step in range(first, last)]


def _write(engine, values):
    with torch.no_grad():
        for name, param in engine.module.named_parameters():
            with gathered([param], modifier_rank=0):
                param.copy_(values[name])


def _same(engine, values):
    return [name for name, w in whole_weights(engine.module).items() if not torch.equal(w, values[name])]


def _written(stage, zero, bf16, folder):
    """Names that do not hold what was written: after an update at a rate of 0, and after saving and loading."""
    engine = _engine(stage, zero, bf16)
    _train(engine, 0, 2)
    generator = torch.Generator().manual_seed(5)
    drawn = {n: torch.randn(w.shape, generator=generator) for n, w in whole_weights(engine.module).items()}
    values = {n: value.to(engine.dtype).float() for n, value in drawn.items()}
    _write(engine, values)
    engine.save_checkpoint(folder)
    engine._rates.peaks[:] = [0.0 for _ in engine._rates.peaks]
    _train(engine, 2, 3)
    stepped = _same(engine, values)
    engine.close()
    engine = _engine(stage, zero, bf16, rate=3e-3)
    engine.load_checkpoint(folder)
    loaded = _same(engine, values)
    engine.close()
    return stepped, loaded


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("stage, zero", CASES)
def test_what_was_written_is_trained_and_saved(rank_pool, tmp_path, stage, zero, bf16):
    assert rank_pool(2).run(_written, stage, zero, bf16, str(tmp_path)) == [([], []), ([], [])]


def _on_one_rank(stage, back, folder=None):
    """Rank 0 alone writes other weights, and puts its own `back`; with a folder all save before the next step."""
    engine = _engine(stage, {}, bf16=True)
    _train(engine, 0, 2)
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    with torch.no_grad():
        for name, param in engine.module.named_parameters() if engine.rank == 0 else ():
            param.zero_()
            if back:
                param.copy_(weights[name])
    if folder is not None:
        engine.save_checkpoint(folder)
    try:
        return _train(engine, 2, 3)[0] > 0
    except RanksDisagreeError as error:
        return str(error)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_writing_on_one_rank_only_is_refused_unless_it_was_undone(rank_pool, tmp_path, stage):
    assert rank_pool(2).run(_on_one_rank, stage, True) == [True, True]
    for said in [*rank_pool(2).run(_on_one_rank, stage, False), *rank_pool(2).run(_on_one_rank, stage, False, str(tmp_path))]:
        assert "step 3: a script wrote weights since the last step, but not on ranks [1]" in said


def _swapped(stage, zero):
    """Losses with other weights (averaged ones, say) in place for a while between two steps, and without."""
    runs = []
    for swaps in (False, True):
        engine = _engine(stage, zero, bf16=True)
        losses = _train(engine, 0, 2)
        if swaps:
            mine = {name: w.clone() for name, w in whole_weights(engine.module).items()}
            _write(engine, {name: torch.zeros_like(w) for name, w in mine.items()})
            _write(engine, mine)
        runs.append(losses + _train(engine, 2, 5))
        engine.close()
    return runs


@pytest.mark.parametrize("stage, zero", CASES)
def test_weights_swapped_out_and_in_again_change_nothing(rank_pool, stage, zero):
    for plain, swapped in rank_pool(2).run(_swapped, stage, zero):
        assert plain == swapped


def _one_row(stage):
    """A persistent parameter is whole between steps at stage 3 too, and is written where it stands."""
    engine = _engine(stage, {"stage3_param_persistence_threshold": 100_000} if stage == 3 else {}, bf16=True)
    _train(engine, 0, 2)
    with torch.no_grad():
        engine.module.embed.weight[7] = 0.5
    engine._rates.peaks[:] = [0.0 for _ in engine._rates.peaks]
    _train(engine, 2, 3)
    rows_of = whole_weights(engine.module)["embed.weight"]
    engine.close()
    return [row for row, values in enumerate(rows_of) if bool((values == 0.5).all())]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_row_written_in_place_stays(rank_pool, stage):
    assert rank_pool(2).run(_one_row, stage) == [[7], [7]]


def _padding_filled():
    """(elements behind the parameters' ends, whether the losses are those without writing there)."""
    engine = _engine(3, {}, bf16=True)
    plain = _train(engine, 0, 3)
    engine.close()
    engine, losses, padded = _engine(3, {}, bf16=True), [], 0
    for step, value in enumerate((float("nan"), 7.0, float("nan"))):
        for param in engine.module.parameters():
            part = param.ds_tensor
            own = max(0, param.ds_numel - engine.rank * part.ds_numel)
            padded += part[own:].numel()
            part.data[own:] = value
        losses += _train(engine, step, step + 1)
    engine.close()
    return padded, losses == plain


def test_what_lies_behind_the_last_slice_is_nobodys(rank_pool):
    """Its memory was never written: whatever is found there, NaN too, is no write of a script's on that rank alone."""
    told = rank_pool(3).run(_padding_filled)
    assert [right for _, right in told] == [True] * 3 and told[0][0] == 0 < told[2][0]
