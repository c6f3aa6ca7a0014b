"""Sliding windows without a dense mask: what a query sees is what transformers' own mask lets it see, in every family."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from bigtrain.data import isolation
from bigtrain.data.isolation import VARLEN, prepare_isolation, register_varlen
from bigtrain.errors import DataError
from bigtrain.kernels import documents, packed_rows
from bigtrain.models import enable_activation_checkpointing
from tests.unit.data.test_isolation import SHAPE

register_varlen()
FAMILIES = ("mistral", "ministral", "gemma3_text", "cohere2", "olmo3", "exaone4", "phi3", "mixtral", "starcoder2", "qwen2")
MORE = {
    "ministral": {"head_dim": 8},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
}
# Two rows that pack differently; the window of 3 is shorter than most documents and longer than some.
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1]])
IDS = torch.arange(26).view(2, 13) + 3


def _model(kind, attention, window=3):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SHAPE, **MORE.get(kind, {}), sliding_window=window, pad_token_id=0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def _trained(model, **inputs):
    """Logits, and all gradients in one vector."""
    logits = model(input_ids=IDS, **inputs).logits
    logits.pow(2).sum().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.fixture
def seen(monkeypatch):
    """Masks that transformers made dense, and windows that attention kept by itself."""
    found = {"dense": 0, "windows": []}
    attend = packed_rows.per_document

    def spy(*args):
        found["windows"].append(args[-1])
        return attend(*args)

    monkeypatch.setattr(isolation, "per_document", spy)
    from transformers import masking_utils

    dense = masking_utils.sdpa_mask

    def count(*args, **kwargs):
        found["dense"] += 1
        return dense(*args, **kwargs)

    monkeypatch.setattr(masking_utils, "sdpa_mask", count)
    register_varlen()
    return found


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_and_gradients_are_those_of_the_dense_mask(seen, kind, packed):
    inputs = {"position_ids": POSITIONS} if packed else {}
    found = []
    for attention in ("sdpa", VARLEN):
        model = _model(kind, attention)
        prepare_isolation(model, "isolated")
        if attention == VARLEN:
            seen.update(dense=0, windows=[])
        found.append(_trained(model, **inputs))
    assert seen["dense"] == 0 and 3 in seen["windows"]
    for mine, theirs in zip(*found):
        # fp32: the same sums over the same tokens in another order. A token more or less in the window is 1e-2 and more.
        assert (mine - theirs).abs().max() <= 2e-6 * theirs.abs().max()


SINKS = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "granite_swa": {},
    "mimo_v2_flash": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 12,
        "v_head_dim": 8,
        "moe_intermediate_size": 16,
    },
}


def _trained_alone(model, positions):
    """As `_trained`, each document by itself: gpt-oss gives its masks no position_ids."""
    logits = torch.empty(*IDS.shape, model.config.vocab_size)
    for row, places in enumerate(positions):
        starts = [*(places == 0).nonzero().flatten().tolist(), len(places)]
        for start, stop in itertools.pairwise(starts):
            one = model(input_ids=IDS[row : row + 1, start:stop], use_cache=False).logits
            one.pow(2).sum().backward()
            logits[row, start:stop] = one.detach()
    return logits, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", SINKS)
def test_sinks_are_those_of_single_operations(seen, monkeypatch, kind, packed):
    monkeypatch.setitem(MORE, kind, SINKS[kind])
    positions = POSITIONS if packed else torch.arange(13).expand(2, 13)
    models = []
    for attention in ("eager", VARLEN):
        try:
            models.append(_model(kind, attention))
        except ValueError:
            pytest.skip(f"this transformers has no {kind}")
        for at, sinks in enumerate(weight for name, weight in models[-1].named_parameters() if name.endswith("sinks")):
            torch.nn.init.normal_(sinks, generator=torch.Generator().manual_seed(at))
    expected = _trained_alone(models[0], positions)
    prepare_isolation(models[1], "isolated")
    seen.update(dense=0)
    found = _trained(models[1], position_ids=positions)
    assert seen["dense"] == 0
    assert all(w.grad.abs().min() > 0 for name, w in models[1].named_parameters() if name.endswith("sinks"))
    for mine, theirs in zip(found, expected):
        # As above; the greatest score is taken from all before the softmax, or not.
        assert (mine - theirs).abs().max() <= 5e-6 * theirs.abs().max()


def test_sinks_go_through_padded_rows_and_generation():
    """With a mask of its own, and with a cache, whose queries are fewer than its keys."""
    models = []
    for attention in ("eager", VARLEN):
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "gpt_oss", **SHAPE, **SINKS["gpt_oss"], sliding_window=3, pad_token_id=0, eos_token_id=None
        )
        models.append(AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval())
    padded = torch.tensor([[0] * 4 + [1] * 9, [1] * 13])
    eager, mine = (m(input_ids=IDS, attention_mask=padded, use_cache=False).logits[padded.bool()] for m in models)
    assert (eager - mine).abs().max() <= 5e-6 * eager.abs().max()
    told = [m.generate(IDS, attention_mask=padded, max_new_tokens=8, do_sample=False) for m in models]
    assert told[0].shape == (2, 21) and torch.equal(*told)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("inputs", [{}, {"position_ids": POSITIONS}], ids=["plain", "packed"])
def test_a_family_that_adds_to_the_mask_is_given_all_of_it(inputs, window):
    """Doge's attention is given no None: with a mask of its own and nothing below it, tokens saw those after them."""
    theirs, mine = (
        _trained(_model("doge", attention, window), use_cache=False, **inputs)[0] for attention in ("eager", VARLEN)
    )
    assert (mine - theirs).abs().max() <= 2e-6 * theirs.abs().max()


def test_a_window_of_another_size_gives_other_logits():
    """So that the comparison above can fail."""
    with torch.no_grad():
        three, four = (_model("mistral", VARLEN, window)(input_ids=IDS, position_ids=POSITIONS).logits for window in (3, 4))
    assert (three - four).abs().max() > 1e-3


@pytest.mark.parametrize("policy", ["full", "selective", "attention", "offload_inputs", "offload"])
def test_a_window_reaches_the_blocks_that_are_recomputed(policy):
    found = []
    for checkpointed in (False, True):
        model = _model("mistral", VARLEN)
        prepare_isolation(model, "isolated")
        if checkpointed:
            assert enable_activation_checkpointing(model, None, None, policy) == 2
        found.append(_trained(model, position_ids=POSITIONS))
    for mine, theirs in zip(*found):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "mask, expected",
    [
        (causal_mask_function, isolation._Seen(causal=True)),
        (sliding_window_causal_mask_function(5), isolation._Seen(5, causal=True)),
        (and_masks(sliding_window_causal_mask_function(5), sliding_window_overlay(4)), isolation._Seen(4, causal=True)),
        (
            and_masks(packed_sequence_mask_function(POSITIONS), sliding_window_causal_mask_function(5)),
            isolation._Seen(5, packed=True, causal=True),
        ),
        (sliding_window_overlay(4), isolation._Seen(4)),
        (and_masks(causal_mask_function, lambda b, h, q, k: q == k), None),
        (lambda b, h, q, k: k <= q, None),
    ],
)
def test_masks_are_known_by_what_they_let_see(mask, expected):
    assert isolation._seen_by(mask) == expected


@pytest.mark.parametrize("packed", [True, False])
def test_the_sign_of_a_window_keeps_what_it_says_and_is_no_mask(packed):
    sign = isolation._window_sign(isolation._Seen(2047, packed, causal=True))
    assert sign.numel() == 0
    for copy in (sign, sign.clone(), sign.to(torch.float16)):
        assert isolation._read_sign(copy) == isolation._Seen(2047, packed, causal=True)
    query = torch.zeros(1, 2, 4, 8)
    with pytest.raises(RuntimeError):
        torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=sign)
    for mask in (None, torch.ones(1, 1, 4, 4, dtype=torch.bool), torch.ones(2, 4)):
        assert isolation._read_sign(mask) is None


def test_packed_rows_whose_attention_is_given_no_positions_are_refused():
    query = torch.zeros(1, 2, 4, 8)
    sign = isolation._window_sign(isolation._Seen(2, packed=True, causal=True))
    with pytest.raises(DataError, match="sliding window and is given no position_ids"):
        isolation.varlen_attention(torch.nn.Module(), query, query, query, sign)


@pytest.mark.parametrize(
    "one_a_row, path, taken", [(True, "auto", "ragged"), (False, "auto", "ragged"), (True, "flash", "flash")]
)
def test_kernels_of_a_gpu_are_given_the_window(monkeypatch, one_a_row, path, taken):
    query, key = torch.zeros(2, 4, 6, 8, dtype=torch.bfloat16), torch.zeros(2, 2, 6, 8, dtype=torch.bfloat16)
    went = []

    def through(name):
        return lambda *args: went.append((name, args[5] if name == "ragged" else args[-1])) or torch.zeros(12, 4, 8)

    monkeypatch.setattr(packed_rows, "is_hopper_or_later", lambda device: True)
    monkeypatch.setattr(packed_rows, "packed_attention", through("ragged"))
    monkeypatch.setattr(packed_rows, "_flash", through("flash"))
    monkeypatch.setattr(packed_rows, "_dense", lambda *args: pytest.fail("it knows no window"))
    bounds = torch.tensor([0, 6, 12] if one_a_row else [0, 3, 6, 12], dtype=torch.int32)
    packed_rows.attend(query, key, key, documents.Documents(bounds, 6, one_a_row), 0.3, path, 2)
    assert went == [(taken, 2)]
    with pytest.raises(DataError, match="window 2: the dense path"):
        packed_rows.attend(query, key, key, documents.Documents(bounds, 6, one_a_row), 0.3, "dense", 2)


def test_flash_attention_counts_the_keys_before_the_query(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "torch.nn.attention.varlen.varlen_attn", lambda *args, **kwargs: asked.append(kwargs["window_size"]) or args[0]
    )
    tensors = (torch.zeros(6, 2, 8),) * 3
    for window in (0, 1, 4):
        packed_rows._flash(*tensors, torch.tensor([0, 6]), 6, 0.3, window)
    assert asked == [(-1, 0), (0, 0), (3, 0)]
