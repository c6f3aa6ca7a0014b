"""JSON files are read as they stand: every value keeps its type, and what is wrong is named by file and line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from types import SimpleNamespace

import pytest

from bigtrain.data import jsonfile
from bigtrain.data.jsonfile import PLACE, coded_columns, decoded
from bigtrain.data.pack import build_rows
from bigtrain.data.source import load_source, split_validation
from bigtrain.data.tokenise import tokenise
from bigtrain.errors import DataError


def lines(*rows, end="\n"):
    return "".join((row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + end for row in rows)


def rows_of(dataset):
    """What stands in the rows, without their places."""
    columns = [name for name in dataset.column_names if name != PLACE]
    values = decoded({name: dataset[name][:] for name in columns}, coded_columns(dataset))
    return [dict(zip(columns, row)) for row in zip(*(values[name] for name in columns))]


@pytest.mark.parametrize(
    "rows",
    [
        [{"text": "2020-01-01"}, {"text": "2021-01-01T10:00:00Z"}],  # not a time
        [{"text": "007"}, {"text": "1.50"}, {"text": "null"}, {"text": "[1]"}],  # not a number, nothing, or a list
        [{"messages": [{"role": "user", "content": "2020-01-01"}]}, {"messages": [{"role": "user", "content": ["a"]}]}],
        [{"prompt": "a", "completion": "2020-01-01"}, {"prompt": [{"role": "user", "content": "b"}], "completion": "12"}],
        [{"text": "a", "id": 2**70, "x": {"a": 0.1}}, {"text": "b", "id": "c", "x": [None]}],
        [{"text": "a\u0000b \U0001f600 \u2028 \x85"}],
    ],
)
def test_values_keep_their_types(tmp_path, rows):
    (tmp_path / "a.jsonl").write_text(lines(*rows))
    assert rows_of(load_source(tmp_path / "a.jsonl")) == rows


def test_the_keys_of_tool_calls_are_those_of_the_row(tmp_path):
    calls = [
        {"messages": [{"role": "assistant", "tool_calls": [{"arguments": a}]}]} for a in ({"x": 1}, {"y": None}, {"x": "z"})
    ]
    for name, row in zip("abc", calls):
        (tmp_path / f"{name}.jsonl").write_text(lines(row))
    assert rows_of(load_source(tmp_path)) == calls


def test_columns_that_come_later(tmp_path, monkeypatch):
    """Also behind the first batch: what means something is kept, what does not may be there or not, of any type."""
    monkeypatch.setattr(jsonfile, "BATCH_BYTES", 1)
    (tmp_path / "a.jsonl").write_text(
        lines({"text": "a", "n": 1}, {"text": "b", "more": 2}, {"text": "c", "n": "x", "tools": [1]})
    )
    assert rows_of(load_source(tmp_path)) == [
        {"text": "a", "n": 1, "tools": None}, {"text": "b", "n": None, "tools": None}, {"text": "c", "n": "x", "tools": [1]},
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize("indent", [None, 1])
def test_one_list_or_one_object(tmp_path, name, indent):
    rows = [{"text": "a", "n": 1}, {"text": "b"}]
    (tmp_path / name).write_text("\n " + json.dumps(rows, indent=indent))
    assert rows_of(load_source(tmp_path)) == [rows[0], {"text": "b", "n": None}]
    (tmp_path / name).write_text(json.dumps(rows[0], indent=indent))
    assert rows_of(load_source(tmp_path)) == [rows[0]]
    (tmp_path / name).write_text(json.dumps(["a", "2020-01-01"], indent=indent))
    assert rows_of(load_source(tmp_path)) == [{"text": "a"}, {"text": "2020-01-01"}]


def test_a_column_of_the_name_that_is_used_here_is_no_harm(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines({"text": "a", PLACE: 5}, {PLACE: "x", "text": "b"}))
    assert rows_of(load_source(tmp_path)) == [{"text": "a"}, {"text": "b"}]


def test_line_ends_marks_blank_lines_and_empty_files(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines({"text": "a"}, "", " ", {"text": "b"}, end="\r\n").encode())
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + lines({"text": "c"}).encode().rstrip())
    (tmp_path / "c.jsonl").write_bytes(b"")
    (tmp_path / "d.json").write_text("\n")
    assert [row["text"] for row in rows_of(load_source(tmp_path))] == ["a", "b", "c"]
    assert load_source(tmp_path)[PLACE][:] == [
        f"{tmp_path}/{at}" for at in ("a.jsonl line 1", "a.jsonl line 4", "b.jsonl line 1")
    ]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_compression_is_told_by_the_bytes(tmp_path, pack):
    packed = pack(lines({"text": "a"}, {"text": "b"}).encode())
    for name in ("a.jsonl", "a.jsonl.gz", "a.json.xz"):
        (tmp_path / name).write_bytes(packed)
        assert [row["text"] for row in rows_of(load_source(tmp_path / name))] == ["a", "b"]
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[:-9])
    with pytest.raises(DataError, match=r"cut.jsonl.gz: EOFError: Compressed file ended"):
        load_source(tmp_path / "cut.jsonl.gz")
    (tmp_path / "bad.jsonl.gz").write_bytes(pack(b'{"text": "a"}\n{"text": "b'))
    with pytest.raises(DataError, match=r"bad.jsonl.gz line 2: JSONDecodeError"):
        load_source(tmp_path / "bad.jsonl.gz")


def test_zstd(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    frame = zstandard.ZstdCompressor().compress
    (tmp_path / "a.jsonl.zst").write_bytes(frame(lines({"text": "a"}).encode()) + frame(lines({"text": "b"}).encode()))
    assert [row["text"] for row in rows_of(load_source(tmp_path))] == ["a", "b"]


def test_zstd_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\x00\x00")
    with pytest.raises(DataError, match="pip install zstandard"):
        load_source(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '[{"text": "a", "text": "b"}]', "a.json: ValueError: key 'text' stands twice"),
        ("a.jsonl", lines({"text": "a"}, '{"m": [{"c": 1, "c": 2}]}'), "line 2: ValueError: key 'c' stands twice"),
        ("a.jsonl", '{"text": "a"}{"text": "b"}\n', "line 1: JSONDecodeError: Extra data"),
        ("a.jsonl", lines({"text": "a"}, "null"), "line 2: a NoneType, not an object"),
        ("a.jsonl", '["a"]\n["b"]\n', "each line is to be a row"),
        ("a.json", '[{"text": "a"}, "b"]', "element 1 of its list is a str"),
        ("a.jsonl", '{"text": "a", "x": ' + "[" * 99999 + "]" * 99999 + "}\n", "a.jsonl line 1: RecursionError"),
        ("a.jsonl", lines({"text": "a"}) + "\0" * 9, "line 2: JSONDecodeError"),
        ("a.jsonl", lines({"text": "a"}) + '{"text": "b', "line 2: JSONDecodeError: Unterminated"),
    ],
)
def test_what_is_damaged_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load_source(tmp_path / name)
    left = [file for file in (tmp_path / ".hf-cache").rglob("*") if file.is_file()]
    assert all(file.suffix == ".lock" for file in left)  # no half copy


def test_what_a_killed_run_left_is_cleared_away(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines({"text": "a"}))
    target = tmp_path / ".cache" / "b.arrow"
    target.parent.mkdir()
    (target.parent / ".b.arrow-x1y2z3").write_text("half")
    assert jsonfile.read([tmp_path / "a.jsonl"], target, "f")["text"][:] == ["a"]
    assert sorted(file.name for file in target.parent.iterdir()) == ["b.arrow", "b.arrow.lock"]


def test_a_sample_that_cannot_be_encoded_is_named_by_its_line_also_of_a_part(tokenizer, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(lines("", *({"text": f"row {i}"} for i in range(9))))
    (tmp_path / "c.jsonl").write_text(lines({"text": "c"}, {"text": 5}))
    whole = load_source(tmp_path)
    with pytest.raises(DataError, match=r"c.jsonl line 2: sample 19: 'text' is int \(5\)"):
        tokenise(whole, tokenizer)
    training, held_out = split_validation(whole, 0.5)
    part = next(part for part in (training, held_out) if 5 in rows_texts(part))
    with pytest.raises(DataError, match=r"c.jsonl line 2: sample \d: 'text' is int \(5\)"):
        tokenise(part, tokenizer)


def rows_texts(dataset):
    return [row["text"] for row in rows_of(dataset)]


def test_an_id_outside_the_vocabulary_is_named_by_its_line(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines("", {"input_ids": [1, 2]}, {"input_ids": [1, 9]}))
    config = SimpleNamespace(vocab_size=9, max_position_embeddings=64)
    with pytest.raises(DataError, match=r"a.jsonl line 3: sample 1: input_ids holds 9 at token 1"):
        build_rows(load_source(tmp_path), None, 8, model_config=config)


@pytest.mark.parametrize(
    "text", ['{"data": [{"text": "one"}]}', '{\n"version": 1, "data": [\n{"prompt": "a", "completion": "b"}]\n}']
)
def test_samples_in_a_list_under_a_key_are_not_one_sample(tmp_path, text):
    """They were told to rename 'data' to 'text'."""
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=r"a\.json: the samples stand in a list under 'data': give that list alone"):
        load_source(tmp_path / "a.json")


def test_a_list_beside_a_text_of_another_name_is_no_list_of_samples(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(*({"body": text, "sections": [{"text": "part"}]} for text in ("one", "two"))))
    assert load_source(tmp_path / "a.jsonl")["body"][:] == ["one", "two"]
