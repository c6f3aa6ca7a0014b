"""What an engine starts from: fp32 masters with all bits of the files."""

import inspect

import pytest
import torch

from tests.ranks import families
from tests.ranks.tiny import TinyLM, config, rows, share, whole_weights

EDITED = "model.layers.1.self_attn.o_proj.weight"


def _masters(engine):
    """Name -> whole fp32 master; a tied parameter has one."""
    from deepspeed.utils import safe_get_full_fp32_param

    if engine.stage:
        return {name: safe_get_full_fp32_param(p).reshape(-1) for name, p in engine.module.named_parameters()}
    optimizer = engine.deepspeed.optimizer
    of = {id(p): m for p, m in zip(optimizer.model_params, optimizer.masters)}
    return {name: of[id(p)].detach().reshape(-1) for name, p in engine.module.named_parameters()}


def _begin(folder, stage, offload, vocab, optimizer="adamw"):
    """(names of masters that differ from the file, master and weight of what was edited before the engine, steps work)."""
    from bigtrain import zero
    from bigtrain.engine import Engine
    from bigtrain.models import build_model

    more: dict = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    settings = config(stage, bf16=True, **more)
    exact = families.reference_values(folder)
    model = build_model(folder, ds_config=settings, resize_vocab_to=vocab)
    edited = dict(model.named_parameters())[EDITED]
    with zero.gathered([edited], modifier_rank=0):
        edited.data.view(-1)[:7] = 3.0
    engine = Engine(model, ds_config=settings, learning_rate=1e-2, optimizer=optimizer)
    if optimizer != "adamw":
        return model.bigtrain_info.finer_files is not None  # type: ignore[union-attr]
    found = _masters(engine)
    wrong = [name for name, value in found.items() if not torch.equal(value[: exact[name].numel()], exact[name].reshape(-1))]
    head = found[EDITED][:8].tolist()
    moved = True
    if "experts" not in "".join(found):  # torch's grouped product wants other widths than the odd ones of the tests
        ids = torch.arange(10).view(1, 10)
        moved = engine.train_step([{"input_ids": ids, "labels": ids}] * engine.accumulation).applied
    engine.close()
    return wrong, head[:7], head[7] == exact[EDITED].reshape(-1)[7], moved


@pytest.mark.parametrize(
    "stage,offload,vocab", [(0, 0, None), (1, 0, None), (2, 1, None), (3, 0, None), (3, 1, 140), (2, 0, 140)]
)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_masters_have_all_bits_of_an_fp32_folder(rank_pool, tmp_path, family, stage, offload, vocab):
    families.make(family, dtype=torch.float32).save_pretrained(tmp_path)
    if family == "qwen3_moe" and vocab:
        pytest.skip("resizing is told apart by one family")
    for wrong, edited, beside, applied in rank_pool(2).run(_begin, str(tmp_path), stage, offload, vocab):
        # what was changed after loading stays changed; a resized matrix has another shape than the file's
        resized = [n for n in wrong if "embed_tokens" in n or "lm_head" in n] if vocab else []
        assert [n for n in wrong if n not in resized] == [EDITED]
        assert edited == [3.0] * 7 and beside and applied


def test_files_as_coarse_as_the_model_are_not_read_again(rank_pool, tmp_path):
    families.make("llama").save_pretrained(tmp_path)
    assert rank_pool(2).run(_begin, str(tmp_path), 2, 0, None, "muon") == [False, False]


def test_an_optimizer_without_masters_begins_too(rank_pool, tmp_path):
    families.make("llama", dtype=torch.float32).save_pretrained(tmp_path)
    assert rank_pool(2).run(_begin, str(tmp_path), 3, 0, None, "adamw_split") == [True, True]


def _asked_in_a_step():
    """What DeepSpeed and torch work out in a step at stage 3: the CPUs, by a new process; signatures of functions."""
    from deepspeed.utils import numa

    from bigtrain.engine import Engine

    engine = Engine(TinyLM(), ds_config=config(3), optimizer="adamw_torch", learning_rate=1e-3, hang_s=None)
    engine.train_step(share(rows(0, 2), 0, 1, 1))
    asked: list[str] = []
    cores, signature = numa.get_numa_cores, inspect._signature_from_function  # type: ignore[attr-defined]
    numa.get_numa_cores = lambda: asked.append("cpus") or cores()
    inspect._signature_from_function = lambda *a, **k: asked.append("signature") or signature(*a, **k)  # type: ignore[attr-defined]
    try:
        engine.train_step(share(rows(1, 2), 0, 1, 1))
    finally:
        numa.get_numa_cores, inspect._signature_from_function = cores, signature  # type: ignore[attr-defined]
        engine.close()
    return asked


def test_nothing_is_asked_again_for_each_gradient_or_module(rank_pool):
    (asked,) = rank_pool(1).run(_asked_in_a_step)
    assert asked == []


def _a_weight_that_moved():
    """(weights of a run, of one whose weight was put elsewhere before its last step, that weight's place after both)."""
    from bigtrain.engine import Engine

    found = []
    for moves in (False, True):
        torch.manual_seed(0)
        engine = Engine(TinyLM(), ds_config=config(2), optimizer="adamw_torch", learning_rate=1e-3, hang_s=None)
        param = next(engine.module.parameters())
        for step in range(3):
            if moves and step == 2:
                param.data = param.data.clone()
            engine.train_step(share(rows(step, 2), engine.rank, engine.world_size, 1))
        whole = engine.deepspeed.optimizer.bit16_groups_flat
        home = any(flat.data_ptr() <= param.data_ptr() < flat.data_ptr() + flat.nbytes for flat in whole)
        found.append(([p.detach().clone() for p in engine.module.parameters()], home))
        engine.close()
    return found


def test_a_weight_that_was_put_elsewhere_comes_back_with_the_step(rank_pool):
    for (weights, home), (others, back) in rank_pool(2).run(_a_weight_that_moved):
        assert home and back
        assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def _masters_dealt_round(folder, stage):
    """What the fp32 masters hold after the start, and the weights after a write and a step at a rate of 0, by rank's own parts."""
    from bigtrain.checkpoint import live
    from bigtrain.engine import Engine
    from bigtrain.models import build_model

    ds_config = config(stage, bf16=True, round_robin_gradients=True, offload_optimizer={"device": "cpu"})
    engine = Engine(
        build_model(folder, ds_config=ds_config), ds_config=ds_config, optimizer="adamw", learning_rate=0.0, weight_decay=0.0
    )
    started = [(s.param, s.start, s.tensor.clone()) for s in live.slices_of(engine) if s.kind == "master"]
    with torch.no_grad():
        engine.module.model.norm.weight.fill_(3.0)
    ids = torch.arange(3, 9)[None]
    engine.train_step([{"input_ids": ids, "labels": ids}])
    weights = whole_weights(engine.module)
    engine.close()
    return started, weights


@pytest.mark.parametrize("stage", [1, 2])
def test_masters_are_those_of_their_parameters_where_they_are_dealt_round(rank_pool, tmp_path, stage):
    """round_robin_gradients: DeepSpeed links parameters to parts of the fp32 copy by another order than that of the parts."""
    model = families.make("llama_odd", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    values = {name: value.detach() for name, value in model.named_parameters()}
    results = rank_pool(2).run(_masters_dealt_round, str(tmp_path), stage)
    seen = 0
    for started, weights in results:
        for name, start, held in started:
            assert torch.equal(held.view(-1), values[name].view(-1)[start : start + held.numel()]), name
            seen += held.numel()
        for name, value in values.items():
            want = torch.full_like(value, 3.0) if name == "model.norm.weight" else value.bfloat16().float()
            assert torch.equal(weights[name], want), name
    assert seen == sum(value.numel() for value in values.values())
