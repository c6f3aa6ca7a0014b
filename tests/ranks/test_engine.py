"""The engine's promises on real ranks: one loss, one norm, dtypes, non-finite steps, agreement."""

import logging
import math

import pytest
import torch
from torch import nn

from bigtrain import ranks
from bigtrain.engine import Engine
from bigtrain.errors import DataError, ModelError, NonFiniteError, RanksDisagreeError, StoppedError, UsageError
from tests.ranks.tiny import TinyLM, config, rows, share, whole_weights

STAGES = [0, 1, 2, 3]


def _engine(stage, *, bf16=True, accumulation=1, model=None, zero=None, **kwargs):
    torch.manual_seed(0)
    ds_config = config(stage, bf16=bf16, accumulation=accumulation, **(zero or {}))
    kwargs = {"learning_rate": 1e-2, **kwargs}
    return Engine(TinyLM() if model is None else model, ds_config=ds_config, **kwargs)


def _gradient(engine):
    from tests.ranks.test_engine_bypass import _reduced_gradient

    return _reduced_gradient(engine)


# ---------------------------------------------------------------- B56


def _four_sequences():
    """2, 9, 3 and 14 target tokens."""
    samples = rows(0, n=4, length=16, ragged=False)
    for sample, targets in zip(samples, (2, 9, 3, 14)):
        sample["labels"][:, targets + 1 :] = -100
    return samples


def _split(stage, accumulation):
    engine = _engine(stage, bf16=False, accumulation=accumulation, max_grad_norm=0.0)
    captured = {}
    original = engine._reduction.step

    def step(refuse):
        captured["gradient"] = _gradient(engine)
        return original(refuse)

    engine._reduction.step = step
    result = engine.train_step(share(_four_sequences(), engine.rank, engine.world_size, accumulation))
    engine.close()
    return result.loss, result.tokens, result.grad_norm, captured["gradient"].tolist()


@pytest.mark.parametrize("stage", [2, 3])
def test_B56_any_split_of_a_global_batch_gives_the_same_loss_and_gradient(rank_pool, stage):
    whole = rank_pool(1).run(_split, stage, 1)[0]
    for world, accumulation in ((2, 1), (1, 2), (2, 2), (1, 4)):
        loss, tokens, norm, gradient = rank_pool(world).run(_split, stage, accumulation)[0]
        assert tokens == whole[1] == 28
        # fp32: the same terms are added in another order; 1e-6 of the largest element is 8 units in its last place.
        assert loss == pytest.approx(whole[0], rel=1e-6)
        assert norm == pytest.approx(whole[2], rel=2e-6)
        difference = (torch.tensor(gradient) - torch.tensor(whole[3])).abs().max()
        assert difference <= 1e-6 * torch.tensor(whole[3]).abs().max()


def _zero_targets():
    engine = _engine(2)
    samples = share(rows(0), engine.rank, engine.world_size, 2)
    samples[0]["labels"][:] = -100
    result = engine.train_step(samples)
    for sample in samples:
        sample["labels"][:] = -100
    try:
        engine.train_step(samples)
    except DataError as error:
        return result.loss, result.applied, str(error)
    finally:
        engine.close()
    return None


def test_a_micro_batch_without_targets_counts_nothing_and_a_global_batch_without_is_an_error(rank_pool):
    for loss, applied, message in rank_pool(2).run(_zero_targets):
        assert math.isfinite(loss) and applied
        assert "no target token" in message


# ---------------------------------------------------------------- B41, dtypes, buffers


def _curve(stage, bf16, clip):
    engine = _engine(stage, bf16=bf16, accumulation=2, max_grad_norm=clip)
    out = []
    for step in range(5):
        result = engine.train_step(share(rows(step), engine.rank, engine.world_size, 2))
        out.append((result.loss, result.grad_norm))
    summary = engine.summary()["dtypes"]
    scale = engine.module.scale
    engine.close()
    return out, summary, (str(scale.dtype), float((scale - torch.linspace(0.9, 1.1, 32)).abs().max()))


def test_B41_one_norm_with_one_meaning_at_every_stage(rank_pool):
    curves = {stage: rank_pool(2).run(_curve, stage, True, 0.5) for stage in STAGES}
    for stage in STAGES:
        assert curves[stage][0][0] == curves[stage][1][0]  # both ranks report the same
        for (loss, norm), (loss0, norm0) in zip(curves[stage][0][0], curves[0][0][0]):
            # bf16 gradients are rounded before (stages 2, 3) or after (0, 1) the sum over ranks: 2^-8 a term
            assert loss == pytest.approx(loss0, rel=2e-3)
            assert norm == pytest.approx(norm0, rel=5e-3)
            assert norm > 0.5  # reported before clipping


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_dtypes_of_weights_master_accumulation_moments_buffers(rank_pool, stage, bf16):
    for _, table, scale in rank_pool(2).run(_curve, stage, bf16, 1.0):
        assert set(table["params"]) == {"bfloat16" if bf16 else "float32"}
        assert set(table["master"]) == set(table["moments"]) == {"float32"}
        assert table["grad_accumulation"] == "float32"
        assert scale == ("torch.float32", 0.0)


def _no_loss_scale():
    engine = _engine(2)
    result = engine.train_step(share(rows(0), engine.rank, engine.world_size, 1))
    names = set(vars(result)) | set(engine.summary())
    engine.close()
    return sorted(n for n in names if "scale" in n)


def test_B38_nothing_speaks_of_a_loss_scale(rank_pool):
    assert rank_pool(2).run(_no_loss_scale) == [[], []]


# ---------------------------------------------------------------- B40


def _keep(stage):
    try:
        engine = _engine(stage, keep_in_fp32=("blocks.*.norm.*",))
    except UsageError as error:
        return str(error)
    engine.train_step(share(rows(0), engine.rank, engine.world_size, 1))
    kept = {n for n, p in engine.module.named_parameters() if p.dtype == torch.float32}
    listed = set(engine.summary()["dtypes"]["keep_in_fp32"])
    engine.close()
    return sorted(kept), kept == listed


def test_B40_parameters_kept_in_fp32_work_at_stage_0_and_are_refused_elsewhere(rank_pool):
    kept, listed = rank_pool(2).run(_keep, 0)[0]
    assert kept == [f"blocks.{i}.norm.{n}" for i in (0, 1) for n in ("bias", "weight")] and listed
    for stage in (1, 2, 3):
        assert f"stage {stage}" in rank_pool(2).run(_keep, stage)[1]


class WithBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8)
        self.out = nn.Linear(8, 1)

    def forward(self, image):
        return self.out(torch.relu(self.bn(self.conv(image))).mean((2, 3))).float().pow(2).mean()


def _batchnorm(stage):
    engine = _engine(stage, model=WithBatchNorm(), agree_every=1)
    for step in range(3):
        image = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + engine.rank))
        assert engine.train_step([{"image": image}]).tokens == 4 * engine.world_size
    bn = engine.module.bn
    evaluated = engine.evaluate([{"image": torch.zeros(2, 3, 8, 8)}])
    engine.close()
    return str(bn.running_var.dtype), bn.running_mean.tolist(), evaluated.tokens, bn.training


@pytest.mark.parametrize("stage", STAGES)
def test_batchnorm_statistics_are_fp32_move_and_are_equal_on_all_ranks(rank_pool, stage):
    first, second = rank_pool(2).run(_batchnorm, stage)
    assert first == second and first[0] == "torch.float32" and first[3] is True
    assert max(abs(v) for v in first[1]) > 1e-4


def _built_apart(stage):
    torch.manual_seed(torch.distributed.get_rank())
    engine = _engine(stage, model=TinyLM(), agree_every=1)
    losses = [engine.train_step(share(rows(s), engine.rank, engine.world_size, 2)).loss for s in range(2)]
    weights = whole_weights(engine.module)
    engine.close()
    return losses, {name: w.tolist() for name, w in weights.items()}


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_that_each_rank_began_otherwise_is_rank_0s_on_all(rank_pool, stage):
    """At stage 0 in bf16 fp32 masters were of each rank's own weights: every rank trained its own model from the first update on."""
    first, second = rank_pool(2).run(_built_apart, stage)
    assert first == second


class WithBuffers(nn.Module):
    """Buffers that forward sets from a rank's own samples."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind
        self.norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True) if kind == "statistics" else nn.Identity()
        self.register_buffer("seen", torch.zeros(4), persistent=kind == "kept")

    def forward(self, x):
        if self.kind != "statistics":
            self.seen = x.detach().float().mean(0)
        return self.norm(self.layer(x).view(-1, 2, 2)).float().pow(2).mean()


def _buffers(stage, kind):
    engine = _engine(stage, model=WithBuffers(kind), agree_every=1)
    try:
        engine.train_step([{"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(engine.rank))}])
        return "", [b.float().tolist() for b in engine.module.norm.buffers()]
    except RanksDisagreeError as error:
        return str(error), []
    finally:
        engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_buffers_that_ranks_fill_from_their_own_samples(rank_pool, stage):
    """InstanceNorm's statistics are shared as BatchNorm's are; what no checkpoint keeps (rotary frequencies that follow the longest
    row) may differ; of the rest the message says what to do, not that a machine computes wrongly."""
    first, second = rank_pool(2).run(_buffers, stage, "statistics")
    assert first == second and first[0] == "" and any(v != 0.0 for v in first[1][0])
    assert [said for said, _ in rank_pool(2).run(_buffers, stage, "not kept")] == ["", ""]
    for said, _ in rank_pool(2).run(_buffers, stage, "kept"):
        assert "seen: rank 0" in said and "all_reduce" in said and "persistent=False" in said and "hardware" not in said


def _batchnorm_meets_nan(stage):
    engine = _engine(stage, model=WithBatchNorm())
    image = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(engine.rank))
    engine.train_step([{"image": image}])
    before = [engine.module.bn.running_mean.tolist(), engine.module.bn.num_batches_tracked.item()]
    skipped = not engine.train_step([{"image": image * (math.nan if engine.rank == 1 else 1.0)}]).applied
    after = [engine.module.bn.running_mean.tolist(), engine.module.bn.num_batches_tracked.item()]
    engine.train_step([{"image": image}])
    loss = engine.evaluate([{"image": image}]).loss
    engine.close()
    return skipped, before == after, math.isfinite(loss)


def test_a_skipped_step_leaves_no_nan_in_batchnorm_statistics(rank_pool):
    assert rank_pool(2).run(_batchnorm_meets_nan, 2) == [(True, True, True)] * 2


# ---------------------------------------------------------------- B06, B07


def _rates(scheduler):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("bigtrain").addHandler(handler)
    ds_config = config(2)
    ds_config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01 if scheduler else 0.5}}
    if scheduler:
        ds_config["scheduler"] = scheduler
    torch.manual_seed(0)
    own = {} if scheduler else {"lr_scheduler": "linear", "warmup_steps": 4, "total_steps": 10}
    engine = Engine(TinyLM(), ds_config=ds_config, optimizer="adamw", learning_rate=1e-2, **own)
    used, logged = [], []
    for step in range(5):
        logged.append(engine.train_step(share(rows(step), engine.rank, engine.world_size, 1)).lr)
        used.append(engine.deepspeed.optimizer.param_groups[0]["lr"])
    engine.close()
    logging.getLogger("bigtrain").removeHandler(handler)
    return used, logged, messages


def test_B06_B07_one_optimizer_said_aloud_and_the_first_update_at_the_warm_up_rate(rank_pool):
    used, logged, messages = rank_pool(2).run(_rates, None)[0]
    assert used == logged == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2, 1e-2])
    assert any("two optimizers" in m for m in messages) and any(
        "learning_rate: the Engine was given 0.01" in m for m in messages
    )


def test_B06_a_schedule_of_the_ds_config_is_translated_or_refused_by_name(rank_pool):
    section = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 4, "total_num_steps": 10, "warmup_max_lr": 0.01}}
    used, logged, messages = rank_pool(2).run(_rates, section)[0]
    assert used == logged == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2, 1e-2])
    assert any("WarmupDecayLR" in m for m in messages)


# ---------------------------------------------------------------- B37


def _poisoned(stage, batches_with_nan, limit, offload=False):
    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)
    zero = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    engine = _engine(stage, accumulation=2, nonfinite_limit=limit, agree_every=1, zero=zero)
    results, weights = [], []
    try:
        for step in range(4):
            if step in batches_with_nan and engine.rank == 1:
                parameter = engine.module.blocks[1].up.weight
                hook = parameter.register_hook(lambda grad: grad * float("nan"))
            else:
                hook = None
            result = engine.train_step(share(rows(step), engine.rank, engine.world_size, 2))
            results.append((result.step, result.applied, result.skipped, result.reason, result.loss, result.lr))
            weights.append(float(sum(w.double().sum() for w in whole_weights(engine.module).values())))
            if hook is not None:
                hook.remove()
    except NonFiniteError as error:
        return results, weights, (str(error), error.step, error.count)
    finally:
        engine.close()
    return results, weights, None


@pytest.mark.parametrize("stage,offload", [(0, False), (1, False), (2, False), (3, False), (1, True), (2, True), (3, True)])
def test_B37_a_non_finite_gradient_on_one_rank_is_skipped_and_named(rank_pool, stage, offload):
    both = rank_pool(2).run(_poisoned, stage, (1,), 5, offload)
    assert both[0] == both[1]
    results, weights, stopped = both[0]
    assert stopped is None and [r[1] for r in results] == [True, False, True, True]
    assert [r[0] for r in results] == [1, 2, 3, 4] and results[-1][2] == 1  # a skipped step counts as a step
    assert "rank 1" in results[1][3] and "blocks.1.up.weight" in results[1][3] and "step 2" in results[1][3]
    assert weights[1] == weights[0] and weights[2] != weights[1]
    assert all(math.isfinite(w) for w in weights)


@pytest.mark.parametrize("stage", STAGES)
def test_B37_the_run_stops_after_so_many_in_a_row_on_all_ranks(rank_pool, stage):
    for results, _, (message, step, count) in rank_pool(2).run(_poisoned, stage, (1, 2, 3), 2):
        assert len(results) == 2 and (step, count) == (3, 2)
        assert "rank 1" in message and "scale" not in message


# ---------------------------------------------------------------- agreement, freezing, B49


def _corrupt(what):
    engine = _engine(2, agree_every=1)
    engine.train_step(share(rows(0), engine.rank, engine.world_size, 1))
    if engine.rank == 1 and what == "weight":
        with torch.no_grad():
            engine.module.norm.bias[3] += 0.5
    if engine.rank == 1 and what == "data position":
        engine.data_position += 1
    try:
        engine.check_agreement()
    except RanksDisagreeError as error:
        return str(error)
    finally:
        engine.close()


def test_ranks_that_differ_stop_naming_what_differs(rank_pool):
    assert all("norm.bias" in m and "rank 1" in m for m in rank_pool(2).run(_corrupt, "weight"))
    assert all("data position" in m for m in rank_pool(2).run(_corrupt, "data position"))
    assert rank_pool(2).run(_corrupt, "nothing") == [None, None]


def _thaw(stage):
    torch.manual_seed(0)
    model = TinyLM()
    model.norm.bias.requires_grad_(False)
    engine = _engine(stage, model=model)
    engine.train_step(share(rows(0), engine.rank, engine.world_size, 1))
    engine.module.norm.bias.requires_grad_(True)
    engine.module.norm.weight.requires_grad_(False)
    try:
        engine.train_step(share(rows(1), engine.rank, engine.world_size, 1))
    except ModelError as error:
        return str(error)
    finally:
        engine.close()


@pytest.mark.parametrize("stage", [0, 2])
def test_a_parameter_unfrozen_or_frozen_after_construction_is_an_error(rank_pool, stage):
    for message in rank_pool(2).run(_thaw, stage):
        assert "norm.bias" in message and "norm.weight" in message


def _no_sync(stage):
    engine = _engine(stage, accumulation=2)
    batches = share(rows(0), engine.rank, engine.world_size, 2)
    results = []
    for batch in batches:
        with engine.no_sync():
            engine.backward(engine(**batch)["loss"])
        results.append(engine.step())
    engine.close()
    return results[0], results[1].applied


@pytest.mark.parametrize("stage", STAGES)
def test_B49_no_sync_is_allowed_and_does_nothing(rank_pool, stage):
    assert rank_pool(2).run(_no_sync, stage) == [(None, True)] * 2


def _modes():
    engine = _engine(3)
    engine.module.blocks[0].eval()
    batches = [batch for step in range(2 + engine.rank) for batch in share(rows(step), engine.rank, engine.world_size, 1)]
    result = engine.evaluate(batches)
    modes = (engine.module.training, engine.module.blocks[0].training, engine.module.blocks[0].drop.training)
    engine.close()
    return result.loss, result.tokens, modes, ranks.rank()


def test_evaluate_counts_each_token_once_and_restores_modes(rank_pool):
    first, second = rank_pool(2).run(_modes)
    assert first[:3] == second[:3] and first[2] == (True, False, False)
    assert math.isfinite(first[0])


def _cut_short():
    engine = _engine(3)
    batches = [batch for step in range(2 + engine.rank) for batch in share(rows(step), engine.rank, engine.world_size, 1)]
    asked, said = [], []
    for at in (2, 4):  # batches on rank 0, of three that all take part in
        try:
            engine.evaluate(batches, stop=lambda at=at: asked.append(1) or (engine.rank == 0 and len(asked) == at))
            said.append("whole")
        except StoppedError as error:
            said.append(str(error))
        asked.clear()
    said.append(engine.evaluate(batches).tokens > 0 and engine.module.training)
    engine.close()
    return said


def test_an_evaluation_is_cut_short_on_all_ranks_before_the_batch_where_one_is_asked_to_stop(rank_pool):
    assert rank_pool(2).run(_cut_short) == [["evaluate() was asked to stop before batch 2", "whole", True]] * 2


def _under_default_dtype(dtype):
    torch.manual_seed(0)
    model = TinyLM()
    torch.set_default_dtype(dtype)  # left there by the script, as for building a model in bf16
    try:
        engine = _engine(0, bf16=False, model=model)
        results = [engine.train_step(share(rows(s), engine.rank, engine.world_size, 1)) for s in range(2)]
        engine.close()
    finally:
        torch.set_default_dtype(torch.float32)
    return [(r.loss, r.grad_norm) for r in results]


def test_gradients_are_summed_in_fp32_at_stage_0_whatever_torchs_default_dtype_is(rank_pool):
    pool = rank_pool(2)
    for one, other in zip(pool.run(_under_default_dtype, torch.bfloat16), pool.run(_under_default_dtype, torch.float32)):
        assert one == other
