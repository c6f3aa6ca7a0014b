"""Checkpoints that DeepSpeed itself wrote become Hugging Face folders, on any number of ranks, and their pickles do not run."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from tests.ranks import families
from tests.ranks.test_weights_load import partition


def train_and_save(family, root, stage, freeze):
    """A few real steps, DeepSpeed's own save, and the fp32 masters by DeepSpeed's own accessor as reference."""
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    from bigtrain import zero

    model = families.make(family)
    model.config._experts_implementation = "eager"  # the grouped kernel wants strides of 16 bytes
    for name, param in model.named_parameters():
        param.requires_grad_(not any(part in name for part in freeze))
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "sub_group_size": 5000, "stage3_param_persistence_threshold": 50},
    }  # fmt: skip
    if stage == 3:
        partition(model, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[::2]}, {"params": trained[1::2], "weight_decay": 0.0}]
    engine = zero.initialize(model, config, optimizer=torch.optim.AdamW(groups, lr=1e-2))
    batch = families.inputs(family, model)
    for _ in range(2):
        loss = engine(**batch, labels=batch["input_ids"]).loss
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(f"{root}/ckpt", tag="step2")
    reference, moments = {}, {}
    for name, param in model.named_parameters():
        master = safe_get_full_fp32_param(param) if param.requires_grad else None
        if master is not None and stage == 3:  # at stages 1 and 2 DeepSpeed's accessor fails on one rank and hangs the others
            moments[name] = safe_get_full_optimizer_state(param, "exp_avg_sq").detach().clone().reshape(-1)
        if master is None:
            with zero.gathered([param]):
                master = param.detach().float()
        reference[name] = master.detach().float().clone().reshape(zero.full_shape(param))
    if dist.get_rank() == 0:
        torch.save(reference, f"{root}/reference.pt")
        torch.save(moments, f"{root}/moments.pt")
        model.config.save_pretrained(f"{root}/model")


def convert(root, out, dtype):
    from bigtrain.weights.deepspeed_export import export_deepspeed

    report = export_deepspeed(f"{root}/ckpt", out, dtype=dtype, model_dir=f"{root}/model", max_shard_bytes=40_000)
    return report.bytes_written


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world,family,freeze", [(2, "llama", ()), (3, "qwen3_moe", ("embed", "q_proj"))])
def test_deepspeed_checkpoints_become_folders(rank_pool, tmp_path, world, stage, family, freeze):
    import transformers

    root = str(tmp_path)
    rank_pool(world).run(train_and_save, family, root, stage, freeze)
    reference = torch.load(f"{root}/reference.pt", weights_only=True)
    from bigtrain.weights.deepspeed_folder import open_deepspeed

    folder = open_deepspeed(f"{root}/ckpt")
    moments = torch.load(f"{root}/moments.pt", weights_only=True)
    assert (
        folder.steps == 2
        and set(folder.moments) == {"exp_avg", "exp_avg_sq"}
        and set(moments) <= set(folder.moments["exp_avg"])
    )
    for name, value in moments.items():
        pieces = folder.moments["exp_avg_sq"][name]
        assert torch.equal(torch.cat([piece.flat for piece in pieces]), value), name
    for readers, dtype in [(2, "float32"), (world, "bfloat16")]:
        out = f"{root}/out.{readers}.{dtype}"
        written = rank_pool(readers).run(convert, root, out, dtype)
        assert all(written)
        model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=getattr(torch, dtype))
        for name, param in model.named_parameters():
            assert torch.equal(param, reference[name].to(param.dtype)), name


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/tmp/bigtrain-deepspeed-pickle-ran",)


def refuse(root):
    from bigtrain.weights.deepspeed_export import export_deepspeed

    try:
        export_deepspeed(f"{root}/ckpt", f"{root}/bad", dtype="bfloat16", model_dir=f"{root}/model")
    except Exception as error:
        return type(error).__name__, str(error)


def test_damaged_deepspeed_checkpoints_are_refused(rank_pool, tmp_path):
    root = str(tmp_path)
    rank_pool(2).run(train_and_save, "llama", root, 3, ())
    tag, keep = f"{root}/ckpt/step2", f"{root}/keep"
    shutil.copytree(tag, keep)
    optim = sorted(name for name in os.listdir(tag) if "rank_1" in name and "optim" in name)[0]
    model = "zero_pp_rank_0_mp_rank_00_model_states.pt"

    def harm(action, words):
        shutil.rmtree(tag)
        shutil.copytree(keep, tag)
        action()
        for name, text in rank_pool(2).run(refuse, root):
            assert name == "WeightsError" and all(word in text for word in words), text
        assert not os.path.exists(f"{root}/bad")

    harm(lambda: os.unlink(f"{tag}/{optim}"), ("2 ranks", "1 optimizer files"))
    harm(lambda: open(f"{tag}/{optim}", "w").close(), (optim, "0 bytes"))
    harm(lambda: os.truncate(f"{tag}/{optim}", 3000), (optim,))
    state = torch.load(f"{keep}/{model}", weights_only=False)
    harm(lambda: torch.save({**state, "evil": Evil()}, f"{tag}/{model}"), (model, "mkdir"))
    assert not os.path.exists("/tmp/bigtrain-deepspeed-pickle-ran")
