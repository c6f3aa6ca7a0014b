"""Every optimizer of the table inside real DeepSpeed, with and without offload."""

import contextlib
import logging

import deepspeed
import pytest
import torch

from bigtrain import optim, ranks, zero
from bigtrain.zero import adam

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Net(torch.nn.Module):
    """Odd sizes; enough elements for 8-bit state; a head and an embedding beside hidden matrices."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 33)
        self.a = torch.nn.Linear(33, 165)
        self.norm = torch.nn.LayerNorm(165)
        self.b = torch.nn.Linear(165, 33)
        self.c = torch.nn.Linear(33, 7)
        self.head = torch.nn.Linear(7, 50)

    def forward(self, x):
        return self.head(self.c(self.b(torch.tanh(self.norm(self.a(self.table(x)))))))


def build(name, stage, offload=False, grad_dtype="bf16", clip=0.5, bf16=True):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": clip,
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": grad_dtype},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 20000},
    }
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    patch = optim.engine_config_patch(name, stage=stage, offload=offload, grad_accum_dtype=grad_dtype)
    for section in ("bf16", "zero_optimization"):
        config[section] |= patch.pop(section, {})
    config |= patch
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config) if stage == 3 else contextlib.nullcontext():
        model = Net()
    _same_values(model)
    groups = optim.param_groups(model, SETTINGS["weight_decay"])
    engine = zero.initialize(
        model,
        config,
        optim.build_optimizer(
            name, groups, optim.Options(offload=optim.Offload() if offload else None, device="cpu", **SETTINGS)
        ),
    )
    optim.after_initialize(name, engine)
    return engine


def _same_values(model):
    """zero.Init draws its random numbers in bf16: give every stage the same start."""
    for param in model.parameters():
        with zero.gathered([param], modifier_rank=0):
            if zero.is_available(param) or not zero.is_partitioned(param):
                values = torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel())) * 0.2
                param.data.copy_(values.bfloat16())


def train(engine, steps, same_data=False):
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * (step % 3) + (0 if same_data else ranks.rank()))
        x = torch.randint(0, 50, (4, 9), generator=generator)
        loss = torch.nn.functional.cross_entropy(engine(x).float().view(-1, 50), x.view(-1))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights(engine):
    out = []
    for param in engine.module.parameters():
        with zero.gathered([param]):
            out.append(param.detach().clone().flatten())
    return torch.cat(out).float()


def _trains(name, stage, offload, steps=12):
    engine = build(name, stage, offload)
    losses = train(engine, steps)
    flat = max(engine.basic_optimizer.state, key=torch.Tensor.numel)  # a partition below 4096 elements keeps fp32 moments
    dtypes = {k: str(t.dtype) for k, t in engine.basic_optimizer.state[flat].items() if isinstance(t, torch.Tensor)}
    kind = type(engine.basic_optimizer).__name__
    engine.destroy()
    return losses[0], losses[-1], dtypes, kind


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_B67_8bit_adam_trains_with_and_without_offload(rank_pool, stage, offload):
    for first, last, dtypes, _ in rank_pool(2).run(_trains, "adamw_8bit", stage, offload):
        assert last < first
        assert dtypes["state1"] == dtypes["state2"] == "torch.uint8" and dtypes["absmax1"] == "torch.float32"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_split_8bit_trains_at_every_stage(rank_pool, stage):
    for first, last, dtypes, _ in rank_pool(2).run(_trains, "adamw_split_8bit", stage, False):
        assert last < first
        assert dtypes == {
            "low": "torch.int16",
            "state1": "torch.uint8",
            "state2": "torch.uint8",
            "absmax1": "torch.float32",
            "absmax2": "torch.float32",
        }


def _plain_deepspeed_refuses():
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    model = Net()
    optimizer = optim.build_optimizer(
        "adamw_8bit", optim.param_groups(model, 0.1), optim.Options(lr=1e-3, offload=optim.Offload(), device="cpu")
    )
    try:
        zero.initialize(model, config, optimizer)
    except Exception as error:
        return type(error).__name__
    return None


def test_B67_without_the_patched_keys_deepspeed_refuses(rank_pool):
    assert rank_pool(2).run(_plain_deepspeed_refuses) == ["ZeRORuntimeException"] * 2


@pytest.mark.parametrize("name, kind", [("adamw", "DeepSpeedCPUAdam"), ("adamw_torch", "AdamW")])
@pytest.mark.parametrize("stage", [2, 3])
def test_B05_offload_decides_the_class_up_front(rank_pool, stage, name, kind):
    for first, last, _, got in rank_pool(2).run(_trains, name, stage, True):
        assert last < first and got == kind


def _without_a_compiler(monkey):
    text = []
    handler = logging.Handler()
    handler.emit = lambda record: text.append(record.getMessage())
    logging.getLogger("bigtrain.zero").addHandler(handler)
    before, adam.why_no_cpu_adam = adam.why_no_cpu_adam, monkey
    try:
        optimizer = optim.build_optimizer(
            "adamw", [{"params": [torch.nn.Parameter(torch.zeros(3))]}], optim.Options(lr=1.0, offload=optim.Offload())
        )
    finally:
        adam.why_no_cpu_adam = before
        logging.getLogger("bigtrain.zero").removeHandler(handler)
    return type(optimizer).__name__, text


def _missing_on_rank_1():
    return "no ninja on PATH" if ranks.rank() == 1 else None


def test_B65_all_ranks_fall_back_together_and_say_why(rank_pool):
    for kind, text in rank_pool(2).run(_without_a_compiler, _missing_on_rank_1):
        assert kind == "AdamW" and "rank 1: no ninja on PATH" in text[0]


def _muon(stage, offload, bf16=False, grad_dtype="fp32"):
    # no clipping: its factor is a sum of squares in another order at each stage, so it differs in the last bit
    engine = build("muon", stage, offload, grad_dtype, clip=1e6, bf16=bf16)
    losses = train(engine, 8, same_data=True)
    result = weights(engine), float(engine.get_global_grad_norm()), losses
    engine.destroy()
    return result


@pytest.mark.parametrize("world", [1, 2, 3])
def test_muon_is_the_same_at_every_stage_world_size_and_with_offload(rank_pool, world):
    (expected, norm, losses), *_ = rank_pool(1).run(_muon, 2, False)
    assert losses[-1] < losses[0]
    for stage, offload in [(1, False), (2, False), (3, False), (2, True), (3, True)]:
        for got, got_norm, _ in rank_pool(world).run(_muon, stage, offload):
            difference = (got - expected).abs().max().item()
            # the same rows on every rank, in fp32: a mean over 2 is exact, over 3 rounded; steps move weights by up to 1e-1
            assert difference == 0 if world < 3 else difference < 1e-4, (stage, offload, difference)
            assert got_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_muon_in_bf16_with_fp32_accumulation(rank_pool, stage):
    (expected, _, _), *_ = rank_pool(1).run(_muon, 2, False, True, "bf16")
    for got, _, _ in rank_pool(2).run(_muon, stage, False, True):
        assert torch.equal(got, expected)
