"""Results of attention kept over a recompute: the bits of training without, and one run of attention for each block and micro step."""

import hashlib

import pytest
import torch

from tests.ranks import zoo
from tests.ranks.test_checkpoint_blocks import ZERO3
from tests.ranks.tiny import config

STEPS, LAYERS = 3, 2
POLICIES = (None, "attention", "offload")
DOCUMENTS = ([3, 6], [9])


def _source(kind):
    if kind == "gpt2":  # random numbers are drawn after attention, in each block, and only there
        return {**zoo.source("gpt2"), "resid_pdrop": 0.2}
    if kind == "dropout":  # and in attention, which CPUs have no fused operator for
        return {**zoo.source("gpt2"), "resid_pdrop": 0.2, "attn_pdrop": 0.2}
    return zoo.source(kind if kind in zoo.CONFIGS else "llama")


def _model(kind, stage, bf16):
    from bigtrain.data.isolation import prepare_isolation, register_varlen
    from bigtrain.models import build_model, edit_model, set_moe_leaf_modules

    own = {name: value for name, value in ZERO3.items() if name != "stage"} if stage == 3 else {}
    cfg = config(stage, bf16=bf16, micro=2, **own)
    frozen = ["model.embed_tokens", "model.layers.0.self_attn"] if kind == "frozen" else ()
    model = build_model(
        _source(kind), ds_config=cfg, seed=5, dtype=torch.bfloat16 if bf16 else torch.float32, freeze=frozen,
        attn_implementation=register_varlen() if kind == "packed" else "sdpa",
    )  # fmt: skip
    if kind == "packed":
        prepare_isolation(model, "isolated")
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        # On the feed-forward part alone: attention's own weights are frozen.
        adapters = LoraConfig(r=3, target_modules=["gate_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        model = edit_model(model, lambda m: get_peft_model(m, adapters))
    set_moe_leaf_modules(model)
    return model.train(), cfg


def _trained(kind, stage, bf16, policy):
    """(losses, what all weights are in the end, attention's forwards)."""
    from bigtrain import zero
    from bigtrain.engine import Engine
    from bigtrain.models import enable_activation_checkpointing
    from tests.unit.models.test_recompute import ATTENTION, Count

    torch.manual_seed(1)
    model, cfg = _model(kind, stage, bf16)
    if policy is not None:
        assert enable_activation_checkpointing(model, policy=policy) == LAYERS
    engine = Engine(model, ds_config=cfg, learning_rate=1e-2)
    torch.manual_seed(2 + engine.rank)
    losses, more = [], {}
    if kind == "packed":
        more = {"position_ids": torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])}
    with Count() as seen:
        for step in range(STEPS):  # ZeRO-3 gathers by its trace from the third on
            ids = torch.randint(0, 59, (2, 9), generator=torch.Generator().manual_seed(10 * step + engine.rank))
            loss = engine(input_ids=ids, labels=ids, **more).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    content = hashlib.sha256()
    for p in engine.module.parameters():
        with zero.gathered([p]):
            content.update(p.detach().float().numpy().tobytes())
    engine.close()
    return losses, content.hexdigest(), seen.counts.get(ATTENTION, 0)


def _all(kind, stage, bf16):
    return [_trained(kind, stage, bf16, policy) for policy in _policies(stage)]


def _policies(stage):
    return POLICIES if stage else (*POLICIES, "full")  # to see that the count sees a second run


@pytest.mark.parametrize(
    ("kind", "stage", "world", "bf16"),
    [
        ("llama", 0, 1, False),
        ("llama", 1, 2, True),
        ("llama", 2, 3, True),
        ("llama", 3, 3, False),
        ("packed", 3, 2, True),
        ("gpt2", 3, 2, False),
        ("dropout", 3, 2, True),
        ("mixtral", 3, 2, True),
        ("lora", 3, 2, True),
        ("frozen", 2, 2, True),
    ],
)
def test_the_bits_are_the_same_and_attention_runs_once(rank_pool, kind, stage, world, bf16):
    calls = STEPS * LAYERS * {"packed": sum(map(len, DOCUMENTS)), "dropout": 0}.get(kind, 1)
    for results in rank_pool(world).run(_all, kind, stage, bf16):
        reference = results[0]
        for policy, (losses, content, forwards) in zip(_policies(stage), results):
            assert losses == reference[0] and content == reference[1], policy
            assert forwards == (2 * calls if policy == "full" else calls), policy
