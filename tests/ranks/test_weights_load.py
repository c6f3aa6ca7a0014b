"""What `load_into` puts into a model equals, bit for bit, what plain `from_pretrained` would have put there."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from tests.ranks import families

STAGE3 = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """family -> folder, written once; every second family in several shards."""
    made = {}

    def folder(family, **kwargs):
        key = (family, json.dumps(kwargs, sort_keys=True))
        if key not in made:
            made[key] = str(tmp_path_factory.mktemp(family))
            kwargs.setdefault("max_shard_size", "20KB" if len(made) % 2 else "5GB")
            families.save(family, made[key], **kwargs)
        return made[key]

    return folder


def partition(model, config=None):
    """Hand a plain module to ZeRO-3."""
    import deepspeed

    deepspeed.zero.Init(module=model, config_dict_or_path=config or STAGE3, dtype=next(model.parameters()).dtype)
    return model


def gathered_state(model):
    """Every tensor of the state dict, whole."""
    from bigtrain import zero

    out = {}
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.nn.Parameter):
                with zero.gathered([tensor]):
                    out[name] = tensor.detach().clone()
            else:
                out[name] = tensor.detach().clone()
    return out


def differences(model, reference):
    """Names whose values are not bitwise equal to `reference`'s."""
    mine = gathered_state(model)
    theirs = reference.state_dict()
    bad = sorted(set(mine) ^ set(theirs))
    for name, value in theirs.items():
        same = name in mine and mine[name].dtype == value.dtype and mine[name].shape == value.shape
        if not same or not torch.equal(mine[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)):
            bad.append(name)
    return bad


def load_and_compare(todo, stage, dtype=torch.bfloat16, **kwargs):
    """For every (family, folder): build with other values, load, compare with from_pretrained on this rank."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    from bigtrain.weights import load_into

    bad = {}
    for family, folder in todo:
        try:
            model = families.make(family, seed=99, dtype=dtype)
            reference = type(model).from_pretrained(folder, dtype=dtype)
            model = type(model)._from_config(reference.config, dtype=dtype)
            if stage == 3:
                partition(model)
            report = load_into(model, folder, progress=False, **kwargs)
            wrong = differences(model, reference)
            if wrong or report.missing or report.unexpected:
                bad[family] = (wrong, report)
        except Exception as error:
            import traceback

            bad[family] = "".join(traceback.format_exception(error)[-6:])
    return bad


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 3])
def test_families_equal_from_pretrained(rank_pool, checkpoints, world, stage):
    todo = [(family, checkpoints(family)) for family in families.FAMILIES]
    for bad in rank_pool(world).run(load_and_compare, todo, stage, verify=True, limit_s=400):
        assert not bad, "\n".join(f"{family}: {why}" for family, why in bad.items())
