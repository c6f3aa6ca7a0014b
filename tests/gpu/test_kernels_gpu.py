"""The chunked loss and liger-kernel on a GPU: value, gradients, memory."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bigtrain.kernels.attach import use_chunked_loss, use_liger
from bigtrain.plan.families import supported
from bigtrain.plan.family_kept import LIGER_KINDS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def _model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64000, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=4096,
    )  # fmt: skip
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16)


def _run(model):
    ids = torch.randint(0, 64000, (4, 4096), generator=torch.Generator().manual_seed(1)).cuda()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = model(input_ids=ids, labels=ids, num_items_in_batch=4 * 4095).loss
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    return loss.item(), {n: p.grad.float() for n, p in model.named_parameters()}, peak


@pytest.mark.parametrize("use", [use_chunked_loss, use_liger])
def test_same_loss_and_gradients_with_less_memory(use):
    expected, expected_grads, full = _run(_model())
    model = _model()
    path = use(model)
    assert path.kind == "chunked"
    got, grads, peak = _run(model)
    print(f"{path.kind}: {path.why}; peak {peak / 2**30:.2f} GiB against {full / 2**30:.2f} GiB")
    assert got == pytest.approx(expected, rel=2e-3 if use is use_liger else 1e-5)
    for name, grad in grads.items():
        # bf16 gradients (2^-9) whose chunks are rounded one by one; liger's kernels also round activations elsewhere
        assert (grad - expected_grads[name]).norm() <= 0.03 * expected_grads[name].norm(), name
    assert peak < 0.6 * full  # all logits, their fp32 copy and its gradient: 4096 * 4 * 64000 * (2 + 4 + 4) bytes = 9.8 GiB


def test_the_planner_knows_which_families_liger_kernel_knows():
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    loss_alone = {"nemotron"}
    assert set(MODEL_TYPE_TO_APPLY_LIGER_FN) & set(supported()) - loss_alone == LIGER_KINDS
