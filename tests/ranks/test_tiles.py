"""Feed-forward parts in tiles: the losses and gradients of the whole, one gradient a parameter, weights gathered once a block."""

import pytest
import torch

from bigtrain.data.demo import stdlib_corpus, train_tokenizer
from tests.ranks import zoo
from tests.ranks.test_train import TRAIN, flags, rows_of, run_forked
from tests.ranks.tiny import config

TOKENS = 18  # of a micro batch: 2 rows of 9


def _model(stage, kind):
    """Frozen: what comes before the first tiled part does not train, so that its input wants no gradient of itself."""
    from bigtrain.models import build_model, edit_model

    at_once = {"stage3_max_reuse_distance": 0} if stage == 3 else {}  # weights are let go of as soon as a module has run
    cfg = config(stage, bf16=False, micro=2, accumulation=2, **at_once)
    names = [
        "model.embed_tokens",
        "model.layers.0.self_attn",
        "model.layers.0.input_layernorm",
        "model.layers.0.post_attention_layernorm",
    ]
    source = zoo.source("gpt2" if kind == "gpt2" else "llama")
    model = build_model(source, ds_config=cfg, seed=5, dtype=torch.float32, freeze=names if kind == "frozen" else ())
    if kind != "lora":
        return model, cfg
    from peft import LoraConfig, get_peft_model

    # Adapters on the feed-forward part alone: its own weights are frozen.
    adapters = LoraConfig(r=3, target_modules=["gate_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return edit_model(model, lambda m: get_peft_model(m, adapters)), cfg


def _trained(stage, kind, tokens, policy):
    """(losses, gradients as the optimizer gets them, gradients from autograd by parameter, gathers in one micro step)."""
    import deepspeed.comm as comm

    from bigtrain.engine import Engine
    from bigtrain.models import enable_activation_checkpointing, tile_mlp
    from tests.ranks.test_engine_bypass import _reduced_gradient

    torch.manual_seed(1)
    model, cfg = _model(stage, kind)
    if tokens is not None:
        assert tile_mlp(model, tokens) == 2
    if policy is not None:
        enable_activation_checkpointing(model, policy=policy)
    fired = {name: 0 for name, p in model.named_parameters() if p.requires_grad}
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda _, name=name: fired.__setitem__(name, fired[name] + 1))
    engine = Engine(model, ds_config=cfg, learning_rate=1e-2, max_grad_norm=0.0)
    losses, gradients, gathers, gather = [], [], 0, comm.allgather_fn

    def counted(*args, **kwargs):
        nonlocal gathers
        gathers += 1
        return gather(*args, **kwargs)

    try:
        for step in range(3):  # ZeRO-3 gathers by its trace from the third on
            for micro in range(2):
                ids = torch.randint(0, 59, (2, 9), generator=torch.Generator().manual_seed(10 * step + 3 * micro + engine.rank))
                comm.allgather_fn, before = counted, gathers
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                comm.allgather_fn, last = gather, gathers - before
                losses.append(loss.item())
                if micro and kind == "llama":
                    gradients.append(_reduced_gradient(engine))
                engine.step()
    finally:
        comm.allgather_fn = gather
    weights = _trained_weights(engine.module)
    engine.close()
    return losses, gradients, fired, last, weights


def _trained_weights(model):
    from bigtrain import zero

    found = []
    for p in model.parameters():
        if p.requires_grad:
            with zero.gathered([p]):
                found.append(p.detach().flatten().clone())
    return torch.cat(found)


def _all(stage, kind, variants):
    return [_trained(stage, kind, *variant) for variant in variants]


VARIANTS = ((None, None), (TOKENS, None), (5, None), (7, "full"), (5, "attention"), (5, "selective"), (3, "offload"))


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (2, 1), (2, 2), (3, 1), (3, 2)])
def test_tiles_train_as_the_whole_does(rank_pool, stage, world):
    for results in rank_pool(world).run(_all, stage, "llama", VARIANTS):
        whole = results[0]
        for (tokens, _), (losses, gradients, fired, _, weights) in zip(VARIANTS, results):
            # fp32: matrix products over fewer rows, and sums over tiles, add the same terms in another order.
            assert losses == pytest.approx(whole[0], rel=1e-5)
            for mine, theirs in zip(gradients, whole[1]):
                assert (mine - theirs).abs().max() <= 2e-5 * theirs.abs().max()
            assert (weights - whole[4]).abs().max() <= 2e-4  # Adam divides by gradients near 0: 2 % of a step of 1e-2
            assert set(fired.values()) == {6}  # one for each parameter and backward: 3 steps of 2 micro steps
            if tokens == TOKENS:
                assert losses == whole[0] and torch.equal(weights, whole[4])
    # Of the tiled ones that do not recompute: as many gathers with 1 tile as with 4.
    assert results[1][3] == results[2][3] and (results[1][3] > 0) == (stage == 3 and world > 1)


@pytest.mark.parametrize(("kind", "stage"), [("frozen", 3), ("lora", 2), ("lora", 3), ("gpt2", 3)])
def test_frozen_parts_adapters_and_biases(rank_pool, kind, stage):
    variants = ((None, None), (5, None if kind == "frozen" else "full"))
    for results in rank_pool(2).run(_all, stage, kind, variants):
        whole = results[0]
        for losses, _, fired, _, weights in results:
            assert losses == pytest.approx(whole[0], rel=1e-5)
            assert (weights - whole[4]).abs().max() <= 2e-4
            assert set(fired.values()) == {6}


def test_a_run_in_tiles_and_one_that_is_refused(tmp_path):
    folder = stdlib_corpus(tmp_path, max_bytes=100_000, validation_every=10)
    train_tokenizer(folder.train_path, tmp_path / "tokenizer", vocab_size=512)
    plain = {"no_export": True, "no_preflight": True, "max_steps": 2}
    said = run_forked([TRAIN, *flags(tmp_path, tmp_path / "whole", **plain)])
    assert "in tiles" not in said
    said = run_forked([TRAIN, *flags(tmp_path, tmp_path / "tiled", mlp_tile_tokens=48, gradient_checkpointing=True, **plain)])
    assert "feed-forward parts run in tiles of 48 tokens, first model.layers.0.mlp" in said
    whole, tiled = ([row["loss"] for row in rows_of(tmp_path / name)] for name in ("whole", "tiled"))
    assert tiled == pytest.approx(whole, rel=2**-8)  # bf16 products over 48 rows instead of 128
    wrong = flags(tmp_path, tmp_path / "out", mlp_tile_tokens=48, model_name_or_path="preset:mixtral-tiny", **plain)
    said = run_forked([TRAIN, *wrong], expect=2, world=2)
    assert "model.layers.0.mlp (MixtralSparseMoeBlock) cannot be computed in tiles: it routes tokens to experts" in said
    assert not (tmp_path / "out").exists()
