"""Models that scale or cap their logits before the loss: the chunked loss does so in fp32, and takes nothing else upon itself."""

import pytest
import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma4ForConditionalGeneration,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    PaliGemmaForConditionalGeneration,
    RecurrentGemmaForCausalLM,
)  # fmt: skip

from bigtrain.errors import ModelError
from bigtrain.kernels import attach
from bigtrain.kernels.attach import _use, use_chunked_loss, why_not_chunked
from bigtrain.kernels.cross_entropy import linear_cross_entropy
from bigtrain.kernels.logits import Change, Step, change_by, use_of
from tests.unit.kernels.test_cross_entropy import IN_PLACE, _build, _error, _loss_and_grads, _problem, small_chunks  # noqa: F401

CHANGES = [(1 / 3, None), (-0.7, None), (1.0, 30.0), (1.7, 2.3)]


def _plain(hidden, weight, bias, targets, scale, cap):
    logits = scale * (hidden @ weight.t() + bias)
    return torch.nn.functional.cross_entropy(logits if cap is None else cap * torch.tanh(logits / cap), targets)


@pytest.mark.parametrize("kernels", [IN_PLACE, None], ids=["in place", "cpu"])
@pytest.mark.parametrize("scale, cap", CHANGES)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 7e-3)])
def test_gradients_against_fp64(scale, cap, kernels, dtype, bound):
    """In bf16 logits are rounded before they are scaled, and their gradients after it: 0.2 to 0.5 % here, 0.2 to 0.6 without a change."""
    hidden, weight, targets = _problem(512, dtype)
    hidden = (hidden.detach() * 4).requires_grad_()  # logits of 20 and more: caps of 2.3 saturate
    bias = torch.linspace(-2, 2, 211).to(dtype).requires_grad_()
    assert (hidden @ weight.t()).abs().max() > 20
    loss = linear_cross_entropy(hidden, weight, targets, bias=bias, scale=scale, cap=cap, chunk_tokens=100, kernels=kernels)
    exact_inputs = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    exact = _plain(*exact_inputs, targets, scale, cap)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6 if dtype == torch.float32 else 1e-3)
    wanted = torch.autograd.grad(exact, exact_inputs)
    for mine, one in zip(torch.autograd.grad(loss, (hidden, weight, bias)), wanted):
        assert mine.dtype == dtype and _error(mine, one) < bound
    with torch.no_grad():
        again = linear_cross_entropy(hidden, weight, targets, bias=bias, scale=scale, cap=cap, kernels=kernels)
    assert again.item() == pytest.approx(loss.item(), rel=1e-6)


def test_no_change_is_the_loss_of_before_bit_for_bit():
    hidden, weight, targets = _problem(96, torch.bfloat16)
    plain, told = (linear_cross_entropy(hidden, weight, targets, **kw) for kw in ({}, {"scale": 1.0, "cap": None}))
    both = [torch.autograd.grad(loss, (hidden, weight)) for loss in (plain, told)]
    assert torch.equal(plain, told) and all(map(torch.equal, *both))


MODELS = {
    "cohere2": (Cohere2Config, Cohere2ForCausalLM, {"logit_scale": 0.3, "pad_token_id": 0}, Change(0.3)),
    "granite": (GraniteConfig, GraniteForCausalLM, {"logits_scaling": 6.0}, Change(1 / 6)),
    "granite by one": (GraniteConfig, GraniteForCausalLM, {"logits_scaling": 1.0}, Change()),
    "granitemoe": (
        GraniteMoeConfig, GraniteMoeForCausalLM, {"logits_scaling": 0.7, "num_local_experts": 4, "output_router_logits": True}, Change(1 / 0.7),
    ),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"final_logit_softcapping": 0.05, "attn_implementation": "eager"}, Change(1.0, 0.05)),
    "gemma2 without": (Gemma2Config, Gemma2ForCausalLM, {"final_logit_softcapping": None, "attn_implementation": "eager"}, Change()),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.bfloat16, 2**-4)])
@pytest.mark.parametrize("tied", [True, False])
def test_equals_transformers(name, dtype, bound, tied, small_chunks):  # noqa: F811
    """In bf16 transformers rounds logits again after each of its operations (2^-9 of each), which the chunked loss does not.

    Gradients of Gemma 2 are then 3 % of their largest apart, and both 4 to 6 % from those of fp64.
    """
    config_class, model_class, kw, change = MODELS[name]
    model = _build(config_class, model_class, dtype, tie_word_embeddings=tied, **kw)
    expected, expected_grads = _loss_and_grads(model, num_items_in_batch=23)
    path = use_chunked_loss(model)
    assert path.kind == "chunked" and ("logits" in path.why) == (change != Change())
    got, grads = _loss_and_grads(model, num_items_in_batch=23)
    assert got.logits is None and change_by(model._bigtrain_steps, model) == change
    assert got.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6 if dtype == torch.float32 else 2e-4)
    assert set(grads) == set(expected_grads)
    for one, grad in grads.items():
        scale = expected_grads[one].float().abs().max()
        assert (grad.float() - expected_grads[one].float()).abs().max() <= bound * scale, one
    with torch.no_grad():
        assert _loss(model).item() == pytest.approx(expected_loss(model).item(), rel=1e-6 if dtype == torch.float32 else 1e-3)


IDS = torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(0))


def _loss(model, **kw):
    return model(input_ids=IDS, labels=IDS, **kw).loss


def expected_loss(model):
    """Of the logits that the model makes without labels; with what it adds for its experts."""
    out = model(input_ids=IDS)
    loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), IDS[:, 1:].flatten())
    aux = getattr(out, "aux_loss", None)
    return loss if aux is None else loss + model.router_aux_loss_coef * aux


def test_a_cap_that_is_set_later_counts():
    """Before, it was an error."""
    model = _build(Gemma2Config, Gemma2ForCausalLM, final_logit_softcapping=None)
    use_chunked_loss(model)
    before = _loss(model).item()
    model.config.final_logit_softcapping = 0.05
    assert _loss(model).item() == pytest.approx(expected_loss(model).item(), rel=1e-6) != pytest.approx(before, rel=1e-5)
    model.config.final_logit_softcapping = float("nan")
    with pytest.raises(ModelError, match="final_logit_softcapping = nan"):
        _loss(model)


@pytest.mark.parametrize("more", [lambda out: out * 2.0, lambda out: out + 0.5, lambda out: out + torch.zeros(2, 9, 97)])
@pytest.mark.parametrize("name", ["granite", "gemma2"])
def test_a_head_that_computes_on_is_refused(name, more):
    config_class, model_class, kw, _ = MODELS[name]
    model = _build(config_class, model_class, **kw)
    use_chunked_loss(model)
    model.lm_head.register_forward_hook(lambda *a: more(a[-1]))
    with pytest.raises(ModelError, match="use_liger_kernel false"):
        _loss(model)


USUAL = "def forward(self, x, labels, given=None):\n    logits = self.lm_head(x).float()\n    {}\n    loss = self.loss_function({})\n    return loss, logits"
SCALED = "logits = logits * self.config.factor"


@pytest.mark.parametrize("line, call", [
    ("logits = logits + 1", "logits, labels"),
    ("logits = 2 / logits", "logits, labels"),
    ("logits = self.factor / logits", "logits, labels"),
    ("logits = logits * given", "logits, labels"),
    ("logits *= self.factor", "logits, labels"),
    ("logits[0] = logits", "logits, labels"),
    ("other = logits * self.factor", "logits, labels"),
    ("logits = torch.tanh(logits, out=logits)", "logits, labels"),
    ("if self.training: logits = logits * self.factor", "logits, labels"),
    ("if self.factor is not None: pass\n    else: logits = logits * self.factor", "logits, labels"),
    ("for _ in range(2): logits = logits * self.factor", "logits, labels"),
    ("if given is None: given = self.factor\n    logits = logits * given", "logits, labels"),
    ("self.loss_function(logits, labels)\n    " + SCALED, "logits, labels"),
    ("if self.x: logits = self.lm_head(x)\n    " + SCALED, "logits, labels"),
    ("labels = labels + 1", "logits, labels"),
    ("pass", "logits=logits, labels=labels, shift_labels=labels"),
    ("pass", "logits, self.labels"),
    ("x = self.lm_head(x) * 2", "logits, labels"),
])  # fmt: skip
def test_what_no_known_step_covers_is_found(line, call):
    assert use_of(USUAL.format(line, call)).strange


def test_steps_are_read():
    assert use_of(USUAL.format("labels = labels.to(logits.device)", "logits, labels")) == ((), None)
    assert use_of(USUAL.format(SCALED, "logits, labels")) == ((Step("times", ("config", "factor")),), None)
    factor = "self.model.lm_head_multiplier"
    assert _use(FalconH1ForCausalLM.__new__(FalconH1ForCausalLM)).steps == (Step("times", tuple(factor.split(".")[1:])),)
    where = ("config", "logits_soft_cap")
    wanted = ((Step("over", where), Step("tanh"), Step("times", where)), None)
    assert _use(RecurrentGemmaForCausalLM.__new__(RecurrentGemmaForCausalLM)) == wanted
    where = ("config", "get_text_config()", "final_logit_softcapping")
    wanted = ((Step("over", where, where), Step("tanh", (), where), Step("times", where, where)), None)
    for several in (Gemma4ForConditionalGeneration, PaliGemmaForConditionalGeneration):
        assert _use(several.__new__(several)) == wanted


def test_what_steps_come_to():
    class Model:
        two, three, none, flag, zero = 2, 3.0, None, True, 0

    def by(*steps):
        return change_by(tuple(steps), Model)

    two, three = Step("times", ("two",)), Step("over", ("three",))
    cap = (Step("over", ("three",)), Step("tanh"), Step("times", ("three",)))
    assert by(two, three) == Change(2 / 3) and by(*cap) == Change(1.0, 3.0) and by(two, *cap) == Change(2.0, 3.0)
    assert by(*cap, two) == Change(2.0, 6.0) and by(two._replace(unless_none=("none",))) == Change()
    assert Change(2.0, 3.0).of(1.7) == pytest.approx(3 * torch.tanh(torch.tensor(3.4 / 3)).item())
    for wrong in ("none", "flag", "zero", "missing"):
        with pytest.raises(ValueError, match=wrong):
            by(Step("times", (wrong,)))
    with pytest.raises(ValueError, match="two soft caps"):
        by(*cap, *cap)


def test_a_factor_that_is_no_number_keeps_the_models_own_loss(caplog):
    model = _build(Cohere2Config, Cohere2ForCausalLM, pad_token_id=0)
    model.logit_scale = torch.nn.Parameter(torch.tensor(0.5))
    assert "logit_scale = Parameter" in why_not_chunked(model)
    assert use_chunked_loss(model).kind == "model" and "logit_scale = Parameter" in caplog.text
    _loss(model).backward()
    assert model.logit_scale.grad is not None


@pytest.mark.parametrize("name", ["granite", "gemma2"])
def test_beside_liger_kernel_the_loss_is_bigtrains(name, monkeypatch):
    """Its own could not read a partitioned head, and for Granite it took torch's cross entropy from the whole process."""
    seen = {}

    def apply(model, cross_entropy=True, fused_linear_cross_entropy=True):
        seen.update(cross_entropy=cross_entropy, fused=fused_linear_cross_entropy)

    monkeypatch.setattr(attach, "_liger_for", lambda kind: ("", apply))
    config_class, model_class, kw, _ = MODELS[name]
    model = _build(config_class, model_class, **kw)
    assert attach.use_liger(model).kind == "chunked" and seen == {"cross_entropy": False, "fused": False}
