"""Ranks that part: other parameters, other counts, other calls. An error in seconds, or made right."""

import os
import textwrap

import pytest
import torch

from bigtrain.engine import Engine
from bigtrain.errors import BigtrainError, RanksDisagreeError
from tests import python_path
from tests.ranks import scripts
from tests.ranks.tiny import Branched, Nested, TinyLM, config, rows, share, whole_weights


def _x(rank, i):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * i + rank))


def _unused(stage, bf16, use, **kwargs):
    """Train with the branch `b` used by (rank, micro step) as `use` says; final weights and norms, with a torch reference."""
    torch.manual_seed(0)
    zero = {"offload_optimizer": {"device": "cpu"}} if bf16 else {}
    module = Branched()
    reference = Branched()
    reference.load_state_dict(module.state_dict())
    engine = Engine(module, ds_config=config(stage, bf16=bf16, micro=4, accumulation=2, **zero), learning_rate=1e-2, **kwargs)
    torch_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.0)
    norms = []
    for step in range(3):
        for k in range(2):
            engine.backward(engine(_x(engine.rank, 10 * step + k).to(engine.dtype), use_b=use[engine.rank][k]))
        norm = engine.step()
        # None and zero differ for AdamW only where a parameter is never used: give the reference zeros.
        torch_optimizer.zero_grad(set_to_none=False)
        for k in range(2):
            for r in range(2):
                (reference(_x(r, 10 * step + k), use_b=use[r][k]) / 4).backward()
        for p in reference.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        true = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0))
        torch_optimizer.step()
        norms.append((norm.grad_norm, true))
    mine = whole_weights(engine.module)
    error = max(float((mine[n] - p.detach()).abs().max()) for n, p in reference.named_parameters())
    engine.close()
    return error, norms


USES = {
    "only rank 0": ((True, True), (False, False)),
    "first micro step only": ((True, False), (True, False)),
    "crosswise": ((True, False), (False, True)),
    "nobody": ((False, False), (False, False)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_B50_a_parameter_unused_on_one_rank_contributes_zero(rank_pool, stage, use):
    first, second = rank_pool(2).run(_unused, stage, False, USES[use])
    assert first == second
    error, norms = first
    assert error <= 1e-5  # AdamW divides by the root of tiny second moments: a last-place difference grows
    assert all(mine == pytest.approx(true, rel=1e-5) for mine, true in norms)


@pytest.mark.parametrize("use", ["first micro step only", "nobody"])
def test_a_parameter_that_no_rank_used_has_no_old_gradient_at_stage_3(rank_pool, use):
    """DeepSpeed keeps the partition of its last gradient and applies it again."""
    (error, norms), _ = rank_pool(2).run(_unused, 3, False, USES[use])
    assert error <= 1e-5
    assert all(mine == pytest.approx(true, rel=1e-5) for mine, true in norms)


@pytest.mark.parametrize("stage", [1, 2])
def test_B50_also_in_bf16_with_offload(rank_pool, stage):
    first, second = rank_pool(2).run(_unused, stage, True, USES["crosswise"])
    assert first == second
    assert all(mine == pytest.approx(true, rel=2e-2) for mine, true in first[1])  # bf16: 2^-8 in weights and activations


def _stage3_branch(leaf):
    torch.manual_seed(0)
    leaves = (Branched,) if leaf else ()
    engine = Engine(Nested(), ds_config=config(3, bf16=False, micro=4), learning_rate=1e-2, leaf_modules=leaves)
    try:
        for step in range(2):
            engine.backward(engine(_x(engine.rank, step), use_b=engine.rank == 0))
            result = engine.step()
        return result.applied
    except RanksDisagreeError as error:
        return str(error)
    finally:
        engine.close()


def test_B50_at_stage_3_a_branch_on_one_rank_is_an_error_that_names_the_module(rank_pool):
    for message in rank_pool(2).run(_stage3_branch, False):
        assert (
            "rank 0 enters module middle.b" in message
            and "rank 1 enters module middle.c" in message
            and "leaf_modules" in message
        )


def test_B50_at_stage_3_leaf_modules_make_it_right(rank_pool):
    assert rank_pool(2).run(_stage3_branch, True) == [True, True]


def _count(what):
    torch.manual_seed(0)
    engine = Engine(TinyLM(), ds_config=config(2, accumulation=2), learning_rate=1e-3)
    batches = share(rows(0), engine.rank, engine.world_size, 2)
    try:
        if what == "micro batches":
            engine.train_step(batches[: 2 - engine.rank])
        elif what == "backwards":
            for batch in batches[: 2 - engine.rank]:
                engine.backward(engine(**batch)["loss"])
            if engine.rank == 1:
                engine.evaluate(batches)
        else:
            engine.evaluate(batches if engine.rank == 0 else [])
    except BigtrainError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.close()


@pytest.mark.parametrize("what", ["micro batches", "backwards", "evaluation batches"])
def test_B48_unequal_counts_are_an_error_in_seconds_on_every_rank(rank_pool, what):
    for message in rank_pool(2).run(_count, what, limit_s=30):
        assert message is not None and message.startswith("RanksDisagreeError")


def test_B50_a_stage_3_hang_ends_with_a_report_of_where_each_rank_is(tmp_path):
    """Without the comparison module by module (as on GPUs), with gathers that wait for ever instead of aborting."""
    body = """
    import time, torch
    from bigtrain.engine import Engine
    from tests.ranks.tiny import Branched, config
    engine = Engine(Branched(), ds_config=config(3, bf16=False, micro=4), learning_rate=1e-2, uniform_forward=True, hang_s=3)
    hold = engine.module.b if engine.rank == 0 else engine.module.c
    hold.register_forward_pre_hook(lambda *_: time.sleep(600))  # stands for a gather that never ends
    engine(torch.zeros(4, 16), use_b=True)
    """
    (tmp_path / "body.py").write_text(textwrap.dedent(body))
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    both = scripts.Ranks([tmp_path / "body.py"], env, tmp_path / "said", cwd=tmp_path, apart=True)
    both.wait(240)
    for rank in both.ranks:
        assert rank.poll() == 1
        assert "no rank has moved" in rank.said()
    said = "".join(rank.said() for rank in both.ranks)
    assert "rank 0: waits before step 1: the forward pass, module b" in said and "the forward pass, module c" in said
