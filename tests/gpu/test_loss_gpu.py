"""The fused loss on a GPU: kernels, error against fp64, bytes as planned; and no wait for the device in a whole step."""

import os
import traceback
import warnings

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bigtrain.kernels import cross_entropy
from bigtrain.kernels.attach import use_chunked_loss
from bigtrain.kernels.cross_entropy import kernels_for, linear_cross_entropy
from bigtrain.plan.activations import fused_loss_rows
from tests.gpu.processes import on_a_card
from tests.unit.kernels.test_cross_entropy import _exact

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("vocab", [1, 97, 32_768, 50_257, 128_256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_torch(vocab, dtype):
    torch.manual_seed(0)
    logits = torch.randn(64, vocab, device="cuda", dtype=dtype) * 4
    targets = torch.randint(0, vocab, (64,), device="cuda")
    targets[::7] = -100
    mine, theirs = logits.clone(), logits.clone()
    losses, wanted = (torch.full((64,), 9.0, device="cuda") for _ in range(2))
    kernels_for("cuda").rows(logits, targets, losses, False)
    cross_entropy._rows(theirs, targets, wanted, True)
    assert (losses - wanted).abs().max() <= 1e-5 * max(1.0, wanted.abs().max().item())  # fp32, other order of sums
    again = torch.empty_like(losses)
    kernels_for("cuda").rows(mine, targets, again, True)
    assert torch.equal(again, losses) and not mine[::7].any() and not losses[::7].any()
    # fp32 in another order; in bf16 that may turn a rounding, 2^-8 of values up to 1
    assert (mine.float() - theirs.float()).abs().max() <= (2e-6 if dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize("vocab", [97, 32_768, 128_256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale, cap", [(1 / 3, None), (-0.7, None), (1.0, 30.0), (1.7, 2.3)])
def test_scaled_and_capped_rows_are_those_of_fp64(vocab, dtype, scale, cap):
    torch.manual_seed(0)
    logits = torch.randn(32, vocab, device="cuda", dtype=dtype) * 8  # a cap of 2.3 saturates
    targets = torch.randint(0, vocab, (32,), device="cuda")
    targets[::7] = -100
    x = logits.double().requires_grad_()
    changed = scale * x if cap is None else cap * torch.tanh(scale * x / cap)
    wanted = torch.nn.functional.cross_entropy(changed, targets, reduction="none")
    wanted.sum().backward()
    losses = torch.full((32,), 9.0, device="cuda")
    kernels_for("cuda").rows(logits.clone(), targets, losses, False, scale, cap)
    assert (losses - wanted).abs().max() <= 1e-6 * max(1.0, wanted.max().item())  # fp32
    kernels_for("cuda").rows(logits, targets, losses, True, scale, cap)
    # Rounded once: half of 2^-8 of values up to the factor, in bf16.
    assert (logits - x.grad).abs().max() <= abs(scale) * (2e-6 if dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize("kind, more", [("cohere2", {"logit_scale": 0.3}), ("gemma2", {"final_logit_softcapping": 3.0})])
def test_a_step_of_a_model_that_changes_its_logits_waits_once_in_its_first_forward(kind, more):
    config = AutoConfig.for_model(
        kind, vocab_size=5000, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").cuda()
    ids = torch.randint(3, 5000, (2, 512), device="cuda")
    own = model(input_ids=ids, labels=ids, num_items_in_batch=1022).loss.item()
    assert use_chunked_loss(model).kind == "chunked"
    assert model(input_ids=ids, labels=ids, num_items_in_batch=1022).loss.item() == pytest.approx(own, rel=1e-3)  # bf16 logits
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=1022).loss
        loss.backward()
        torch.cuda.set_sync_debug_mode("default")
    places = [f"{w.filename}:{w.lineno}" for w in said if "synchronizing CUDA operation" in str(w.message)]
    assert not [place for place in places if "bigtrain" in place and "site-packages" not in place], places


def test_a_target_that_is_no_word_gives_nan():
    logits = torch.randn(3, 100, device="cuda")
    losses = torch.zeros(3, device="cuda")
    kernels_for("cuda").rows(logits, torch.tensor([5, 100, -1], device="cuda"), losses, True)
    assert losses.isnan().tolist() == logits.isnan().all(1).tolist() == [False, True, True]


def _problem(tokens, vocab, width):
    torch.manual_seed(0)
    hidden = (torch.randn(tokens, width, device="cuda") + torch.randn(width, device="cuda")).bfloat16().requires_grad_()
    weight = (torch.randn(vocab, width, device="cuda") * 0.05).bfloat16().requires_grad_()
    targets = (torch.rand(tokens, device="cuda") ** 3 * vocab).long()
    targets[::5] = -100
    return hidden, weight, targets


def test_nearer_to_fp64_than_liger_kernel():
    ops = pytest.importorskip("liger_kernel.ops.fused_linear_cross_entropy")
    hidden, weight, targets = _problem(8192, 16_000, 512)
    value, exact = _exact(hidden, weight, targets, 1 / 3)
    loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=1024)
    mine = torch.autograd.grad(loss / 3, (hidden, weight))
    theirs = torch.autograd.grad(
        ops.LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, targets)[0] / 3, (hidden, weight)
    )
    assert loss.item() == pytest.approx(value, rel=1e-3)
    for ours, ligers, wanted in zip(mine, theirs, exact):
        errors = [((x.double() - wanted).norm() / wanted.norm()).item() for x in (ours, ligers)]
        print("relative errors, ours and liger's:", errors)
        assert errors[0] < 5e-3 and errors[0] <= errors[1] * 1.05  # both are bf16's rounding


@pytest.mark.parametrize("tokens, vocab, width", [(8192, 128_256, 512), (16_384, 50_257, 768)])
def test_memory_is_what_the_plan_says(tokens, vocab, width):
    hidden, weight, targets = _problem(tokens, vocab, width)
    linear_cross_entropy(hidden[:512], weight, targets[:512]).backward()  # cuBLAS's workspace
    hidden.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, targets).backward()
    peak = torch.cuda.max_memory_allocated() - before
    planned = 2 * (tokens * width + vocab * width + fused_loss_rows(vocab, tokens) * vocab)
    assert planned <= peak <= 1.01 * planned  # beside them a few values a token
    # Backward hands on what forward made: nobody copies it.
    assert torch.cuda.memory_allocated() - before <= 1.01 * 2 * (tokens + vocab) * width


@pytest.mark.parametrize("stage, policy", [(2, "none"), (2, "full"), (2, "selective"), (3, "none")])
def test_a_step_does_not_wait_for_the_device_before_its_end(stage, policy):
    """torch warns of each such wait; from the first micro batch's move to the reading of loss and norm there is none of ours."""
    found, watched, losses = on_a_card(waits, stage, policy)
    print(found)
    # At stage 3 DeepSpeed's own code is not ours to change.
    assert watched == 2 and not [place for place in found if stage < 3 or "deepspeed" not in place.split(" < ")[0]]
    assert losses[0] > losses[-1] > 0


def waits(stage, policy):
    """(places that waited, steps watched, losses) of four steps of a packed model with liger-kernel's kernels, where installed."""
    from bigtrain.data.isolation import prepare_isolation, register_varlen
    from bigtrain.engine import Engine
    from bigtrain.kernels.attach import use_liger
    from bigtrain.models import build_model, enable_activation_checkpointing
    from tests.ranks.tiny import config

    cfg = config(stage, micro=2, accumulation=2, reduce_bucket_size=50_000_000, allgather_bucket_size=50_000_000)
    cfg["data_types"] = {"grad_accum_dtype": "bf16"}
    model = build_model(
        "preset:llama-50m", ds_config=cfg, seed=1, num_hidden_layers=3, attn_implementation=register_varlen()
    )  # fmt: skip
    prepare_isolation(model, "isolated")
    use_liger(model)
    if policy != "none":
        enable_activation_checkpointing(model, policy=policy)
    engine = Engine(model, ds_config=cfg, optimizer="adamw_split_8bit", learning_rate=1e-3, hang_s=None)
    read, watched, losses = engine._since.exchange, 0, []

    def exchange(*args):
        torch.cuda.set_sync_debug_mode("default")
        return read(*args)

    found = set()

    def say(message, *_where):  # torch's own frames ask for what someone else wanted
        if "synchronizing CUDA operation" in str(message):
            others = (f"{os.sep}torch{os.sep}", f"{os.sep}warnings.py")  # Python 3.12 leaves a frame of the latter
            asked = [f for f in traceback.extract_stack()[:-1] if not any(part in f.filename for part in others)]
            found.add(" < ".join(f"{f.filename}:{f.lineno}" for f in asked[:-4:-1]))

    engine._since.exchange = exchange
    with warnings.catch_warnings():
        warnings.showwarning = say
        for step in range(4):
            if step >= 2:  # before, kernels are compiled and graphs built
                watched += 1
                torch.cuda.set_sync_debug_mode("warn")
                warnings.simplefilter("always")
            losses.append(engine.train_step([_packed_rows(micro) for micro in range(2)]).loss)
    engine.close()
    return sorted(found), watched, losses


def _packed_rows(micro):
    ids = torch.randint(0, 500, (2, 512), generator=torch.Generator().manual_seed(micro))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ([100, 412], [200, 12, 300])])
    labels = ids.clone()
    labels[positions == 0] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": positions}
