"""Text and pre-tokenised samples, the checks on them, and the cache."""

from __future__ import annotations

import os

import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset

from bigtrain.data.pack import build_rows
from bigtrain.data.source import load_source
from bigtrain.data.tokenise import tokenise, tokenizer_fingerprint
from bigtrain.data.tokens import TokenStore
from bigtrain.errors import DataError


class Config:
    """The two limits that are read of a model's config."""

    def __init__(self, vocab_size=400, max_position_embeddings=64):
        self.vocab_size, self.max_position_embeddings = vocab_size, max_position_embeddings


def test_B58_every_text_document_ends_with_one_real_end_token(tokenizer):
    eos = tokenizer.eos_token_id
    out = tokenise(Dataset.from_dict({"text": ["one two", "", "three<|eos|>"]}), tokenizer)
    assert [row["input_ids"][-1] for row in out] == [eos] * 3
    assert [row["input_ids"].count(eos) for row in out] == [1, 1, 1]
    assert out.column_names == ["input_ids"]


def test_text_without_end_token_only_on_purpose(tokenizer):
    tokenizer.eos_token = None
    source = Dataset.from_dict({"text": ["one two"]})
    with pytest.raises(DataError, match="no end token"):
        tokenise(source, tokenizer)
    assert len(tokenise(source, tokenizer, append_eos=False)[0]["input_ids"]) > 0


def test_pre_tokenised_padding_is_cut_by_mask_not_by_id():
    source = Dataset.from_dict({"input_ids": [[5, 6, 2, 2, 2]], "attention_mask": [[1, 1, 1, 0, 0]]})
    assert tokenise(source, None)[0] == {"input_ids": [5, 6, 2]}
    left = Dataset.from_dict(
        {"input_ids": [[2, 2, 5, 6, 2]], "attention_mask": [[0, 0, 1, 1, 1]], "labels": [[-100, -100, -100, 6, 2]]}
    )
    assert tokenise(left, None)[0] == {"input_ids": [5, 6, 2], "labels": [-100, 6, 2]}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"input_ids": [[1, 2], [3, -7]]}, "sample 1: 'input_ids' holds -7"),
        ({"input_ids": [[1, 2], [3, 2**40]]}, "sample 1: 'input_ids' holds 1099511627776"),
        ({"input_ids": [[1], [2, 3]], "labels": [[1], [2]]}, "sample 1: 2 input_ids but 1 labels"),
        ({"input_ids": [[1.5, 2.0]]}, "sample 0: 'input_ids' must be a list of integers"),
        ({"input_ids": [[1], None]}, "sample 1: 'input_ids' must be a list of integers"),
        ({"text": ["a", None]}, "sample 1: it has no 'text'"),
        ({"prompt": ["a", "b"], "completion": ["c", None]}, "sample 1: prompt is 'b' and completion None; both must be"),
        ({"messages": [[{"role": "user", "content": "a"}]], "tools": ["{x"]}, "sample 0: 'tools' is no JSON"),
        ({"body": ["a"]}, "needed is one of"),
        ({"input_ids": [[1, 2]], "completion_mask": [[0, 1]]}, r"the samples have \['completion_mask'\] beside 'input_ids'"),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1, 2]]}, "sample 0: 'attention_mask' holds 2; it must be 1"),
        ({"input_ids": [[1, 2], [3, 4]], "position_ids": [[0, 1], [0, 0]]}, "sample 1: 'position_ids' do not run 0, 1"),
    ],
)
def test_bad_samples_are_named(tokenizer, columns, message):
    with pytest.raises(DataError, match=message):
        tokenise(Dataset.from_dict(columns), tokenizer)


def test_bytes_that_are_no_utf8_are_refused(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"a.jsonl line 2: UnicodeDecodeError"):
        load_source(tmp_path / "a.jsonl")
    column = pa.array([b"caf\xe9"]).cast(pa.string(), safe=False)
    pyarrow.parquet.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="cannot be tokenised: UnicodeDecodeError"):
        tokenise(load_source(tmp_path / "a.parquet"), tokenizer)


def test_text_needs_a_tokenizer():
    with pytest.raises(DataError, match="needs a tokenizer"):
        tokenise(Dataset.from_dict({"text": ["a"]}), None)


def test_another_text_column(tokenizer):
    out = tokenise(Dataset.from_dict({"body": ["one"]}), tokenizer, text_column="body")
    assert tokenizer.decode(out[0]["input_ids"]) == "one<|eos|>"


@pytest.mark.parametrize("packing", ["isolated", "concatenate", "none"])
def test_ids_outside_the_vocabulary_name_sample_token_and_value(packing):
    source = Dataset.from_dict({"input_ids": [[1, 2, 3]] * 5 + [[4, 5, 400, 6]] + [[401, 1]]})
    with pytest.raises(DataError, match=r"sample 5: input_ids holds 400 at token 2, .* vocab_size is 400"):
        build_rows(source, None, 8, packing, model_config=Config())
    assert len(build_rows(source, None, 8, packing, model_config=Config(vocab_size=402)))


def test_labels_outside_the_vocabulary_are_found_too():
    source = Dataset.from_dict({"input_ids": [[1, 2], [1, 2]], "labels": [[-100, 2], [-100, 999]]})
    with pytest.raises(DataError, match="sample 1: labels holds 999 at token 1"):
        build_rows(source, None, 8, model_config=Config())


def test_check_spans_arrow_chunks():
    source = Dataset.from_dict({"input_ids": [[1, 2, 3]] * 2500 + [[1, 500]]})
    with pytest.raises(DataError, match="sample 2500: input_ids holds 500 at token 1"):
        build_rows(source, None, 8, model_config=Config())


def test_rows_longer_than_the_model_name_the_longest_sample():
    source = Dataset.from_dict({"input_ids": [[1, 2], list(range(100))]})
    with pytest.raises(DataError, match=r"seq_len=65 is above .*=64 \(the longest sample is 1 with 100 tokens\)"):
        build_rows(source, None, 65, model_config=Config())


def test_limits_come_from_the_text_part_of_a_nested_config():
    class Outer:
        def get_text_config(self):
            return Config(vocab_size=3)

    with pytest.raises(DataError, match="vocab_size is 3"):
        build_rows(Dataset.from_dict({"input_ids": [[1, 5]]}), None, 8, model_config=Outer())


def test_second_call_reads_the_cache(tokenizer, tmp_path):
    source = Dataset.from_dict({"text": ["one two", "three"]})
    first = tokenise(source, tokenizer, cache_dir=tmp_path)
    before = {f.name: f.stat().st_mtime_ns for f in tmp_path.iterdir()}
    tokenizer(["a", "b b b b"], padding=True, truncation=True, max_length=2)  # changes the fast tokenizer's inner state
    second = tokenise(source, tokenizer, cache_dir=tmp_path)
    assert {f.name: f.stat().st_mtime_ns for f in tmp_path.iterdir()} == before and len(before) == 1
    assert first[:] == second[:]
    tokenise(source, tokenizer, cache_dir=tmp_path, append_eos=False)
    assert len(list(tmp_path.iterdir())) == 2


def test_fingerprint_sees_what_changes_the_ids(tokenizer):
    before = tokenizer_fingerprint(tokenizer)
    tokenizer.chat_template = "{{ messages }}"
    assert tokenizer_fingerprint(tokenizer) != before


def test_several_processes_give_the_same_and_name_the_sample(tokenizer, tmp_path):
    source = Dataset.from_dict({"text": [f"one {i}" for i in range(40)]})
    one, environ, values = tokenise(source, tokenizer, cache_dir=tmp_path / "a"), os.environ, dict(os.environ)
    two = tokenise(source, tokenizer, cache_dir=tmp_path / "b", num_proc=2)
    assert one[:] == two[:]
    assert os.environ is environ and dict(environ) == values  # datasets puts a copy in its place
    bad = Dataset.from_dict({"input_ids": [[1]] * 30 + [[-4]]})
    with pytest.raises(DataError, match="sample 30"):
        tokenise(bad, None, cache_dir=tmp_path / "c", num_proc=2)


def test_the_main_rank_goes_first(tokenizer):
    events = []

    class First:
        def __enter__(self):
            events.append("enter")

        def __exit__(self, *exc):
            events.append("exit")

    tokenise(Dataset.from_dict({"text": ["one"]}), tokenizer, main_first=First())
    assert events == ["enter", "exit"]


def test_very_long_documents_are_tokenised_in_parts_with_the_same_ids(tokenizer, monkeypatch):
    """Cut after line breaks, where this byte-level tokenizer never merges across (its pre-tokenizer splits there)."""
    from bigtrain.data import tokenise as module

    lines = "".join(f"line {i} of a long file\n" for i in range(200))
    source = Dataset.from_dict({"text": [lines, "one", lines + "no line break " * 30, ""]})
    whole = module.text_encoder(tokenizer, True, "text")(source[:], [0, 1, 2, 3])["input_ids"]
    monkeypatch.setattr(module, "_CALL_CHARS", 150)
    parts = module.text_encoder(tokenizer, True, "text")(source[:], [0, 1, 2, 3])["input_ids"]
    assert parts[0].tolist() == whole[0].tolist() and parts[1].tolist() == whole[1].tolist()
    assert parts[3].tolist() == whole[3].tolist() == [tokenizer.eos_token_id]
    assert tokenizer.decode(parts[2]) == tokenizer.decode(whole[2])  # cut inside a line: other ids, same text
    assert [row.tolist().count(tokenizer.eos_token_id) for row in parts] == [1, 1, 1, 1]


def test_the_content_is_a_hash_of_every_token_and_label_however_divided():
    def content(ids, labels=None, parts=1):
        columns = {"input_ids": ids} if labels is None else {"input_ids": ids, "labels": labels}
        whole = Dataset.from_dict(columns)
        table = pa.concat_tables([whole.data.table.slice(i, 1) for i in range(len(ids))]) if parts > 1 else whole.data.table
        return TokenStore(Dataset(table)).content

    ids = [[1, 2, 3], [4], [5, 6]]
    assert content(ids) == content(ids, parts=3) and len(content(ids)) == 32
    others = [content([[1, 2, 3], [4], [5, 7]]), content([[1, 2], [3, 4], [5, 6]]), content(ids[::-1]), content(ids, ids)]
    others.append(content(ids, [[1, 2, 3], [4], [-100, 6]]))
    assert len({content(ids), *others}) == 6


def test_columns_beside_the_ids_that_say_nothing_else_are_passed_over():
    source = {"input_ids": [[1, 2]], "position_ids": [[0, 1]], "labels": [[-100, 2]], "loss_mask": [[0, 1]], "label": [3]}
    assert tokenise(Dataset.from_dict(source), None)[0] == {"input_ids": [1, 2], "labels": [-100, 2]}
