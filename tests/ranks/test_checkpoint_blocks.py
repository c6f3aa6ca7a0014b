"""Some blocks recomputed and others not, under every policy: the same bits as without, at stages 0 to 3."""

import functools
import json
import types

import pytest
import torch
from torch import nn

from bigtrain.data.demo import stdlib_corpus, train_tokenizer
from tests.ranks import zoo
from tests.ranks.test_host_memory import container
from tests.ranks.test_train import TRAIN, flags, rows_of, run_forked


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(24, 24)
        self.gain = nn.Parameter(torch.ones(24))

    def forward(self, x):
        return x + torch.tanh(self.inner(x)) * self.gain


class TwoStacks(nn.Module):
    """Blocks in two lists, the second of which runs later, as in an encoder and decoder."""

    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList(Block() for _ in range(2))
        self.second = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in (*self.first, *self.second):
            x = block(x)
        return types.SimpleNamespace(loss=x.float().square().mean())


# Weights are gathered module by module, some ahead of time, and let go of at once: where in forward, and where in backward, differs.
ZERO3 = {
    "stage": 3,
    "stage3_param_persistence_threshold": 100,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 1500,
}


def _config(stage):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": ZERO3 if stage == 3 else {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
    }


def _model(kind, stage):
    from bigtrain.models import build_model

    if kind == "any":
        model = build_model(TwoStacks, ds_config=_config(stage), seed=7)
        return model, [*model.first, *model.second], "Block", {"x": torch.ones(2, 24).bfloat16()}
    source = zoo.source(kind)
    ids = torch.randint(0, 59, (2, 9), generator=torch.Generator().manual_seed(0))
    model = build_model(source, ds_config=_config(stage), seed=7)
    if kind == "t5":
        model.config.decoder_start_token_id = 0
    blocks = [*model.encoder.block, *model.decoder.block] if kind == "t5" else list(model.model.layers)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1  # random numbers must be drawn again as they were
    return model, blocks, None, {"input_ids": ids, "labels": ids}


def _train(kind, stage, policy, blocks):
    """(blocks recomputed, by block whether its forward ran twice, losses and a sum over the weights)."""
    from bigtrain import zero
    from bigtrain.models import enable_activation_checkpointing

    torch.manual_seed(1)
    model, found, classes, batch = _model(kind, stage)
    count = 0 if policy is None else enable_activation_checkpointing(model, classes, blocks, policy)
    inner = [next(m for m in block.modules() if isinstance(m, nn.Linear)) for block in found]
    calls = [0] * len(inner)
    for i, module in enumerate(inner):
        module.register_forward_pre_hook(lambda *_, i=i: calls.__setitem__(i, calls[i] + 1))
    engine = zero.initialize(model, _config(stage), params=list(model.parameters()))
    torch.manual_seed(2)
    seen = []
    for _ in range(3):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        seen.append(loss.item())
    for p in model.parameters():
        with zero.gathered([p]):
            seen.append(p.detach().double().sum().item())
    engine.destroy()
    return count, [c == 6 for c in calls], seen


def _all(kind, stage, variants):
    return [_train(kind, stage, *variant) for variant in variants]


@functools.cache
def _variants(kind):
    total = 2 if kind == "llama" else 4
    return (
        (None, None),
        *((policy, n) for policy in ("full", "attention", "selective", "offload") for n in (None, 1)),
        ("full", total),
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["llama", "t5", "any"])
def test_every_policy_and_number_of_blocks_trains_to_the_same_bits(rank_pool, kind, stage):
    variants = _variants(kind)
    for results in rank_pool(2).run(_all, kind, stage, variants):
        reference = results[0][2]
        for (policy, n), (count, twice, seen) in zip(variants, results):
            total = len(twice)
            assert count == (0 if policy is None else n or total)
            assert twice == [at < count for at in range(total)], (policy, n)  # the first ones, and only they
            assert seen == reference, (policy, n)


def _too_many(stage):
    from bigtrain.errors import ModelError
    from bigtrain.models import enable_activation_checkpointing

    model, *_ = _model("llama", stage)
    with pytest.raises(ModelError, match="3 blocks are to be recomputed, and LlamaForCausalLM has 2"):
        enable_activation_checkpointing(model, None, 3)
    return True


def test_more_blocks_than_there_are(rank_pool):
    assert all(rank_pool(2).run(_too_many, 3))


def test_a_run_with_some_blocks_with_auto_and_with_too_many(tmp_path):
    """auto on a host with room for what one recomputed block needs, and for no more: one. Too many are refused before data is read.

    Micro batches so large that activations need more than the buffers of a save.
    """
    folder = stdlib_corpus(tmp_path, max_bytes=200_000, validation_every=10)
    train_tokenizer(folder.train_path, tmp_path / "tokenizer", vocab_size=512)

    def command(out, blocks, **more):
        shape = {"seq_len": 512, "per_device_train_batch_size": 32, "num_train_epochs": 100, "max_steps": 1, "no_export": True}
        return [TRAIN, *flags(tmp_path, out, checkpoint_blocks=blocks, ds_config="ds_configs/zero2.json", **shape, **more)]

    said = run_forked(command(tmp_path / "one", 1, checkpointing_policy="offload"))
    told = json.loads((tmp_path / "one" / "run.json").read_text())
    # A block of this size waits for its host, which would look for attention to keep.
    assert "checkpointing_policy offload: offload_inputs is taken: with attention's results as well it does not fit" in said
    assert [d["value"] for d in told["decisions"] if d["path"] == "checkpointing_policy"] == ["offload_inputs"]
    assert told["arguments"]["checkpointing_policy"] == "offload_inputs"
    assert (
        "activation checkpointing, offload_inputs: 1 blocks are recomputed" in said
        and told["planned"]["checkpoint_blocks"] == 1
    )
    root = container(tmp_path / "host", told["planned"]["host_need_bytes"], 2**20)
    said = run_forked(command(tmp_path / "auto", "auto"), BIGTRAIN_HOST_ROOT=str(root))
    told = json.loads((tmp_path / "auto" / "run.json").read_text())
    assert "checkpoint_blocks auto: 1 (as few of " in said and "of host memory with the plan's margin" in said
    assert told["planned"]["checkpoint_blocks"] == 1 and told["arguments"]["checkpoint_blocks"] == "1"
    assert [d["value"] for d in told["decisions"] if d["path"] == "checkpoint_blocks"] == [1]
    auto, one = (rows_of(tmp_path / name) for name in ("auto", "one"))
    assert [(r["loss"], r["grad_norm"]) for r in auto] == [(r["loss"], r["grad_norm"]) for r in one] and len(one) == 1
    said = run_forked(command(tmp_path / "many", 99, train_data=tmp_path / "tokenizer"), expect=2)
    assert "--checkpoint_blocks 99, but preset:llama-tiny has " in said and not (tmp_path / "many" / "run.json").exists()
