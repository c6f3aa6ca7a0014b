"""Pretrained folders, frozen parts, adapters, activation checkpointing and experts over a model built at stage 3."""

import argparse
import json
import os
import types

import pytest
import torch
from torch import nn

from tests import python_path
from tests.ranks import scripts, zoo

ZERO3 = {"zero_optimization": {"stage": 3}}


def _config(stage, **more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, **more},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
    }


def _engine(model, stage=3, **more):
    from bigtrain import zero

    return zero.initialize(model, _config(stage, **more), params=[p for p in model.parameters() if p.requires_grad])


def _batch(seed=0):
    ids = torch.randint(0, 59, (2, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def _step(engine, **batch):
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    return loss.item()


# ---------------------------------------------------------------- pretrained folders


def _from_folder(folder, stage, vocab=None, **more):
    from bigtrain.models import build_model

    model = build_model(folder, ds_config={"zero_optimization": {"stage": stage}}, seed=11, resize_vocab_to=vocab, **more)
    return model, model.bigtrain_info


def _check_folder(folder, stage):
    from transformers import AutoModelForCausalLM

    model, info = _from_folder(folder, stage)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).train()
    return zoo.differences(model, reference), info.initialised, info.tied, model.training


def _save(folder, name, drop=()):
    model = zoo.plain(name, 1, torch.float32)
    model.save_pretrained(folder)
    if drop:
        from safetensors.torch import load_file, save_file

        values = load_file(folder / "model.safetensors")
        save_file({k: v for k, v in values.items() if k not in drop}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["llama_tied", "opt", "mixtral"])
def test_a_folder_with_weights_is_loaded(rank_pool, tmp_path, name, stage):
    _save(tmp_path, name)
    for wrong, initialised, _, training in rank_pool(2).run(_check_folder, tmp_path, stage):
        assert wrong == [] and initialised == () and training


def _missing(folder):
    """The missing tensor has the values that the seed gives in a plain build of the same class, at every stage."""
    from bigtrain import zero

    found = {}
    for stage in (0, 3):
        model, info = _from_folder(folder, stage, allow_missing=["*.1.mlp.up_proj.*"])
        p = dict(model.named_parameters())["model.layers.1.mlp.up_proj.weight"]
        with zero.gathered([p]):
            found[stage] = p.detach().clone()
        q = dict(model.named_parameters())["model.layers.0.mlp.up_proj.weight"]
        with zero.gathered([q]):
            found[f"other {stage}"] = q.detach().clone()
    std = found[3].float().std().item()
    return torch.equal(found[0], found[3]), torch.equal(found["other 0"], found["other 3"]), std, info.initialised


def test_names_missing_in_the_file_are_drawn_as_transformers_does_and_named(rank_pool, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    _save(tmp_path, "llama", drop=(name,))
    for same, others, std, initialised in rank_pool(3).run(_missing, tmp_path):
        assert same and others and 0.015 < std < 0.025 and initialised == (name,)


def _refused(folder, stage, **more):
    from bigtrain.errors import WeightsError

    try:
        return _from_folder(folder, stage, **more)[1].initialised
    except WeightsError as error:
        return str(error)


@pytest.mark.parametrize("stage", [0, 3])
def test_B19_missing_and_unexpected_tensors_stop_the_build_unless_allowed(rank_pool, tmp_path, stage):
    name = "model.layers.1.mlp.up_proj.weight"
    _save(tmp_path, "llama", drop=(name,))
    for said in rank_pool(2).run(_refused, tmp_path, stage):
        assert name in said and f"--allow_missing '{name}'" in said
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    for said in rank_pool(2).run(_refused, tmp_path, stage):
        assert "unexpected, 8" in said and "--allow_unexpected 'model.layers.1.*'" in said
    assert rank_pool(2).run(_refused, tmp_path, stage, allow_unexpected=["model.layers.1.*"]) == [(), ()]


def _resized_folder(folder):
    from bigtrain import zero

    found = {}
    for stage in (0, 3):
        model, info = _from_folder(folder, stage, vocab=70)
        with zero.gathered(list(model.parameters())):
            found[stage] = {n: p.detach().clone() for n, p in model.named_parameters()}
        ties = info.tied
    same = all(torch.equal(found[0][n], found[3][n]) for n in found[0])
    return same, tuple(found[3]["model.embed_tokens.weight"].shape), len(ties)


def test_a_loaded_folder_can_be_resized(rank_pool, tmp_path):
    _save(tmp_path, "llama_tied")
    for same, shape, ties in rank_pool(2).run(_resized_folder, tmp_path):
        assert same and shape == (70, 24) and ties == 1


def _with_live_hf_config(stage):
    from transformers.integrations import HfDeepSpeedConfig

    from bigtrain.models import build_model

    keep = HfDeepSpeedConfig({**ZERO3, "train_micro_batch_size_per_gpu": 1})
    model = build_model(zoo.source("llama"), ds_config={"zero_optimization": {"stage": stage}}, seed=7)
    import transformers.integrations.deepspeed as hf

    restored = hf._hf_deepspeed_config_weak_ref() is keep
    hf.unset_hf_deepspeed_config()
    return zoo.differences(model, zoo.plain("llama", 7)), restored


@pytest.mark.parametrize("stage", [0, 3])
def test_trap_13_a_live_or_dead_HfDeepSpeedConfig_changes_nothing(rank_pool, stage):
    for wrong, restored in rank_pool(2).run(_with_live_hf_config, stage):
        assert wrong == [] and restored


def test_trap_18_rotary_buffers_stay_fp32(rank_pool):
    for dtypes in rank_pool(2).run(_buffer_dtypes):
        assert dtypes == {torch.float32}


def _buffer_dtypes():
    from bigtrain.models import build_model

    model = build_model(zoo.source("llama"), ds_config=_config(3))
    engine = _engine(model)
    dtypes = {b.dtype for n, b in engine.module.named_buffers() if "inv_freq" in n}
    engine.destroy()
    return dtypes


# ---------------------------------------------------------------- frozen parts


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.conv(x))).mean((2, 3))


class Student(nn.Module):
    def __init__(self, checkpoint):
        super().__init__()
        from bigtrain.models import frozen_module

        self.teacher = frozen_module(Teacher, checkpoint)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return types.SimpleNamespace(loss=self.head(self.teacher(x)).float().square().mean())


def _student(path, stage, lightning):
    from bigtrain import zero
    from bigtrain.models import build_model

    model = build_model(lambda: Student(path), ds_config=_config(stage))
    wanted = torch.load(path, weights_only=True) if path.endswith((".pt", ".ckpt")) else None
    if wanted is not None:
        wanted = {k.removeprefix("net."): v for k, v in wanted["state_dict"].items()} if lightning else wanted
        weight = model.teacher.conv.weight
        with zero.gathered([weight]):
            assert torch.equal(weight, wanted["conv.weight"].bfloat16())
        assert torch.equal(model.teacher.norm.running_mean, wanted["norm.running_mean"])
    engine = _engine(model, stage)
    engine.train()
    before = engine.module.teacher.norm.running_mean.clone()
    losses = [_step(engine, x=torch.ones(2, 3, 8, 8).bfloat16()) for _ in range(3)]
    modes = {m.training for m in engine.module.teacher.modules()}
    same = torch.equal(before, engine.module.teacher.norm.running_mean)
    states = sum(p.numel() for g in engine.optimizer.param_groups for p in g["params"] if p.requires_grad)
    engine.destroy()
    return losses, modes, same, states, model.bigtrain_info.frozen


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["pt", "safetensors", "ckpt"])
def test_a_frozen_sub_model_with_its_own_checkpoint(rank_pool, tmp_path, stage, kind):
    torch.manual_seed(2)
    values = Teacher()
    values.norm.running_mean.normal_()
    values = values.state_dict()
    path = str(tmp_path / f"teacher.{kind}")
    if kind == "safetensors":
        from safetensors.torch import save_file

        save_file(values, path)
    else:
        torch.save(values if kind == "pt" else {"state_dict": {f"net.{k}": v for k, v in values.items()}, "epoch": 3}, path)
    for losses, modes, same, _, frozen in rank_pool(2).run(_student, path, stage, kind == "ckpt"):
        assert losses[-1] < losses[0] and modes == {False} and same
        assert set(frozen) == {"teacher.conv.weight", "teacher.conv.bias", "teacher.norm.weight", "teacher.norm.bias"}


def _vlm_frozen(stage):
    from bigtrain.models import build_model

    model = build_model(zoo.source("llava"), ds_config=_config(stage), freeze=("vision_tower",))
    frozen = model.bigtrain_info.frozen
    model.train()
    engine = _engine(model, stage)
    loss = _step(engine, **_batch())
    grads = [n for n, p in model.named_parameters() if "vision_tower" in n and p.grad is not None]
    engine.destroy()
    return len(frozen), all("vision_tower" in n for n in frozen), loss, grads, model.model.vision_tower.training


def test_a_vision_tower_is_frozen_by_prefix(rank_pool):
    for count, only, loss, grads, training in rank_pool(2).run(_vlm_frozen, 3):
        assert count > 10 and only and 3 < loss < 6 and grads == [] and training is False


# ---------------------------------------------------------------- adapters


def _lora(stage):
    from peft import LoraConfig, get_peft_model

    from bigtrain import zero
    from bigtrain.models import build_model, edit_model

    seen = {}

    def add(model):
        seen["shape"] = tuple(model.lm_head.weight.shape)
        seen["norm"] = model.lm_head.weight.float().norm().item()
        return get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "embed_tokens"], task_type="CAUSAL_LM"))

    model = build_model(zoo.source("llama"), ds_config=_config(stage), seed=7)
    tuned = edit_model(model, add)
    whole = {}
    for n, p in tuned.named_parameters():
        with zero.gathered([p]):
            whole[n] = (tuple(p.shape), p.requires_grad, p.detach().clone())
    parts = [zero.is_partitioned(p) for p in tuned.parameters()]
    engine = _engine(tuned, stage)
    losses = [_step(engine, **_batch()) for _ in range(3)]
    engine.destroy()
    return seen, whole, parts, losses, tuned.bigtrain_info.frozen


def test_B17_adapters_see_full_shapes_on_a_partitioned_model(rank_pool):
    reference = rank_pool(2).run(_lora, 0)[0]
    for seen, whole, parts, losses, frozen in rank_pool(2).run(_lora, 3):
        assert seen["shape"] == (61, 24) and seen["norm"] == reference[0]["norm"] and all(parts)
        assert whole.keys() == reference[1].keys()
        for name, (shape, trains, values) in whole.items():
            assert shape == reference[1][name][0] and trains == ("lora_" in name) and torch.equal(values, reference[1][name][2])
        assert losses == pytest.approx(reference[3], rel=1e-2) and losses[-1] < losses[0]
        assert frozen and not any("lora_" in n for n in frozen)


# ---------------------------------------------------------------- activation checkpointing


def _forwards(kind, stage, on):
    """Forward calls of each block in one training step."""
    from bigtrain.models import build_model, enable_activation_checkpointing
    from bigtrain.weights.companions import exported_config

    config = _config(stage)
    if kind == "hf":
        model = build_model(zoo.source("llama"), ds_config=config, seed=7)
        blocks, classes, batch = list(model.model.layers), None, _batch()
        inner = [b.mlp for b in blocks]
    else:
        model = build_model(Blocks, ds_config=config, seed=7)
        blocks, classes, batch = list(model.blocks), ["Block"], {"x": torch.ones(2, 8).bfloat16()}
        inner = [b.inner for b in blocks]
    names = [n for n, _ in model.named_parameters()]
    wrapped = enable_activation_checkpointing(model, classes) if on else 0
    assert names == [n for n, _ in model.named_parameters()]
    counts = [0] * len(inner)
    for i, module in enumerate(inner):
        module.register_forward_pre_hook(lambda *_, i=i: counts.__setitem__(i, counts[i] + 1))
    engine = _engine(model, stage)
    losses = [_step(engine, **batch) for _ in range(2)]
    engine.destroy()
    cache = (model.config.use_cache, exported_config(model, torch.bfloat16).use_cache) if kind == "hf" else None
    return wrapped, [c / 2 for c in counts], losses, cache, model.bigtrain_info.checkpointed_blocks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x + torch.tanh(self.inner(x)) * self.gain


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return types.SimpleNamespace(loss=h.float().square().mean())


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["hf", "any"])
def test_B42_B47_checkpointing_recomputes_each_block_once(rank_pool, kind, stage):
    off = rank_pool(2).run(_forwards, kind, stage, False)
    on = rank_pool(2).run(_forwards, kind, stage, True)
    for (wrapped0, calls0, losses0, _, _), (wrapped, calls, losses, cache, told) in zip(off, on):
        assert wrapped0 == 0 and calls0 == [1, 1]
        assert wrapped == told == 2 and calls == [2, 2] and losses == losses0
        assert cache in (None, (False, True))


def _frozen_with_checkpointing():
    from bigtrain.models import build_model, enable_activation_checkpointing

    model = build_model(zoo.source("llama"), ds_config=_config(3), seed=7)
    for name, p in model.named_parameters():
        p.requires_grad_("up_proj" in name)
    enable_activation_checkpointing(model)
    engine = _engine(model)
    losses = [_step(engine, **_batch()) for _ in range(2)]
    engine.destroy()
    return losses


def test_B44_checkpointing_with_frozen_parameters_at_stage_3(rank_pool):
    for losses in rank_pool(2).run(_frozen_with_checkpointing):
        assert losses[1] < losses[0]


# ---------------------------------------------------------------- experts


class OldMixtral(nn.Module):
    """A block as transformers 4 had it: experts in a list, run where the router sends tokens."""

    def __init__(self, hidden=8, experts=3):
        super().__init__()
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, 12), nn.SiLU(), nn.Linear(12, hidden)) for _ in range(experts)
        )

    def forward(self, x, route):
        out = torch.zeros_like(x)
        weights = self.gate(x).softmax(-1)
        for e, expert in enumerate(self.experts):
            rows = (route == e).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, e : e + 1])
        return x + out


class OldMoe(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.ModuleDict({"moe": OldMixtral()}) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x, route):
        h = self.embed(x)
        for layer in self.layers:
            h = layer["moe"](h, route)
        return types.SimpleNamespace(loss=self.head(h).float().square().mean())


def _unused_expert():
    from bigtrain import ranks
    from bigtrain.models import build_model, set_moe_leaf_modules

    model = build_model(OldMoe, ds_config=_config(3), seed=7)
    names = set_moe_leaf_modules(model)
    engine = _engine(model, stage3_param_persistence_threshold=0)
    route = torch.tensor([0, 1]) if ranks.rank() == 0 else torch.tensor([2, 2])
    x = torch.ones(2, 8).bfloat16()
    losses = [_step(engine, x=x, route=route) for _ in range(3)]
    engine.destroy()
    return names, losses


def test_experts_unused_on_one_rank_do_not_hang(rank_pool):
    for names, losses in rank_pool(2).run(_unused_expert, limit_s=60):
        assert names == ["layers.0.moe", "layers.1.moe", "layers.2.moe"] and losses[-1] < losses[0]


# ---------------------------------------------------------------- before the process group exists


def _looping(kind):
    import transformers

    from tests.ranks import families

    if kind == "dbrx":
        experts = dict(ffn_hidden_size=22, moe_num_experts=6, moe_top_k=2)
        sizes = dict(d_model=36, n_heads=3, n_layers=2, max_seq_len=64, vocab_size=131)
        return transformers.DbrxConfig(
            **sizes, attn_config={"kv_n_heads": 3, "clip_qkv": 8.0, "rope_theta": 1e4}, ffn_config=experts
        )
    source = families.make(kind).config
    for part in (source, source.get_text_config()):
        part._experts_implementation = "eager"
    return source


def _experts_in_a_loop(kind, stage):
    """Losses of four steps in which each rank has rows of another length, and so other experts with tokens."""
    from bigtrain.engine import Engine
    from bigtrain.models import build_model, set_moe_leaf_modules
    from tests.ranks import tiny

    cfg = tiny.config(stage, **({"stage3_prefetch_bucket_size": 20000} if stage == 3 else {}))
    model = build_model(_looping(kind), ds_config=cfg, seed=3)
    set_moe_leaf_modules(model)
    engine = Engine(model, ds_config=cfg, optimizer="adamw_torch", learning_rate=1e-3, hang_s=30)
    losses = []
    for step in range(4):
        ids = torch.randint(3, 120, (1, 4 + 3 * engine.rank), generator=torch.Generator().manual_seed(10 * step + engine.rank))
        losses.append(engine.train_step([{"input_ids": ids, "labels": ids.clone()}]).loss)
    engine.close()
    return losses


@pytest.mark.parametrize("kind", ["ernie_vl_moe", "dbrx"])
def test_fused_experts_in_a_loop_that_differs_between_ranks(rank_pool, kind):
    """
    A module is called once for each expert with tokens, an activation or, in DBRX, one with all weights: ZeRO-3's trace of modules
    counted that, and stood still in the second step.
    """
    plain, split = (rank_pool(3).run(_experts_in_a_loop, kind, stage)[0] for stage in (0, 3))
    assert split == pytest.approx(plain, rel=2e-3)  # bf16 weights, rounded from masters that sums in another order moved


_SCRIPT = """
import json, os, sys, torch
from bigtrain import ranks, zero
from bigtrain.models import build_model
from tests.ranks.zoo import Sevens
model = build_model(Sevens, ds_config={"zero_optimization": {"stage": 3}})
sizes = [p.ds_tensor.numel() * ranks.world_size() >= p.ds_numel > p.ds_tensor.numel() for p in model.parameters()]
with zero.gathered(list(model.parameters())):
    sevens = all(bool((p == 7).all()) for p in model.parameters())
open(sys.argv[1] + "." + str(ranks.rank()), "w").write(json.dumps([ranks.world_size(), all(sizes), sevens]))
os._exit(0)  # gloo's threads can abort the interpreter's own end ("terminate called without an active exception")
"""


def test_B15_building_starts_the_process_group_first(tmp_path):
    script = tmp_path / "build.py"
    script.write_text(_SCRIPT)
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    scripts.run([script, tmp_path / "out"], environment, world=2)
    assert [json.loads((tmp_path / f"out.{r}").read_text()) for r in range(2)] == [[2, True, True]] * 2


def _world_of_one():
    from bigtrain.errors import ModelError
    from bigtrain.models import build_model

    os.environ["WORLD_SIZE"] = "2"
    try:
        build_model(zoo.Sevens, ds_config=ZERO3)
    except ModelError as error:
        return str(error)
    finally:
        os.environ["WORLD_SIZE"] = "1"
    return None


def test_B15_a_process_group_of_one_under_a_launcher_of_two_is_refused(rank_pool):
    (text,) = rank_pool(1).run(_world_of_one)
    assert "started 2 ranks, but the process group has one" in text


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    from bigtrain.errors import WeightsError
    from bigtrain.models import frozen_module

    path = tmp_path / "teacher.ckpt"
    torch.save({"state_dict": Teacher().state_dict(), "hyper_parameters": argparse.Namespace(a=1)}, path)
    with pytest.raises(WeightsError, match="would run code"):
        frozen_module(Teacher, path)


def _spoiled(folder, stage):
    """What `verify_load` says when memory does not hold what was read, on this rank."""
    from bigtrain.errors import BigtrainError
    from bigtrain.weights import load

    def read_and_spoil(plan, *args):
        done = read_all(plan, *args)
        tensor = next(slot.tensor for slot, part in plan.filled if part.name == "model.layers.1.mlp.up_proj.weight")
        getattr(tensor, "ds_tensor", tensor).data.view(-1)[5] += 1
        return done

    read_all, load._read_all = load._read_all, read_and_spoil
    try:
        _from_folder(folder, stage, verify_load=True)
    except BigtrainError as error:
        return str(error)
    finally:
        load._read_all = read_all


@pytest.mark.parametrize("stage", [0, 3])
def test_verify_load_compares_every_tensor_with_its_file(rank_pool, tmp_path, stage):
    from bigtrain.errors import ModelError
    from bigtrain.models import build_model

    _save(tmp_path, "llama")
    assert rank_pool(2).run(_refused, tmp_path, stage, verify_load=True) == [(), ()]
    said = rank_pool(2).run(_spoiled, tmp_path, stage)
    assert all("1 tensors are not what the file holds" in one and "up_proj" in one for one in said)
    with pytest.raises(ModelError, match="preset:llama-tiny has no weight files"):
        build_model("preset:llama-tiny", verify_load=True)
