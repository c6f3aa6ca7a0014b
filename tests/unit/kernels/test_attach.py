"""What people do to a model before and after the chunked loss is put into it."""

import copy
import sys

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    BambaConfig,
    BambaForCausalLM,
    EuroBertConfig,
    EuroBertForMaskedLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)  # fmt: skip

from bigtrain.errors import DataError, ModelError
from bigtrain.kernels import cross_entropy
from bigtrain.kernels.attach import use_chunked_loss, use_liger, why_not_chunked
from bigtrain.kernels.experts import NAME

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
IDS = torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(0))


def _llama(**kw):
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SMALL, **kw))


def _patched(**kw):
    model = _llama(**kw)
    assert use_chunked_loss(model).kind == "chunked"
    return model


def _loss(model, **kw):
    return model(input_ids=IDS, labels=IDS, **kw).loss


def test_a_loss_that_looks_at_the_logits_again_keeps_them():
    """Bamba's z-loss came out as that of the chunked loss's own value."""
    shape = {**SMALL, "attn_layer_indices": [], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
    with torch.device("meta"):
        model = BambaForCausalLM(BambaConfig(**shape, z_loss_coefficient=0.1))
        without = BambaForCausalLM(BambaConfig(**shape))
    assert "z_loss_coefficient = 0.1" in why_not_chunked(model)
    assert why_not_chunked(without) is None


def _image_text(kind):
    """With 4 tokens of one image in each row."""
    text = {k: v for k, v in SMALL.items() if k != "pad_token_id"}
    tower = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 16,
        "patch_size": 8,
    }
    towers, texts = {"llava": "clip_vision_model", "gemma3": "siglip_vision_model"}, {"llava": "llama", "gemma3": "gemma3_text"}
    config = AutoConfig.for_model(
        kind, image_token_index=90, image_token_id=90, mm_tokens_per_image=4, text_config={"model_type": texts[kind], **text},
        vision_config={"model_type": towers[kind], **tower},
    )  # fmt: skip
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    ids = IDS.clamp(max=89)
    ids[:, 1:5] = 90
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids == 90, -100), "pixel_values": torch.randn(2, 3, 16, 16)}
    return model, batch | ({"token_type_ids": (ids == 90).long()} if kind == "gemma3" else {})


@pytest.mark.parametrize("kind", ["llava", "gemma3"])
@pytest.mark.parametrize("how", [{}, {"num_items_in_batch": 5}, {"return_dict": False}], ids=str)
def test_image_text_models_have_the_same_loss_under_another_type(kind, how):
    """They kept the logits of the whole batch, for "a loss of its own (ForConditionalGeneration)", which is ForCausalLMLoss."""
    model, batch = _image_text(kind)

    def loss_and_grads():
        model.zero_grad()
        out = model(**batch, **how)
        loss = out[0] if isinstance(out, tuple) else out.loss
        loss.backward()
        return loss, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected, wanted = loss_and_grads()
    assert use_chunked_loss(model).kind == "chunked"
    loss, grads = loss_and_grads()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6) and set(grads) == set(wanted)
    assert any("vision_tower" in name for name in grads)
    largest = max(one.abs().max() for one in wanted.values())
    assert all((grads[n] - one).abs().max() <= 1e-5 * largest for n, one in wanted.items())


def test_a_masked_models_loss_is_not_the_causal_one():
    with torch.device("meta"):
        model = EuroBertForMaskedLM(EuroBertConfig(**{**SMALL, "head_dim": None}))
    assert "loss_function is ForMaskedLMLoss" in why_not_chunked(model)


def test_a_loss_function_of_the_users_is_not_replaced():
    model = _llama()
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.square().mean()
    expected = _loss(model).item()
    path = use_chunked_loss(model)
    assert path.kind == "model" and "loss_function is <lambda>" in path.why and _loss(model).item() == expected


def test_a_head_that_is_more_than_linear_keeps_its_forward():
    model = _llama()
    model.lm_head.forward = lambda hidden: 2 * torch.nn.functional.linear(hidden, model.lm_head.weight)
    assert "more than a linear layer" in use_chunked_loss(model).why


def test_a_copy_computes_with_its_own_weights():
    """An average of weights, or a frozen reference beside the model: they gave the loss of the original."""
    model = _patched()
    other = copy.deepcopy(model)
    torch.nn.init.zeros_(other.lm_head.weight)
    assert _loss(other).item() == pytest.approx(torch.tensor(97.0).log().item())
    assert _loss(model).item() != _loss(other).item()
    _loss(other).backward()
    assert other.lm_head.weight.grad is not None and model.lm_head.weight.grad is None


@pytest.mark.parametrize("how", ["copied head", "larger vocabulary"])
def test_a_head_put_in_later_is_the_one_that_trains(how):
    """peft's modules_to_save computes with a copy of the head: that copy got no gradient."""
    model = _patched()
    if how == "copied head":
        model.lm_head = copy.deepcopy(model.lm_head)
    else:
        model.resize_token_embeddings(120)
    out = model(input_ids=IDS, labels=IDS)
    plain = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    assert out.loss.item() == pytest.approx(plain.item(), rel=1e-6)
    out.loss.backward()
    assert model.lm_head.weight.grad.any()


def test_a_head_that_computes_on_is_told_how_to_go_on():
    model = _patched()
    model.lm_head.register_forward_hook(lambda *a: a[-1] * 1.0)
    with pytest.raises(ModelError, match="use_liger_kernel false"):
        _loss(model)


@pytest.mark.parametrize(
    "config, model", [(MixtralConfig, MixtralForCausalLM), (GraniteMoeConfig, GraniteMoeForCausalLM)], ids=["plain", "scaled"]
)
def test_a_tuple_keeps_everything_but_the_logits(config, model):
    scaling = {"logits_scaling": 3.0} if config is GraniteMoeConfig else {}
    model = model(config(**SMALL, **scaling, num_local_experts=4, output_router_logits=True))
    loss, aux, logits, *rest = model(input_ids=IDS, labels=IDS, return_dict=False)
    assert logits.shape == (*IDS.shape, 97)
    use_chunked_loss(model)
    found = model(input_ids=IDS, labels=IDS, return_dict=False)
    assert found[0].item() == pytest.approx(loss.item(), rel=1e-6) and torch.equal(found[1], aux)
    assert found[2] is None and len(found) == 3 + len(rest)


def test_another_mark_for_ignored_labels_is_heard():
    model = _llama()
    mark = int(IDS[0, 3])
    expected = _loss(model, ignore_index=mark).item()
    use_chunked_loss(model)
    assert _loss(model, ignore_index=mark).item() == expected != _loss(model).item()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_none_is_computed(mode, monkeypatch):
    """`needs_input_grad` is true for a parameter under no_grad too: evaluation made the head's gradient, 1 GB of it at 8B."""
    seen, original = [], cross_entropy._in_chunks
    monkeypatch.setattr(cross_entropy, "_in_chunks", lambda *a: seen.append(a[-1]) or original(*a))
    model = _patched()
    with mode():
        value = _loss(model).item()
    assert seen == [(False, False, False)] and _loss(model).item() == value
    assert seen[1] == (True, True, False)


@pytest.mark.parametrize("label", [97, -1])
def test_a_label_that_is_no_word_is_named(label):
    model, labels = _patched(), IDS.clone()
    labels[1, 3] = label
    with pytest.raises(DataError, match=f"label {label} is neither one of the 97 words"):
        model(input_ids=IDS, labels=labels)


_LIGER = """
import sys
from types import MethodType

def forward(self, *_):
    raise AssertionError("liger-kernel's experts run")

def apply(model):
    for module in model.modules():
        if type(module).__name__ == "MixtralExperts":
            module.forward = MethodType(forward, module)
            module._get_name = MethodType(lambda self: "LigerExperts", module)
            sys.modules[type(module).__module__].MixtralExperts = None

MODEL_TYPE_TO_APPLY_LIGER_FN = {"mixtral": apply, "llama": apply}
"""


def test_liger_kernels_experts_are_given_back(monkeypatch, tmp_path):
    """They took longer than grouped products, and minutes of a first step to be tuned. A stand-in, as there is no GPU."""
    (tmp_path / "liger_kernel/transformers").mkdir(parents=True)
    (tmp_path / "liger_kernel/transformers/monkey_patch.py").write_text(_LIGER)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch"):
        monkeypatch.setitem(sys.modules, name, None)  # taken back afterwards
        del sys.modules[name]
    config = MixtralConfig(**SMALL, num_local_experts=2)
    model = MixtralForCausalLM(config)
    with torch.no_grad():
        expected = model(input_ids=IDS, labels=IDS).loss
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    use_liger(model)
    with torch.no_grad():
        loss = model(input_ids=IDS, labels=IDS).loss
    assert "experts.LigerExperts" not in str(model) and model.config._experts_implementation == NAME
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert "MixtralExperts" in str(MixtralForCausalLM(config))  # a later model's are transformers' too
