"""Models that attend in their own way: told apart by their documents all the same, or refused; never silently mixed."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, Gemma2ForCausalLM

from bigtrain.data.isolation import VARLEN, prepare_isolation, register_varlen, varlen_attention
from bigtrain.data.isolation_choice import isolation_for
from bigtrain.errors import DataError, UsageError
from bigtrain.kernels import documents, packed_rows
from bigtrain.models.source import resolve
from bigtrain.run import attention
from bigtrain.run.arguments import TrainArguments
from tests.unit.data.test_isolation import SHAPE

register_varlen()


@pytest.mark.parametrize(
    "kind, attention", [("opt", "sdpa"), ("opt", "eager"), ("persimmon", VARLEN), ("gpt_bigcode", VARLEN), ("bert", VARLEN)]
)
def test_models_that_do_not_pass_positions_on_are_refused(kind, attention):
    """OPT makes a mask of its own; Persimmon and GPT-BigCode give their attention no positions; BERT looks ahead."""
    model = _by_name(kind, attention)
    prepare_isolation(model, "isolated")
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    with pytest.raises(DataError, match="does not pass position_ids on"):
        model(input_ids=torch.ones_like(positions), position_ids=positions)


@pytest.mark.parametrize("kind, attention", [("opt", VARLEN), ("persimmon", "sdpa"), ("gpt_bigcode", "eager")])
def test_the_same_models_where_they_do(kind, attention):
    model = _by_name(kind, attention)
    prepare_isolation(model, "isolated")
    ids, positions = torch.tensor([[3, 4, 5, 6, 7, 8]]), torch.tensor([[0, 1, 2, 0, 1, 2]])
    packed = model(input_ids=ids, position_ids=positions).logits
    alone = model(input_ids=ids[:, 3:], position_ids=positions[:, 3:]).logits
    assert (packed[:, 3:] - alone).abs().max() < 1e-6  # other kernels for other sizes
    assert not model._forward_pre_hooks  # looked at once


@pytest.mark.parametrize(
    "kind, what",
    [
        ("falcon_h1", "(hybrid)"),  # attention and Mamba in one layer
        ("zaya", "(hybrid"),  # a convolution over the tokens before
        ("inkling_text", "(hybrid"),
        ("deepseek_v4", "compressed_"),  # keys of several tokens in one, by their place in the row
        ("minimax_m3_vl_text", "(minimax_m3_sparse)"),  # blocks of keys, the nearest taken by the position in the document
        ("blt", "patches that reach from one document"),
        ("qwen4_exp_text", "hashes each token with those before it"),
    ],
)
def test_models_that_mix_tokens_beside_the_mask_are_refused(kind, what):
    """All but MiniMax's packed documents saw those before them in the row, without a word: their positions do reach the masks."""
    more = {"layer_types": ["minimax_m3_sparse"], "num_hidden_layers": 1} if "minimax" in kind else {}
    more = {"layer_types": ["indexed_attention"], "num_hidden_layers": 1} if "qwen4" in kind else more
    config = AutoConfig.for_model(kind, **more)
    with pytest.raises(DataError) as refused:
        isolation_for(config, "isolated")
    assert what in str(refused.value) and "packing='none'" in str(refused.value)
    assert isolation_for(config, "none").method == "none needed"


@pytest.mark.parametrize("kind", ["llama4_text", "gemma3_text", "deepseek_v32", "gpt_oss", "qwen3_moe"])
def test_layers_that_keep_to_the_mask_are_taken(kind):
    assert isolation_for(AutoConfig.for_model(kind), "isolated").method == "position_ids"


def _by_name(kind, attention, **more):
    torch.manual_seed(0)
    gpt = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    shape = gpt if kind == "gpt_bigcode" else {**SHAPE, "ffn_dim": 48, "word_embed_proj_dim": 32, **more}
    config = AutoConfig.for_model(kind, **shape, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    return auto.from_config(config, attn_implementation=attention).eval()


def test_varlen_refuses_to_leave_out_caps():
    model = _by_name("gemma2", VARLEN)
    with pytest.raises(DataError, match="softcap"):
        model(input_ids=torch.ones(1, 6, dtype=torch.int64))


def test_varlen_refuses_keys_that_the_model_chose():
    """DeepSeek V3.2 puts its choice into the mask for sdpa and eager only."""
    query = torch.zeros(1, 2, 4, 8)
    with pytest.raises(DataError, match="gives attention indices"):
        varlen_attention(torch.nn.Module(), query, query, query, None, indices=torch.zeros(1, 4, 2, dtype=torch.int32))


def test_heads_whose_values_are_narrower_than_their_keys():
    """Latent attention: on a GPU by zeros beside the values, elsewhere as they are."""
    width = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32}
    ids, positions = torch.tensor([[3, 4, 5, 6, 7, 8]]), torch.tensor([[0, 1, 2, 0, 1, 2]])
    heads = {"num_key_value_heads": 4}
    models = [_by_name("deepseek_v3", a, **width, **experts, **heads) for a in ("eager", VARLEN)]
    for model in models:
        prepare_isolation(model, "isolated")
    with torch.no_grad():
        eager, varlen = (m(input_ids=ids, position_ids=positions).logits for m in models)
    assert (eager - varlen).abs().max() < 1e-5


def test_narrower_values_on_the_path_of_a_gpu(monkeypatch):

    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 5)
    bounds = torch.tensor([0, 4, 6, 12], dtype=torch.int32)
    monkeypatch.setattr(packed_rows, "packed_attention", lambda *args: None)
    monkeypatch.setattr(packed_rows, "is_hopper_or_later", lambda device: False)
    monkeypatch.setattr(
        packed_rows, "_flash", lambda q, k, v, b, longest, scale, window: packed_rows.per_document(q, k, v, b, scale, 0.0)
    )
    out = packed_rows.attend(query, key, value, documents.Documents(bounds, 6), 0.3)
    flat = [x.transpose(1, 2).reshape(12, x.shape[1], x.shape[-1]) for x in (query, key, value)]
    expected = packed_rows.per_document(*flat, bounds, 0.3, 0.0).view(2, 6, 4, 5)
    assert out.shape == expected.shape and (out - expected).abs().max() < 1e-6  # other sums for another width


@pytest.mark.parametrize("packing", ["isolated", "concatenate", "none"])
@pytest.mark.parametrize(
    "kind, chosen",
    [
        *dict.fromkeys(("llama", "gpt_oss"), VARLEN).items(),
        ("gemma2", "flex_attention"),  # a cap
        ("deepseek_v4", "eager"),  # sinks, and keys that are joined, for which no flash kernel will do
        *dict.fromkeys(("doge", "deepseek_v32"), "sdpa").items(),
    ],
)
def test_auto_on_a_gpu_leaves_models_alone_that_sdpa_cannot_do(monkeypatch, kind, chosen, packing):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention, "has_triton_package", lambda: True)
    assert attention.choose(_arguments(packing=packing), AutoConfig.for_model(kind)) == chosen


def test_sinks_on_a_cpu_are_kept_apart_in_packed_rows():
    """gpt-oss gives its masks no position_ids; for whole rows single operations do."""
    config = AutoConfig.for_model("gpt_oss")
    assert attention.choose(_arguments(packing="isolated"), config) == VARLEN
    assert attention.choose(_arguments(packing="none"), config) == "eager"


def _arguments(**more):
    return TrainArguments(model_name_or_path="x", output_dir="x", train_data="x", ds_config="x", **more)


def test_caps_are_kept_whatever_the_class_says_of_sdpa(monkeypatch):
    """Up to transformers 5.17 Gemma 2 says that it has sdpa, which drops the cap: a GPU took kernels that refuse it, a CPU dropped it."""
    monkeypatch.setattr(Gemma2ForCausalLM, "_supports_sdpa", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention, "has_triton_package", lambda: True)
    config = AutoConfig.for_model("gemma2")
    assert attention.choose(_arguments(), config) == "flex_attention"
    config.attention_dropout = 0.1  # which compiled kernels have not
    assert attention.choose(_arguments(), config) == "eager"
    config.attention_dropout = 0.0
    for unfit in ({"seq_len": 1000}, {"checkpointing_policy": "selective"}):
        assert attention.choose(_arguments(**unfit), config) == "eager"
    with pytest.raises(UsageError, match="flex_attention cannot run with --checkpointing_policy selective"):
        attention.choose(_arguments(attn_implementation="flex_attention", checkpointing_policy="selective"), config)
    for asked in ("sdpa", VARLEN):
        with pytest.raises(UsageError, match=r"a cap of its scores \(softcap\)"):
            attention.choose(_arguments(attn_implementation=asked), config)
    assert attention.choose(_arguments(attn_implementation="flex_attention"), config) == "flex_attention"
    config.attn_logit_softcapping = None  # then sdpa leaves nothing out
    assert attention.choose(_arguments(), config) == VARLEN


def test_a_wait_for_compiled_kernels_is_told(caplog):
    config = AutoConfig.for_model("gemma2", **SHAPE, head_dim=8, attn_implementation="flex_attention")
    with caplog.at_level("INFO"):
        attention.tell(_arguments(), Gemma2ForCausalLM(config), 128)
    assert "attention: flex_attention, since Gemma2ForCausalLM gives it a cap" in caplog.text and "25 s more" in caplog.text


@pytest.mark.parametrize("packing", ["isolated", "none"])
def test_gemma2_as_built_by_default_is_plain_transformers_eager(monkeypatch, caplog, packing):
    monkeypatch.setattr(Gemma2ForCausalLM, "_supports_sdpa", True)
    config = AutoConfig.for_model(
        "gemma2", **SHAPE, head_dim=8, attn_logit_softcapping=0.1, sliding_window=8, query_pre_attn_scalar=1
    )
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ours = resolve(config, attn_implementation=attention.choose(_arguments(packing=packing), config)).construct()
    by_builder = resolve(config).construct()
    ids, apart = torch.arange(3, 27)[None] % 61, torch.cat([torch.arange(14), torch.arange(10)])[None]
    positions = apart if packing == "isolated" else torch.arange(24)[None]
    with caplog.at_level("INFO"):
        attention.tell(_arguments(), ours, 24)
    assert "attention: eager, since Gemma2ForCausalLM gives it a cap of its scores (softcap)" in caplog.text
    for model in (plain, ours, by_builder):
        model.load_state_dict(plain.state_dict())
        prepare_isolation(model, packing)
    alone = torch.cat([plain(input_ids=ids[:, s], use_cache=False).logits for s in (slice(14), slice(14, 24))], 1)
    packed = ours(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert ((packed - alone).abs().max() < 1e-6) == (packing == "isolated")
    for _ in range(3):
        losses = [m(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss for m in (plain, ours, by_builder)]
        assert losses[0] == losses[1] == losses[2]
        for model, loss in zip((plain, ours, by_builder), losses):
            model.zero_grad()
            loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
