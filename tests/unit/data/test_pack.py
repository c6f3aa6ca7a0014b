"""Rows: exact contents, nothing lost, padding never and end tokens always in the loss."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from bigtrain.data.pack import Rows, best_fit, build_rows, cut, stats_dict
from bigtrain.data.tokens import TokenStore
from bigtrain.errors import DataError

EOS = PAD = 2


def _lists(row):
    return {name: tensor.tolist() for name, tensor in row.items()}


def test_B58_pad_equal_to_end_in_one_row_each(make_rows):
    rows = make_rows([[5, 6, EOS], [7, 8, 9, EOS]], 6, "none", pad_token_id=PAD)
    assert _lists(rows[0]) == {
        "input_ids": [5, 6, 2, 2, 2, 2],
        "labels": [-100, 6, 2, -100, -100, -100],  # the end is a target, the padding is not, nothing is shifted
        "position_ids": [0, 1, 2, 3, 4, 5],
    }
    assert rows[1]["labels"].tolist() == [-100, 8, 9, 2, -100, -100]


def test_B58_pad_equal_to_end_in_packed_rows(make_rows):
    rows = make_rows([[5, 6, EOS], [7, 8, 9, EOS]], 8, pad_token_id=PAD)
    assert len(rows) == 1
    assert _lists(rows[0]) == {
        "input_ids": [7, 8, 9, 2, 5, 6, 2, 2],
        "labels": [-100, 8, 9, 2, -100, 6, 2, -100],
        "position_ids": [0, 1, 2, 3, 0, 1, 2, 3],
    }


def test_B58_transformers_counts_each_target_once(make_rows):
    """The model's own shifted loss on a row equals the mean over exactly the label places: no double shift."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, use_cache=False
    )
    model = LlamaForCausalLM(config)
    row = make_rows([[5, 6, EOS], [7, 8, 9, EOS]], 8, pad_token_id=PAD)[0]
    batch = {name: tensor[None] for name, tensor in row.items()}
    with torch.no_grad():
        out = model(**batch)
    logp = out.logits[0].log_softmax(-1)
    targets = [(place, label) for place, label in enumerate(row["labels"].tolist()) if label != -100]
    assert len(targets) == 5
    expected = -torch.stack([logp[place - 1, label] for place, label in targets]).mean()
    torch.testing.assert_close(out.loss, expected)  # default fp32 bound: the same sum in another order


def test_concatenate_runs_documents_together(make_rows):
    rows = make_rows([[1, 2, 3], [4, 5], [6, 7, 8]], 5, "concatenate", pad_token_id=0)
    assert _lists(rows[0])["input_ids"] == [1, 2, 3, 4, 5]
    assert _lists(rows[0])["labels"] == [-100, 2, 3, 4, 5]
    assert _lists(rows[1]) == {  # the window shares token 5, so that 6 is predicted from it
        "input_ids": [5, 6, 7, 8, 0],
        "labels": [-100, 6, 7, 8, -100],
        "position_ids": [0, 1, 2, 3, 4],
    }
    assert rows.stats.target_tokens == 7


def test_long_documents_are_cut_without_losing_a_target(make_rows):
    rows = make_rows([list(range(10, 20))], 4)
    assert [rows[i]["input_ids"].tolist() for i in range(3)] == [[10, 11, 12, 13], [13, 14, 15, 16], [16, 17, 18, 19]]
    assert [rows[i]["labels"].tolist()[0] for i in range(3)] == [-100] * 3
    assert rows.stats.documents_cut == 1 and rows.stats.target_tokens == 9 and rows.stats.tokens_truncated == 0


def test_none_truncates_and_says_how_much(make_rows, caplog):
    rows = make_rows([list(range(10, 20)), [1, 2]], 4, "none")
    assert rows[0]["input_ids"].tolist() == [10, 11, 12, 13]
    assert (rows.stats.documents_truncated, rows.stats.tokens_truncated) == (1, 6)
    assert "1 documents truncated (6 tokens dropped)" in caplog.text


def test_answers_that_are_all_empty_are_told(tokenizer, caplog):
    chat = [[{"role": "user", "content": "one"}, {"role": "assistant", "content": answer}] for answer in ("", "two")]
    build_rows(Dataset.from_dict({"messages": chat[1:]}), tokenizer, 16)
    assert "all answers are empty" not in caplog.text
    build_rows(Dataset.from_dict({"messages": chat[:1] * 3}), tokenizer, 16)
    assert "all answers are empty" in caplog.text


def test_documents_without_a_target_are_left_out_and_counted(make_rows, caplog):
    labels = [[-100, -100, -100], [-100, 5, 6], [7]]
    rows = make_rows([[1, 2, 3], [4, 5, 6], [7]], 4, labels=labels)
    assert len(rows) == 1 and rows.documents_of(0) == [1]
    assert (rows.stats.documents_without_targets, rows.stats.tokens_left_out) == (2, 4)
    assert "2 documents left out (4 tokens)" in caplog.text


def test_truncation_that_removes_every_target_leaves_the_document_out(make_rows):
    rows = make_rows([[1, 2, 3, 4], [5, 6]], 2, "none", labels=[[-100, -100, -100, 4], [-100, 6]])
    assert len(rows) == 1 and rows.stats.documents_without_targets == 1
    assert "nothing in them is a target within their first 2 tokens" in rows.stats.describe("none", 2)
    with pytest.raises(DataError, match="within its first seq_len=2 tokens, at which packing none cuts: raise seq_len"):
        make_rows([[1, 2, 3, 4]], 2, "none", labels=[[-100, -100, -100, 4]])


def _targets_of_rows(rows):
    return [int((rows[i]["labels"] != -100).sum()) for i in range(len(rows))]


@pytest.mark.parametrize(
    ("packing", "targets", "told"),
    [("isolated", [2, 1], "2 pieces without a target left out"), ("concatenate", [3], "3 windows without a target left out")],
)
def test_every_row_has_a_target(make_rows, packing, targets, told):
    """Of a prompt longer than seq_len only the last piece has one; a step of the others alone would end the run."""
    rows = make_rows([list(range(1, 12)), [4, 5, 6]], 5, packing, labels=[[-100] * 9 + [10, 11], [-100, 5, -100]])
    assert _targets_of_rows(rows) == targets and rows.stats.target_tokens == 3
    assert told in rows.stats.describe(packing, 5) and rows.stats.pieces_left_out == int(told[0])


@pytest.mark.parametrize(
    ("packing", "seq_len", "told"),
    [
        ("isolated", 5, "2 of 4 documents have a prompt that fills a row of 5 tokens: the answer is learned without that part of it"),
        ("none", 5, "2 of 4 documents have no token of an answer within their first 5 and train nothing: raise --seq_len"),
        ("concatenate", 5, "windows of 5 tokens lie within prompts and train nothing: raise --seq_len"),
        ("isolated", 12, ""), ("none", 12, ""), ("concatenate", 12, ""),
    ],
)  # fmt: skip
def test_prompts_longer_than_a_row_are_warned_of(make_rows, caplog, packing, seq_len, told):
    ids, cut = list(range(1, 12)), [-100] * 9 + [10, 11]
    rows = make_rows([ids, ids, ids, [4, 5]], seq_len, packing, labels=[cut, cut, [-100, 2] + [-100] * 9, [-100, 5]])
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [told in line for line in said if "train nothing" in line or "learned without" in line] == ([True] if told else [])
    assert rows.stats.answers_cut_off == (2 if told and packing != "concatenate" else 0)


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=23), min_size=1, max_size=8), st.integers(2, 9), st.booleans())
@settings(max_examples=30, deadline=None)
def test_leaving_out_what_has_no_target_loses_none(learned, seq_len, isolated):
    documents = [list(range(100 * d, 100 * d + len(one))) for d, one in enumerate(learned)]
    labels = [[t if yes else -100 for t, yes in zip(ids, one)] for ids, one in zip(documents, learned)]
    useful = [one for one in labels if not isolated or any(t != -100 for t in one[1:])]
    try:
        rows = Rows(TokenStore(Dataset.from_dict({"input_ids": documents, "labels": labels})), seq_len, _PACKING[isolated], 0)
    except DataError:
        assert not any(t != -100 for one in labels for t in one[1:])
        return
    expected = [t for d, one in enumerate(useful) for t in one[int(isolated or d == 0) :] if t != -100]
    found = [t for i in range(len(rows)) for t in rows[i]["labels"].tolist() if t != -100]
    assert sorted(found) == sorted(expected) and len(found) == rows.stats.target_tokens and min(_targets_of_rows(rows)) > 0


_PACKING = {True: "isolated", False: "concatenate"}


def test_targets_of_pieces_are_those_of_their_documents_in_a_file_of_many_chunks():
    """Each chunk takes its own pieces: whole documents, halves of some, none of others."""
    chunks, per = 200, 20
    lists = pa.ListArray.from_arrays(
        np.arange(0, 3 * per + 1, 3, dtype=np.int32), np.tile(np.array([-100, 7, 8], np.int32), per)
    )
    column = pa.chunked_array([lists] * chunks)
    store = TokenStore(Dataset(pa.table({"input_ids": column, "labels": column})))
    documents = np.arange(chunks * per)
    assert np.array_equal(store.target_counts(), np.full(chunks * per, 2))
    assert np.array_equal(store.labelled(documents, np.ones_like(documents), store.lengths), store.target_counts())
    some = np.repeat(documents[documents % 7 == 3], 2)  # in two pieces each, of one and two tokens
    start = np.tile([0, 1], len(some) // 2)
    assert np.array_equal(store.labelled(some, start, np.tile([1, 3], len(some) // 2)), np.tile([0, 2], len(some) // 2))


@pytest.mark.parametrize("packing", ["isolated", "concatenate", "none"])
def test_nothing_to_learn_is_refused(make_rows, packing):
    with pytest.raises(DataError, match="none of the 2 samples has a token to learn from"):
        make_rows([[1, 2], [3, 4]], 4, packing, labels=[[-100, -100], [-100, -100]])


def test_bad_arguments(make_rows):
    with pytest.raises(DataError, match=r"packing='packed' is unknown.*isolated"):
        make_rows([[1, 2]], 4, "packed")
    with pytest.raises(DataError, match="seq_len=1 must be"):
        make_rows([[1, 2]], 1)
    with pytest.raises(DataError, match="pad_token_id=99 is outside"):
        config = type("C", (), {"vocab_size": 10, "max_position_embeddings": None})
        make_rows([[1, 2]], 4, pad_token_id=99, model_config=config)
    with pytest.raises(IndexError):
        make_rows([[1, 2]], 4)[1]


DOCUMENTS = st.lists(st.lists(st.integers(3, 99), min_size=0, max_size=23), min_size=1, max_size=12)


@given(DOCUMENTS, st.integers(2, 9), st.sampled_from(["isolated", "concatenate", "none"]))
@settings(max_examples=60, deadline=None)
def test_every_target_appears_exactly_once(documents, seq_len, packing):
    """Each document's transition (previous token, token) is trained once; only stated losses are missing."""
    rows = _rows(documents, seq_len, packing)
    if rows is None:
        return
    kept = [d[:seq_len] if packing == "none" else d for d in documents]
    expected: Counter = Counter()
    if packing == "concatenate":
        stream = [token for document in kept for token in document]
        expected.update(itertools.pairwise(stream))
    else:
        for document in kept:
            expected.update(itertools.pairwise(document))
    found: Counter = Counter()
    padding = 0
    for i in range(len(rows)):
        row = _lists(rows[i])
        assert len(row["input_ids"]) == len(row["labels"]) == len(row["position_ids"]) == seq_len
        assert row["labels"][0] == -100
        padding += row["input_ids"].count(0)
        for at, label in enumerate(row["labels"]):
            if label != -100:
                assert label == row["input_ids"][at] and row["position_ids"][at] == row["position_ids"][at - 1] + 1
                found[(row["input_ids"][at - 1], label)] += 1
    assert found == expected
    assert rows.stats.target_tokens == found.total()
    assert rows.stats.padding_tokens == padding
    assert rows.stats.tokens == sum(map(len, documents))
    assert stats_dict(rows)["rows"] == len(rows)


def _rows(documents, seq_len, packing):
    store = _MemoryStore(documents)
    try:
        return Rows(store, seq_len, packing, 0)
    except DataError:
        assert all(len(d) < 2 for d in documents) or packing == "concatenate"
        return None


class _MemoryStore:
    """A TokenStore over lists; the Arrow one is covered by the other tests and costs 20 ms per example."""

    def __init__(self, documents):
        self.documents = documents
        self.lengths = np.array([len(d) for d in documents], np.int64)

    def __len__(self):
        return len(self.documents)

    def ids(self, document, start, stop):
        return np.array(self.documents[document][start:stop], np.int64)

    labels = ids

    def target_counts(self, limit=None):
        return np.maximum((self.lengths if limit is None else np.minimum(self.lengths, limit)) - 1, 0)

    def labelled(self, documents, start, stop):
        return np.maximum(stop - start, 0)

    def first_targets(self, documents):
        return len(documents)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_best_fit_is_a_packing_with_at_most_one_half_empty_bin(lengths):
    bins = best_fit(np.array(lengths), 50)
    assert sorted(i for one in bins for i in one) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in one) <= 50 for one in bins)
    # At most one bin can be half empty: what opened a second one would have fitted into the first.
    assert len(bins) <= 2 * sum(lengths) / 50 + 1


def test_best_fit_is_fast():
    import time

    lengths = np.random.Generator(np.random.PCG64(0)).integers(2, 4097, 100_000)
    start = time.perf_counter()
    bins = best_fit(lengths, 4096)
    assert time.perf_counter() - start < 40  # measured 0.3 s, 6 s on a busy machine; a quadratic search would take minutes
    assert lengths.sum() / (len(bins) * 4096) > 0.97


def test_cut_shares_one_token_between_neighbours():
    document, start, length = cut(np.array([1, 4, 5, 7, 8]), np.arange(5), 4)
    assert document.tolist() == [0, 1, 2, 2, 3, 3, 4, 4, 4]
    assert start.tolist() == [0, 0, 0, 3, 0, 3, 0, 3, 6]
    assert length.tolist() == [1, 4, 4, 2, 4, 4, 4, 4, 2]
