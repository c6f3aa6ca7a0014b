"""adamw_split inside DeepSpeed equals DeepSpeed's own fp32-master AdamW bit for bit and keeps no second copy of weights."""

import contextlib
import gc
import time

import deepspeed
import pytest
import torch

from bigtrain import optim, ranks, zero

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Net(torch.nn.Module):
    """Odd sizes, so that partitions need padding at every world size."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(33, 65)
        self.norm = torch.nn.LayerNorm(65)
        self.b = torch.nn.Linear(65, 17)

    def forward(self, x):
        return self.b(torch.tanh(self.norm(self.a(x))))


def config_of(name, stage, accumulation, clip, grad_dtype):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": grad_dtype},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 1500,
            "reduce_bucket_size": 20000,
        },
    }
    patch = optim.engine_config_patch(name, stage=stage, grad_accum_dtype=grad_dtype)
    for section in ("bf16", "zero_optimization"):
        config[section] |= patch.pop(section, {})
    return config | patch


def build(name, stage, accumulation=1, clip=0.05, grad_dtype="bf16", model=Net):
    config = config_of(name, stage, accumulation, clip, grad_dtype)
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config) if stage == 3 else contextlib.nullcontext():
        model = model()
    groups = optim.param_groups(model, SETTINGS["weight_decay"])
    engine = zero.initialize(model, config, optim.build_optimizer(name, groups, optim.Options(device="cpu", **SETTINGS)))
    optim.after_initialize(name, engine)
    return engine


def train(engine, steps):
    norms = []
    for step in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro + ranks.rank())
            x = torch.randn(4, 33, generator=generator).bfloat16()
            engine.backward(engine(x).float().square().mean() * 4)
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms


def weights(engine):
    out = []
    for param in engine.module.parameters():
        with zero.gathered([param]):
            out.append(param.detach().clone().flatten())
    return torch.cat(out).view(torch.int16)


def _run(name, stage, steps, **kw):
    engine = build(name, stage, **kw)
    norms = train(engine, steps)
    result = weights(engine), norms
    engine.destroy()
    return result


def _both(stage, accumulation, clip, grad_dtype):
    reference = _run("adamw_torch", stage, 20, accumulation=accumulation, clip=clip, grad_dtype=grad_dtype)
    ours = _run("adamw_split", stage, 20, accumulation=accumulation, clip=clip, grad_dtype=grad_dtype)
    return int((reference[0] != ours[0]).sum()), reference[1] == ours[1], min(ours[1])


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("accumulation, grad_dtype", [(1, "bf16"), (3, "bf16"), (3, "fp32")])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_equals_deepspeeds_fp32_master_adamw(rank_pool, stage, accumulation, grad_dtype, world):
    if stage == 1 and grad_dtype == "fp32":
        pytest.skip("runs as stage 2: test_stage_1_with_fp32_accumulation_runs_as_stage_2")
    for different, same_norms, norm in rank_pool(world).run(_both, stage, accumulation, 0.05, grad_dtype):
        assert different == 0 and same_norms
        assert norm > 0.05  # every step was clipped


def _stage_1():
    engine = build("adamw_split", 1, grad_dtype="fp32")
    stage = engine.zero_optimization_stage()
    train(engine, 1)
    engine.destroy()
    return stage


def test_stage_1_with_fp32_accumulation_runs_as_stage_2(rank_pool):
    assert rank_pool(2).run(_stage_1) == [2, 2]


def _storages(engine):
    """Bytes of all bf16 tensors alive that are as large as this rank's flat weights, each storage once."""
    gc.collect()
    seen = {}
    for thing in gc.get_objects():
        if not isinstance(thing, torch.Tensor) or thing.is_meta:
            continue
        if thing.dtype == torch.bfloat16 and type(thing) is not torch.nn.Parameter:
            storage = thing.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(33, 20000)
        self.b = torch.nn.Linear(20000, 17)

    def forward(self, x):
        return self.b(self.a(x))


def _memory(stage):
    before = _storages(None)
    engine = build("adamw_split", stage, model=Wide)
    engine.backward(engine(torch.randn(4, 33).bfloat16()).float().square().mean())
    engine.step()
    total = sum(zero.full_numel(p) for p in engine.module.parameters())
    used = float("inf")
    for _ in range(20):  # gloo's thread lets go of the last gradient a moment after its reduction
        used = min(used, (_storages(engine) - before) / (2 * total))
        if used < 1.1:
            break
        time.sleep(0.1)
    state = sum(t.nbytes for s in engine.basic_optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    flat = sum(p.numel() for p in engine.basic_optimizer.state)
    engine.destroy()
    return used, state, flat


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_second_copy_of_the_weights_is_kept(rank_pool, stage):
    rank_pool(2).stop()  # all tensors alive are counted: in processes that ran nothing else
    for used, state, flat in rank_pool(2).run(_memory, stage):
        # stages 1, 2: all weights once; stage 3: this rank's half and its gradient buffer
        assert used < 1.1, used
        assert state == optim.state_bytes("adamw_split", flat)
