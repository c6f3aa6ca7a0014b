"""Updates in chunks: the bits of DeepSpeed's own way, without its fp32 gradient of a whole partition."""

import contextlib
from unittest import mock

import deepspeed
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bigtrain import optim, zero
from bigtrain.optim import chunks
from bigtrain.zero import flat
from tests.ranks.test_optim import SETTINGS, Net, _same_values, train

# Elements of a chunk in these tests: several in each partition, and one that is not full.
SMALL = {"cpu": 512}


def build(name, stage, accumulation, grad_dtype, bf16=True):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.05,
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": grad_dtype},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 9000,
            "reduce_bucket_size": 20000,
        },
    } | optim.engine_config_patch(name, stage=stage)
    config["zero_optimization"] |= {"stage": stage}
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config) if stage == 3 else contextlib.nullcontext():
        model = Net()
    _same_values(model)
    groups = optim.param_groups(model, SETTINGS["weight_decay"])
    return zero.initialize(model, config, optim.build_optimizer(name, groups, optim.Options(device="cpu", **SETTINGS)))


def _run(name, chunked, *how):
    """Losses, masters and states after five updates."""
    engine = build(name, *how)
    if chunked:
        optim.after_initialize(name, engine)
    assert ("step" in vars(engine.basic_optimizer)) == chunked
    losses = train(engine, 5 * how[1])
    masters = [
        flat_master[m.at : m.at + m.spans[layout.rank][1]]
        .detach()
        .clone()  # without what fills up, which nobody writes at stage 3
        for flat_master, layout in flat.partition_layouts(engine.optimizer).items()
        for m in layout.matrices
    ]
    states = list(engine.basic_optimizer.state.values())
    engine.destroy()
    return losses, masters, states, float(engine.get_global_grad_norm())


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    return len(one) == len(other) and all(map(same, one, other)) if isinstance(one, list) else one == other


def _both(*how):
    with mock.patch.dict(chunks.CHUNK_ELEMS, SMALL):
        ours = _run(how[0], True, *how[1:])
    theirs = _run(how[0], False, *how[1:])
    elems = max(t.numel() for state in ours[2] for t in state.values() if isinstance(t, torch.Tensor))
    return [same(a, b) for a, b in zip(ours, theirs)], elems, ours[-1]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("accumulation, grad_dtype", [(1, "bf16"), (3, "bf16"), (3, "fp32")])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_the_same_bits_as_in_one_piece(rank_pool, name, stage, accumulation, grad_dtype, world):
    if stage == 1 and grad_dtype == "fp32":
        pytest.skip("DeepSpeed's BF16_Optimizer: gradients are fp32 where they lie")
    for equal, elems, norm in rank_pool(world).run(_both, name, stage, accumulation, grad_dtype):
        assert equal == [True] * 4
        assert elems > 8 * SMALL["cpu"] and norm > 0.05  # several chunks; every step was clipped


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_same_bits_in_fp32_training(rank_pool, stage):
    for equal, _, _ in rank_pool(2).run(_both, "adamw_torch", stage, 1, "fp32", False):
        assert equal == [True] * 4


class LargestNew(TorchDispatchMode):
    """Elements of the largest fp32 tensor that an operator made."""

    elems = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.dtype == torch.float32 and t.untyped_storage().data_ptr() not in given:
                self.elems = max(self.elems, t.untyped_storage().nbytes() // 4)
        return out


def _largest_made(name, chunked, stage, grad_dtype):
    """By the second step (the first makes the moments), and elements of this rank's largest partition."""
    engine = build(name, stage, 1, grad_dtype)
    if chunked:
        optim.after_initialize(name, engine)
    with mock.patch.dict(chunks.CHUNK_ELEMS, SMALL):
        train(engine, 1)
        loss = engine(torch.arange(36).view(4, 9)).float().square().mean()
        engine.backward(loss)
        with LargestNew() as made:
            engine.step()
    largest = max(p.numel() for p in engine.basic_optimizer.state)
    engine.destroy()
    return made.elems, largest


@pytest.mark.parametrize("grad_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_no_fp32_tensor_of_a_partition_is_made(rank_pool, name, stage, grad_dtype):
    if (name, stage, grad_dtype) == ("adamw", 1, "fp32"):
        pytest.skip(
            "DeepSpeed's BF16_Optimizer copies no gradient, but torch's AdamW makes the root of a whole moment on a CPU"
        )
    for made, _ in rank_pool(2).run(_largest_made, name, True, stage, grad_dtype):
        assert made <= SMALL["cpu"] * torch.get_num_threads()


def test_deepspeed_makes_one(rank_pool):
    for made, largest in rank_pool(2).run(_largest_made, "adamw_8bit", False, 2, "bf16"):
        assert made == largest
