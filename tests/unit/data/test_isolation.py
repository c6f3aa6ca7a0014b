"""Packed documents do not see each other: the logits of a document in a row are those of the document alone."""

from __future__ import annotations

import numpy
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from bigtrain.data.isolation import (
    VARLEN,
    prepare_isolation,
    register_varlen,
    varlen_attention,
)
from bigtrain.data.isolation_choice import isolation_for
from bigtrain.data.loader import stack
from bigtrain.errors import DataError
from bigtrain.kernels import documents, packed_rows
from bigtrain.kernels.documents import cumulative_lengths

register_varlen()
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
# Documents whose rows pack differently, so that a mask made for the first row would be wrong for the second.
DOCUMENTS = [[3, 4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14], [15, 16, 17, 18, 19, 20, 21], [22, 23], [24, 25, 26, 27]]


def _build(kind, attention, **extra):
    config_class, model_class = MODELS[kind]
    torch.manual_seed(0)
    config = config_class(**SHAPE, **extra)
    config._attn_implementation = attention
    return model_class(config).eval()


def _documents_in(row):
    """(start, ids) of each document of a row, padding as part of the last one."""
    starts = [i for i, p in enumerate(row["position_ids"].tolist()) if p == 0]
    ids = row["input_ids"].tolist()
    return [(start, ids[start:end]) for start, end in zip(starts, [*starts[1:], len(ids)])]


def _worst_difference(model, rows, micro_batch):
    worst = 0.0
    for first in range(0, len(rows), micro_batch):
        chosen = [rows[i % len(rows)] for i in range(first, first + micro_batch)]
        batch = stack(chosen)
        with torch.no_grad():
            packed = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
            for index, row in enumerate(chosen):
                for start, ids in _documents_in(row):
                    alone = model(input_ids=torch.tensor([ids])).logits[0]
                    worst = max(worst, (packed[index, start : start + len(ids)] - alone).abs().max().item())
    return worst


@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("attention", ["sdpa", "eager", VARLEN])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_logits_in_a_packed_row_are_those_of_the_document_alone(make_rows, kind, attention, micro_batch):
    model = _build(kind, attention)
    assert model.config.use_cache
    assert prepare_isolation(model, "isolated").method == "position_ids"
    assert not model.config.use_cache
    rows = make_rows(DOCUMENTS, 13, pad_token_id=0)
    assert len(rows) >= 2 and any(len(_documents_in(rows[i])) > 1 for i in range(len(rows)))
    # fp32, same sums over the same tokens in another order (other matrix sizes): a few ulp of values of about 0.5.
    # Attention across documents gives 1e-2 here, see the next test.
    assert _worst_difference(model, rows, micro_batch) < 2e-6


def test_the_trap_with_a_cache_documents_do_see_each_other(make_rows):
    """Why `prepare_isolation` exists. If this fails, transformers isolates with a cache too: drop the workaround."""
    model = _build("llama", "sdpa")
    assert _worst_difference(model, make_rows(DOCUMENTS, 13, pad_token_id=0), 1) > 1e-3


def test_concatenated_documents_do_see_each_other(make_rows):
    model = _build("llama", "sdpa")
    row = make_rows(DOCUMENTS[:2], 9, "concatenate", pad_token_id=0)[0]
    with torch.no_grad():
        together = model(input_ids=row["input_ids"][None], position_ids=row["position_ids"][None], use_cache=False).logits
        alone = model(input_ids=torch.tensor([DOCUMENTS[1]])).logits
    assert (together[0, 5:9] - alone[0]).abs().max() > 1e-3


@pytest.mark.parametrize("attention", ["sdpa", VARLEN])
def test_gradients_of_a_packed_row_are_the_sum_of_the_documents(make_rows, attention):
    """Training sees no leak either: summed loss gradients packed (micro batch 2) and document by document."""
    rows = make_rows(DOCUMENTS, 13, pad_token_id=0)
    batch = stack([rows[0], rows[1]])
    grads = []
    for packed in (True, False):
        model = _build("llama", attention).train()
        prepare_isolation(model, "isolated")
        if packed:
            model(**batch, num_items_in_batch=1).loss.backward()
        else:
            for i in range(2):
                for start, ids in _documents_in(rows[i]):
                    labels = rows[i]["labels"][start : start + len(ids)][None]
                    model(input_ids=torch.tensor([ids]), labels=labels, num_items_in_batch=1).loss.backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    scale = grads[1].abs().max()
    assert (grads[0] - grads[1]).abs().max() / scale < 1e-6  # fp32 sums in another order


def test_varlen_makes_no_dense_mask(make_rows, monkeypatch):
    """No seq x seq tensor: the attention function gets no mask for packed rows, and one for padded generation."""
    import bigtrain.data.isolation as isolation

    seen = []
    inner = isolation.varlen_attention

    def spy(module, query, key, value, attention_mask, **kwargs):
        seen.append(attention_mask is None)
        return inner(module, query, key, value, attention_mask, **kwargs)

    from transformers import AttentionInterface

    AttentionInterface.register("bigtrain_spy", spy)
    from transformers import AttentionMaskInterface

    AttentionMaskInterface.register("bigtrain_spy", AttentionMaskInterface()[VARLEN])
    model = _build("llama", "bigtrain_spy")
    model.config.use_cache = False
    rows = make_rows(DOCUMENTS, 13, pad_token_id=0)
    batch = stack([rows[0], rows[1]])
    with torch.no_grad():
        model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
        assert seen == [True, True]
        seen.clear()
        mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
        padded = model(input_ids=torch.tensor([[0, 0, 3, 4], [3, 4, 5, 6]]), attention_mask=mask).logits
    assert seen == [False, False]
    reference = _build("llama", "sdpa")
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([[0, 0, 3, 4], [3, 4, 5, 6]]), attention_mask=mask).logits
    torch.testing.assert_close(padded[:, 2:], expected[:, 2:])


def test_varlen_generates_like_sdpa():
    ids = torch.tensor([[3, 4, 5]])
    out = [
        _build("llama", attention).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
        for attention in ("sdpa", VARLEN)
    ]
    assert torch.equal(out[0], out[1])


def test_forward_under_inference_mode():
    """Nobody counts writes into tensors that are made there."""
    model = _build("llama", VARLEN)
    ids, positions = torch.tensor([[3, 4, 5, 6, 7, 8]]), torch.tensor([[0, 1, 2, 0, 1, 2]])
    with torch.no_grad():
        expected = model(input_ids=ids, position_ids=positions).logits
    with torch.inference_mode():
        positions = positions + 0
        assert torch.equal(model(input_ids=ids, position_ids=positions).logits, expected)
        positions[:] = torch.arange(6)
        assert torch.equal(model(input_ids=ids, position_ids=positions).logits, model(input_ids=ids).logits)


def test_documents_follow_memory_that_is_shared_with_numpy():
    """A loader that fills the same array for every micro batch: torch counts no write."""
    array = numpy.arange(6)[None]
    positions, cache = torch.from_numpy(array), documents.DocumentsCache()
    assert cache.of(positions, 1, 6, is_bounds=False).count == 1
    array[0, 3:] -= 3
    assert cache.known(positions) is None
    assert cache.of(positions, 1, 6, is_bounds=False).count == 2


def test_transformers_function_is_wrapped_once():
    from transformers.masking_utils import find_packed_sequence_indices as find

    prepare_isolation(_build("llama", "sdpa"), "isolated")
    register_varlen()
    from transformers.masking_utils import find_packed_sequence_indices as again

    assert again is find and not hasattr(find.__wrapped__, "of_bigtrain")


def test_bounds_of_documents():
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    assert cumulative_lengths(positions).tolist() == [0, 3, 5, 6, 10]
    assert cumulative_lengths(torch.tensor([[0, 1, 2], [0, 1, 2]])).tolist() == [0, 3, 6]


def test_methods_by_attention_implementation():
    config = LlamaConfig(**SHAPE)
    config._attn_implementation = "flash_attention_2"
    assert isolation_for(config, "isolated").document_bounds
    assert not isolation_for(config, "none").document_bounds
    config._attn_implementation = "paged|eager"
    with pytest.raises(DataError, match=r"paged.*use one of sdpa, eager, flex_attention, a flash"):
        isolation_for(config, "isolated")


def test_recurrent_models_are_refused():
    with pytest.raises(DataError, match="recurrent"):
        isolation_for(MambaConfig(), "isolated")
    assert isolation_for(MambaConfig(), "none").method == "none needed"


def test_models_without_positions_are_refused_and_foreign_modules_left_alone():
    class NoPositions(torch.nn.Module):
        config = LlamaConfig(**SHAPE)

        def forward(self, input_ids):
            return input_ids

    with pytest.raises(DataError, match="takes no position_ids"):
        prepare_isolation(NoPositions(), "isolated")
    assert prepare_isolation(torch.nn.Linear(1, 1), "isolated").method == "none needed"


def test_absolute_positions_restart_too(make_rows):
    """GPT-2 adds learned positions: they must be those of the document."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)).eval()
    prepare_isolation(model, "isolated")
    assert _worst_difference(model, make_rows(DOCUMENTS, 13, pad_token_id=0), 2) < 2e-6


def test_documents_are_found_once_for_all_layers(monkeypatch):
    found = []
    monkeypatch.setattr(documents, "cumulative_lengths", lambda positions: found.append(1) or cumulative_lengths(positions))
    cache = documents.DocumentsCache()
    one_row = torch.arange(6)[None]
    first = cache.of(one_row, 2, 6, is_bounds=False)  # the same positions for both rows
    assert cache.of(one_row, 2, 6, is_bounds=False) is first and len(found) == 1
    assert first.one_a_row and first.bounds.tolist() == [0, 6, 12]
    one_row[0, 3:] -= 3
    packed = cache.of(one_row, 2, 6, is_bounds=False)
    assert len(found) == 2 and not packed.one_a_row and packed.bounds.tolist() == [0, 3, 6, 9, 12]


def test_bounds_of_a_caller_are_whole_rows_only_where_that_is_sure():
    across = torch.tensor([0, 4, 12], dtype=torch.int32)  # as many documents as rows, but not one in each
    assert not documents.DocumentsCache().of(across, 2, 6, is_bounds=True).one_a_row
    assert documents.DocumentsCache().of(across[::2], 1, 12, is_bounds=True).one_a_row


class Asked(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts what a device would have to be waited for: values and sizes that the host asks for."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select"):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [True, False])
def test_nothing_is_asked_of_the_device_once_the_documents_are_known(monkeypatch, packed):
    """Each such wait would also queue behind the copies of a streamed optimizer update."""
    monkeypatch.setattr("bigtrain.data.isolation.per_document", lambda q, *rest: q)  # the CPU's path reads the bounds
    positions = torch.arange(12).repeat(2, 1)
    if packed:
        positions[0, 5:] -= 5
    config = LlamaConfig(**SHAPE, attn_implementation=VARLEN)
    model = LlamaForCausalLM(config)
    prepare_isolation(model, "isolated")
    batch = {"input_ids": torch.ones(2, 12, dtype=torch.int64), "position_ids": positions.clone()}
    with Asked() as before:
        model(**batch)
    documents.cache.remember(positions, batch["position_ids"])
    with Asked() as after:
        model(**batch)
    assert before.names and not after.names
    found = documents.cache.known(batch["position_ids"])
    assert found.bounds.tolist() == ([0, 5, 12, 24] if packed else [0, 12, 24]) and found.one_a_row != packed
    batch["position_ids"].add_(0)  # written to: not known any more
    assert documents.cache.known(batch["position_ids"]) is None


def test_known_documents_give_the_indices_that_transformers_finds():
    from transformers.masking_utils import find_packed_sequence_indices as find

    whole, packed = torch.arange(8).repeat(2, 1), torch.arange(8).repeat(2, 1)
    packed[1, 3:] -= 3
    for positions in (whole, packed):
        expected = find.__wrapped__(positions)
        documents.cache.remember(positions, positions)
        assert find(positions) is None if expected is None else torch.equal(find(positions), expected)
        assert find(positions.clone()) is None if expected is None else torch.equal(find(positions.clone()), expected)


def test_documents_are_remembered_only_for_an_attention_that_wants_them(monkeypatch):
    meta = torch.empty(1, 4, device="meta", dtype=torch.int64)
    noted = []
    monkeypatch.setattr(documents.cache, "remember", lambda *pair: noted.append(pair))
    documents.remember(torch.arange(4)[None], meta)
    documents.remember(None, None)
    documents.remember(torch.arange(4)[None], torch.arange(4)[None])  # both on the host
    documents.remember(torch.arange(4), meta[0])  # not [batch, seq_len]
    monkeypatch.setattr(documents, "wanted", False)
    documents.remember(torch.arange(4)[None], meta)
    assert len(noted) == 1


@pytest.mark.parametrize(
    ("path", "one_a_row", "hopper", "cudnn", "taken"),
    [
        ("auto", True, True, True, "dense"),
        ("auto", False, True, True, "ragged"),
        ("auto", False, True, False, "flash"),
        ("auto", True, False, False, "flash"),
        ("ragged", True, True, True, "ragged"),
        ("flash", True, True, True, "flash"),
        ("dense", True, False, False, "dense"),
        ("dense", False, True, True, "error"),
        ("ragged", False, True, False, "error"),
        ("fastest", True, True, True, "error"),
    ],
)
def test_the_path_attention_takes_on_a_gpu(monkeypatch, path, one_a_row, hopper, cudnn, taken):

    query, key = torch.zeros(2, 4, 6, 8, dtype=torch.bfloat16), torch.zeros(2, 2, 6, 8, dtype=torch.bfloat16)
    went = []

    def through(name, result):
        return lambda *args: went.append(name) or result

    monkeypatch.setattr(packed_rows, "is_hopper_or_later", lambda device: hopper)
    monkeypatch.setattr(packed_rows, "_dense", through("dense", query.transpose(1, 2)))
    monkeypatch.setattr(packed_rows, "packed_attention", through("ragged", torch.zeros(12, 4, 8) if cudnn else None))
    monkeypatch.setattr(packed_rows, "_flash", through("flash", torch.zeros(12, 4, 8)))
    bounds = torch.tensor([0, 6, 12] if one_a_row else [0, 3, 6, 12], dtype=torch.int32)
    packed = documents.Documents(bounds, 6, one_a_row)
    if taken == "error":
        with pytest.raises(DataError, match=r"path|dense|cuDNN"):
            packed_rows.attend(query, key, key, packed, 0.3, path)
    else:
        assert packed_rows.attend(query, key, key, packed, 0.3, path).shape == (2, 6, 4, 8)
        assert went[-1] == taken


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
def test_varlen_on_a_gpu_equals_sdpa_with_a_dense_mask(heads):
    """bf16, hidden states and gradients; two rows that pack differently."""
    positions = torch.arange(256).repeat(2, 1)
    for row, starts in enumerate(([100, 101, 200], [64])):
        for start in starts:
            positions[row, start:] -= positions[row, start].clone()
    ids = torch.randint(0, 64, (2, 256), generator=torch.Generator().manual_seed(0)).cuda()
    results = []
    for attention in ("sdpa", VARLEN):
        torch.manual_seed(0)
        shape = SHAPE | {"hidden_size": 512, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
        config = LlamaConfig(**shape | {"max_position_embeddings": 256})
        config._attn_implementation = attention
        model = LlamaForCausalLM(config).cuda().bfloat16().train()
        prepare_isolation(model, "isolated")
        logits = model(input_ids=ids, position_ids=positions.cuda()).logits.float()
        logits.pow(2).mean().backward()
        grads = torch.cat([p.grad.float().flatten() for p in model.parameters()])
        results.append((logits.detach(), grads))
    for mine, expected in zip(results[1], results[0]):
        # Two bf16 kernels differ by their rounding, 2**-8 a value; a leak between documents is 0.1 and more.
        assert (mine - expected).norm() / expected.norm() < 2e-2


def test_attention_with_dropout_of_whole_rows_is_one_call_whose_result_is_not_copied(monkeypatch):
    """GPT-2 passes positions on though nothing is packed: each row was a call of its own, after a wait for its bounds, and the results were joined."""
    asked, inner = [], torch.nn.functional.scaled_dot_product_attention

    def spy(query, *args, **kwargs):
        asked.append((tuple(query.shape[:3]), kwargs["dropout_p"], kwargs["is_causal"]))
        return inner(query, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    register_varlen()
    query, key, value = (torch.randn(2, 12, 3, 8).transpose(1, 2) for _ in range(3))
    whole, packed = torch.arange(12)[None], torch.arange(12)[None] % 6
    module = torch.nn.Module()
    for positions, seen in ((whole, [((2, 3, 12), 0.5, True)]), (packed, [((1, 3, 6), 0.5, True)] * 4)):
        asked.clear()
        varlen_attention(module, query, key, value, None, dropout=0.5, position_ids=positions)
        assert asked == seen
    expected = inner(query, key, value, is_causal=True).transpose(1, 2)
    assert torch.equal(varlen_attention(module, query, key, value, None, position_ids=whole)[0], expected)
